"""Adaptive replacement: blocks asked for once and blocks asked for again share the room as it pays.

After "ARC: A Self-Tuning, Low Overhead Replacement Cache" (Megiddo and Modha, FAST 2003). A scan, such as
a burst of prompts that are never seen again, can't push out what is used again and again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from aiokv.offload.policies.base import Key
from aiokv.offload.policies.lru import IdleHeap

__all__ = ["Arc"]

_ONCE, _AGAIN = 1, 2


class Arc:
    """ARC. Ghosts, the keys of blocks that went, are at most as many as there were ever blocks at a time."""

    def __init__(self) -> None:
        self._heaps = {_ONCE: IdleHeap(), _AGAIN: IdleHeap()}
        #: Which of the two lists each block is in; 0: neither.
        self._lists = bytearray()
        #: Blocks in each.
        self._sizes = {_ONCE: 0, _AGAIN: 0}
        #: Keys of blocks that went, oldest first.
        self._ghosts: dict[int, OrderedDict[Key, None]] = {_ONCE: OrderedDict(), _AGAIN: OrderedDict()}
        #: How many blocks those asked for once may have, by what was learned.
        self._target = 0.0
        #: The most blocks that there were at a time: the capacity, as far as it can be known.
        self._most = 0
        self._now = 0
        #: While victims are named: how many of those asked for once are left, and when the last was used.
        self._once = 0
        self._last = 0

    @property
    def ghosts(self) -> int:
        """Keys that are remembered of blocks that went."""
        return len(self._ghosts[_ONCE]) + len(self._ghosts[_AGAIN])

    def stored(self, blocks: Sequence[int], keys: Sequence[Key]) -> None:
        """See ``Policy``."""
        self._now += 1
        more = max(blocks, default=-1) + 1 - len(self._lists)
        if more > 0:
            self._lists.extend(bytes(more))
        once, again = self._ghosts[_ONCE], self._ghosts[_AGAIN]
        parted: dict[int, list[int]] = {_ONCE: [], _AGAIN: []}
        for block, key in zip(blocks, keys, strict=True):
            if key in once:
                # What was asked for once went too early.
                self._target = min(self._most, self._target + max(1.0, len(again) / len(once)))
                del once[key]
                parted[_AGAIN].append(block)
            elif key in again:
                self._target = max(0.0, self._target - max(1.0, len(once) / len(again)))
                del again[key]
                parted[_AGAIN].append(block)
            else:
                parted[_ONCE].append(block)
        for which, those in parted.items():
            for block in those:
                self._lists[block] = which
            self._sizes[which] += len(those)
            if those:
                self._heaps[which].touch(those, self._now)
        self._most = max(self._most, self._sizes[_ONCE] + self._sizes[_AGAIN])

    def used(self, blocks: Sequence[int], *, hit: bool) -> None:
        """See ``Policy``."""
        self._now += 1
        lists = self._lists
        if hit:
            risen = [block for block in blocks if lists[block] == _ONCE]
            for block in risen:
                lists[block] = _AGAIN
            self._sizes[_ONCE] -= len(risen)
            self._sizes[_AGAIN] += len(risen)
            self._heaps[_AGAIN].touch(blocks, self._now)
            # What is looked up is in use: it is idle again, in its new list, when that is over.
            return
        for which, heap in self._heaps.items():
            heap.touch([block for block in blocks if lists[block] == which], self._now)

    def idle(self, blocks: Sequence[int]) -> None:
        """See ``Policy``."""
        lists = self._lists
        for which, heap in self._heaps.items():
            if those := [block for block in blocks if lists[block] == which]:
                heap.push(those)

    def victims(self) -> Iterator[int]:
        """See ``Policy``."""
        self._once = self._sizes[_ONCE]
        while True:
            which = _ONCE if self._once > self._target else _AGAIN
            block = self._pop(which)
            if block < 0:
                which = _ONCE + _AGAIN - which
                block = self._pop(which)
            if block < 0:
                return
            self._once -= which == _ONCE
            self._last = self._heaps[which].times[block]
            yield block

    def freed(self, block: int) -> bool:
        """See ``Policy``."""
        which = self._lists[block]
        wanted = _ONCE if self._once > self._target else _AGAIN
        if which == wanted and self._heaps[which].times[block] <= self._last:
            self._once -= which == _ONCE
            return True
        self._heaps[which].push((block,))
        return False

    def _pop(self, which: int) -> int:
        heap = self._heaps[which]
        while (block := heap.pop()) >= 0 and self._lists[block] != which:
            pass
        return block

    def removed(self, blocks: Sequence[int], keys: Sequence[Key], *, evicted: bool) -> None:
        """See ``Policy``."""
        for block, key in zip(blocks, keys, strict=True):
            which = self._lists[block]
            self._lists[block] = 0
            self._sizes[which] -= 1
            if evicted:
                self._ghosts[which][key] = None
        once, again = self._ghosts[_ONCE], self._ghosts[_AGAIN]
        while once and len(once) + self._sizes[_ONCE] > self._most:
            once.popitem(last=False)
        while self.ghosts > self._most:
            (again or once).popitem(last=False)
