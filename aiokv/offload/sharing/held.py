"""Places of a pool that a tier uses: what is in each, how many use it, and how often it was given."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from aiokv.errors import LocalProtocolError
from aiokv.offload.policies import Key

__all__ = ["HeldPlaces"]


class HeldPlaces:
    """What is in use in this process of an index that another keeps.

    A place is given by the owner as often as it is found there, and counted here by those who use it; with
    the last of them all that was given goes back.

    Attributes:
        detached: Places in use whose block is gone.
    """

    def __init__(self) -> None:
        #: Of each place: what is in it, None where that was dropped; how many use it; and, unless that is one
        #: time, how often it was given.
        self._keys: dict[int, Key | None] = {}
        self._counts: dict[int, int] = {}
        self._given: dict[int, int] = {}
        #: Those of them that are being written.
        self._writing: set[int] = set()
        self.detached = 0

    @property
    def in_use(self) -> int:
        """See ``Index``."""
        return len(self._keys)

    @property
    def pending(self) -> int:
        """See ``Index``."""
        return len(self._writing)

    def key_at(self, place: int) -> Key | None:
        """See ``BlockTable``."""
        return self._keys.get(place)

    def keys_at(self, places: Sequence[int]) -> list[Key | None]:
        """See ``BlockTable``."""
        return list(map(self._keys.get, places))

    def ready(self, place: int) -> bool:
        """See ``BlockTable``."""
        return self._keys.get(place) is not None and place not in self._writing

    def pin(self, places: Sequence[int]) -> None:
        """See ``BlockTable``."""
        for place in places:
            self._counts[place] += 1

    # -- what is given and goes back

    def _take(self, places: Sequence[int], keys: Sequence[Key]) -> None:
        """These were given, and are in use."""
        if self._keys.keys().isdisjoint(places):
            self._keys.update(zip(places, keys, strict=False))
            self._counts.update(dict.fromkeys(places, 1))
            return
        for place, key in zip(places, keys, strict=False):
            if place in self._keys:
                self._counts[place] += 1
                self._given[place] = self._given.get(place, 1) + 1
            else:
                self._keys[place], self._counts[place] = key, 1

    def _write(self, place: int, key: Key) -> None:
        """It was given, to be written."""
        self._keys[place], self._counts[place] = key, 1
        self._writing.add(place)

    def _useless(self, places: Sequence[int]) -> list[int]:
        """These were given, and are of no use; those to give back now."""
        back: list[int] = []
        for place in places:
            if place in self._keys:  # with those that it was given before
                self._given[place] = self._given.get(place, 1) + 1
            else:
                back.append(place)
        return back

    def _released(self, places: Sequence[int]) -> list[int]:
        """Use places no longer; those that nobody uses any more, each as often as it was given.

        Raises:
            LocalProtocolError: One isn't in use.
        """
        keys, counts, given = self._keys, self._counts, self._given
        back: list[int] = []
        for place in places:
            count = counts.get(place, 0)
            if count > 1:
                counts[place] = count - 1
                continue
            if not count:
                raise LocalProtocolError(f"place {place} of the host tier was released more often than used")
            del counts[place]
            if keys.pop(place) is None:
                self.detached -= 1
            back.append(place)
            if given and place in given:
                back += [place] * (given.pop(place) - 1)
        return back

    def _forget(self, places: Iterable[int]) -> list[Key]:
        """These are not found any more, nor what they were."""
        keys: list[Key] = []
        for place in places:
            key = self._keys.get(place)
            if key is not None:
                keys.append(key)
                self._keys[place] = None
                self.detached += 1
        return keys

    def _outdate(self) -> None:
        """Nothing that is in use here is found any more."""
        self._keys = dict.fromkeys(self._keys)
        self.detached = len(self._keys)
