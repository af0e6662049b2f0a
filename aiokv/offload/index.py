"""What a tier asks of what keeps its index: here, or the owner of a pool that it shares."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from aiokv.offload.manager import BlockTable
from aiokv.offload.offered import Offered
from aiokv.offload.policies import Key

__all__ = ["Index", "OwnIndex"]


class Index(Protocol):
    """Which block is where, as far as one tier has to know it.

    The calls that are awaited, and ``keep``, may have to ask another process; each begins with the call. The
    others are of places that are in use here, and answered at once. See ``BlockTable``.

    Attributes:
        detached: Places in use here whose block is gone.
    """

    detached: int

    @property
    def in_use(self) -> int:
        """Places in use here."""

    @property
    def pending(self) -> int:
        """Those of them that are being written."""

    @property
    def capacity(self) -> int:
        """Places there are."""

    @property
    def free(self) -> int:
        """Places with nothing in them."""

    async def find(self, keys: Sequence[Key]) -> list[int]:
        """As ``BlockTable.lookup``. Cancelled, nothing is in use for it."""

    def keep(self, keys: Sequence[Key], parent: Key | None, then: Callable[[Offered], None]) -> None:
        """As ``BlockTable.offer``; calls ``then``, once, with what becomes of the blocks.

        Raises:
            ValueError: A key stands twice.
        """

    async def count(self, keys: Sequence[Key]) -> int:
        """How many of a prefix are there, or being written."""

    async def delete(self, keys: Sequence[Key]) -> int:
        """Drop blocks; how many there were.

        Raises:
            ValueError: A key stands twice.
        """

    async def clear(self) -> int:
        """Drop all; how many there were."""

    def orphaned(self, places: Sequence[int]) -> bool:
        """Whether who keeps these in mind is lost, so that nobody finds them."""

    def key_at(self, place: int) -> Key | None:
        """See ``BlockTable``."""

    def keys_at(self, places: Sequence[int]) -> list[Key | None]:
        """See ``BlockTable``."""

    def ready(self, place: int) -> bool:
        """See ``BlockTable``."""

    def pin(self, places: Sequence[int]) -> None:
        """See ``BlockTable``."""

    def release(self, places: Sequence[int]) -> None:
        """See ``BlockTable``."""

    def finish(self, places: Sequence[int], *, ok: bool) -> None:
        """See ``BlockTable``."""

    def drop(self, places: Iterable[int], why: str = "dropped") -> list[Key]:
        """See ``BlockTable``."""

    def grow(self, count: int) -> None:
        """So many places more can be used here."""


class OwnIndex(BlockTable):
    """The table of a tier that has its memory for itself: nobody has to be asked."""

    async def find(self, keys: Sequence[Key]) -> list[int]:
        """See ``Index``."""
        return self.lookup(keys)

    def keep(self, keys: Sequence[Key], parent: Key | None, then: Callable[[Offered], None]) -> None:
        """See ``Index``."""
        then(self.offer(keys, parent))

    async def count(self, keys: Sequence[Key]) -> int:
        """See ``Index``."""
        return next((at for at, key in enumerate(keys) if key not in self), len(keys))

    async def delete(self, keys: Sequence[Key]) -> int:
        """See ``Index``."""
        places = self.lookup([key for key in keys if key in self])
        gone = self.drop(places, "deleted")
        self.release(places)
        return len(gone)

    async def clear(self) -> int:
        """See ``Index``."""
        return self.reset()

    def orphaned(self, places: Sequence[int]) -> bool:
        """See ``Index``."""
        return False
