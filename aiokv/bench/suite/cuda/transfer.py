"""How fast each transport moves the KV of Llama-3-8B between two processes, beside the bare rate.

The processes have a GPU each where there are two, and share one otherwise. 32 layers of 8 KV heads of 128
in bfloat16, in blocks of 16 tokens that lie anywhere in both caches. The clock runs from the fetch of an
offer that is ready to the task that waits for it. Each round measures what is bare in the same pair of
processes: a copy of memory that lies together, within the GPU or from the one to the other, ncclSend and
ncclRecv, DMA in both directions, sockets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import uvloop

from aiokv.bench.child import Child, child
from aiokv.bench.cuda.end import FUNCTION
from aiokv.bench.cuda.gpu import gpus, missing
from aiokv.bench.cuda.llama import BLOCK_TOKENS, block_ids, token_bytes
from aiokv.bench.cuda.rawnccl import environment
from aiokv.bench.figures import Spread, over
from aiokv.bench.registry import Options
from aiokv.bench.report import Goal, Report
from aiokv.bench.rounds import alternate
from aiokv.transports.handshake import STREAMS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["GOALS", "draw", "missing", "run"]

GOALS = {
    "transfer.cuda_ipc_over_d2d_8k": Goal(0.75, "higher"),
    "transfer.cuda_ipc_over_d2d_32k": Goal(0.90, "higher"),
    "transfer.nccl_over_raw": Goal(0.97, "higher"),
    "transfer.shm_cuda_over_pcie": Goal(0.95, "higher"),
    "transfer.tcp_cuda_over_limit": Goal(0.90, "higher"),
}

_TRANSPORTS = ("cuda_ipc", "nccl", "shm", "tcp")
_D2D, _GROUPED, _SINGLY = "device to device copy", "ncclSend, one group", "ncclSend, one by one"
_PCIE, _SOCKETS = "DMA both ways at once", "raw sockets"
_SEED, _K = 3, 1 << 10
#: The most tokens that are moved by what takes a second and more for the rest.
_SLOW = 8 * _K
#: Seconds for the first transfer of a transport.
_PATIENCE_S = 40

Way = Callable[[], Awaitable[float]]


class _Pair:
    """Both processes, and the ways to move bytes between them; each gives bytes a second."""

    def __init__(
        self,
        producer: Child,
        consumer: Child,
        addresses: dict[str, str],
        back: dict[str, str],
        blocks: int,
    ) -> None:
        self._producer, self._consumer, self._blocks = producer, consumer, blocks
        #: Of the producer's engines, by transport; and of the consumer's.
        self.addresses, self._back = addresses, back
        self._round = 0

    async def move(self, transport: str, tokens: int, times: int, *, scattered: bool = True) -> float:
        """Fetch so often, one after another."""
        there = block_ids(tokens, self._blocks, _SEED, scattered=scattered)
        here = block_ids(tokens, self._blocks, _SEED + 1, scattered=scattered)
        self._round += 1
        tids = [f"{transport}.{self._round}.{number}" for number in range(times)]
        await _told(self._producer, "offer", engine=transport, tids=tids, blocks=there)
        took = await _told(
            self._consumer,
            "fetch",
            engine=transport,
            tids=tids,
            blocks=here,
            source=self.addresses[transport],
        )
        await _told(self._producer, "finish", engine=transport)
        return _rate(took, tokens * token_bytes())

    async def both(self, transport: str, tokens: int, times: int) -> float:
        """Each fetches from the other at once; of the slower direction."""
        blocks = block_ids(2 * tokens, self._blocks, _SEED, scattered=True)
        out, into = blocks[: len(blocks) // 2], blocks[len(blocks) // 2 :]
        self._round += 1
        sides: list[tuple[Child, list[str], str]] = []
        for end, other, source in (
            (self._consumer, self._producer, self.addresses[transport]),
            (self._producer, self._consumer, self._back[transport]),
        ):
            tids = [f"{transport}.{self._round}.{len(sides)}.{number}" for number in range(times)]
            await _told(other, "offer", engine=transport, tids=tids, blocks=out)
            sides.append((end, tids, source))
        found = await asyncio.gather(
            *(
                _told(end, "fetch", engine=transport, tids=tids, blocks=into, source=source)
                for end, tids, source in sides
            )
        )
        for end in (self._producer, self._consumer):
            await _told(end, "finish", engine=transport)
        return min(_rate(took, tokens * token_bytes()) for took in found)

    async def check(self, transport: str, tokens: int) -> None:
        """Move fresh random numbers, and compare.

        Raises:
            RuntimeError: Others arrived.
        """
        there, here = (block_ids(tokens, self._blocks, _SEED + end, scattered=True) for end in (0, 1))
        self._round += 1
        seed = 1000 + self._round
        await _told(self._producer, "fill", seed=seed)
        await _told(self._consumer, "fill", seed=0)
        await self.move(transport, tokens, 1)
        if not (await _told(self._consumer, "same", seed=seed, there=there, here=here))["same"]:
            raise RuntimeError(f"{transport} did not move the bytes")

    async def profile(self, transport: str, tokens: int, folder: str) -> None:
        """Write what both processes' loops do for some transfers."""
        ends = {"producer": self._producer, "consumer": self._consumer}
        for end in ends.values():
            await _told(end, "profile", engine=transport)
        await self.move(transport, tokens, 10)
        for side, end in ends.items():
            await _told(end, "profile", engine=transport, file=f"{folder}/{transport}-{side}.prof")

    async def join(self, name: str) -> None:
        """Make the pair of ranks."""
        await asyncio.gather(_told(self._producer, "join", id=name), _told(self._consumer, "join", id=name))

    async def nccl(self, tokens: int, *, grouped: bool) -> float:
        """Bare NCCL."""
        await _told(self._producer, "nccl", tokens=tokens, grouped=grouped)
        took = await _told(self._consumer, "nccl", tokens=tokens, grouped=grouped)
        return _rate(took, tokens * token_bytes())

    async def d2d(self, tokens: int, times: int) -> float:
        """A copy within the GPU."""
        took = await _told(self._consumer, "d2d", tokens=tokens, times=times)
        return _rate(took, tokens * token_bytes())

    async def connect(self, streams: int) -> None:
        """Bare sockets."""
        port = (await _told(self._producer, "listen", streams=streams))["port"]
        await _told(self._consumer, "dial", port=port, streams=streams)

    async def bare(self, what: str) -> float:
        """What moves a fixed number of bytes at the consumer's word."""
        took = await _told(self._consumer, what)
        return _rate(took, took["nbytes"])


