"""Things that are due at some time, earliest first."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Timers"]

T = TypeVar("T")

#: Below so many entries none is looked through for what no longer matters.
_FEW = 64


class Timers(Generic[T]):
    """A heap whose entries may come to matter no more before they are due.

    Those are let go of when the heap has grown to twice what was left after the last time, so that
    what is over isn't kept until a deadline that may be a day away.

    Args:
        over: Whether something no longer matters.
    """

    def __init__(self, over: Callable[[T], bool]) -> None:
        self._over = over
        self._heap: list[tuple[int, int, T]] = []
        self._order = itertools.count()
        self._enough = _FEW

    def __len__(self) -> int:
        """Entries, those included that no longer matter and were not looked at since."""
        return len(self._heap)

    def set(self, when: int, what: T) -> None:
        """Have ``what`` be due at ``when`` (ns), besides other times that it may be due at."""
        if len(self._heap) >= self._enough:
            self._heap = [entry for entry in self._heap if not self._over(entry[2])]
            heapq.heapify(self._heap)
            self._enough = max(_FEW, 2 * len(self._heap))
        heapq.heappush(self._heap, (when, next(self._order), what))

    def next(self) -> int | None:
        """When the first is due (ns); None if nothing is."""
        while self._heap and self._over(self._heap[0][2]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def take(self, now: int) -> T | None:
        """Something that is due at ``now`` (ns), the earliest first; None if nothing is."""
        while self._heap and self._heap[0][0] <= now:
            what = heapq.heappop(self._heap)[2]
            if not self._over(what):
                return what
        return None
