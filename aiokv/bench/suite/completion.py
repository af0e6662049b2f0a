"""How late a task learns that a device is done, and what the waiting costs.

Another process stands for the device: it runs operations of given durations, sets a shared word behind each,
and notes the clock. Each task launches an operation, waits for it, notes the clock again, and goes on.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import uvloop

import aiokv
from aiokv.bench.child import child
from aiokv.bench.figures import Spread, quantile
from aiokv.bench.partner import FUNCTION, layout
from aiokv.bench.registry import Options
from aiokv.bench.report import Goal, Report
from aiokv.bench.rounds import alternate
from aiokv.bench.usage import used_cpu_ns
from aiokv.bench.waiters import Waiter, waiters
from aiokv.bench.words import Words, WordStream
from aiokv.device.timer import MicroTimer

__all__ = ["GOALS", "missing", "run"]

GOALS = {
    "completion.idle_cpu_share": Goal(0.001, "lower"),
    "completion.lag_p50_us": Goal(20, "lower"),
    "completion.lag_p99_us": Goal(100, "lower"),
    "completion.cpu_share_1ms": Goal(0.10, "lower"),
    "completion.cpu_share_10ms": Goal(0.03, "lower"),
}

_MS = 1_000_000
_SEED = 7


class Case(NamedTuple):
    """What is waited for."""

    pending: int
    streams: int
    duration_ms: int
    #: Durations lie so far around it, as a share.
    variation: float


class Figures(NamedTuple):
    """One round of one way to wait."""

    p50_us: float
    p99_us: float
    cpu_share: float


@dataclass
class _Round:
    """One way to wait, for a while."""

    case: Case
    waiter: Waiter
    streams: list[WordStream]
    until: int
    drawing: random.Random
    lags: list[int] = field(default_factory=list)
    #: When the first task stopped: from then on less is pending.
    ended: int = 0
    cpu_ns: int = 0

    async def task(self, stream: WordStream) -> None:
        """Launch and wait, one after another."""
        nominal = self.case.duration_ms * _MS
        while time.monotonic_ns() < self.until:
            duration = nominal * (1 + self.case.variation * self.drawing.uniform(-1, 1))
            event = stream.launch(int(duration))
            await self.waiter.wait(event, stream, expected_ns=nominal)
            seen = time.monotonic_ns()
            if not self.ended:
                self.lags.append(seen - event.ended_ns)
        if not self.ended:
            self.ended = time.monotonic_ns()
            self.cpu_ns = used_cpu_ns()


async def _measure(case: Case, waiter: Waiter, words: Words, seconds: float) -> Figures:
    streams = words.streams[: case.streams]
    # Long enough that each pending operation comes to its end some times.
    filling = case.duration_ms * _MS * (case.pending // case.streams)
    began, cpu_ns = time.monotonic_ns(), used_cpu_ns()
    until = began + int(seconds * 1e9) + filling
    measured = _Round(case, waiter, streams, until, random.Random(_SEED))  # noqa: S311 - not a secret
    await asyncio.gather(*(measured.task(streams[number % case.streams]) for number in range(case.pending)))
    lags = sorted(measured.lags)
    share = (measured.cpu_ns - cpu_ns) / (measured.ended - began)
    return Figures(quantile(lags, 0.5) / 1e3, quantile(lags, 0.99) / 1e3, share)


async def _compare(case: Case, words: Words, rounds: int, seconds: float) -> dict[str, list[Figures]]:
    ways = waiters()
    measures: dict[str, Callable[[], Coroutine[None, None, Figures]]] = {
        name: partial(_measure, case, waiter, words, seconds) for name, waiter in ways.items()
    }
    try:
        return await alternate(rounds, measures)
    finally:
        for waiter in ways.values():
            waiter.close()


def _cases(options: Options) -> list[Case]:
    if options.quick:
        return [Case(1, 1, 1, 0.0), Case(100, 8, 1, 0.1), Case(1, 1, 10, 0.0)]
    pending = [(1, 1), (100, 1), (100, 8), (1000, 1), (1000, 8)]
    found = [Case(*these, 1, variation) for these in pending for variation in (0.0, 0.1, 0.3)]
    return found + [Case(1, 1, 10, variation) for variation in (0.0, 0.1, 0.3)]


def _tell(report: Report, case: Case, found: Mapping[str, list[Figures]]) -> None:
    for name, figures in found.items():
        report.row(
            "waiting for operations of another process",
            {
                "operation ms": case.duration_ms,
                "varies by %": round(case.variation * 100),
                "pending": case.pending,
                "streams": case.streams,
                "by": name,
                "lag p50 us": Spread.of(each.p50_us for each in figures),
                "lag p99 us": Spread.of(each.p99_us for each in figures),
                "CPU %": Spread.of(each.cpu_share * 100 for each in figures),
            },
        )
    ours = found["aiokv"]
    if case == Case(1, 1, 1, 0.0):
        report.ratio("completion.lag_p50_us", [each.p50_us for each in ours])
        report.ratio("completion.lag_p99_us", [each.p99_us for each in ours])
        report.ratio("completion.cpu_share_1ms", [each.cpu_share for each in ours])
    elif case == Case(1, 1, 10, 0.0):
        report.ratio("completion.cpu_share_10ms", [each.cpu_share for each in ours])


async def _oversleeping(duration_ms: int, seconds: float) -> Figures:
    """How late a bare timer wakes a loop that sleeps: no way to wait that sleeps can do better."""
    loop = asyncio.get_running_loop()
    rang: asyncio.Future[None] = loop.create_future()
    timer = MicroTimer(loop, lambda: rang.set_result(None))
    lags = []
    began, cpu_ns = time.monotonic_ns(), used_cpu_ns()
    try:
        while (due := time.monotonic_ns() + duration_ms * _MS) < began + seconds * 1e9:
            timer.arm(duration_ms * _MS)
            await rang
            lags.append(time.monotonic_ns() - due)
            rang = loop.create_future()
    finally:
        timer.close()
    share = (used_cpu_ns() - cpu_ns) / (time.monotonic_ns() - began)
    return Figures(quantile(sorted(lags), 0.5) / 1e3, quantile(sorted(lags), 0.99) / 1e3, share)


async def _tell_timer(report: Report, rounds: int, seconds: float) -> None:
    for duration_ms in (1, 10):
        figures = [await _oversleeping(duration_ms, seconds) for _ in range(rounds)]
        report.row(
            "a timer alone, of a loop with nothing else to do",
            {
                "after ms": duration_ms,
                "late p50 us": Spread.of(each.p50_us for each in figures),
                "late p99 us": Spread.of(each.p99_us for each in figures),
                "CPU %": Spread.of(each.cpu_share * 100 for each in figures),
            },
        )


async def _idle(rounds: int, seconds: float) -> list[float]:
    """CPU share of an engine with a connected peer and nothing to do."""
    cache = await asyncio.to_thread(aiokv.KVCache.allocate, layout(4))
    shares = []
    with closing(cache):
        async with child(FUNCTION, blocks=4, layers=1, transports=["shm"]) as peer:
            address = (await peer.heard())["address"]
            async with aiokv.TransferEngine(cache, transports=["shm"]) as engine:
                await peer.ask("offer", tids=["t"], blocks=[[0]])
                await _connect(engine, "t", address)
                await peer.ask("finish")
                for _ in range(rounds):
                    before = used_cpu_ns()
                    await asyncio.sleep(seconds)
                    shares.append((used_cpu_ns() - before) / (seconds * 1e9))
    return shares


async def _connect(engine: aiokv.TransferEngine, tid: str, address: str) -> None:
    """One block, to be connected."""
    async with engine.fetch(tid, [0], sources=[address]) as transfer:
        await transfer.wait()


async def _run(report: Report, options: Options) -> None:
    rounds, seconds = (2, 0.3) if options.quick else (7, 1.0)
    with Words() as words:
        async with child("aiokv.bench.words:operate", fds=[words.fd], fd=words.fd):
            for case in _cases(options):
                _tell(report, case, await _compare(case, words, rounds, seconds))
    await _tell_timer(report, rounds, seconds)
    report.ratio("completion.idle_cpu_share", await _idle(*((2, 1.0) if options.quick else (5, 5.0))))


def missing() -> str:
    """What this machine lacks."""
    return "" if hasattr(os, "memfd_create") else "it needs memfd_create, which Linux has"


def run(report: Report, options: Options) -> None:
    """Measure."""
    uvloop.run(_run(report, options))
