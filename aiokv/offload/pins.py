"""How many use each place of the pool."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from aiokv.errors import LocalProtocolError
from aiokv.offload.places import array_of

__all__ = ["Pins"]

#: From so many places on numpy is faster.
_MANY = 32


class Pins:
    """Counts by place.

    Attributes:
        counts: Of each place, to be read; single ones of an array are read faster than of numpy's.
    """

    def __init__(self) -> None:
        self.counts = array("i")

    def grow(self, count: int) -> None:
        """So many places more, which nobody uses."""
        self.counts.frombytes(bytes(count * self.counts.itemsize))

    def unused(self) -> list[int]:
        """All places that nobody uses, ascending."""
        found: list[int] = np.flatnonzero(np.frombuffer(self.counts, np.int32) == 0).tolist()
        return found

    def up(self, places: Sequence[int]) -> int:
        """Use different places; how many of them nobody used before."""
        if len(places) > _MANY:
            where = array_of(places)
            counts = np.frombuffer(self.counts, np.int32)
            there = counts[where]
            counts[where] = there + 1
            return len(places) - int(np.count_nonzero(there))
        fresh, pins = 0, self.counts
        for place in places:
            count = pins[place]
            fresh += not count
            pins[place] = count + 1
        return fresh

    def down(self, places: Sequence[int]) -> list[int]:
        """Use different places no longer; those of them that nobody uses any more.

        Raises:
            LocalProtocolError: One isn't in use.
        """
        pins = self.counts
        if len(places) > _MANY:
            where = array_of(places)
            counts = np.frombuffer(pins, np.int32)
            left = counts[where] - 1
            if left.min() >= 0:
                counts[where] = left
                return [] if left.all() else where[left == 0].tolist()
        unused = []
        for place in places:
            count = pins[place] - 1
            if count < 0:
                raise LocalProtocolError(f"place {place} of the host tier was released more often than used")
            pins[place] = count
            if not count:
                unused.append(place)
        return unused
