"""Which places of the pool are free, handed out in long runs where there are any."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice, pairwise

import numpy as np
from numpy.typing import NDArray

__all__ = ["FreePlaces", "Places", "array_of", "ascending", "runs_of"]

#: From so many places on numpy is faster.
_MANY = 100
#: Runs of the wanted size class that are tried; a longer one fits anyway.
_LOOKED_AT = 4


class Places(list[int]):
    """Places that are counted up and down as an array, which is made once."""

    __slots__ = ("where",)

    def __init__(self, places: Iterable[int]) -> None:
        super().__init__(places)
        #: The same as they were first; None until somebody asked.
        self.where: NDArray[np.int64] | None = None


def array_of(places: Sequence[int]) -> NDArray[np.int64]:
    """Places as an array."""
    if not isinstance(places, Places):
        return np.array(places, dtype=np.int64)
    if places.where is None:
        places.where = np.array(places, dtype=np.int64)
    return places.where[: len(places)]  # some may have been cut off


class FreePlaces:
    """Free places by runs: neighbours in the pool are one DMA where neighbours of a prefix lie there.

    Runs are kept by the power of two in their length, so that taking and giving back cost the same however
    many there are.
    """

    def __init__(self) -> None:
        #: Length of each free run, by its first place; and its first place, by the place behind its last.
        self._lengths: dict[int, int] = {}
        self._firsts: dict[int, int] = {}
        #: First places of the runs of each size class.
        self._classes: list[dict[int, None]] = []
        self._free = 0

    def __len__(self) -> int:
        """Free places."""
        return self._free

    @property
    def runs(self) -> int:
        """How many pieces the free places are in."""
        return len(self._lengths)

    def take(self, count: int) -> list[int]:
        """As many places, in as few runs as are found at once; ascending within each.

        Raises:
            ValueError: There aren't so many.
        """
        if count > self._free:
            raise ValueError(f"{count} places asked for, {self._free} are free")
        self._free -= count
        found: list[int] = []
        while count:
            first = self._best(count)
            length = self._remove(first)
            size = min(length, count)
            found.extend(range(first, first + size))
            if length > size:
                self._insert(first + size, length - size)
            count -= size
        return found

    def take_below(self, count: int, limit: int) -> list[int]:
        """Up to so many places below a limit. Looks at all runs, so not for every day."""
        found: list[int] = []
        for first in sorted(first for first in self._lengths if first < limit):
            length = self._remove(first)
            size = min(length, limit - first, count - len(found))
            found.extend(range(first, first + size))
            if length > size:
                self._insert(first + size, length - size)
            if len(found) == count:
                break
        self._free -= len(found)
        return found

    def give(self, places: Sequence[int]) -> None:
        """Places are free again; none of them is free already."""
        for first, length in runs_of(places):
            self._free += length
            before, behind = self._firsts.get(first), self._lengths.get(first + length)
            start, size = first, length
            if before is not None:
                size += self._remove(before)
                start = before
            if behind is not None:
                size += self._remove(first + length)
            self._insert(start, size)

    def _best(self, count: int) -> int:
        """First place of a run that is long enough, and not much longer; else of one of the longest."""
        size = count.bit_length()
        for kept in self._classes[size - 1 : size]:
            for first in islice(kept, _LOOKED_AT):
                if self._lengths[first] >= count:
                    return first
        for kept in self._classes[size:]:
            if kept:
                return next(iter(kept))
        for kept in reversed(self._classes[:size]):
            if kept:
                return next(iter(kept))
        raise ValueError("no place is free")  # the caller has counted

    def _insert(self, first: int, length: int) -> None:
        self._lengths[first] = length
        self._firsts[first + length] = first
        size = length.bit_length() - 1
        while len(self._classes) <= size:
            self._classes.append({})
        self._classes[size][first] = None

    def _remove(self, first: int) -> int:
        length = self._lengths.pop(first)
        del self._firsts[first + length]
        del self._classes[length.bit_length() - 1][first]
        return length


def runs_of(places: Sequence[int]) -> list[tuple[int, int]]:
    """First place and length of each run of neighbours, whatever order they come in."""
    return ascending(sorted(places)) if len(places) > 1 else ascending(places)


def ascending(places: Sequence[int]) -> list[tuple[int, int]]:
    """First place and length of each run of neighbours, in the order in which they stand."""
    count = len(places)
    if not count:
        return []
    if places[-1] - places[0] == count - 1 and places == list(range(places[0], places[0] + count)):
        return [(places[0], count)]
    if count > _MANY:
        edges = [0, *(np.flatnonzero(np.diff(np.array(places, dtype=np.int64)) != 1) + 1).tolist(), count]
        return [(places[at], to - at) for at, to in pairwise(edges)]
    found = []
    first, behind = places[0], places[0] + 1
    for place in places[1:]:
        if place != behind:
            found.append((first, behind - first))
            first = place
        behind = place + 1
    found.append((first, behind - first))
    return found
