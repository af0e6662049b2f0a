"""What a model that launches its kernels from Python loses to transfers in the same process.

A step is 200 small kernels and a wait for them. Beside it 256 MiB in 32 layers, whose blocks lie anywhere on
the GPU, go to pinned memory at 20 GB/s, one transfer after another. Each way is measured by itself, with the
transfers, and the transfers by themselves, in alternating rounds: aiokv's loop in a thread of its own; shared
with a server that has an executor run the steps; pumped between the steps; and three threads without a loop.
"""

from __future__ import annotations

import asyncio
import cProfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

from aiokv.bench.cuda.beside import Model, OwnThread, Pumped, Shared, ThreeThreads, Way
from aiokv.bench.cuda.gpu import Gpu, missing
from aiokv.bench.cuda.traffic import CountingSelector, LoopThread, Memory, Traffic
from aiokv.bench.figures import Spread, quantile
from aiokv.bench.registry import Options
from aiokv.bench.report import Goal, Report

__all__ = ["GOALS", "missing", "run"]

GOALS = {
    "gil.step_inflation_mean": Goal(0.03, "lower"),
    "gil.step_inflation_p99": Goal(0.10, "lower"),
    "gil.threads_less_aiokv": Goal(0, "higher"),
    "gil.transfer_rate_kept": Goal(0.95, "higher"),
    "gil.wakeups_per_transfer": Goal(12, "lower"),
}

_RATE = 20e9
_OWN, _THREADS = "aiokv, a thread of its own", "three threads, no loop"
#: Of Student's distribution, for 95 %, by degrees of freedom.
_STUDENT = {1: 12.7, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}


class Round(NamedTuple):
    """One round: steps in nanoseconds, alone and beside transfers; rates without steps and beside them."""

    alone: list[int]
    beside: list[int]
    rate_alone: float
    rate_beside: float

    @property
    def mean(self) -> float:
        """How much longer a step takes on average, less 1."""
        return fmean(self.beside) / fmean(self.alone) - 1

    @property
    def p99(self) -> float:
        """How much longer the slowest of a hundred steps takes, less 1."""
        return _p99(self.beside) / _p99(self.alone) - 1

    @property
    def kept(self) -> float:
        """Of the rate."""
        return self.rate_beside / self.rate_alone


def _p99(steps: list[int]) -> float:
    return quantile(sorted(steps), 0.99)


def _round(way: Way, model: Model, seconds: float) -> Round:
    alone = way.measure(model, seconds, 0)
    beside = way.measure(model, seconds, _RATE)
    moved = way.measure(None, seconds, _RATE)
    if beside.moved is None or moved.moved is None:
        raise RuntimeError("nothing was moved")
    return Round(alone.steps, beside.steps, moved.moved.rate, beside.moved.rate)


def _rounds(ways: Mapping[str, Way], model: Model, rounds: int, seconds: float) -> dict[str, list[Round]]:
    """Each once a round, in the other order every second round; the first doesn't count."""
    found: dict[str, list[Round]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name in list(ways) if number % 2 else list(ways)[::-1]:
            measured = _round(ways[name], model, seconds)
            if number:
                found[name].append(measured)
    return found


def _tell(report: Report, found: Mapping[str, list[Round]]) -> None:
    for name, rounds in found.items():
        report.row(
            "a model's step beside transfers",
            {
                "by": name,
                "step alone us": Spread.of(fmean(each.alone) / 1e3 for each in rounds),
                "longer by %": Spread.of(each.mean * 100 for each in rounds),
                "p99 alone us": Spread.of(_p99(each.alone) / 1e3 for each in rounds),
                "p99 longer by %": Spread.of(each.p99 * 100 for each in rounds),
                "GB/s": Spread.of(each.rate_beside / 1e9 for each in rounds),
                "of the rate kept": Spread.of(each.kept for each in rounds),
            },
        )


def _ratios(report: Report, found: Mapping[str, list[Round]]) -> None:
    ours, threads = found[_OWN], found[_THREADS]
    report.ratio("gil.step_inflation_mean", [each.mean for each in ours])
    report.ratio("gil.step_inflation_p99", [each.p99 for each in ours])
    report.ratio("gil.transfer_rate_kept", [each.kept for each in ours])
    less = [theirs.mean - mine.mean for theirs, mine in zip(threads, ours, strict=True)]
    report.ratio("gil.threads_less_aiokv", less)
    reach = _STUDENT.get(len(less) - 1, 2.0) * stdev(less) / len(less) ** 0.5
    report.row(
        "longer steps by three threads, less those by aiokv",
        {"mean": fmean(less), "from (95 %)": fmean(less) - reach, "to (95 %)": fmean(less) + reach},
    )


def _wakeups(report: Report, gpu: Gpu, rounds: int, times: int, profiles: str) -> None:
    """How often the loop woke for a transfer, both engines on one loop of asyncio's."""
    selector = CountingSelector()
    with closing(Memory(gpu)) as memory, LoopThread(lambda: asyncio.SelectorEventLoop(selector)) as thread:

        async def made() -> Traffic:
            return await Traffic(memory).__aenter__()

        traffic = thread.call(made())
        thread.call(traffic.cost(3))
        memory.check()
        counts, costs = [], []
        for _ in range(rounds):
            before = selector.wakeups
            costs.append(thread.call(traffic.cost(times)))
            # The call itself woke the loop, and ends before the loop sleeps again.
            counts.append((selector.wakeups - before - 1) / times)
        if profiles:
            thread.call(_profiled(traffic, Path(profiles)))
        thread.call(traffic.__aexit__())
    report.row(
        "what one transfer takes of the loop, both engines on it",
        {"wake-ups": Spread.of(counts), "CPU ms": Spread.of(cost * 1e3 for cost in costs)},
    )
    report.ratio("gil.wakeups_per_transfer", counts)


async def _profiled(traffic: Traffic, folder: Path) -> None:
    """Write what a loop's thread does for transfers."""
    profile = cProfile.Profile()
    profile.enable()
    await traffic.cost(20)
    profile.disable()
    profile.dump_stats(folder / "gil.prof")


def _run(report: Report, options: Options) -> None:
    rounds, seconds = (2, 0.3) if options.quick else (5, 0.5)
    with closing(Gpu()) as gpu, ExitStack() as stack:
        model = Model(gpu)
        model.run(0.2)
        made: dict[str, Callable[[Memory], OwnThread | Shared | Pumped | ThreeThreads]] = {
            _OWN: OwnThread,
            "aiokv, the server's loop, steps in an executor": Shared,
            "aiokv, pumped between the steps": Pumped,
            _THREADS: lambda memory: ThreeThreads(memory, gpu),
        }
        ways: dict[str, Way] = {}
        for name, make in made.items():
            memory = stack.enter_context(closing(Memory(gpu)))
            way = stack.enter_context(closing(make(memory)))
            way.measure(None, 0.1, _RATE)
            memory.check()
            ways[name] = way
        found = _rounds(ways, model, rounds, seconds)
        _tell(report, found)
        _ratios(report, found)
        _wakeups(report, gpu, rounds, 10, options.profiles)


def run(report: Report, options: Options) -> None:
    """Measure."""
    _run(report, options)
