"""Requests that came before their other half, and the memory of transfers that are over.

A router starts both sides together, so a grant often arrives before the offer that it is for. It
waits here, within bounds. And a request that comes too late is told what became of its transfer,
in place of waiting for something that will not come.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from aiokv.errors import DeadlineExceeded, TransferAborted
from aiokv.proto.messages import Abort, Grant, Offer, Role
from aiokv.proto.session import Session
from aiokv.proto.timers import Timers
from aiokv.proto.transfers import Key, Transfer

__all__ = ["Parked", "Tombstone", "Tombstones", "Waiting", "Withdrawn", "stone_of"]


@dataclass(slots=True, eq=False)
class Parked:
    """A grant or an offer that waits for its other half."""

    session: Session
    message: Grant | Offer
    #: When it is refused, on this engine's clock (ns).
    deadline: int
    #: It waits no more.
    gone: bool = False


class Waiting:
    """Grants and offers that wait; bounded for each peer.

    Args:
        per_peer: How many requests of one peer may wait.
    """

    def __init__(self, per_peer: int) -> None:
        self._per_peer = per_peer
        self._parked: dict[tuple[Key, Role], list[Parked]] = {}
        self._size = 0
        self._timers: Timers[Parked] = Timers(lambda parked: parked.gone)
        #: Told which transfer a request came to wait for.
        self.came: Callable[[Key], None] = _nobody

    def __len__(self) -> int:
        """Requests that wait."""
        return self._size

    def park(self, session: Session, message: Grant | Offer, sender: Role, deadline: int) -> str:
        """Let a request wait.

        Returns:
            Why it may not, as the reason of a refusal; empty if it waits.
        """
        if session.parked >= self._per_peer:
            return "capacity"
        waiting = self._parked.setdefault(((message.tid, message.attempt), sender), [])
        if any(each.session is session for each in waiting):
            return "duplicate"
        parked = Parked(session, message, deadline)
        waiting.append(parked)
        session.parked += 1
        self._size += 1
        self._timers.set(deadline, parked)
        self.came((message.tid, message.attempt))
        return ""

    def wanted(self, key: Key, readers: int) -> int:
        """From which token on the readers of something want it, if all of them wait; -1: they don't.

        Who asks for a certain number of tokens doesn't, be it none.
        """
        parked = self._parked.get((key, "consumer"), ())
        grants = [each.message for each in parked if isinstance(each.message, Grant)]
        if len(grants) < readers or any(grant.tokens >= 0 for grant in grants):
            return -1
        return min((grant.first_token for grant in grants), default=-1)

    def sessions(self, key: Key, sender: Role) -> list[Session]:
        """Whose requests wait for this."""
        return [parked.session for parked in self._parked.get((key, sender), ())]

    def claim(self, key: Key, sender: Role) -> list[Parked]:
        """The other half is here: all that waited for it, in order of arrival."""
        waiting = self._parked.pop((key, sender), [])
        for parked in waiting:
            self._leave(parked)
        return waiting

    def withdraw(self, session: Session, key: Key, sender: Role) -> None:
        """The peer gave its request up."""
        waiting = self._parked.get((key, sender), [])
        for parked in waiting:
            if parked.session is session:
                self._leave(parked)
        self._sweep(key, sender)

    def lost(self, session: Session) -> None:
        """The peer's session is over, and with it all that it asked for."""
        if not session.parked:
            return
        for key, sender in list(self._parked):
            self.withdraw(session, key, sender)

    def expired(self, now: int) -> list[Parked]:
        """Requests whose time is over; they wait no more."""
        found = []
        while (parked := self._timers.take(now)) is not None:
            self._leave(parked)
            message = parked.message
            sender: Role = "consumer" if isinstance(message, Grant) else "producer"
            self._sweep((message.tid, message.attempt), sender)
            found.append(parked)
        return found

    def next_timer(self) -> int | None:
        """When the first request's time is over (ns); None if nothing waits."""
        return self._timers.next()

    def _leave(self, parked: Parked) -> None:
        parked.gone = True
        parked.session.parked -= 1
        self._size -= 1

    def _sweep(self, key: Key, sender: Role) -> None:
        kept = [parked for parked in self._parked.get((key, sender), []) if not parked.gone]
        if kept:
            self._parked[key, sender] = kept
        else:
            self._parked.pop((key, sender), None)


