"""Which loads are on their way to which blocks of the cache, so that others can join them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat

import numpy as np

from aiokv.offload.batch import Batch, Part
from aiokv.offload.calls import Wanted
from aiokv.offload.progress import Run

__all__ = ["Loading"]


class Loading:
    """The loads of one tier that are not over.

    Args:
        ratios: Blocks of each group in one of the tier.
    """

    def __init__(self, ratios: Sequence[int]) -> None:
        self._ratios = ratios
        #: Which load writes each block of the cache's first group, and which of its blocks that is.
        self._writers: dict[int, tuple[Batch, int]] = {}

    def add(self, batch: Batch) -> None:
        """A load more."""
        firsts = batch.blocks[0].ids[:: self._ratios[0]].tolist()
        self._writers.update(zip(firsts, zip(repeat(batch), range(len(firsts))), strict=False))

    def over(self, batch: Batch, part: Part) -> None:
        """A part of a load writes no more."""
        ratio = self._ratios[0]
        for first in batch.blocks[0].ids[part.lo * ratio : part.hi * ratio : ratio].tolist():
            if self._writers.get(first, (None, 0))[0] is batch:
                del self._writers[first]

    def join(self, places: Sequence[int], wanted: Wanted) -> tuple[list[Run], list[int]]:
        """Find what is on its way to the same blocks already.

        Returns:
            The runs of all, None for those that aren't, or no runs where none is; and the indices of these.
        """
        firsts: list[int] = wanted.blocks[0].ids[:: self._ratios[0]].tolist()
        if self._writers.keys().isdisjoint(firsts):
            return [], list(range(len(places)))
        runs: list[Run] = []
        fresh: list[int] = []
        index = 0
        while index < len(places):
            other = self._writers.get(firsts[index])
            same = 0 if other is None else self._same(*other, places, wanted, index)
            if other is not None and same:
                runs.append((other[0], other[1], other[1] + same))
                index += same
                continue
            at = len(fresh)
            if runs and runs[-1][0] is None:
                runs[-1] = (None, runs[-1][1], at + 1)
            else:
                runs.append((None, at, at + 1))
            fresh.append(index)
            index += 1
        return runs, fresh

    def _same(self, batch: Batch, at: int, places: Sequence[int], wanted: Wanted, index: int) -> int:
        """How many blocks from ``index`` on another load, from its own ``at`` on, brings to the same ones."""
        count = min(len(batch.places) - at, len(places) - index)
        if batch.stopped:
            return 0
        if batch.places[at : at + count] == places[index : index + count]:
            same = np.ones(count, np.bool_)
        else:
            same = np.array(batch.places[at : at + count]) == np.array(places[index : index + count])
        for theirs, ours, ratio in zip(batch.blocks, wanted.blocks, self._ratios, strict=True):
            equal = (
                theirs.ids[at * ratio : (at + count) * ratio]
                == ours.ids[index * ratio : (index + count) * ratio]
            )
            same &= equal if ratio == 1 else equal.reshape(count, ratio).all(axis=1)
        return count if same.all() else int(same.argmin())
