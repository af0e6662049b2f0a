"""Many small transfers between two processes: what each costs, and whether anything is left of them.

One after another, by the tens of thousands, and a thousand at once. What was held before, on both sides, is
held afterwards; a profile tells what the CPU time goes to.
"""

from __future__ import annotations

import asyncio
import cProfile
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any, NamedTuple

import uvloop

import aiokv
from aiokv.bench import partner, profiles
from aiokv.bench.child import Child, child
from aiokv.bench.figures import Spread, quantile
from aiokv.bench.registry import Options
from aiokv.bench.report import Goal, Report
from aiokv.bench.usage import holdings, resident_bytes, used_cpu_ns, used_cpu_of_loop_ns

__all__ = ["GOALS", "run"]

GOALS = {
    "scale.cpu_us_per_transfer": Goal(400, "lower"),
    "scale.leaked": Goal(0, "lower"),
}

_TOP = 15
#: Ended transfers are remembered for a while. With few of them, memory that grows is memory that is lost.
_SETTINGS = {"tombstones": 1_024}
_SIDES = ("consumer", "producer")


class _Size(NamedTuple):
    """How much of it."""

    #: Transfers one after another, and in how many rounds.
    sequence: int
    rounds: int
    #: Transfers at once.
    at_once: int
    #: Transfers that are profiled.
    profiled: int


class _Used(NamedTuple):
    """What one side used and holds."""

    cpu_ns: int
    #: Of the loop's thread alone.
    loop_ns: int
    rss: int
    held: Mapping[str, int]


class _Pair:
    """The consumer here and the producer in another process."""

    def __init__(self, engine: aiokv.TransferEngine, peer: Child, address: str) -> None:
        self._engine = engine
        self._address = address
        self.peer = peer
        self._round = 0

    async def sequence(self, count: int) -> None:
        """Transfers of a block, one after another; neither side waits for a word of the other's to begin."""
        self._round += 1
        prefix = f"s{self._round}."
        self.peer.say("sequence", prefix=prefix, count=count, blocks=[0])
        for number in range(count):
            async with self._engine.fetch(f"{prefix}{number}", [1], sources=[self._address]) as fetch:
                await fetch.wait()
        await self.peer.heard()

    async def at_once(self, count: int) -> list[int]:
        """Transfers of a block each, all begun at once; how long each took, in nanoseconds, sorted."""
        self._round += 1
        tids = [f"a{self._round}.{number}" for number in range(count)]
        await self.peer.ask("offer", tids=tids, blocks=[[number] for number in range(count)])
        took: list[int] = []

        async def fetched(tid: str, block: int) -> None:
            async with self._engine.fetch(tid, [block], sources=[self._address]) as fetch:
                await fetch.wait()
            took.append(time.monotonic_ns() - began)

        began = time.monotonic_ns()
        await asyncio.gather(*(fetched(tid, number) for number, tid in enumerate(tids)))
        await self.peer.ask("finish")
        return sorted(took)

    async def used(self) -> tuple[_Used, _Used]:
        """Both sides so far: this one first."""
        theirs = await self.peer.ask("usage")
        mine = _Used(used_cpu_ns(), used_cpu_of_loop_ns(), resident_bytes(), holdings(self._engine))
        return mine, _Used(**theirs)

    async def cpu_ns(self) -> int:
        """CPU time of both sides so far."""
        return sum(side.cpu_ns for side in await self.used())


@asynccontextmanager
async def _pair(blocks: int) -> AsyncIterator[_Pair]:
    cache = await asyncio.to_thread(aiokv.KVCache.allocate, partner.layout(blocks))
    with closing(cache):
        producer = child(partner.FUNCTION, blocks=blocks, layers=1, transports=["shm"], settings=_SETTINGS)
        async with producer as peer:
            address = (await peer.heard())["address"]
            settings = aiokv.Settings(**_SETTINGS)
            async with aiokv.TransferEngine(cache, transports=["shm"], settings=settings) as engine:
                yield _Pair(engine, peer, address)


async def _sequence(pair: _Pair, report: Report, size: _Size) -> None:
    count = size.sequence // size.rounds
    took, cpu = [], []
    loops: dict[str, list[float]] = {side: [] for side in _SIDES}
    for _ in range(size.rounds):
        began, before = time.monotonic_ns(), await pair.used()
        await pair.sequence(count)
        took.append((time.monotonic_ns() - began) / count / 1e3)
        after = await pair.used()
        cpu.append(sum(now.cpu_ns - was.cpu_ns for now, was in zip(after, before, strict=True)) / count / 1e3)
        for side, was, now in zip(_SIDES, before, after, strict=True):
            loops[side].append((now.loop_ns - was.loop_ns) / count / 1e3)
    report.row(
        "64 KiB, one after another",
        {
            "transfers": size.sequence,
            "us each": Spread.of(took),
            "CPU us each, both sides": Spread.of(cpu),
            **{f"of which the {side}'s loop": Spread.of(loops[side]) for side in _SIDES},
        },
    )
    report.ratio("scale.cpu_us_per_transfer", cpu)


