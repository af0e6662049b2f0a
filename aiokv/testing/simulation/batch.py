"""Many seeds, on one or several processes."""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor

from aiokv.testing.parent import end_with
from aiokv.testing.simulation.run import run_seed

__all__ = ["Summary", "play_seeds"]

#: Seeds that a process plays before it tells of them.
CHUNK = 25

#: A seed, what is wrong with it, and what was counted.
Summary = tuple[int, list[str], Counter[str]]


def play_seeds(seeds: range, jobs: int) -> Iterator[Summary]:
    """Play seeds, and tell of each in their order.

    Args:
        seeds: Which.
        jobs: Processes that play at once.
    """
    chunks = [seeds[at : at + CHUNK] for at in range(0, len(seeds), CHUNK)]
    if jobs <= 1:
        _spare_the_collector()
        for chunk in chunks:
            yield from _play(chunk)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_begin, initargs=(os.getpid(),)) as pool:
        for found in pool.map(_play, chunks):
            yield from found


def _begin(parent: int) -> None:
    """In a process of the pool, before it plays."""
    if not end_with(parent):
        os._exit(1)
    _spare_the_collector()


def _spare_the_collector() -> None:
    """What was imported stays, so it need not be looked at for each seed."""
    gc.collect()
    gc.freeze()


def _play(seeds: Iterable[int]) -> list[Summary]:
    found = []
    for seed in seeds:
        report = run_seed(seed)
        found.append((seed, report.failures[:3], Counter(report.counts)))
    return found
