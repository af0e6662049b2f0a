"""Least recently used first."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush, heapreplace

import numpy as np

from aiokv.offload.places import array_of
from aiokv.offload.policies.base import Key

__all__ = ["IdleHeap", "Lru"]

_BITS = 32
_MASK = (1 << _BITS) - 1
#: From so many blocks on numpy, and one new heap, are faster.
_MANY = 32


class IdleHeap:
    """Blocks that may go, the longest unused first.

    A block is in the heap once at most, with its time of then; when it comes up and was used since, it is
    put back. So using a block, which is what happens most, costs one assignment.
    """

    def __init__(self) -> None:
        #: Time of the last use of each block.
        self.times = array("q")
        #: Whether each block is in the heap.
        self._queued = bytearray()
        self._heap: list[int] = []

    def __len__(self) -> int:
        return len(self._heap)

    def touch(self, blocks: Sequence[int], now: int) -> None:
        """They were used now; a time of the caller's own, which never goes back."""
        times = self.times
        if len(blocks) > _MANY:
            where = array_of(blocks)
            self._grow(int(where.max()) + 1)
            np.frombuffer(times, np.int64)[where] = now
            return
        self._grow(max(blocks, default=-1) + 1)
        for block in blocks:
            times[block] = now

    def _grow(self, size: int) -> None:
        more = size - len(self.times)
        if more > 0:
            self.times.frombytes(bytes(more * self.times.itemsize))
            self._queued.extend(bytes(more))

    def push(self, blocks: Sequence[int]) -> None:
        """They may go."""
        queued, times, heap = self._queued, self.times, self._heap
        if len(blocks) > _MANY and len(blocks) > len(heap) // 8:
            new = [block for block in blocks if not queued[block]]
            for block in new:
                queued[block] = 1
            heap.extend([times[block] << _BITS | block for block in new])
            heapify(heap)
            return
        for block in blocks:
            if not queued[block]:
                queued[block] = 1
                heappush(heap, times[block] << _BITS | block)

    def pop(self) -> int:
        """The one that was unused for longest; -1 if there is none."""
        heap, times = self._heap, self.times
        while heap:
            first = heap[0]
            block = first & _MASK
            used = times[block]
            if used == first >> _BITS:
                heappop(heap)
                self._queued[block] = 0
                return block
            heapreplace(heap, used << _BITS | block)
        return -1


class Lru:
    """Least recently used first. Of a prefix the tail goes before the head, whatever was stored first."""

    def __init__(self) -> None:
        self._idle = IdleHeap()
        self._now = 0
        #: When the last victim was used.
        self._last = 0

    def stored(self, blocks: Sequence[int], keys: Sequence[Key]) -> None:
        """See ``Policy``."""
        self._now += 1
        self._idle.touch(blocks, self._now)

    def used(self, blocks: Sequence[int], *, hit: bool) -> None:
        """See ``Policy``."""
        self._now += 1
        self._idle.touch(blocks, self._now)

    def idle(self, blocks: Sequence[int]) -> None:
        """See ``Policy``."""
        self._idle.push(blocks)

    def victims(self) -> Iterator[int]:
        """See ``Policy``."""
        pop, times = self._idle.pop, self._idle.times
        while (block := pop()) >= 0:
            self._last = times[block]
            yield block

    def freed(self, block: int) -> bool:
        """See ``Policy``. What was used no later than the oldest that could go is the oldest now."""
        if self._idle.times[block] <= self._last:
            return True
        self._idle.push((block,))
        return False

    def removed(self, blocks: Sequence[int], keys: Sequence[Key], *, evicted: bool) -> None:
        """See ``Policy``. What is left in the heap is found out when it comes up."""
