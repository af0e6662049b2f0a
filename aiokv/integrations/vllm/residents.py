"""Which blocks the workers' host tiers have, as far as the scheduler's half knows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["Residents"]


class Residents:
    """A set of hashes for each rank; a block is there if all ranks have it.

    Args:
        ranks: How many workers there are.
    """

    def __init__(self, ranks: int) -> None:
        self._all = (1 << ranks) - 1
        #: Bit ``r`` of a hash's number: rank ``r`` has that block.
        self._ranks: dict[bytes, int] = {}

    def __contains__(self, block: bytes) -> bool:
        """Whether all ranks have a block."""
        return self._ranks.get(block) == self._all

    def prefix(self, hashes: Sequence[bytes], first: int) -> int:
        """Index behind the last block that is there, of those that follow each other from ``first`` on."""
        at = first
        while at < len(hashes) and self._ranks.get(hashes[at]) == self._all:
            at += 1
        return at

    def add(self, hashes: Iterable[bytes], rank: int) -> list[bytes]:
        """A rank has these; gives those that all ranks have now, and had not."""
        found = []
        for block in hashes:
            before = self._ranks.get(block, 0)
            self._ranks[block] = now = before | 1 << rank
            if now == self._all != before:
                found.append(block)
        return found

    def discard(self, hashes: Iterable[bytes], rank: int) -> list[bytes]:
        """A rank hasn't these; gives those that all ranks had until now."""
        found = []
        for block in hashes:
            before = self._ranks.get(block, 0)
            now = before & ~(1 << rank)
            if now:
                self._ranks[block] = now
            else:
                self._ranks.pop(block, None)
            if before == self._all != now:
                found.append(block)
        return found

    def lose(self, rank: int) -> list[bytes]:
        """Nobody knows what a rank has; gives those that all ranks had until now."""
        return self.discard(list(self._ranks), rank)

    def clear(self) -> list[bytes]:
        """No rank has anything; gives those that all ranks had."""
        found = [block for block, ranks in self._ranks.items() if ranks == self._all]
        self._ranks.clear()
        return found
