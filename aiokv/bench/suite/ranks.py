"""Agreement on a batch of 64 requests between ranks of a group on CPUs (gloo): time, CPU, and loop lag.

Beside it, in the same processes: one ``all_gather_object`` for each request, one for the whole batch, a
blocking ``all_reduce`` of one number for each 512 tokens of a prompt of 32k, and a bare blocking
``all_reduce`` of the vector that aiokv reduces.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import uvloop

from aiokv.bench.child import Child, child
from aiokv.bench.figures import Spread, over, quantile
from aiokv.bench.rank import CHUNKS, FUNCTION, REQUESTS
from aiokv.bench.registry import Options
from aiokv.bench.report import Goal, Report
from aiokv.bench.rounds import alternate

__all__ = ["GOALS", "Group", "compare", "run"]

GOALS = {
    "ranks.gather_each_over_ours": Goal(20, "higher"),
    "ranks.gather_batch_over_ours": Goal(3, "higher"),
    "ranks.ours_over_bare": Goal(1.5, "lower"),
    "ranks.loop_lag_p99_ms": Goal(1, "lower"),
}

#: Of how many ranks the figures are.
_GATHERING, _BARE, _LAGGING = 4, 2, 2

#: Ways of agreeing, and how often each is done in a round, as parts of what is asked for.
_WAYS = {
    "ours": ("aiokv: one agreement on the batch", 1.0),
    "bare": ("bare all_reduce of the same vector", 1.0),
    "exchange": ("bare all_to_all_single of the same vector", 1.0),
    "gather_batch": ("one all_gather_object of the batch", 1.0),
    "gather_each": (f"{REQUESTS} all_gather_object", 0.05),
    "chunks": (f"{CHUNKS} all_reduce, for one prompt of 32k tokens", 0.05),
}


class Group:
    """The first so many of the processes.

    Args:
        ranks: All of them, by rank.
    """

    def __init__(self, ranks: Sequence[Child]) -> None:
        self._ranks = ranks
        self.size = len(ranks)

    async def measure(self, what: str, count: int) -> tuple[float, float]:
        """Median time (us), and CPU of the loop's thread (us), as the first rank found them."""
        answers = await self._ask("measure", what, count)
        return quantile(sorted(answers["times"]), 0.5) / 1e3, answers["cpu_ns"] / 1e3

    async def lag(self, what: str, count: int) -> float:
        """The 99th percentile of the first rank's loop lag (ms), while others come late."""
        answers = await self._ask("lag", what, count)
        return quantile(answers["late"], 0.99) / 1e6

    async def _ask(self, do: str, what: str, count: int) -> dict[str, Any]:
        for rank in self._ranks:
            rank.say(do, what=what, size=self.size, count=count)
        answers = [await rank.heard() for rank in self._ranks]
        return answers[0]


async def _run(report: Report, options: Options) -> None:
    sizes = [2, 4] if options.quick else [2, 4, 8]
    rounds, count = (2, 10) if options.quick else (9, 200)
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="aiokv-ranks-"))
        store = str(Path(folder) / "store")
        ranks = [
            await stack.enter_async_context(child(FUNCTION, rank=rank, sizes=sizes, store=store))
            for rank in range(max(sizes))
        ]
        await asyncio.gather(*(rank.heard() for rank in ranks))
        for size in sizes:
            # Where ranks share processors they take turns, and each round takes many times as long.
            fewer = max(1, size // (os.cpu_count() or 1))
            group = Group(ranks[:size])
            few = max(min(rounds, 3), rounds // fewer), max(min(count, 40), count // fewer)
            times = await compare(group, report, *few)
            _ratios(report, size, times)
        await _lags(Group(ranks[:_LAGGING]), report, rounds, count)
    report.row(
        "collectives for prompts of 32k tokens",
        {
            "prompts": REQUESTS,
            "aiokv": 1,
            "all_gather_object, each": 2 * REQUESTS,
            "by 512 tokens": REQUESTS * CHUNKS,
        },
    )


async def compare(group: Group, report: Report, rounds: int, count: int) -> dict[str, list[float]]:
    """Measure all ways, and tell; gives the time of each (us), by round."""
    found = await alternate(
        rounds,
        {way: partial(group.measure, way, max(2, int(count * share))) for way, (_, share) in _WAYS.items()},
    )
    times = {way: [time for time, _ in each] for way, each in found.items()}
    for way, (name, _) in _WAYS.items():
        report.row(
            f"a batch of {REQUESTS} requests, us",
            {
                "ranks": group.size,
                "what": name,
                "time": Spread.of(times[way]),
                "over aiokv": Spread.of(over(times[way], times["ours"])),
                "CPU of the thread": Spread.of(cpu for _, cpu in found[way]),
            },
        )
    return times


def _ratios(report: Report, size: int, times: dict[str, list[float]]) -> None:
    if size == _GATHERING:
        report.ratio("ranks.gather_each_over_ours", over(times["gather_each"], times["ours"]))
        report.ratio("ranks.gather_batch_over_ours", over(times["gather_batch"], times["ours"]))
    if size == _BARE:
        report.ratio("ranks.ours_over_bare", over(times["ours"], times["bare"]))


async def _lags(group: Group, report: Report, rounds: int, count: int) -> None:
    found = await alternate(
        rounds, {way: partial(group.lag, way, max(10, count // 4)) for way in ("ours", "bare")}
    )
    for way, lags in found.items():
        report.row(
            "loop lag while another rank comes 5 ms late",
            {"ranks": group.size, "what": _WAYS[way][0], "p99 ms": Spread.of(lags)},
        )
    report.ratio("ranks.loop_lag_p99_ms", found["ours"])


def run(report: Report, options: Options) -> None:
    """Measure."""
    uvloop.run(_run(report, options))
