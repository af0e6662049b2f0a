"""Agreement on a batch of 64 requests between two ranks of an NCCL group: time, and CPU of the loop's thread.

Beside the same ways as between CPUs. The ranks have a GPU each where there are two, and share one otherwise.
"""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

import uvloop

from aiokv.bench.child import child
from aiokv.bench.cuda.gpu import gpus, missing
from aiokv.bench.cuda.rawnccl import environment
from aiokv.bench.rank import FUNCTION
from aiokv.bench.registry import Options
from aiokv.bench.report import Goal, Report
from aiokv.bench.suite.ranks import Group, compare

__all__ = ["GOALS", "missing", "run"]

#: The goals are those of groups on CPUs; here everything is printed.
GOALS: dict[str, Goal] = {}

_RANKS = 2


async def _run(report: Report, options: Options) -> None:
    rounds, count = (3, 40) if options.quick else (9, 200)
    used = min(gpus(), _RANKS)
    report.row("between", {"processes": _RANKS, "GPUs": used})
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="aiokv-ranks-"))
        store = str(Path(folder) / "store")
        starting = [
            child(
                FUNCTION,
                environment=environment(rank, used),
                rank=rank,
                sizes=[_RANKS],
                store=store,
                gpus=used,
            )
            for rank in range(_RANKS)
        ]
        ranks = [await stack.enter_async_context(each) for each in starting]
        await asyncio.gather(*(rank.heard() for rank in ranks))
        await compare(Group(ranks), report, rounds, count)


def run(report: Report, options: Options) -> None:
    """Measure."""
    uvloop.run(_run(report, options))