async def _awake(pair: _Pair, report: Report, size: _Size) -> None:
    """The same while neither side ever sleeps: what the work takes, without the waking for it."""
    count = size.sequence // size.rounds
    awake, took = partner.Awake(asyncio.get_running_loop()), []
    await pair.peer.ask("keep_awake", on=True)
    awake.set(True)
    try:
        for _ in range(2):
            began = time.monotonic_ns()
            await pair.sequence(count)
            took.append((time.monotonic_ns() - began) / count / 1e3)
    finally:
        awake.set(False)
        await pair.peer.ask("keep_awake", on=False)
    report.row(
        "64 KiB, one after another, neither side ever asleep",
        {"transfers": 2 * count, "us each": Spread.of(took)},
    )


async def _at_once(pair: _Pair, report: Report, size: _Size) -> None:
    halves, lasts, cpu = [], [], []
    for _ in range(size.rounds):
        cpu_ns = await pair.cpu_ns()
        times = await pair.at_once(size.at_once)
        cpu.append((await pair.cpu_ns() - cpu_ns) / size.at_once / 1e3)
        halves.append(quantile(times, 0.5) / 1e6)
        lasts.append(times[-1] / 1e6)
    report.row(
        "64 KiB, all at once",
        {
            "transfers": size.at_once,
            "p50 ms": Spread.of(halves),
            "last ms": Spread.of(lasts),
            "per second": Spread.of(size.at_once / last * 1e3 for last in lasts),
            "CPU us each, both sides": Spread.of(cpu),
        },
    )


def _tell_held(report: Report, before: tuple[_Used, _Used], after: tuple[_Used, _Used]) -> None:
    leaked = 0
    for side, was, found in zip(_SIDES, before, after, strict=True):
        more = {name: max(0, number - was.held[name]) for name, number in found.held.items()}
        leaked += sum(more.values())
        report.row(
            "held before and after",
            {
                "side": side,
                "resident MiB": f"{was.rss / 2**20:.1f} to {found.rss / 2**20:.1f}",
                **{
                    name: f"{was.held[name]} to {found.held[name]}"
                    for name in ("descriptors", "tasks", "segments", "leases", "parts")
                },
                "left": sum(more.values()),
            },
        )
    report.ratio("scale.leaked", [leaked])


async def _profile(pair: _Pair, report: Report, size: _Size, folder: Path, keep: bool) -> None:
    mine, theirs = cProfile.Profile(time.thread_time), str(folder / "scale-producer.prof")
    await pair.peer.ask("profile")
    mine.enable()
    await pair.sequence(size.profiled)
    mine.disable()
    await pair.peer.ask("profile", file=theirs)
    found: dict[str, cProfile.Profile | str] = {"consumer": mine, "producer": theirs}
    for side, profile in found.items():
        if keep:
            written = profiles.text(profile)
            await asyncio.to_thread((folder / f"scale-{side}.txt").write_text, written, encoding="utf-8")
        for cost in profiles.costs(profile, size.profiled, _TOP):
            report.row(f"what dominates at the {side}: CPU us of its loop, under the profiler", _cells(cost))


def _cells(cost: profiles.Cost) -> dict[str, Any]:
    return {
        "function": cost.function,
        "calls": cost.calls,
        "by itself": cost.own_us,
        "with callees": cost.with_callees_us,
    }


async def _run(report: Report, options: Options) -> None:
    size = _Size(300, 2, 100, 100) if options.quick else _Size(20_000, 8, 1_000, 2_000)
    async with _pair(size.at_once) as pair:
        # What is made once is made by then: connections, streams, and memory that is kept.
        await pair.sequence(_SETTINGS["tombstones"])
        await pair.at_once(size.at_once)
        before = await pair.used()
        await _sequence(pair, report, size)
        await _awake(pair, report, size)
        await _at_once(pair, report, size)
        _tell_held(report, before, await pair.used())
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(options.profiles or scratch)
            await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
            await _profile(pair, report, size, folder, bool(options.profiles))


def run(report: Report, options: Options) -> None:
    """Measure."""
    uvloop.run(_run(report, options))
