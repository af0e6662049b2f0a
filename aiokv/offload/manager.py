"""What the host tier holds: which block is where, which may go, and who uses it. No I/O, no clock, no loop.

A block of the tier has a place in its pool. It is *pending* while it is written there, *ready* afterwards,
and counted by those who use it (``pins``). It can go when it is ready, nobody uses it, and no block is there
that continues it: so the tail of a prefix goes before its head, whatever the policy and whatever was stored
first.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import cast

import numpy as np

from aiokv.errors import LocalProtocolError
from aiokv.offload.judges import Judges
from aiokv.offload.offered import Offered
from aiokv.offload.pins import Pins
from aiokv.offload.places import FreePlaces, Places, array_of, ascending
from aiokv.offload.policies import Admission, Key, Policy

__all__ = ["BlockTable"]

#: From so many blocks on numpy is faster.
_MANY = 32


class BlockTable:
    """The tier's index. All calls are made from one thread, and each leaves it whole.

    Args:
        policy: Orders what may go.
        admission: Says which new blocks get a place; None: all.
        removed: Told the keys of blocks that went, and why: ``"evicted"``, ``"dropped"`` or ``"reset"``.
        distrusted: Told of a policy or filter that raised, or did what it mustn't; an ``Lru`` took its place,
            or no filter.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        admission: Admission | None = None,
        removed: Callable[[Sequence[Key], str], None] | None = None,
        distrusted: Callable[[Exception], None] | None = None,
    ) -> None:
        self._judges = Judges(policy, admission, there=self._there, distrusted=distrusted)
        self._on_removed = removed
        self._places: dict[Key, int] = {}
        self._free = FreePlaces()
        #: All of these by place. The key is None where nothing is, or where it was dropped while in use.
        self._keys: list[Key | None] = []
        self._pins = Pins()
        self._pending = bytearray()
        #: How many blocks continue each one.
        self._followers = array("i")
        #: The place of the block that each one continues, -1 if it isn't there.
        self._parents = array("q")
        #: Places that are pending, and places that are in use (pending ones count).
        self.pending = 0
        self.in_use = 0
        #: Places in use of which the block was dropped.
        self.detached = 0

    # -- what there is

    def __len__(self) -> int:
        """Blocks that can be found, pending ones included."""
        return len(self._places)

    def __contains__(self, key: Key) -> bool:
        return key in self._places

    @property
    def capacity(self) -> int:
        """Places there are."""
        return len(self._keys)

    @property
    def free(self) -> int:
        """Places with nothing in them."""
        return len(self._free)

    @property
    def policy(self) -> Policy:
        """What orders the blocks now."""
        return self._judges.policy

    def key_at(self, place: int) -> Key | None:
        """What is in a place; None if nothing, or what was dropped while in use."""
        return self._keys[place]

    def keys_at(self, places: Sequence[int]) -> list[Key | None]:
        """The same of several."""
        keys = self._keys
        return [keys[place] for place in places]

    def writing(self, keys: Iterable[Key]) -> list[int]:
        """Places of those of some blocks that are being written."""
        pending = self._pending
        return [place for place in map(self._places.get, keys) if place is not None and pending[place]]

    def readable(self, keys: Sequence[Key], within: int) -> int:
        """How many blocks of a prefix are written, in places below ``within``. Says nothing of their use."""
        get, pending = self._places.get, self._pending
        for at, key in enumerate(keys):
            place = get(key, -1)
            if not 0 <= place < within or pending[place]:
                return at
        return len(keys)

    def ready(self, place: int) -> bool:
        """Whether what is in a place is written, and still what its key names."""
        return self._keys[place] is not None and not self._pending[place]

    def grow(self, count: int) -> None:
        """So many places more."""
        first = len(self._keys)
        self._keys.extend([None] * count)
        self._pins.grow(count)
        self._pending.extend(bytes(count))
        self._followers.extend([0] * count)
        self._parents.extend([-1] * count)
        self._free.give(range(first, first + count))

    # -- use

    def lookup(self, keys: Sequence[Key]) -> list[int]:
        """Places of the longest prefix that is there, or being written; each is in use until released.

        Raises:
            ValueError: A key stands twice: it can't be a prefix.
        """
        if len(set(keys)) != len(keys):
            raise ValueError("a hash stands twice in one lookup")
        get = self._places.get
        places = [] if not keys or get(keys[0]) is None else list(map(get, keys))
        if None in places:
            del places[places.index(None) :]
        found = Places(cast("list[int]", places))
        self.pin(found)
        if found:
            self._judges.used(found, hit=True)
        return found

    def pin(self, places: Sequence[int]) -> None:
        """Use blocks that are in use already, or found just now."""
        self.in_use += self._pins.up(places)

    def release(self, places: Sequence[int]) -> None:
        """Use blocks no longer.

        Raises:
            LocalProtocolError: One isn't in use.
        """
        followers, keys = self._followers, self._keys
        unused = self._pins.down(places)
        self.in_use -= len(unused)
        if self.detached and (gone := [place for place in unused if keys[place] is None]):
            self.detached -= len(gone)
            self._free.give(gone)
            unused = [place for place in unused if keys[place] is not None]
        if len(unused) > _MANY:
            where = np.array(unused, dtype=np.int64)
            idle = where[np.frombuffer(followers, np.int32)[where] == 0].tolist()
        else:
            idle = [place for place in unused if not followers[place]]
        if idle:
            self._judges.idle(idle)

    # -- storing

    def offer(self, keys: Sequence[Key], parent: Key | None = None, within: int | None = None) -> Offered:
        """Find places for those blocks of a prefix that aren't there, as far from the first as there is room.

        Every one in ``new`` is pending until ``finish``. What is offered, and what it continues, is not
        evicted for it.

        Args:
            keys: Each continues the one before.
            parent: What the first one continues.
            within: Only places below this are of use; None: all are.

        Raises:
            ValueError: A key stands twice.
        """
        if len(set(keys)) != len(keys):
            raise ValueError("a hash stands twice in one store")
        get = self._places.get
        at = list(map(get, keys))
        there = [] if at.count(None) == len(at) else [place for place in at if place is not None]
        before = get(parent, -1) if parent is not None else -1
        lacking = [index for index, place in enumerate(at) if place is None] if there else range(len(keys))
        found = Offered()
        wanted = self._judges.admitted(keys if not there else [keys[index] for index in lacking])
        held = [*there, before] if before >= 0 and before not in there else there
        self.pin(held)
        try:
            if there:
                self._judges.used(there, hit=False)
            if wanted > len(self._free):
                found.evicted = self._evict(wanted - len(self._free))
            room = min(wanted, len(self._free))
            taken = self._free.take(room) if within is None else self._free.take_below(room, within)
            room = len(taken)
            found.kept = lacking[room] if room < len(lacking) else len(keys)
            found.refused = len(keys) - found.kept
            new = lacking[:room]
            if there:
                pending = self._pending
                found.pending = [
                    (index, place)
                    for index, place in enumerate(at[: found.kept])
                    if place is not None and pending[place]
                ]
            found.new = list(zip(new, taken, strict=True))
            self._put(keys if room == len(keys) else [keys[index] for index in new], taken)
            self._link(cast("list[int]", at), found.new, before)
        finally:
            self.release(held)
        return found

    def finish(self, places: Sequence[int], *, ok: bool) -> None:
        """What was to be written is: it can be read from now on. Or it isn't, and is gone."""
        pending = self._pending
        if len(places) > _MANY:
            places = Places(places)
            np.frombuffer(pending, np.uint8)[array_of(places)] = 0
        else:
            for place in places:
                pending[place] = 0
        self.pending -= len(places)
        if not ok:
            self.drop(places, "dropped")
        self.release(places)

    def drop(self, places: Iterable[int], why: str = "dropped") -> list[Key]:
        """Blocks that nobody is to find any more. Those in use keep their place until they aren't."""
        gone = [place for place in places if self._keys[place] is not None]
        keys = [key for place in gone if (key := self._keys[place]) is not None]
        self._forget(gone, keys, why)
        return keys

    def reset(self) -> int:
        """Drop all; how many there were."""
        keys, places = list(self._places), list(self._places.values())
        count = len(self._keys)
        self._places.clear()
        self._keys = [None] * count
        self._parents = array("q", [-1]) * count
        self._followers = array("i", [0]) * count
        self._free = FreePlaces()
        self._free.give(self._pins.unused())
        self.detached = self.in_use
        if keys:
            self._gone(places, keys, "reset")
        return len(keys)

    # -- inside

    def _there(self) -> list[tuple[int, Key, bool]]:
        """All blocks, and whether they may go."""
        return [
            (place, key, not self._pins.counts[place] and not self._followers[place])
            for key, place in self._places.items()
        ]

    def _put(self, keys: Sequence[Key], places: Sequence[int]) -> None:
        """Enter new blocks, pending and in use by whoever writes them."""
        self._places.update(zip(keys, places, strict=True))
        at = 0
        for first, length in ascending(places):
            behind = first + length
            self._keys[first:behind] = keys[at : at + length]
            self._pins.counts[first:behind] = array("i", [1]) * length
            self._pending[first:behind] = b"\1" * length
            at += length
        self.pending += len(places)
        self.in_use += len(places)
        if places:
            self._judges.stored(places, keys)

    def _link(self, at: list[int], new: Sequence[tuple[int, int]], before: int) -> None:
        """Say of each new block which one it continues.

        Args:
            at: Where all blocks of the call are, but for the new ones, which are entered.
            new: Index and place of each, ascending.
            before: Where the block before the first is; -1 if it isn't there.
        """
        parents, followers = self._parents, self._followers
        if len(new) > _MANY and new[-1][0] - new[0][0] == len(new) - 1:
            # Of those behind the first each continues a new one, which nothing continued before.
            where = np.array([place for _, place in new], dtype=np.int64)
            np.frombuffer(parents, np.int64)[where[1:]] = where[:-1]
            np.frombuffer(followers, np.int32)[where[:-1]] = 1
            new = new[:1]
        for index, place in new:
            at[index] = place
            parent = at[index - 1] if index else before
            parents[place] = parent
            if parent >= 0:
                followers[parent] += 1

    def _evict(self, count: int) -> list[Key]:
        """Make so many places free, or as many as can be."""
        taken: list[int] = []
        keys: list[Key] = []
        try:
            self._choose(count, taken, keys)
        except Exception as error:  # noqa: BLE001 - whatever a policy does, it costs hits and nothing else
            for place, key in zip(taken, keys, strict=True):
                self._keys[place] = key
                if (parent := self._parents[place]) >= 0:
                    self._followers[parent] += 1
            self._judges.distrust(error)
            return []
        for key in keys:
            del self._places[key]
        self._free.give(taken)
        self._gone(taken, keys, "evicted")
        return keys

    def _choose(self, count: int, taken: list[int], gone: list[Key]) -> None:
        pins, followers, keys, parents = self._pins.counts, self._followers, self._keys, self._parents
        policy, places, patience = self.policy, len(self._keys), 2 * len(self._keys) + 64
        freed, left = policy.freed, count
        for victim in policy.victims():
            if not 0 <= victim < places:
                raise LocalProtocolError(f"the policy would evict block {victim} of {places}")
            place, key = victim, keys[victim]
            if pins[place] or followers[place]:
                key = None
            while key is not None:
                keys[place] = None
                taken.append(place)
                gone.append(key)
                left -= 1
                place = parents[place]
                if place >= 0:
                    followers[place] -= 1
                free = place >= 0 and not followers[place] and not pins[place] and freed(place)
                if not left:
                    if free:
                        policy.idle((place,))  # it is next, another time
                    return
                if not free:
                    break
                key = keys[place]
            else:
                patience -= 1
                if not patience:
                    raise LocalProtocolError("the policy goes on naming blocks that can't go")

    def _forget(self, places: Sequence[int], keys: Sequence[Key], why: str) -> None:
        """Take blocks out of the index, some of which may be in use or continued; free the others' places."""
        if not places:
            return
        parents, followers = self._parents, self._followers
        for place, key in zip(places, keys, strict=True):
            del self._places[key]
            self._keys[place] = None
        idle: list[int] = []
        for place in places:
            parent = parents[place]
            parents[place] = -1
            if parent >= 0:
                followers[parent] -= 1
                if not followers[parent] and not self._pins.counts[parent] and self._keys[parent] is not None:
                    idle.append(parent)
        for place in places:
            if followers[place]:
                # Rare: what continues it stays, and continues nothing. Its place will be another block's.
                links = np.frombuffer(parents, np.int64)
                links[links == place] = -1
                followers[place] = 0
        self._gone(places, keys, why)
        if idle:
            self._judges.idle(idle)
        unused = [place for place in places if not self._pins.counts[place]]
        self.detached += len(places) - len(unused)
        self._free.give(unused)

    def _gone(self, places: Sequence[int], keys: Sequence[Key], why: str) -> None:
        self._judges.removed(places, keys, evicted=why == "evicted")
        if self._on_removed is not None:
            self._on_removed(keys, why)
