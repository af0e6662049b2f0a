"""Device memory that chunks are gathered in and received into, all of it allocated at the start.

Memory that is allocated, or freed, while a communicator waits for its peer can wait for that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aiokv.device.base import Buffer

__all__ = ["Pool", "Slot"]

#: Slots that one link takes at most.
_MOST = 8


@dataclass(frozen=True, eq=False, slots=True)
class Slot:
    """A place for one chunk."""

    buffer: Buffer
    offset: int

    @property
    def address(self) -> int:
        """Address of its first byte."""
        return self.buffer.address + self.offset


class Pool:
    """Slots of one direction, shared by all links of a transport.

    A link takes some when its communicator is made, and gives them back with it. The more are taken, the
    fewer the next one gets; when there are none it waits, the first first. Who has some while others wait is
    asked for them, see ``Home``: since those who have most are asked first, all soon have about as many, and
    if there are more links than slots they take turns.

    Args:
        buffer: The memory.
        start: Offset of the first slot.
        count: How many slots.
        nbytes: Bytes of each.
        wanted: Called when somebody has to wait: whoever holds slots in vain shall give them back.
    """

    def __init__(
        self, buffer: Buffer, start: int, count: int, nbytes: int, wanted: Callable[[], None]
    ) -> None:
        self.nbytes = nbytes
        self._free = [Slot(buffer, start + number * nbytes) for number in range(count)]
        self._wanted = wanted
        self._waiting: dict[object, Callable[[list[Slot]], None]] = {}

    @property
    def short(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def take(self, owner: object, got: Callable[[list[Slot]], None]) -> None:
        """Call ``got`` with at least one slot, now or when there is one, unless ``owner`` leaves before."""
        if self._free and not self._waiting:
            got(self._share())
        else:
            self._waiting[owner] = got
            self._wanted()

    def leave(self, owner: object) -> None:
        """Whoever waited does so no more."""
        self._waiting.pop(owner, None)

    def give(self, slots: Sequence[Slot]) -> None:
        """Give slots back; nothing in flight uses them."""
        self._free += slots
        while self._free and self._waiting:
            owner = next(iter(self._waiting))
            self._waiting.pop(owner)(self._share())

    def _share(self) -> list[Slot]:
        count = max(1, min(_MOST, len(self._free) // 2))
        taken, self._free = self._free[:count], self._free[count:]
        return taken