async def _told(end: Child, do: str, **facts: object) -> dict[str, Any]:
    """Tell a process to do something, and wait for the answer.

    Raises:
        RuntimeError: It can't.
    """
    said = await end.ask(do, **facts)
    if "error" in said:
        raise RuntimeError(said["error"])
    return said


def _rate(took: dict[str, Any], nbytes: int) -> float:
    found: float = nbytes / median(took["ns"]) * 1e9
    return found


def _ways(pair: _Pair, tokens: int, times: int, *, slow: bool) -> dict[str, Way]:
    """What is measured in one round; slow: also what takes a second and more for the largest sizes."""
    ways: dict[str, Way] = {_D2D: partial(pair.d2d, tokens, times)}
    for name in pair.addresses:
        if name == "cuda_ipc":
            ways[name] = partial(pair.move, name, tokens, times)
        elif slow:
            ways[name] = partial(pair.move, name, tokens, 1)
    for name in ("cuda_ipc", "nccl"):
        if slow and name in pair.addresses:
            ways[f"{name}, both ways at once, each"] = partial(pair.both, name, tokens, times)
    if slow and "nccl" in pair.addresses:
        ways["nccl, blocks together"] = partial(pair.move, "nccl", tokens, 1, scattered=False)
        ways[_GROUPED] = partial(pair.nccl, tokens, grouped=True)
        ways[_SINGLY] = partial(pair.nccl, tokens, grouped=False)
    if slow and not {"shm", "tcp"}.isdisjoint(pair.addresses):
        ways[_PCIE] = partial(pair.bare, "pcie")
        ways[_SOCKETS] = partial(pair.bare, "sockets")
    return ways


async def _check(report: Report, pair: _Pair, tokens: int) -> None:
    """See that each transport moves the bytes; what doesn't is left out."""
    for name in list(pair.addresses):
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await pair.check(name, tokens)
        except RuntimeError as error:
            del pair.addresses[name]
            _leave_out(report, name, str(error))


