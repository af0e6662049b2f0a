"""Which loads are on their way to which blocks of the cache, so that others can join them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat

import numpy as np

from aiokv.offload.batch import Batch, Part
from aiokv.offload.calls import NONE, Wanted
from aiokv.offload.progress import Run
from aiokv.proto.plan import GroupBlocks
from aiokv.proto.section import Offsets

__all__ = ["Loading"]


class Loading:
    """The loads of one tier that are not over.

    Args:
        ratios: Blocks of each group in one of the tier.
        blocks: How many blocks each group of the cache has.
    """

    def __init__(self, ratios: Sequence[int], blocks: Sequence[int]) -> None:
        self._ratios = ratios
        self._blocks = blocks
        #: Which load writes where, by ``_lands``, and which of its blocks that is.
        self._writers: dict[int, tuple[Batch, int]] = {}

    def add(self, batch: Batch) -> None:
        """A load more."""
        lands = self._lands(batch.blocks)
        self._writers.update(zip(lands, zip(repeat(batch), range(len(lands))), strict=False))
        self._writers.pop(NONE, None)

    def over(self, batch: Batch, part: Part) -> None:
        """A part of a load writes no more."""
        for land in self._lands(batch.blocks, part.lo, part.hi):
            if self._writers.get(land, (None, 0))[0] is batch:
                del self._writers[land]

    def join(self, places: Sequence[int], wanted: Wanted) -> tuple[list[Run], list[int]]:
        """Find what is on its way to the same blocks already.

        Returns:
            The runs of all, None for those that aren't, or no runs where none is; and the indices of these.
        """
        lands = self._lands(wanted.blocks)
        if self._writers.keys().isdisjoint(lands):
            return [], list(range(len(places)))
        runs: list[Run] = []
        fresh: list[int] = []
        index = 0
        while index < len(places):
            other = self._writers.get(lands[index])
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

    def _lands(self, blocks: Sequence[GroupBlocks], lo: int = 0, hi: int | None = None) -> list[int]:
        """A number for each block of the tier, by the last block of the cache that it is brought to.

        That is one of the first group, unless nothing is brought to that; then the numbers go on with those
        of the next one. ``NONE`` where nothing is brought anywhere.
        """
        found, before = _lasts(blocks[0], self._ratios[0], lo, hi), self._blocks[0]
        for index in range(1, len(blocks)):
            if not found.size or found[0] != NONE:
                break
            lasts = _lasts(blocks[index], self._ratios[index], lo, hi)
            found = np.where((found == NONE) & (lasts != NONE), lasts + before, found)
            before += self._blocks[index]
        numbers: list[int] = found.tolist()
        return numbers

    def _same(self, batch: Batch, at: int, places: Sequence[int], wanted: Wanted, index: int) -> int:
        """How many blocks from ``index`` on another load, from its own ``at`` on, brings to the same ones."""
        count = min(len(batch.places) - at, len(places) - index)
        if batch.stopped:
            return 0
        theirs, ours = batch.places[at : at + count], places[index : index + count]
        pairs = [
            (
                other.ids[at * ratio : (at + count) * ratio],
                listed.ids[index * ratio : (index + count) * ratio],
            )
            for other, listed, ratio in zip(batch.blocks, wanted.blocks, self._ratios, strict=True)
        ]
        if theirs == ours and all(np.array_equal(*pair) for pair in pairs):
            return count
        same = np.array(theirs) == np.array(ours)
        for one, other in pairs:
            same &= (one == other).reshape(count, -1).all(axis=1)
        return int(same.argmin())


def _lasts(listed: GroupBlocks, ratio: int, lo: int, hi: int | None) -> Offsets:
    """The last block of each block of the tier."""
    return listed.ids[lo * ratio + ratio - 1 : None if hi is None else hi * ratio : ratio]
