"""The index of a tier that shares a pool: what it holds there is known here, all else is the owner's to say.

Whatever is asked is answered in the order in which it was asked. So what the owner had not heard yet when it
answered is exactly what has not been answered itself: places that were found bad are remembered until then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol

from aiokv.errors import AiokvError
from aiokv.offload.offered import Offered
from aiokv.offload.places import Places
from aiokv.offload.policies import Key
from aiokv.offload.sharing.held import HeldPlaces
from aiokv.offload.sharing.keys import decoded, encoded
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
    Release,
    Removed,
    Spoilt,
    Written,
)

__all__ = ["Owner", "SharedIndex"]

_log = logging.getLogger("aiokv")

#: Names of blocks that an owner is told late to drop; of more, it drops all.
_MOST_OWED = 100_000

Then = Callable[[FromOwner | None], None]


class Owner(Protocol):
    """The connection to who keeps the index."""

    def ask(self, make: Callable[[int], FromGuest], then: Then) -> None:
        """Send what ``make`` makes of an id; ``then`` gets the answer, or None if there won't be any."""

    def tell(self, message: FromGuest) -> None:
        """Send what isn't answered."""

    def mapped(self, places: int) -> None:
        """So many places can be used here."""

    def unused(self) -> None:
        """Nothing is in use any more that an owner gave who is lost."""

    @property
    def there(self) -> bool:
        """Whether there is a connection."""


