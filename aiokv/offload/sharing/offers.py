"""Those that share a pool, and their offers that wait for what others write."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from aiokv.offload.sharing.messages import FromOwner, Keep

__all__ = ["Guest", "Offers", "Waiting"]

#: Offers of one guest that wait for others.
_MOST = 1024
#: Names of blocks in all of these.
_MOST_KEYS = 1 << 20


@dataclass(slots=True, eq=False)
class Guest:
    """One attachment of one process.

    Attributes:
        digest: Names what its blocks hold.
        say: Sends it a message.
        limit: Places from the first on that it can use.
        held: How often each place was given to it.
        writing: Those of them that it writes.
        waiting: Its offers that wait for others.
        there: Whether it hears what it is told.
    """

    digest: bytes
    say: Callable[[FromOwner], None]
    limit: int = 0
    held: dict[int, int] = field(default_factory=dict)
    writing: set[int] = field(default_factory=set)
    waiting: dict[Waiting, None] = field(default_factory=dict)
    there: bool = True


@dataclass(slots=True, eq=False)
class Waiting:
    """An offer, and the places that others write."""

    guest: Guest
    offer: Keep
    places: set[int]
    #: It waited when it was looked at the last time.
    long: bool = False


class Offers:
    """Offers that wait, by what they wait for."""

    def __init__(self) -> None:
        #: Those that wait for each place, in the order in which they came.
        self._by_place: dict[int, dict[Waiting, None]] = {}

    def __bool__(self) -> bool:
        """Whether any waits."""
        return bool(self._by_place)

    def add(self, guest: Guest, offer: Keep, places: set[int], *, long: bool) -> bool:
        """Have an offer wait for places; False if too much of this guest's does.

        Args:
            guest: Whose it is.
            offer: What it asked for.
            places: What others write.
            long: It waited before for others, and was looked at.
        """
        waits = sum(len(each.offer.keys) for each in guest.waiting)
        if len(guest.waiting) >= _MOST or waits + len(offer.keys) > _MOST_KEYS:
            return False
        waiting = Waiting(guest, offer, places, long)
        guest.waiting[waiting] = None
        for place in places:
            self._by_place.setdefault(place, {})[waiting] = None
        return True

    def freed(self, places: Iterable[int]) -> list[Waiting]:
        """These are not written any more: those that wait for nothing else, which wait no longer."""
        free: list[Waiting] = []
        for place in places if self._by_place else ():
            for waiting in self._by_place.pop(place, ()):
                waiting.places.discard(place)
                if not waiting.places:
                    del waiting.guest.waiting[waiting]
                    free.append(waiting)
        return free

    def forget(self, guest: Guest) -> list[Waiting]:
        """All of a guest's, which wait no longer."""
        return [self._taken(waiting) for waiting in list(guest.waiting)]

    def old(self) -> list[Waiting]:
        """Those that waited already at the last call, which wait no longer."""
        waiting = {each: None for at in self._by_place.values() for each in at}
        old = [self._taken(each) for each in waiting if each.long]
        for each in waiting:
            each.long = True
        return old

    def _taken(self, waiting: Waiting) -> Waiting:
        del waiting.guest.waiting[waiting]
        for place in waiting.places:
            at = self._by_place[place]
            del at[waiting]
            if not at:
                del self._by_place[place]
        return waiting
