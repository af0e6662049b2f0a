"""The parts that a receiver expects, and those whose data it drains."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from aiokv.device.base import Buffer
from aiokv.proto.plan import Chunk, CopyPlan
from aiokv.transports.extents import Extents, addresses
from aiokv.transports.seen import Seen

__all__ = ["Arriving", "NoRoom", "Parts"]

#: Forgotten parts that are remembered; data of older ones cuts the link.
_FORGOTTEN = 4096


class NoRoom(Exception):
    """Whatever it goes through on its way is full; who is told of it asks again, when told to."""


class Arriving:
    """One part that is expected.

    Args:
        plan: Of the part.
        dst: Where it goes.
        landed: Told of each chunk that is in place.
    """

    __slots__ = ("_seen", "_wanted", "dst", "landed", "plan")

    def __init__(self, plan: CopyPlan, dst: Sequence[Buffer], landed: Callable[[Chunk], None]) -> None:
        self.plan = plan
        self.dst = dst
        self.landed = landed
        self._seen = Seen(plan)
        self._wanted = True

    def begin(self, chunk: Chunk) -> Sequence[Chunk]:
        """A chunk begins to arrive, each once: the parts of it, in order, that are to be placed one by one.

        Args:
            chunk: As the producer told, whatever that is.

        Raises:
            ValueError: It is not in the plan, or some of it came before.
        """
        self._seen.add(chunk)
        return (chunk,)

    def place(self, chunk: Chunk, extents: Extents) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where a part of what ``begin`` was told of goes: addresses and lengths.

        Args:
            chunk: The part.
            extents: The link's.

        Raises:
            NoRoom: There is no place for it now.
        """
        copy = self.plan.copy(chunk)
        return extents.targets(copy, chunk.lo, chunk.hi, addresses(copy.dst, self.dst))

    def complete(self, chunk: Chunk) -> None:
        """All of what was placed is there."""
        self.tell(chunk)

    def tell(self, chunk: Chunk) -> None:
        """So much is in place: whoever wants to know is told."""
        if self._wanted:
            self.landed(chunk)

    def forget(self) -> None:
        """Tell nobody of what lands from now on."""
        self._wanted = False


class Parts:
    """All of one link's parts, by the tags that they have on the wire."""

    def __init__(self) -> None:
        self.expected: dict[bytes, Arriving] = {}
        self.extents = Extents()
        #: Parts whose data is drained, oldest first.
        self.forgotten: dict[bytes, None] = {}

    def knows(self, tag: bytes) -> bool:
        """Whether the part was ever expected, as far as is remembered."""
        return tag in self.expected or tag in self.forgotten

    def forget(self, tag: bytes) -> None:
        """Drain what comes of a part from now on, and tell nobody of it."""
        if (part := self.expected.pop(tag, None)) is not None:
            part.forget()
        self.forgotten[tag] = None
        if len(self.forgotten) > _FORGOTTEN:
            del self.forgotten[next(iter(self.forgotten))]

    def drop(self) -> None:
        """The link is over: nobody is told of anything."""
        for part in self.expected.values():
            part.forget()
        self.expected.clear()
