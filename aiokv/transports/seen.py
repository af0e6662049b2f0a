"""What came of a part: each piece of each tensor once."""

from __future__ import annotations

from bisect import bisect_left

from aiokv.proto.plan import Chunk, CopyPlan

__all__ = ["Ranges", "Seen"]


class Seen:
    """Pieces of a part that came, or are coming, by whatever path and in whatever order.

    Args:
        plan: Of the part.
    """

    __slots__ = ("_plan", "_ranges")

    def __init__(self, plan: CopyPlan) -> None:
        self._plan = plan
        #: By layer and tensor.
        self._ranges: dict[tuple[int, int], Ranges] = {}

    def add(self, chunk: Chunk) -> None:
        """A chunk comes.

        Raises:
            ValueError: It is not in the plan, or some of it came before.
        """
        self._plan.check(chunk)
        for share in self._plan.shares(chunk):
            ranges = self._ranges.get(share)
            if ranges is None:
                ranges = self._ranges[share] = Ranges()
            if not ranges.add(chunk.lo, chunk.hi):
                raise ValueError(f"{chunk} came before")


class Ranges:
    """Half-open ranges of integers, none of them twice; those that adjoin become one.

    In order, as chunks are sent, there is one range at any time.
    """

    def __init__(self) -> None:
        self._los: list[int] = []
        self._his: list[int] = []

    def add(self, lo: int, hi: int) -> bool:
        """Add one range; False, and nothing is added, when some of it is there already."""
        at = bisect_left(self._los, hi)  # ranges from here on begin at its end or later
        if at and self._his[at - 1] > lo:
            return False
        joins_next = at < len(self._los) and self._los[at] == hi
        joins_last = at > 0 and self._his[at - 1] == lo
        if joins_last and joins_next:
            self._his[at - 1] = self._his.pop(at)
            self._los.pop(at)
        elif joins_last:
            self._his[at - 1] = hi
        elif joins_next:
            self._los[at] = lo
        else:
            self._los.insert(at, lo)
            self._his.insert(at, hi)
        return True
