"""Which blocks are in use: held while anything may still read or write them.

A block may be read by many transfers at once (requests share prefix blocks), or written by one.
Blocks are counted, not listed: taking and giving back cost one vector operation.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from aiokv.errors import BusyError, InvalidBlocks
from aiokv.proto.layout import CacheLayout
from aiokv.proto.plan import GroupBlocks
from aiokv.proto.transfers import Fetching

__all__ = ["BlockLeases", "Lease", "written"]

#: A block's count while it is being written.
_WRITER = -1


class Lease:
    """Blocks held by one transfer. Given back once, by the sweep that saw them quiet."""

    __slots__ = ("_blocks", "_held", "_owner", "_write")

    def __init__(self, owner: BlockLeases, blocks: Sequence[GroupBlocks], *, write: bool) -> None:
        self._owner = owner
        self._blocks = blocks
        self._write = write
        self._held = True

    @property
    def blocks(self) -> int:
        """How many it holds, over all groups."""
        return sum(int(listed.ids.size) for listed in self._blocks)

    def give_back(self) -> None:
        """The blocks are nobody's again. Does nothing the second time."""
        if self._held:
            self._held = False
            self._owner.release(self._blocks, write=self._write)


class BlockLeases:
    """The blocks of one cache, and how many transfers hold each.

    Args:
        layout: The cache's layout.
    """

    def __init__(self, layout: CacheLayout) -> None:
        self._layout = layout
        self._counts = [np.zeros(group.blocks, np.int32) for group in layout.groups]
        #: Where each block stands in the list that was checked last; never cleared: old entries mean nothing.
        self._places = [np.zeros(group.blocks, np.int64) for group in layout.groups]
        #: Leases that are out, of both kinds.
        self.out = 0

    def take(self, blocks: Sequence[GroupBlocks], *, write: bool) -> Lease:
        """Hold blocks, to be written or to be read.

        Args:
            blocks: One list for each group.
            write: Whether the transfer writes them (fetch) or has them read (offer).

        Raises:
            InvalidBlocks: An id is out of range, or stands twice in a list.
            BusyError: A block is being written, or is to be written and being read.
        """
        for index, (listed, counts) in enumerate(zip(blocks, self._counts, strict=True)):
            self._check(index, listed.ids, counts, write=write)
        for listed, counts in zip(blocks, self._counts, strict=True):
            if write:
                counts[listed.ids] = _WRITER
            else:
                counts[listed.ids] += 1
        self.out += 1
        return Lease(self, blocks, write=write)

    def _check(
        self, group: int, ids: np.ndarray[tuple[int], np.dtype[np.int64]], counts: np.ndarray, *, write: bool
    ) -> None:
        if not ids.size:
            return
        # As an unsigned number, a negative id is a huge one.
        if ids.view(np.uint64).max() >= counts.size:
            bad = int(ids.min()) if ids.min() < 0 else int(ids.max())
            raise InvalidBlocks(f"group {group}: there is no block {bad}, the cache has 0..{counts.size - 1}")
        # Of a block that stands there twice, only the last place is kept.
        places, order = self._places[group], np.arange(ids.size)
        places[ids] = order
        if (places[ids] != order).any():
            values, times = np.unique(ids, return_counts=True)
            raise InvalidBlocks(f"group {group}: block {int(values[times > 1][0])} stands twice in one list")
        held = counts[ids]
        taken = held != 0 if write else held == _WRITER
        if taken.any():
            block = int(ids[taken][0])
            how = "written" if counts[block] == _WRITER else "read"
            raise BusyError(f"group {group}: block {block} is being {how} by another transfer")

    def release(self, blocks: Sequence[GroupBlocks], *, write: bool) -> None:
        """Count blocks back; called once by their lease."""
        for listed, counts in zip(blocks, self._counts, strict=True):
            if write:
                counts[listed.ids] = 0
            else:
                counts[listed.ids] -= 1
        self.out -= 1

    def held(self) -> int:
        """Blocks that are held now, over all groups."""
        return sum(int(np.count_nonzero(counts)) for counts in self._counts)


def written(fetching: Fetching, layout: CacheLayout) -> list[GroupBlocks]:
    """The blocks that a fetch writes: not those that hold only tokens which are there already."""
    found = []
    for listed, group in zip(fetching.blocks, layout.groups, strict=True):
        skipped = 0
        if group.kind != "state":
            skipped = max(0, fetching.first_token - listed.start) // group.block_size
        found.append(GroupBlocks(start=listed.start + skipped * group.block_size, ids=listed.ids[skipped:]))
    return found
