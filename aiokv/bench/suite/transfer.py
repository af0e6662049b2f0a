"""How fast each host transport moves KV, beside the same bytes by bare sockets, system calls and copies.

From 64 KiB to 1 GiB, as contiguous ranges and as fragments of 32 KiB in random order, one transfer and eight
at once, between two processes (``memory``: within one). The clock runs from the fetch of offers that are
ready to the task that waits for it. ``--peers`` measures other libraries in the same rounds.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any

import numpy as np
import uvloop

from aiokv.bench import source
from aiokv.bench.child import Child, ChildFailed, child
from aiokv.bench.figures import Spread, highest, lowest, over, quantile
from aiokv.bench.lag import Ticker
from aiokv.bench.moves import Fetches, RemoteOffers, Work, copies, raw_reads, raw_sockets
from aiokv.bench.partner import Partner
from aiokv.bench.peers.pair import LIBRARIES, Pair, joined
from aiokv.bench.raw import PlainCopy, ProcessReads, RawReader
from aiokv.bench.registry import Options
from aiokv.bench.report import Cell, Goal, Report
from aiokv.bench.rounds import alternate
from aiokv.device.host import HostBuffer
from aiokv.transports.memory import MemoryHub, MemoryTransport
from aiokv.transports.shm import ShmTransport
from aiokv.transports.tcp import TcpTransport

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["GOALS", "draw", "missing", "run"]

GOALS = {
    "transfer.tcp_over_raw": Goal(0.85, "higher"),
    "transfer.shm_over_copy": Goal(0.80, "higher"),
    "transfer.cma_over_raw": Goal(0.85, "higher"),
    "transfer.paged_over_contiguous": Goal(0.87, "higher"),
    "transfer.loop_lag_p99_ms": Goal(2, "lower"),
}

_KIB, _MIB, _GIB = 1 << 10, 1 << 20, 1 << 30
_REMOTE = ("shm", "cma", "tcp")
_OURS = ("memory", *_REMOTE)
_SOCKETS, _READV, _COPY = "raw sockets", "process_vm_readv", "plain copy"
_ONE = "one at a time, GB/s"
#: Seconds that another library may take to come up.
_PATIENCE_S = 60
#: Transfers at once, where several are.
_SEVERAL = 8

#: What moves some work, and gives the rate in bytes a second.
Way = Callable[[Work], Awaitable[float]]
Rates = Mapping[tuple[str, bool], list[float]]


def _threads_of(transport: type, name: str) -> int:
    """How many streams or threads a transport uses by default; one where it has no such argument."""
    parameter = signature(transport).parameters.get(name)
    return 1 if parameter is None else int(parameter.default)


@dataclass
class _Bench:
    """All ways to move bytes into one buffer, and the process where they come from."""

    ways: dict[str, Way]
    peer: Child
    into: HostBuffer
    others: list[Pair]

    def ways_for(self, work: Work) -> dict[str, Way]:
        """Those that can do it: most of what is bare moves one range at a time, and not every library all."""
        left_out = {_SOCKETS, _COPY} if work.paged else set()
        if work.at_once > 1:
            left_out |= {_SOCKETS, _READV, _COPY}
        found = {name: way for name, way in self.ways.items() if name not in left_out}
        return found | {other.library.name: other.move for other in self.others if other.can(work)}


@asynccontextmanager
async def _bench(report: Report, options: Options, nbytes: int) -> AsyncIterator[_Bench]:
    streams, threads = _threads_of(TcpTransport, "streams"), _threads_of(ShmTransport, "threads")
    async with AsyncExitStack() as stack:
        into, near = [
            stack.enter_context(closing(await asyncio.to_thread(HostBuffer.allocate, nbytes)))
            for _ in range(2)
        ]
        await asyncio.to_thread(source.fill, near)
        peer = await stack.enter_async_context(
            child(source.FUNCTION, nbytes=nbytes, streams=streams, transports=_REMOTE)
        )
        there = await peer.heard()
        fetches = {name: Fetches() for name in _OURS}
        hub = MemoryHub()
        for layers in source.LAYERS:
            for name in _REMOTE:
                engine = await stack.enter_async_context(source.engine_on(into, layers, name))
                key = f"{name}{layers}"
                fetches[name].add(layers, engine, RemoteOffers(peer, key), there["addresses"][key])
            producer, consumer = [
                await stack.enter_async_context(source.engine_on(buffer, layers, MemoryTransport(hub)))
                for buffer in (near, into)
            ]
            fetches["memory"].add(layers, consumer, Partner(producer), producer.address)
        reader = stack.enter_context(closing(RawReader(there["port"], streams)))
        copy = stack.enter_context(closing(PlainCopy(into.address, near.address, threads)))
        reads = ProcessReads(there["pid"], there["address"], into.address)
        ways: dict[str, Way] = {name: each.move for name, each in fetches.items()}
        ways[_SOCKETS] = partial(raw_sockets, reader, into.view)
        ways[_READV] = partial(raw_reads, reads)
        ways[_COPY] = partial(copies, copy)
        others = await _others(stack, report) if options.peers else []
        yield _Bench(ways, peer, into, others)


async def _others(stack: AsyncExitStack, report: Report) -> list[Pair]:
    """Other libraries, as far as they are installed and work."""
    found = []
    for library in LIBRARIES:
        why = "not installed"
        if library.installed:
            try:
                async with asyncio.timeout(_PATIENCE_S):
                    found.append(await stack.enter_async_context(joined(library)))
                continue
            except (ChildFailed, TimeoutError) as error:
                why = f"doesn't work here: {error!r}"
        report.row("libraries left out", {"library": library.name, "why": why})
    return found


async def _check(bench: _Bench) -> None:
    """See that each way really moves the bytes.

    Raises:
        RuntimeError: One doesn't.
    """
    work = Work(16 * _MIB, paged=False, at_once=1, times=1)
    # Layers lie as far apart as the cache is large; only the first one's are looked at.
    words = np.frombuffer(bench.into.view, np.int64)[: _MIB // 8 // 2]
    for name, way in bench.ways.items():
        words[:] = -1
        await way(work)
        if not np.array_equal(words, np.arange(len(words))):
            raise RuntimeError(f"{name} did not move the bytes")


async def _one(bench: _Bench, nbytes: int, rounds: int, times: int) -> Rates:
    """One transfer at a time, contiguous and paged."""
    measures = {}
    for paged in (False, True):
        work = Work(nbytes, paged, 1, times)
        for name, way in bench.ways_for(work).items():
            measures[name, paged] = partial(way, work)
    return await alternate(rounds, measures)


async def _several(bench: _Bench, nbytes: int, rounds: int, times: int) -> Rates:
    """Several transfers at the same time."""
    work = Work(nbytes, False, _SEVERAL, times)
    ways = bench.ways_for(work)
    return await alternate(rounds, {(name, False): partial(way, work) for name, way in ways.items()})


def _tell(report: Report, table: str, by_size: Mapping[int, Rates]) -> None:
    ways = dict.fromkeys(key for rates in by_size.values() for key in rates)
    for name, paged in sorted(ways, key=lambda key: key[1]):
        cells: dict[str, Cell] = {"by": name, "as": "32 KiB fragments" if paged else "contiguous"}
        for nbytes, rates in by_size.items():
            found = rates.get((name, paged), [])
            if any(map(math.isnan, found)):
                cells[_size(nbytes)] = "failed"
            elif found:
                cells[_size(nbytes)] = Spread.of(rate / 1e9 for rate in found)
        report.row(table, cells)


async def _lag(bench: _Bench, report: Report, work: Work, rounds: int) -> dict[str, list[float]]:
    """Loop lag, p99 in milliseconds, of the worse side while each transport moves."""
    ticker = Ticker()

    async def late(name: str) -> float:
        await bench.peer.ask("watch")
        ticker.start()
        await bench.ways[name](work)
        mine = quantile(ticker.stop(), 0.99) / 1e6
        theirs: float = (await bench.peer.ask("late"))["p99_ms"]
        return max(mine, theirs)

    found = await alternate(rounds, {name: partial(late, name) for name in _OURS})
    ticker.close()
    for name, lags in found.items():
        report.row(
            "loop lag while it moves",
            {"size": _size(work.nbytes), "transport": name, "p99 ms, worse side": Spread.of(lags)},
        )
    return found


def _ratios(report: Report, by_size: Mapping[int, Rates]) -> None:
    """The named figures, of the sizes that were measured."""

    def give(name: str, sizes: list[int], ours: str, theirs: str) -> None:
        if all(size in by_size for size in sizes):
            cases = {size: over(by_size[size][ours, False], by_size[size][theirs, False]) for size in sizes}
            report.ratio(name, lowest(cases))

    give("transfer.tcp_over_raw", [16 * _MIB, 64 * _MIB, 256 * _MIB], "tcp", _SOCKETS)
    give("transfer.shm_over_copy", [64 * _MIB, 256 * _MIB], "shm", _COPY)
    give("transfer.cma_over_raw", [64 * _MIB], "cma", _READV)
    rates = by_size[64 * _MIB]
    report.ratio(
        "transfer.paged_over_contiguous",
        lowest({name: over(rates[name, True], rates[name, False]) for name in _OURS}),
    )


async def _run(report: Report, options: Options) -> None:
    rounds, sizes = 7, {64 * _KIB: 100, _MIB: 40, 16 * _MIB: 8, 64 * _MIB: 3, 256 * _MIB: 1, _GIB: 1}
    if options.quick:
        rounds, sizes = 2, {64 * _KIB: 20, _MIB: 8, 16 * _MIB: 2, 64 * _MIB: 1}
    async with _bench(report, options, max(sizes)) as bench:
        await _check(bench)
        one: dict[int, Rates] = {}
        several: dict[int, Rates] = {}
        try:
            for nbytes, times in sizes.items():
                one[nbytes] = await _one(bench, nbytes, rounds, times)
            for nbytes, times in sizes.items():
                if nbytes * _SEVERAL <= max(sizes):
                    several[nbytes] = await _several(bench, nbytes, rounds, max(1, times // 4))
        finally:
            _tell(report, _ONE, one)
            _tell(report, f"{_SEVERAL} at once, GB/s", several)
        _ratios(report, one)
        largest = min(max(sizes), 256 * _MIB)
        lags = await _lag(bench, report, Work(largest, False, 1, 2), rounds)
    if options.quick:
        report.leave_out([name for name in GOALS if name not in report.ratios], "not with --quick")
    else:
        report.ratio("transfer.loop_lag_p99_ms", highest(lags))


def missing() -> str:
    """What this machine lacks."""
    return "" if sys.platform == "linux" else "shared memory and process_vm_readv are Linux's here"


def run(report: Report, options: Options) -> None:
    """Measure."""
    uvloop.run(_run(report, options))


def draw(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """Rate over size, of contiguous transfers one at a time."""
    shown: dict[str, dict[str, Any]] = {}
    for cells in rows:
        if cells.get("as") == "contiguous":
            shown.setdefault(cells["by"], cells)  # those one at a time come first
    sizes: list[str] = []
    for name, cells in shown.items():
        own = {size: cell.median for size, cell in cells.items() if isinstance(cell, Spread)}
        sizes = sizes or list(own)
        style = "o-" if name in _OURS else "o--"
        axes.plot([sizes.index(size) for size in own], list(own.values()), style, label=name)
    axes.set_xticks(range(len(sizes)), sizes)
    axes.set_ylabel("GB/s")
    axes.set_title(f"{_ONE}, contiguous")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))


def _size(nbytes: int) -> str:
    for unit, name in ((_GIB, "GiB"), (_MIB, "MiB")):
        if nbytes >= unit:
            return f"{nbytes // unit} {name}"
    return f"{nbytes // _KIB} KiB"