class SharedIndex(HeldPlaces):
    """See ``Index``. Belongs to the loop's thread.

    Args:
        owner: Whom to ask.
        removed: Told the keys of blocks that went, and why.
    """

    def __init__(self, owner: Owner, *, removed: Callable[[Sequence[Key], str], None]) -> None:
        super().__init__()
        self._owner = owner
        self._on_removed = removed
        #: What the owner's numbers of places are counted from here; and how many of those in use are those of
        #: an owner that is lost.
        self._base = 0
        self._old = 0
        #: Places that were found bad, and how many messages say so that the owner may not have taken yet.
        self._bad: dict[int, int] = {}
        #: What an owner that was lost could not be told: to drop all, or these.
        self._owes_reset = False
        self._owed: dict[bytes, None] = {}
        self.capacity = 0
        #: Free places of the pool, as of the last answer.
        self._free = 0

    # -- what there is

    @property
    def free(self) -> int:
        """See ``Index``: as last heard, of those that can be used here at most."""
        return min(self._free, self.capacity)

    def orphaned(self, places: Sequence[int]) -> bool:
        """See ``Index``."""
        return not self._owner.there or any(place < self._base for place in places[:1])

    def grow(self, count: int) -> None:
        """See ``Index``."""
        self.capacity += count
        self._owner.mapped(self.capacity)

    # -- what is in use here

    def release(self, places: Sequence[int]) -> None:
        """See ``BlockTable``."""
        self._give_back(self._released(places))

    def _give_back(self, places: list[int]) -> None:
        """These are not in use here any more; each as often as it was given."""
        if self._old:
            theirs = [place for place in places if place >= self._base]
            self._old -= len(set(places)) - len(set(theirs))
            places = theirs
            if not self._old:
                self._owner.unused()
        if places:
            self._owner.tell(Release(self._told(places)))

    def _told(self, places: Sequence[int]) -> list[int]:
        """Places in the owner's numbers."""
        base = self._base
        return [place - base for place in places] if base else list(places)

    def _heard(self, places: list[int]) -> list[int]:
        """The owner's places in the numbers of here."""
        base = self._base
        return [place + base for place in places] if base else places

    def finish(self, places: Sequence[int], *, ok: bool) -> None:
        """See ``BlockTable``."""
        if not places:
            return
        self._writing.difference_update(places)
        bad: list[int] = []
        if not ok:
            bad = list(places)
            self._dropped(places, "dropped")
        if places[0] >= self._base:
            self._distrust(bad)
            told = self._told(places)
            self._owner.ask(lambda number: Written(number, told, ok), partial(self._taken, bad, ()))
        self.release(places)

    def drop(self, places: Iterable[int], why: str = "dropped") -> list[Key]:
        """See ``BlockTable``."""
        gone = [place for place in places if self.key_at(place) is not None]
        keys = self._dropped(gone, why)
        theirs = [place for place in gone if place >= self._base]
        if len(theirs) < len(gone):  # given by a connection that was lost: maybe to the same owner
            self._unwanted(encoded(keys))
        elif theirs:
            self._distrust(theirs)
            names, told = encoded(keys), self._told(theirs)
            self._owner.ask(lambda number: Spoilt(number, told), partial(self._taken, theirs, names))
        return keys

    def _unwanted(self, names: Sequence[bytes]) -> None:
        """These are not to be found; the owner is told now, or when there is one."""
        self._owed.update(dict.fromkeys(names))
        if len(self._owed) > _MOST_OWED:
            self._owed, self._owes_reset = {}, True
        if self._owner.there:
            self._pay()

    def _pay(self) -> None:
        """Tell the owner what it could not be told before."""
        if self._owes_reset:
            self._owner.ask(Clear, lambda _: self._cleared())
        owed, self._owed = self._owed, {}
        if owed:
            self._owner.ask(lambda number: Delete(number, list(owed)), partial(self._deleted, list(owed)))

    def _deleted(self, names: list[bytes], answer: FromOwner | None) -> None:
        if self._note(answer) is None:
            self._unwanted(names)

    def _dropped(self, places: Iterable[int], why: str) -> list[Key]:
        """These are not found any more, nor what they were."""
        keys = self._forget(places)
        if keys:
            self._on_removed(keys, why)
        return keys

    def _distrust(self, places: Iterable[int]) -> None:
        for place in places:
            self._bad[place] = self._bad.get(place, 0) + 1

    def _taken(self, places: Iterable[int], names: Sequence[bytes], answer: FromOwner | None) -> None:
        """The owner knows that places, which have these blocks, are bad; or it is lost."""
        for place in places:
            self._bad[place] -= 1
            if not self._bad[place]:
                del self._bad[place]
        if self._note(answer) is None and names:
            self._unwanted(names)

    def _note(self, answer: FromOwner | None) -> int | None:
        """How many, as the owner says; None if it doesn't."""
        if not isinstance(answer, Done):
            return None
        self._free = answer.free
        return answer.count

    # -- what is asked

    async def find(self, keys: Sequence[Key]) -> list[int]:
        """See ``Index``."""
        if len(set(keys)) != len(keys):
            raise ValueError("a hash stands twice in one lookup")
        found = asyncio.get_running_loop().create_future()
        names = encoded(keys)
        self._owner.ask(lambda number: Find(number, names), partial(self._found, keys, found))
        try:
            places: list[int] = await found
        except asyncio.CancelledError:
            if found.done() and not found.cancelled():  # both came in one turn
                self.release(found.result())
            raise
        return places

    def _found(self, keys: Sequence[Key], found: asyncio.Future[list[int]], answer: FromOwner | None) -> None:
        places: list[int] = []
        if isinstance(answer, Found):
            self._free = answer.free
            places = self._heard(answer.places)
            good = len(places)
            if self._bad:  # which it did not know yet
                good = next((at for at, place in enumerate(places) if place in self._bad), good)
            self._take(places[:good], keys)
            self._give_back(self._useless(places[good:]))
            places = places[:good]
        if found.done():
            self.release(places)
        else:
            found.set_result(Places(places))

    def keep(self, keys: Sequence[Key], parent: Key | None, then: Callable[[Offered], None]) -> None:
        """See ``Index``."""
        if len(set(keys)) != len(keys):
            raise ValueError("a hash stands twice in one store")
        before = None if parent is None else encoded([parent])[0]
        names = encoded(keys)
        self._owner.ask(lambda number: Keep(number, names, before), partial(self._kept, keys, then))

    def _kept(self, keys: Sequence[Key], then: Callable[[Offered], None], answer: FromOwner | None) -> None:
        offered = Offered(refused=len(keys))
        useless: list[int] = []
        if isinstance(answer, Kept):
            self._free = answer.free
            kept = answer.kept
            base = self._base
            new = [(index, place + base) for index, place in answer.new]
            pending = [(index, place + base) for index, place in answer.pending]
            for index, place in pending:
                if place in self._bad:  # it was, when the owner said so; it failed since
                    kept = min(kept, index)
            for index, place in new:
                self._write(place, keys[index])
            useless = [place for index, place in new if index >= kept]
            offered = Offered(
                new=[(index, place) for index, place in new if index < kept],
                pending=[
                    (index, place) for index, place in pending if index < kept and place in self._writing
                ],
                kept=kept,
                refused=answer.refused,
            )
        self.finish(useless, ok=False)
        try:
            then(offered)
        except AiokvError:
            # Whoever waits for it sees that nothing was kept; the places were given back.
            _log.exception("a store could not begin")

    async def count(self, keys: Sequence[Key]) -> int:
        """See ``Index``."""
        names = encoded(keys)
        return await self._number(lambda number: Count(number, names))

    async def delete(self, keys: Sequence[Key]) -> int:
        """See ``Index``."""
        if len(set(keys)) != len(keys):
            raise ValueError("a hash stands twice")
        names = encoded(keys)
        return await self._number(lambda number: Delete(number, names), partial(self._deleted, names))

    async def clear(self) -> int:
        """See ``Index``."""
        self._outdate()
        self._owes_reset = True  # to the next owner, if it isn't answered: that may be the same one
        return await self._number(Clear, lambda _: self._cleared())

    def _cleared(self) -> None:
        self.reset()
        self._owes_reset = not self._owner.there

    async def _number(self, make: Callable[[int], FromGuest], first: Then | None = None) -> int:
        answered: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def over(answer: FromOwner | None) -> None:
            if first is not None:
                first(answer)
            number = self._note(answer) or 0
            if not answered.done():
                answered.set_result(number)

        self._owner.ask(make, over)
        return await answered

    # -- what the owner says by itself

    def removed(self, message: Removed) -> None:
        """Blocks are not found any more."""
        self._forget(self._heard(message.places))
        keys = []
        for name in message.keys:
            with suppress(ValueError, TypeError):  # another's, that means nothing here
                key = decoded(name)
                hash(key)
                keys.append(key)
        self._on_removed(keys, message.why)

    def reset(self) -> None:
        """No block is found any more that was given so far."""
        self._outdate()
        self._on_removed((), "reset")

    def lost(self, base: int) -> None:
        """The owner is gone. What is in use stays, and is nobody else's; nothing of it is found any more.

        Args:
            base: Higher than all of its places here.
        """
        self._outdate()
        self._old, self._base = len(self._keys), base
        self.capacity = self._free = 0
        self._on_removed((), "lost")
        if not self._old:
            self._owner.unused()

    def renew(self, base: int) -> None:
        """There is another owner, whose places count from ``base`` on here."""
        self._base = base
        self._pay()
