"""Layers of 4 MB over NCCL between two processes: aiokv, two designs with sender threads, and NCCL alone.

The question of a pull request for vLLM's pipe: what a transfer costs beyond the bytes. One layer, and 80 of
them. The clock runs from the sender's call for layers that are written to where the receiver can use them;
for aiokv on a transfer that was granted before. The two designs send each tensor's metadata through the GPU;
a table says where their time goes. The figures printed are those of that pull request.

Each process has a GPU where there are two. On one they take turns of some milliseconds: a receive that waits
keeps the other process's send from running, so what is measured there is mostly that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from statistics import fmean, median
from typing import Any

import uvloop

from aiokv.bench.child import Child, child
from aiokv.bench.cuda.gpu import gpus, missing
from aiokv.bench.cuda.pipeend import FUNCTION, LAYER_BYTES
from aiokv.bench.cuda.rawnccl import environment
from aiokv.bench.figures import Spread, lowest, over, quantile
from aiokv.bench.registry import Options
from aiokv.bench.report import Goal, Report
from aiokv.bench.rounds import alternate

__all__ = ["GOALS", "missing", "run"]

GOALS = {
    "pipe.single_layer_overhead_us": Goal(100, "lower"),
    "pipe.overhead_80_layers": Goal(0.03, "lower"),
    "pipe.pickled_design_over_aiokv": Goal(1.5, "higher"),
    "pipe.one_tensor_design_over_aiokv": Goal(1.1, "higher"),
}

_LAYERS = (1, 80)
_OURS, _RAW, _GROUPED = "aiokv", "NCCL alone", "NCCL alone, one group"
_PIPES = ("pickled", "one tensor")

#: Nanoseconds of each transfer of a round.
Times = list[int]


class _Pair:
    """Both processes."""

    def __init__(self, sender: Child, receiver: Child, addresses: Mapping[str, str]) -> None:
        self._sender, self._receiver, self._addresses = sender, receiver, addresses
        self._count = 0
        #: Where the pipes' time went, of each transfer, by pipe, layers and step.
        self.stages: dict[tuple[str, int, str], list[int]] = {}

    async def ours(self, layers: int) -> int:
        """By aiokv."""
        self._count += 1
        tid = f"t{self._count}"
        await self._sender.ask("arm", layers=layers, tid=tid)
        self._receiver.say("fetch", layers=layers, tid=tid, source=self._addresses[str(layers)])
        began = await self._sender.ask("go", layers=layers, tid=tid)
        return _between(began, await self._receiver.heard())

    async def raw(self, layers: int, *, grouped: bool = False) -> int:
        """By NCCL alone, the receiver waiting."""
        await self._receiver.ask("raw_post", layers=layers, grouped=grouped)
        self._receiver.say("raw_wait")
        began = await self._sender.ask("raw_send", layers=layers, grouped=grouped)
        return _between(began, await self._receiver.heard())

    async def pipe(self, layers: int, *, pipe: str) -> int:
        """By one of the other designs, the receiver waiting."""
        self._receiver.say("pipe_recv", layers=layers, pipe=pipe)
        await asyncio.sleep(2e-3)
        began = await self._sender.ask("pipe_send", layers=layers, pipe=pipe)
        ended = await self._receiver.heard()
        for name, spent in {**began["stages"], **ended["stages"]}.items():
            self.stages.setdefault((pipe, layers, name), []).append(spent)
        return _between(began, ended)

    async def check(self, name: str, layers: int, way: Callable[[int], Awaitable[int]], seed: int) -> None:
        """Move fresh random numbers, and compare.

        Raises:
            RuntimeError: Others arrived.
        """
        await self._sender.ask("fill", layers=layers, seed=seed)
        await self._receiver.ask("fill", layers=layers, seed=0)
        await way(layers)
        if not (await self._receiver.ask("same", layers=layers, seed=seed))["same"]:
            raise RuntimeError(f"{name} did not move the bytes of {layers} layers")
        await self._receiver.ask("fill", layers=layers, seed=0)


def _between(began: dict[str, Any], ended: dict[str, Any]) -> int:
    found: int = ended["at"] - began["at"]
    return found


def _ways(pair: _Pair, layers: int) -> dict[str, Callable[[int], Awaitable[int]]]:
    ways: dict[str, Callable[[int], Awaitable[int]]] = {_OURS: pair.ours, _RAW: pair.raw}
    if layers > 1:
        ways[_GROUPED] = partial(pair.raw, grouped=True)
    return ways | {f"{name} metadata": partial(pair.pipe, pipe=name) for name in _PIPES}


async def _several(way: Callable[[int], Awaitable[int]], layers: int, times: int) -> Times:
    return [await way(layers) for _ in range(times)]


def _tell(report: Report, layers: int, found: Mapping[str, list[Times]]) -> None:
    for name, rounds in found.items():
        every = sorted(took / 1e6 for times in rounds for took in times)
        report.row(
            f"{layers} x {LAYER_BYTES / 1e6:.1f} MB, ms"
            if layers > 1
            else f"one layer of {LAYER_BYTES / 1e6:.1f} MB, ms",
            {
                "by": name,
                "average": fmean(every),
                **{f"p{share}": quantile(every, share / 100) for share in (10, 50, 90, 98)},
                "GB/s": layers * LAYER_BYTES / quantile(every, 0.5) / 1e6,
                "transfers": len(every),
            },
        )


def _ratios(report: Report, found: Mapping[int, Mapping[str, list[Times]]]) -> None:
    medians = {
        layers: {name: [median(times) for times in rounds] for name, rounds in ways.items()}
        for layers, ways in found.items()
    }
    one, many = medians[1], medians[80]
    report.ratio(
        "pipe.single_layer_overhead_us",
        [(ours - raw) / 1e3 for ours, raw in zip(one[_OURS], one[_RAW], strict=True)],
    )
    raw = min(many[_RAW], many[_GROUPED], key=median)
    report.ratio("pipe.overhead_80_layers", [ratio - 1 for ratio in over(many[_OURS], raw)])
    for name in _PIPES:
        cases = {layers: over(ways[f"{name} metadata"], ways[_OURS]) for layers, ways in medians.items()}
        report.ratio(f"pipe.{name.replace(' ', '_')}_design_over_aiokv", lowest(cases))


def _tell_stages(report: Report, pair: _Pair) -> None:
    for (pipe, layers, name), spent in pair.stages.items():
        report.row(
            "where the two designs spend the time, us a layer",
            {
                "design": f"{pipe} metadata",
                "layers": layers,
                "step": name,
                "us": Spread.of(each / layers / 1e3 for each in spent),
            },
        )


async def _run(report: Report, options: Options) -> None:
    rounds, times = (2, {1: 10, 80: 2}) if options.quick else (5, {1: 40, 80: 4})
    used = min(gpus(), 2)
    over = "sockets" if used == 1 else "what it finds"
    report.row("between", {"processes": 2, "GPUs": used, "NCCL over": over})
    async with AsyncExitStack() as stack:
        ends = [
            await stack.enter_async_context(
                child(
                    FUNCTION,
                    environment=environment(rank, used),
                    rank=rank,
                    ordinal=rank % used,
                    layers=_LAYERS,
                )
            )
            for rank in range(2)
        ]
        first, _ = [await end.heard() for end in ends]
        await asyncio.gather(*(end.ask("join", id=first["id"]) for end in ends))
        pair = _Pair(ends[0], ends[1], first["addresses"])
        found: dict[int, dict[str, list[Times]]] = {}
        for layers in _LAYERS:
            ways = _ways(pair, layers)
            for number, (name, way) in enumerate(ways.items()):
                await pair.check(name, layers, way, layers + number)
            pair.stages = {key: spent for key, spent in pair.stages.items() if key[1] != layers}
            measures = {name: partial(_several, way, layers, times[layers]) for name, way in ways.items()}
            found[layers] = await alternate(rounds, measures)
            _tell(report, layers, found[layers])
        _tell_stages(report, pair)
        _ratios(report, found)


def run(report: Report, options: Options) -> None:
    """Measure."""
    uvloop.run(_run(report, options))
