"""How late a task learns that an operation of a GPU is over, and what the waiting costs.

Each task launches a kernel that runs for a given time and then writes the GPU's clock, waits for it, notes
the host's clock, and goes on. The two clocks are brought together before and after each round.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import uvloop

from aiokv.bench.cuda.clock import GpuClock, Reading, host_times
from aiokv.bench.cuda.gpu import Gpu, missing
from aiokv.bench.cuda.waiters import cuda_waiters
from aiokv.bench.figures import Spread, quantile
from aiokv.bench.registry import Options
from aiokv.bench.report import Goal, Report
from aiokv.bench.rounds import alternate
from aiokv.bench.suite.completion import Case
from aiokv.bench.usage import used_cpu_ns
from aiokv.bench.waiters import Waiter
from aiokv.device.cuda import CudaStream
from aiokv.device.poller import CompletionPoller

__all__ = ["GOALS", "missing", "run"]

GOALS = {
    "completion.cuda_lag_p50_us": Goal(20, "lower"),
    "completion.cuda_lag_p99_us": Goal(100, "lower"),
    "completion.cuda_cpu_share_1ms": Goal(0.10, "lower"),
    "completion.cuda_cpu_share_10ms": Goal(0.03, "lower"),
}

_MS = 1_000_000
_SEED = 7
_STREAMS = 8
#: Where nothing is due, a look at so many events on eight streams is what a poll costs.
_PENDING = 1000
#: Turns of the loop that such looks are timed for: a poller looks in each of so many at least.
_TURNS = 100


class Figures(NamedTuple):
    """One round of one way to wait."""

    p50_us: float
    p99_us: float
    cpu_share: float
    #: Of the two clocks: how far apart they may be by what was read, and how much faster the GPU's goes.
    error_us: float
    drift_ppm: float


@dataclass
class _Round:
    """One way to wait, for a while."""

    case: Case
    waiter: Waiter
    clock: GpuClock
    until: int
    drawing: random.Random
    #: When each task saw its operation's end, and the number of that operation.
    seen: list[int] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    #: When the first task stopped: from then on less is pending.
    ended: int = 0
    cpu_ns: int = 0

    async def task(self, stream: CudaStream) -> None:
        """Launch and wait, one after another."""
        nominal = self.case.duration_ms * _MS
        while time.monotonic_ns() < self.until:
            duration = nominal * (1 + self.case.variation * self.drawing.uniform(-1, 1))
            event, number = self.clock.launch(int(duration), stream)
            await self.waiter.wait(event, stream, expected_ns=nominal)
            if not self.ended:
                self.seen.append(time.monotonic_ns())
                self.numbers.append(number)
        if not self.ended:
            self.ended = time.monotonic_ns()
            self.cpu_ns = used_cpu_ns()


async def _measure(
    case: Case, waiter: Waiter, clock: GpuClock, streams: list[CudaStream], seconds: float
) -> Figures:
    streams = streams[: case.streams]
    before = clock.read()
    filling = case.duration_ms * _MS * (case.pending // case.streams)
    began, cpu_ns = time.monotonic_ns(), used_cpu_ns()
    until = began + int(seconds * 1e9) + filling
    measured = _Round(case, waiter, clock, until, random.Random(_SEED))  # noqa: S311 - not a secret
    await asyncio.gather(*(measured.task(streams[number % case.streams]) for number in range(case.pending)))
    after = clock.read()
    ended = host_times(before, after, [clock.ended_ns(number) for number in measured.numbers])
    lags = sorted(seen - at for seen, at in zip(measured.seen, ended, strict=True))
    share = (measured.cpu_ns - cpu_ns) / (measured.ended - began)
    return Figures(
        quantile(lags, 0.5) / 1e3,
        quantile(lags, 0.99) / 1e3,
        share,
        _error_us(before, after),
        _drift(before, after),
    )


def _error_us(before: Reading, after: Reading) -> float:
    return max(before.round_trip, after.round_trip) / 2e3


def _drift(before: Reading, after: Reading) -> float:
    return ((after.gpu - before.gpu) / (after.host - before.host) - 1) * 1e6


async def _compare(
    case: Case, gpu: Gpu, clock: GpuClock, streams: list[CudaStream], rounds: int, seconds: float
) -> dict[str, list[Figures]]:
    ways = cuda_waiters(gpu)
    measures: dict[str, Callable[[], Coroutine[None, None, Figures]]] = {
        name: partial(_measure, case, waiter, clock, streams, seconds) for name, waiter in ways.items()
    }
    try:
        return await alternate(rounds, measures)
    finally:
        for waiter in ways.values():
            waiter.close()


def _cases(options: Options) -> list[Case]:
    if options.quick:
        return [Case(1, 1, 1, 0.0), Case(100, 8, 1, 0.1), Case(1, 1, 10, 0.0)]
    found = [Case(1, 1, duration, variation) for duration in (1, 10) for variation in (0.0, 0.1, 0.3)]
    return [*found, Case(100, 8, 1, 0.1)]


def _tell(report: Report, case: Case, found: Mapping[str, list[Figures]]) -> None:
    for name, figures in found.items():
        report.row(
            "waiting for operations of a GPU",
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
        report.ratio("completion.cuda_lag_p50_us", [each.p50_us for each in ours])
        report.ratio("completion.cuda_lag_p99_us", [each.p99_us for each in ours])
        report.ratio("completion.cuda_cpu_share_1ms", [each.cpu_share for each in ours])
        every = [each for figures in found.values() for each in figures]
        report.row(
            "the two clocks",
            {
                "apart by at most us": Spread.of(each.error_us for each in every),
                "the GPU's is faster by ppm": Spread.of(each.drift_ppm for each in every),
            },
        )
    elif case == Case(1, 1, 10, 0.0):
        report.ratio("completion.cuda_cpu_share_10ms", [each.cpu_share for each in ours])


async def _tell_polls(
    report: Report, clock: GpuClock, streams: list[CudaStream], rounds: int, milliseconds: int
) -> None:
    """What a look costs where many events are pending: a poller that looks at each turn of the loop."""
    for pending, over in ((_STREAMS, _STREAMS), (_PENDING, _STREAMS), (_PENDING, 1)):
        costs = [await _poll_us(clock, streams[:over], pending, milliseconds) for _ in range(rounds)]
        report.row(
            "a poll, with a turn of the loop",
            {"pending": pending, "streams": over, "us": Spread.of(costs), "at most": 15},
        )


async def _poll_us(clock: GpuClock, streams: list[CudaStream], pending: int, milliseconds: int) -> float:
    # The time stands still: so the loop is never late, and each turn has a look.
    frozen = [1]
    poller = CompletionPoller(
        asyncio.get_running_loop(), clock=lambda: frozen[0] or time.monotonic_ns(), spin_ns=1 << 60
    )
    events = [clock.launch(milliseconds * _MS, stream)[0] for stream in streams]
    futures = []
    for number in range(pending):
        stream = streams[number % len(streams)]
        event = events[number] if number < len(streams) else stream.record()
        # What nobody expects anything of is looked at in each turn, at first.
        futures.append(poller.wait(event, stream))
    before, began = poller.statistics.turns, time.perf_counter_ns()
    for _ in range(_TURNS):
        await asyncio.sleep(0)
    turns, took = poller.statistics.turns - before, time.perf_counter_ns() - began
    frozen[0] = 0
    await asyncio.gather(*futures)
    poller.close()
    return took / max(turns, 1) / 1e3


async def _run(report: Report, options: Options) -> None:
    rounds, seconds = (2, 0.25) if options.quick else (4, 0.3)
    with closing(Gpu()) as gpu:
        clock = GpuClock(gpu)
        report.row("the GPU's clock", {"goes on by ns": clock.resolution_ns})
        streams = [gpu.device.stream() for _ in range(_STREAMS)]
        for case in _cases(options):
            _tell(report, case, await _compare(case, gpu, clock, streams, rounds, seconds))
        await _tell_polls(report, clock, streams, rounds, 50)


def run(report: Report, options: Options) -> None:
    """Measure."""
    uvloop.run(_run(report, options))
