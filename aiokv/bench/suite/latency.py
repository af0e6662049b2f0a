"""What a small transfer takes: the fetch of 64 KiB that were offered before, and where the time goes.

Beside it, in the same run, an echo of 64 bytes by plain pyzmq: a question and its answer is the least that a
fetch needs. What each step takes is found by wrappers that note the clock, in rounds of their own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing
from functools import partial
from itertools import pairwise

import numpy as np
import uvloop

import aiokv
from aiokv.bench import echo, partner
from aiokv.bench.channels import CHANNELS
from aiokv.bench.child import Child, child
from aiokv.bench.figures import Spread, over, quantile
from aiokv.bench.registry import Options
from aiokv.bench.report import Goal, Report
from aiokv.bench.rounds import alternate
from aiokv.bench.taps import Marks, tapped_channel, tapped_transport
from aiokv.proto.plan import GroupBlocks, Side, plan_copy
from aiokv.transports.shm import ShmTransport

__all__ = ["GOALS", "run"]

GOALS = {"latency.fetch_over_echo": Goal(3.5, "lower")}

_BLOCKS = 8
_ECHO_BYTES = 64

#: Steps of a fetch, in order.
_STEPS = (
    "call to first message out",
    "control: to the answer in, with the peer's work",
    "answer to copy, with the plan",
    "copy",
    "wake-up: copied to the task running",
)


class _Fetching:
    """A pair of engines over one channel."""

    def __init__(self, engine: aiokv.TransferEngine, peer: Child, address: str) -> None:
        self._engine = engine
        self._peer = peer
        self._address = address
        self._round = 0

    async def times(self, count: int) -> list[int]:
        """How long each of so many fetches took, one after another, in nanoseconds, sorted."""
        return sorted([ended - began async for began, ended in self.each(count)])

    async def each(self, count: int) -> AsyncIterator[tuple[int, int]]:
        """When each of so many fetches of ready offers began, and when it was over."""
        self._round += 1
        tids = [f"{self._round}.{number}" for number in range(count)]
        await self._peer.ask("offer", tids=tids, blocks=[[number % _BLOCKS] for number in range(count)])
        for number, tid in enumerate(tids):
            began = time.monotonic_ns()
            async with self._engine.fetch(tid, [(number + 1) % _BLOCKS], sources=[self._address]) as fetch:
                await fetch.wait()
            yield began, time.monotonic_ns()
        await self._peer.ask("finish")


@asynccontextmanager
async def _pair(channel: str, cache: aiokv.KVCache, marks: Marks | None = None) -> AsyncIterator[_Fetching]:
    async with child(partner.FUNCTION, blocks=_BLOCKS, layers=1, transports=["shm"], channel=channel) as peer:
        address = (await peer.heard())["address"]
        mine, transport = CHANNELS[channel](), ShmTransport()
        async with aiokv.TransferEngine(
            cache,
            channel=mine if marks is None else tapped_channel(mine, marks),
            transports=[transport if marks is None else tapped_transport(transport, marks)],
        ) as engine:
            yield _Fetching(engine, peer, address)


async def _steps(fetching: _Fetching, marks: Marks, count: int) -> list[list[int]]:
    """What each step took, by step, in nanoseconds."""
    found: list[list[int]] = [[] for _ in _STEPS]
    marks.seen.clear()
    async for began, ended in fetching.each(count):
        copying = marks.first("copying")
        at = [
            began,
            marks.first("sent"),
            marks.last("heard", copying),
            copying,
            marks.first("copied"),
            ended,
        ]
        for step, (since, until) in enumerate(pairwise(at)):
            found[step].append(until - since)
        marks.seen.clear()
    return found


def _plan_ns(cache: aiokv.KVCache, count: int) -> list[int]:
    """What a plan of one block takes."""
    side = Side(cache.layout, cache.placement, (GroupBlocks(start=0, ids=np.array([1])),))
    found = []
    for _ in range(count):
        began = time.monotonic_ns()
        plan_copy(side, side, first_token=0, tokens=16, heads=(0, 8))
        found.append(time.monotonic_ns() - began)
    return sorted(found)


async def _measure(cache: aiokv.KVCache, report: Report, options: Options) -> None:
    rounds, count = (2, 50) if options.quick else (9, 200)
    async with AsyncExitStack() as stack:
        other = await stack.enter_async_context(child(echo.FUNCTION))
        sock = stack.enter_context(echo.connected((await other.heard())["port"]))

        async def echoes(nbytes: int) -> list[int]:
            return sorted(echo.round_trips(sock, count, nbytes))

        pairs = {name: await stack.enter_async_context(_pair(name, cache)) for name in CHANNELS}
        measures: dict[str, Callable[[], Awaitable[list[int]]]] = {
            f"fetch over {name}": partial(pair.times, count) for name, pair in pairs.items()
        }
        measures["echo of 64 bytes"] = partial(echoes, _ECHO_BYTES)
        measures["echo of 64 KiB"] = partial(echoes, 64 << 10)
        found = await alternate(rounds, measures)
    for name, times in found.items():
        report.row(
            "64 KiB, us",
            {"what": name, "p50": _us(times, 0.5), "p99": _us(times, 0.99), "rounds of": count},
        )
    halves = {name: [quantile(each, 0.5) for each in times] for name, times in found.items()}
    ratios = {name: over(halves[f"fetch over {name}"], halves["echo of 64 bytes"]) for name in CHANNELS}
    for name, ratio in ratios.items():
        report.row("fetch over echo, p50", {"channel": name, "times": Spread.of(ratio)})
    report.ratio("latency.fetch_over_echo", ratios["zmq"])
    await _explain(cache, report, rounds, count)


async def _explain(cache: aiokv.KVCache, report: Report, rounds: int, count: int) -> None:
    for name in CHANNELS:
        marks = Marks()
        async with _pair(name, cache, marks) as fetching:
            await fetching.times(10)  # connects, and settles
            taken = [await _steps(fetching, marks, count) for _ in range(rounds)]
        for number, step in enumerate(_STEPS):
            found = Spread.of(quantile(sorted(each[number]), 0.5) / 1e3 for each in taken)
            report.row("where the time of a fetch goes, p50 us", {"channel": name, "step": step, "us": found})
    plans = Spread.of(quantile(_plan_ns(cache, count), 0.5) / 1e3 for _ in range(rounds))
    report.row("where the time of a fetch goes, p50 us", {"step": "one plan, by itself", "us": plans})


def _us(rounds: list[list[int]], share: float) -> Spread:
    return Spread.of(quantile(times, share) / 1e3 for times in rounds)


async def _run(report: Report, options: Options) -> None:
    cache = await asyncio.to_thread(aiokv.KVCache.allocate, partner.layout(_BLOCKS))
    with closing(cache):
        await _measure(cache, report, options)


def run(report: Report, options: Options) -> None:
    """Measure."""
    uvloop.run(_run(report, options))