def _nobody(key: Key) -> None:
    """Is told of what came where nobody else is."""


class Withdrawn:
    """Consumers that gave up what was not offered yet; the offer is told when it comes.

    Without this it would wait for them until its deadline (vllm#29906).

    Args:
        keep_ns: For how long that is remembered.
        most: Transfers of which it is; the oldest go first.
    """

    def __init__(self, keep_ns: int, most: int) -> None:
        self._keep_ns = keep_ns
        self._most = most
        self._noted: OrderedDict[Key, list[tuple[int, Session, Abort]]] = OrderedDict()

    def __len__(self) -> int:
        """Transfers of which somebody gave up."""
        return len(self._noted)

    def note(self, session: Session, abort: Abort, now: int) -> None:
        """A consumer gave up. Said twice it counts once, from then on."""
        key = abort.tid, abort.attempt
        kept = [each for each in self._noted.get(key, ()) if each[1] is not session]
        self._noted[key] = [*kept, (now, session, abort)]
        while len(self._noted) > self._most:
            self._noted.popitem(last=False)

    def claim(self, key: Key, now: int) -> list[tuple[Session, Abort]]:
        """The offer is here: who gave it up, in order."""
        noted = self._noted.pop(key, [])
        return [(session, abort) for when, session, abort in noted if when + self._keep_ns > now]

    def lost(self, session: Session) -> None:
        """The peer's session is over; that it gave up is not worth remembering."""
        for key, noted in list(self._noted.items()):
            kept = [each for each in noted if each[1] is not session]
            if kept:
                self._noted[key] = kept
            else:
                del self._noted[key]


class Tombstone(NamedTuple):
    """What became of one transfer."""

    #: For the peer that comes too late: ``ended`` (well), ``aborted``, ``deadline`` or ``failed``.
    reason: str
    #: The same in words, behind "it".
    text: str
    #: When it would have been over at the latest (ns).
    deadline: int
    #: The peers' lives that had a part.
    lives: frozenset[bytes] = frozenset()
    #: Nothing can touch its blocks any more; not so where a part went into quarantine.
    quiet: bool = True


class Tombstones:
    """What became of transfers that are over, for a while.

    Args:
        keep_ns: How long after its deadline a transfer is remembered.
        most: How many are remembered; the oldest go first.
    """

    def __init__(self, keep_ns: int, most: int) -> None:
        self._keep_ns = keep_ns
        self._most = most
        self._stones: OrderedDict[tuple[Key, Role], Tombstone] = OrderedDict()

    def __len__(self) -> int:
        """Transfers remembered."""
        return len(self._stones)

    def bury(self, key: Key, role: Role, stone: Tombstone) -> None:
        """A transfer is over."""
        self._stones[key, role] = stone
        while len(self._stones) > self._most:
            self._stones.popitem(last=False)

    def find(self, key: Key, role: Role, now: int) -> Tombstone | None:
        """What became of a transfer; None if nothing is known of it."""
        # Forgetting needs no timer: what is too old goes when somebody asks. Deadlines differ, so
        # the order is only nearly that of age, and some are remembered longer than need be.
        while self._stones:
            first = next(iter(self._stones))
            if self._stones[first].deadline + self._keep_ns > now:
                break
            del self._stones[first]
        return self._stones.get((key, role))


def stone_of(transfer: Transfer) -> Tombstone:
    """What is remembered of a transfer that is over."""
    # Who was to have what didn't land may come until then, though it was held, or asked for, for less.
    deadline = transfer.deadline if transfer.error else max(part.deadline for part in transfer.parts)
    match transfer.error:
        case None:
            reason = "ended"
        case TransferAborted():
            reason = "aborted"
        case DeadlineExceeded():
            reason = "deadline"
        case _:
            reason = "failed"
    return Tombstone(
        reason,
        "landed" if transfer.error is None else f"ended: {transfer.said(transfer.error)}",
        deadline,
        lives=frozenset(part.session.life for part in transfer.parts if part.session is not None),
        quiet=not any(part.quarantined for part in transfer.parts),
    )
