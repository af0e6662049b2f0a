"""The transfer table: what this engine offers and fetches, and what becomes of each.

It decides and does nothing: it takes calls of the user, messages of peers and reports of the data
plane, each with the time, sends messages by the peers' sessions, and leaves ``actions`` for the
layer above. The producer's side, the consumer's side and what both share are modules of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from aiokv.errors import (
    AiokvError,
    CapacityError,
    DeadlineExceeded,
    LayoutMismatch,
    Refused,
    RemoteProtocolError,
    TransferAborted,
)
from aiokv.proto.consumer import Consumer
from aiokv.proto.layout import CacheLayout
from aiokv.proto.ledger import Ledger
from aiokv.proto.messages import (
    Abort,
    Aborted,
    Accept,
    Grant,
    Landed,
    Message,
    Offer,
    Ready,
    Refuse,
    Renew,
    Role,
)
from aiokv.proto.parts import Event, State
from aiokv.proto.producer import Producer
from aiokv.proto.session import Session
from aiokv.proto.settings import Settings
from aiokv.proto.transfers import Action, Key, Offering, Part, Transfer, other_role
from aiokv.proto.waiting import Waiting, Withdrawn

__all__ = ["Table"]

#: Reasons that a peer gives, and the errors that they become here where there is one more fitting.
_KINDS: Mapping[str, type[AiokvError]] = MappingProxyType(
    {
        "layout": LayoutMismatch,
        "capacity": CapacityError,
        "deadline": DeadlineExceeded,
        "unknown": DeadlineExceeded,  # the other half did not come in time
        "aborted": TransferAborted,
    }
)


class Table:
    """All transfers of one engine.

    Args:
        layout: This engine's cache layout.
        settings: Timers and bounds.
    """

    def __init__(self, layout: CacheLayout, settings: Settings) -> None:
        self.ledger = Ledger(layout, settings)
        self.waiting = Waiting(settings.parked_per_peer)
        self.withdrawn = Withdrawn(settings.tombstone_ns, 8 * settings.parked_per_peer)
        self.producer = Producer(self.ledger, self.waiting, self.withdrawn)
        self.consumer = Consumer(self.ledger, self.waiting)

    @property
    def actions(self) -> list[Action]:
        """What the layer above has to do, in order; it empties the list."""
        return self.ledger.actions

    def parts_of(self, session: Session) -> list[Part]:
        """Parts that have not ended and go over this session."""
        return self.ledger.parts_of(session)

    def count(self, role: Role) -> int:
        """Transfers going on in a role. May be called from any thread."""
        return [each for _, each in list(self.ledger.transfers)].count(role)

    def abort(self, transfer: Transfer, error: AiokvError, reason: str) -> None:
        """Give a whole transfer up, on this side's decision."""
        for part in list(transfer.parts):
            self.ledger.settle(part, Event.ABORT, error, reason)

    def ended(self, part: Part, now: int) -> None:
        """A part is over: who waits for a place in its transfer is told if there is none."""
        (self.producer if part.role == "producer" else self.consumer).take_parked(part.transfer.key, now)

    def fail(self, part: Part, error: AiokvError) -> None:
        """Something that the part needs went wrong on this side."""
        self.ledger.settle(part, Event.FAIL, error)

    def receive(self, session: Session, message: Message, now: int) -> None:
        """Take one message of a peer's session.

        Raises:
            RemoteProtocolError: The peer must not say this; its session has to end.
        """
        match message:
            case Grant():
                self.producer.on_grant(session, message, now, now + message.remaining_us * 1000)
            case Landed():
                self.producer.on_landed(session, message)
            case Offer():
                self.consumer.on_offer(session, message, now, now + message.remaining_us * 1000)
            case Accept():
                self.consumer.on_accept(session, message, now)
            case Ready():
                self.consumer.on_ready(session, message)
            case Refuse():
                self._on_refuse(session, message)
            case Abort():
                self._on_abort(session, message, now)
            case Aborted():
                self._on_aborted(session, message)
            case Renew():
                self.producer.on_renew(session, message, now)
            case _:
                raise RemoteProtocolError(f"unexpected {type(message).__name__} from {session.address}")

    def _on_refuse(self, session: Session, refuse: Refuse) -> None:
        part = self.ledger.find(session, (refuse.tid, refuse.attempt), other_role(refuse.role))
        if part is None or part.accepted or part.state not in (State.OFFERED, State.GRANTED):
            return
        text = f"transfer {part.transfer}: {session.address} refused ({refuse.reason}): {refuse.text}"
        part.abort_known = True
        self.ledger.settle(part, Event.FAIL, _KINDS.get(refuse.reason, Refused)(text))

    def _on_abort(self, session: Session, abort: Abort, now: int) -> None:
        key, mine = (abort.tid, abort.attempt), other_role(abort.role)
        self.waiting.withdraw(session, key, abort.role)
        part = self.ledger.find(session, key, mine)
        if part is None:
            part = self.ledger.elsewhere(session, key, mine)
        if part is None and abort.reason != "layout":  # whose cache doesn't fit is not who it waits for
            part = self._unclaimed(session, key, mine, now)
        if part is None:
            offering = self.ledger.transfers.get((key, mine))
            if abort.reason == "layout" and isinstance(offering, Offering):
                offering.refusal = f"{session.address} itself: {abort.text}"
            early = offering is None and self.ledger.tombstones.find(key, mine, now) is None
            if mine == "producer" and early and abort.reason != "layout":
                self.withdrawn.note(session, abort, now)
            if not self.ledger.hangs(session, key, mine, now):
                session.send(Aborted(*key, mine))  # also for what isn't known
            return
        if part.state is State.DRAINING:
            # Both gave up at once. ABORTED follows when this side is quiet: an ABORT says only that
            # its sender commits nothing more, not that nothing of it is in flight.
            return
        text = f"transfer {part.transfer}: given up by the {abort.role} at {session.address}: {abort.text}"
        part.abort_known = True
        self.ledger.settle(part, Event.ABORT, _KINDS.get(abort.reason, TransferAborted)(text))

    def _unclaimed(self, session: Session, key: Key, mine: Role, now: int) -> Part | None:
        """The part of who gave up before it could say that it takes part: nobody else will come for it."""
        transfer = self.ledger.transfers.get((key, mine))
        if transfer is None or transfer.has(session.life):
            return None  # it had its part
        part = transfer.unclaimed
        if part is not None:
            self.ledger.bind(part, session, now)
        return part

    def _on_aborted(self, session: Session, aborted: Aborted) -> None:
        part = self.ledger.find(session, (aborted.tid, aborted.attempt), other_role(aborted.role))
        if part is None:
            return
        if part.state is not State.DRAINING:
            part.abort_known = True
            error = TransferAborted(f"transfer {part.transfer}: given up by the {aborted.role}")
            self.ledger.settle(part, Event.ABORT, error)
        if part.role == "producer" and part.one_sided:
            self.ledger.quiet(part)

    def lost(self, session: Session, error: AiokvError, *, certain: bool) -> None:
        """A session ended. ``certain``: the peer's process, or its way to our memory, is gone too."""
        self.waiting.lost(session)
        self.withdrawn.lost(session)
        self.ledger.lost(session, error, certain=certain)

    def next_timer(self) -> int | None:
        """When ``handle_timer`` wants to be called (ns), or None if nothing is pending."""
        parts, parked = self.ledger.next_timer(), self.waiting.next_timer()
        if parts is None or parked is None:
            return parked if parts is None else parts
        return min(parts, parked)

    def handle_timer(self, now: int) -> None:
        """Let time pass."""
        self.ledger.handle_timer(now)
        for parked in self.waiting.expired(now):
            role: Role = "producer" if isinstance(parked.message, Grant) else "consumer"
            verb = "offered" if role == "producer" else "fetched"
            text = f"it was not {verb} here before its deadline"
            message = parked.message
            parked.session.send(Refuse(message.tid, message.attempt, role, "unknown", text))