def _leave_out(report: Report, transport: str, why: str) -> None:
    report.row("transports left out", {"transport": transport, "why": why})
    report.leave_out([name for name in GOALS if name.startswith(f"transfer.{transport}_")], why)


def _tell(report: Report, tokens: int, found: dict[str, list[float]]) -> None:
    for name, rates in found.items():
        report.row(
            "the KV of Llama-3-8B, one transfer at a time",
            {
                "tokens": tokens,
                "MiB": tokens * token_bytes() >> 20,
                "by": name,
                "GB/s": Spread.of(rate / 1e9 for rate in rates),
                "ms": Spread.of(tokens * token_bytes() / rate * 1e3 for rate in rates),
            },
        )


def _ratios(report: Report, tokens: int, found: dict[str, list[float]], *, quick: bool) -> None:
    if "cuda_ipc" in found and tokens in (8 * _K, 32 * _K):
        report.ratio(f"transfer.cuda_ipc_over_d2d_{tokens // _K}k", over(found["cuda_ipc"], found[_D2D]))
    if tokens != (2 if quick else 8) * _K:
        return
    if "nccl" in found:
        raw = max(found[_GROUPED], found[_SINGLY], key=median)
        report.ratio("transfer.nccl_over_raw", over(found["nccl, blocks together"], raw))
    if "shm" in found:
        report.ratio("transfer.shm_cuda_over_pcie", over(found["shm"], found[_PCIE]))
    if "tcp" in found:
        limit = [min(both) for both in zip(found[_PCIE], found[_SOCKETS], strict=True)]
        report.ratio("transfer.tcp_cuda_over_limit", over(found["tcp"], limit))


async def _run(report: Report, options: Options) -> None:
    sizes, rounds = ({2 * _K: 3}, 2) if options.quick else ({2 * _K: 5, 8 * _K: 5, 32 * _K: 3}, 5)
    # Scattered among more than are needed, also where both ways go at once.
    blocks = max(max(sizes) * 5 // 4, 2 * min(max(sizes), _SLOW)) // BLOCK_TOKENS
    used = min(gpus(), 2)
    report.row("between", {"processes": 2, "GPUs": used})
    async with AsyncExitStack() as stack:
        ends = []
        for rank in range(2):
            starting = child(
                FUNCTION,
                environment=environment(rank, used),
                rank=rank,
                gpus=used,
                blocks=blocks,
                tokens=max(sizes),
                transports=_TRANSPORTS,
            )
            ends.append(await stack.enter_async_context(starting))
        first, second = [await end.heard() for end in ends]
        addresses = {
            name: address for name, address in first["addresses"].items() if name in second["addresses"]
        }
        for name, why in {**first["faults"], **second["faults"]}.items():
            _leave_out(report, name, why)
        pair = _Pair(ends[0], ends[1], addresses, second["addresses"], blocks)
        await pair.join(first["id"])
        await pair.connect(STREAMS)
        await _check(report, pair, min(sizes))
        for tokens, times in sizes.items():
            ways = _ways(pair, tokens, times, slow=tokens <= _SLOW)
            found = await alternate(rounds if tokens > 2 * _K else min(rounds, 3), ways)
            _tell(report, tokens, found)
            _ratios(report, tokens, found, quick=options.quick)
        if options.profiles:
            for name in pair.addresses:
                await pair.profile(name, min(sizes), options.profiles)
    if options.quick:
        report.leave_out([name for name in GOALS if name not in report.ratios], "not with --quick")


def run(report: Report, options: Options) -> None:
    """Measure."""
    uvloop.run(_run(report, options))


def draw(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """Rates over the number of tokens."""
    kept = [cells for cells in rows if "tokens" in cells]
    sizes = list(dict.fromkeys(cells["tokens"] for cells in kept))
    for name in dict.fromkeys(cells["by"] for cells in kept):
        own = [cells for cells in kept if cells["by"] == name]
        at = [sizes.index(cells["tokens"]) for cells in own]
        style = "o-" if name in _TRANSPORTS else "o--"
        axes.plot(at, [cells["GB/s"].median for cells in own], style, label=name)
    axes.set_xticks(range(len(sizes)), [f"{size:,}" for size in sizes])
    axes.set_yscale("log")
    axes.set_xlabel("tokens")
    axes.set_ylabel("GB/s")
    axes.set_title("the KV of Llama-3-8B, scattered")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
