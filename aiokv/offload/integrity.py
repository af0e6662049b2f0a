"""Looks whether blocks are what they were when they were stored, for those that were drawn."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

from aiokv.offload.batch import Batch, Part
from aiokv.offload.checksums import Checksums
from aiokv.offload.index import Index

__all__ = ["Integrity"]

_log = logging.getLogger("aiokv")


class Integrity:
    """Checksums of blocks in the table.

    Args:
        table: What is where.
        checksums: Hashes them.
        changed: Told of a load in which blocks had changed.
    """

    def __init__(self, table: Index, checksums: Checksums, changed: Callable[[Batch], None]) -> None:
        self._table = table
        self._checksums = checksums
        self._on_changed = changed

    def stored(self, places: Sequence[int]) -> None:
        """These were written: make a checksum of those that are drawn."""
        for place in self._checksums.sampled(places):
            self._make(place)

    def _make(self, place: int) -> None:
        key = self._table.key_at(place)
        self._table.pin([place])

        def made(_: bool) -> None:
            if self._table.key_at(place) is None:
                self._checksums.forget([key])
            self._table.release([place])

        self._checksums.make(key, place, made)

    def look(self, batch: Batch, part: Part, good: Callable[[], None]) -> None:
        """A part of a load is across: call ``good`` once its blocks are known to be as they were.

        Blocks that had changed are dropped, and the prefix ends before the first of them.
        """
        keys = batch.keys[part.lo : part.hi]
        if not self._checksums.known(keys):
            good()
            return
        places = batch.places[part.lo : part.hi]
        batch.checking += 1
        left = len(places)
        bad: list[int] = []

        def looked(place: int, fine: bool) -> None:
            nonlocal left
            left -= 1
            if not fine:
                bad.append(place)
            if left:
                return
            batch.checking -= 1
            if not bad:
                good()
                return
            _log.error("host tier: %d blocks had changed since they were stored", len(bad))
            self._table.drop(bad)
            self._table.release(places)
            batch.landed = max(batch.landed, batch.good_up_to(part, min(places.index(each) for each in bad)))
            self._on_changed(batch)
            batch.bell.ring()

        for place, key in zip(places, keys, strict=True):
            self._checksums.check(key, place, partial(looked, place))
