"""What the owner of a pool decides: who holds what, who writes what, and who has to wait. No I/O, no clock.

The index is a tier's (``BlockTable``), with the name of a block's cache put before its own. What is special
about several processes:

* A guest holds a place as often as it was given to it, whatever it does there; in the table that counts once.
* Blocks that are being written are seen by the one that writes them only.
* An offer of blocks of which another guest is writing some waits until that is over. As it holds nothing
  meanwhile, nobody ever waits in a circle.
* What a guest holds is anybody else's only when it can't touch it any more: when it says so, or when its
  process is gone. A connection that ended is neither: a copy that was begun goes on, of a GPU's even when the
  process's own threads have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from aiokv.errors import RemoteProtocolError
from aiokv.offload.manager import BlockTable
from aiokv.offload.policies import Admission, Key, Policy
from aiokv.offload.sharing.messages import (
    Clear,
    Count,
    Delete,
    Done,
    Find,
    Found,
    FromGuest,
    FromOwner,
    Keep,
    Kept,
    Mapped,
    Release,
    Removed,
    Reset,
    Spoilt,
    Written,
)
from aiokv.offload.sharing.offers import Guest, Offers

__all__ = ["Shares"]

#: Names in one message about blocks that went.
_MOST_NAMES = 4096


class Shares:
    """All calls are made from one thread, and each leaves it whole.

    Args:
        policy: Orders what may go.
        admission: Says which new blocks get a place; None: all.
        distrusted: Told of one of these that failed.
    """

    def __init__(
        self,
        policy: Policy,
        admission: Admission | None = None,
        distrusted: Callable[[Exception], None] | None = None,
    ) -> None:
        self.table = BlockTable(policy, admission=admission, removed=self._on_removed, distrusted=distrusted)
        #: Guests that hold anything, or might, those that are not there any more included.
        self.guests: dict[Guest, None] = {}
        self._offers = Offers()
        #: Places whose blocks are being dropped, and who knows that already.
        self._dropping: Sequence[int] = ()
        self._knows: Guest | None = None
        self.evicted = 0

    # -- guests

    def attach(self, digest: bytes, say: Callable[[FromOwner], None]) -> Guest:
        """A guest more."""
        guest = Guest(digest, say)
        self.guests[guest] = None
        return guest

    def lost(self, guest: Guest) -> None:
        """It hears nothing any more; what it holds it keeps, as its process may be there.

        What it was writing is nobody's: it can't say any more that it has written it. Only the places stay.
        """
        guest.there = False
        self._offers.forget(guest)
        self._knows = guest
        self.table.drop(guest.writing, "dropped")
        self._knows = None
        self._go_on(guest.writing)

    def gone(self, guest: Guest) -> None:
        """It touches nothing any more: what it wrote is dropped, and what it held is given back."""
        self.lost(guest)
        del self.guests[guest]
        writing, guest.writing = list(guest.writing), set()
        held, guest.held = list(guest.held), {}
        self._finish(guest, writing, ok=False)
        self.table.release(held)
        self._go_on(writing)

    def there(self, digests: Sequence[bytes], keys: Sequence[bytes]) -> int:
        """How long the prefix is that guests of each of these digests can load. Changes nothing.

        Those that can use the most count. One that can use less, as it has only just come, or may pin no
        more, finds less when it looks it up; nobody else is to find less for it.
        """
        count = len(keys)
        for digest in dict.fromkeys(digests):
            limits = [guest.limit for guest in self.guests if guest.there and guest.digest == digest]
            names = [digest + key for key in keys[:count]]
            count = self.table.readable(names, max(limits, default=self.table.capacity))
        return count

    # -- what guests say

    def receive(self, guest: Guest, message: FromGuest) -> None:
        """Do what it asks.

        Raises:
            RemoteProtocolError: It says what it mustn't; nothing was changed.
        """
        match message:
            case Find():
                self._find(guest, message)
            case Keep():
                self._once(message.keys)
                self._keep(guest, message)
            case Written():
                self._written(guest, message)
            case Release():
                self._release(guest, message.places)
            case Spoilt():
                self._spoilt(guest, message)
            case Mapped():
                if not guest.limit <= message.places <= self.table.capacity:
                    raise RemoteProtocolError(f"it maps {message.places} of {self.table.capacity} places")
                guest.limit = message.places
            case Count():
                self._count(guest, message)
            case Delete():
                self._delete(guest, message)
            case Clear():
                self._clear(guest, message)
            case _:
                raise RemoteProtocolError(f"a {type(message).__name__} at a wrong time")

    def _find(self, guest: Guest, message: Find) -> None:
        self._once(message.keys)
        table = self.table
        found = table.lookup(_named(guest, message.keys))
        if table.pending > len(guest.writing) or guest.limit < table.capacity:
            there = 0
            while there < len(found) and self._sees(guest, found[there]):
                there += 1
            rest = found[there:]
            del found[there:]
            table.release(rest)
        held = guest.held
        if held.keys().isdisjoint(found):
            held.update(dict.fromkeys(found, 1))
        else:
            again = [place for place in found if place in held]
            for place in found:
                held[place] = held.get(place, 0) + 1
            table.release(again)
        guest.say(Found(message.id, list(found), table.free))

    def _sees(self, guest: Guest, place: int) -> bool:
        return place < guest.limit and (place in guest.writing or self.table.ready(place))

    def _keep(self, guest: Guest, message: Keep, refused: int = 0, *, long: bool = False) -> None:
        table = self.table
        names = _named(guest, message.keys)
        others = self._others(guest, names)
        if others:
            if not self._offers.add(guest, message, others, long=long):
                self._refuse(guest, message)
            return
        parent = None if message.parent is None else guest.digest + message.parent
        within = guest.limit if guest.limit < table.capacity else None
        offered = table.offer(names, parent, within)
        for _, place in offered.new:
            guest.held[place] = 1
            guest.writing.add(place)
        refused += offered.refused
        guest.say(Kept(message.id, offered.kept, refused, offered.new, offered.pending, table.free))

    def _written(self, guest: Guest, message: Written) -> None:
        if len(set(message.places)) != len(message.places) or not guest.writing.issuperset(message.places):
            raise RemoteProtocolError("it has written where it doesn't write")
        self._finish(guest, message.places, ok=message.ok)
        guest.writing.difference_update(message.places)
        guest.say(Done(message.id, len(message.places), self.table.free))
        self._go_on(message.places)

    def _finish(self, guest: Guest, places: Sequence[int], *, ok: bool) -> None:
        """What a guest wrote is there, or isn't; it holds the places on."""
        self.table.pin(places)
        self._dropping, self._knows = (), guest
        self.table.finish(places, ok=ok)
        self._knows = None

    def _release(self, guest: Guest, places: Sequence[int]) -> None:
        held = guest.held
        once = list(map(held.get, places)).count(1) == len(places) == len(set(places))
        if once and guest.writing.isdisjoint(places):  # as nearly always
            for place in places:
                del held[place]
            self.table.release(places)
            return
        left: list[int] = []
        counts: dict[int, int] = {}
        for place in places:
            counts[place] = counts.get(place, 0) + 1
        for place, count in counts.items():
            there = held.get(place, 0)
            if there < count or (there == count and place in guest.writing):
                raise RemoteProtocolError(f"it gives back place {place}, which it doesn't hold, or writes")
        for place, count in counts.items():
            if held[place] == count:
                del held[place]
                left.append(place)
            else:
                held[place] -= count
        self.table.release(left)

    def _spoilt(self, guest: Guest, message: Spoilt) -> None:
        if not guest.held.keys() >= set(message.places):
            raise RemoteProtocolError("it drops what it doesn't hold")
        self._drop(dict.fromkeys(message.places), "dropped", guest)
        guest.say(Done(message.id, len(message.places), self.table.free))

    def _count(self, guest: Guest, message: Count) -> None:
        table, names = self.table, _named(guest, message.keys)
        count = next((at for at, name in enumerate(names) if name not in table), len(names))
        hidden = {table.key_at(place) for place in self._others(guest, names)}
        if hidden:
            count = next((at for at, name in enumerate(names[:count]) if name in hidden), count)
        guest.say(Done(message.id, count, table.free))

    def _delete(self, guest: Guest, message: Delete) -> None:
        self._once(message.keys)
        table = self.table
        places = table.lookup([name for name in _named(guest, message.keys) if name in table])
        count = self._drop(places, "deleted", None)
        table.release(places)
        guest.say(Done(message.id, count, table.free))

    def _clear(self, guest: Guest, message: Clear) -> None:
        # What waits was offered before, so it isn't kept.
        for other in self.guests:
            for waiting in self._offers.forget(other):
                self._refuse(other, waiting.offer)
        count = self.table.reset()
        for other in self.guests:
            if other is not guest and other.there:
                other.say(Reset())
        guest.say(Done(message.id, count, self.table.free))

    def _others(self, guest: Guest, names: Sequence[bytes]) -> set[int]:
        """Places of those blocks that other guests are writing."""
        if self.table.pending == len(guest.writing):
            return set()
        return {place for place in self.table.writing(names) if place not in guest.writing}

    @staticmethod
    def _once(keys: Sequence[bytes]) -> None:
        if len(set(keys)) != len(keys):
            raise RemoteProtocolError("a key stands twice")

    # -- waiting for others

    def _go_on(self, places: Iterable[int]) -> None:
        """These are written, or won't be: who waited for nothing else goes on."""
        for waiting in self._offers.freed(places):
            self._keep(waiting.guest, waiting.offer, long=waiting.long)

    @property
    def waiting(self) -> bool:
        """Whether an offer waits."""
        return bool(self._offers)

    def give_up_old(self) -> None:
        """Offers that waited already at the last call wait no longer: who writes may be stopped, for example.

        They get what comes before the first block that another writes.
        """
        for waiting in self._offers.old():
            guest, offer = waiting.guest, waiting.offer
            names = _named(guest, offer.keys)
            others = {self.table.key_at(place) for place in self._others(guest, names)}
            first = next((at for at, name in enumerate(names) if name in others), len(names))
            self._keep(guest, Keep(offer.id, offer.keys[:first], offer.parent), len(names) - first)

    def _refuse(self, guest: Guest, offer: Keep) -> None:
        guest.say(Kept(offer.id, 0, len(offer.keys), [], [], self.table.free))

    # -- what goes

    def _drop(self, places: Iterable[int], why: str, knows: Guest | None) -> int:
        self._dropping, self._knows = list(places), knows
        gone = self.table.drop(self._dropping, why)
        self._dropping, self._knows = (), None
        return len(gone)

    def _on_removed(self, names: Sequence[Key], why: str) -> None:
        """Tell those that could find these; what was never there for others isn't told to them."""
        if why == "evicted":
            self.evicted += len(names)
        if why == "reset" or (self._knows is not None and not self._dropping):
            return
        by_digest: dict[bytes, list[bytes]] = {}
        for name in names:
            if isinstance(name, bytes):
                by_digest.setdefault(name[:16], []).append(name[16:])
        for guest in self.guests:
            keys = by_digest.get(guest.digest)
            if keys and guest.there and guest is not self._knows:
                places = [place for place in self._dropping if place in guest.held]
                for at in range(0, len(keys), _MOST_NAMES):  # one message of all might be too long to be read
                    guest.say(Removed(keys[at : at + _MOST_NAMES], places if not at else [], why))


def _named(guest: Guest, keys: Sequence[bytes]) -> list[bytes]:
    """Keys as they stand in the table."""
    digest = guest.digest
    return [digest + key for key in keys]
