"""The parts of one engine's transfers: how they settle, drain and end, whatever their role.

Parts are found by (session, transfer id, attempt, role), so nothing of an old session or attempt
can find one. The ledger takes the time as an argument, sends messages by the parts' sessions, and
leaves ``actions`` for the layer above; it does nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable

from aiokv.errors import (
    AiokvError,
    BusyError,
    DeadlineExceeded,
    DeviceError,
    PeerLostError,
    Refused,
    TransferAborted,
)
from aiokv.proto.layout import CacheLayout
from aiokv.proto.messages import Abort, Aborted, Landed, Role, as_text
from aiokv.proto.parts import Event, State
from aiokv.proto.session import Session
from aiokv.proto.settings import Settings
from aiokv.proto.timers import Timers
from aiokv.proto.transfers import Action, ActionKind, Key, Offering, Part, Transfer
from aiokv.proto.waiting import Tombstones, stone_of

__all__ = ["Ledger"]


class Ledger:
    """All transfers and parts of one engine.

    Args:
        layout: This engine's cache layout.
        settings: Timers and bounds.
    """

    def __init__(self, layout: CacheLayout, settings: Settings) -> None:
        self.layout = layout
        self.settings = settings
        #: For the layer above, in order; it empties the list.
        self.actions: list[Action] = []
        #: Told when a part entered another state, with the one that it left; None where it is new.
        self.stepped: Callable[[Part, State | None], None] = _nobody
        #: Transfers that are not over.
        self.transfers: dict[tuple[Key, Role], Transfer] = {}
        #: Parts that have a session and have not ended.
        self.parts: dict[tuple[Session, str, int, Role], Part] = {}
        self._by_session: dict[Session, dict[Part, None]] = {}
        self.tombstones = Tombstones(settings.tombstone_ns, settings.tombstones)
        self._timers: Timers[Part] = Timers(lambda part: part.ended)

    # -- the beginning of parts

    def register(self, transfer: Transfer, role: Role, now: int) -> None:
        """A new transfer.

        Raises:
            BusyError: This id and attempt is going on already, or was.
        """
        verb = "offered" if role == "producer" else "fetched"
        if (transfer.key, role) in self.transfers:
            raise BusyError(f"transfer {transfer} is being {verb} already")
        if (stone := self.tombstones.find(transfer.key, role, now)) is not None:
            raise BusyError(
                f"transfer {transfer} was {verb} before and {stone.text}; use a new attempt number"
            )
        self.transfers[transfer.key, role] = transfer

    def add_part(self, transfer: Transfer, role: Role, session: Session | None, now: int) -> Part:
        """A new part, with its peer if that is known."""
        deadline = transfer.held_until(now) if isinstance(transfer, Offering) else transfer.deadline
        part = Part(transfer=transfer, role=role, deadline=deadline)
        transfer.parts.append(part)
        self._timers.set(deadline, part)
        if session is not None:
            self.bind(part, session, now)
            self.act(ActionKind.CONNECT, part)
        self.stepped(part, None)
        return part

    def bind(self, part: Part, session: Session, now: int) -> None:
        """It is known now who is at the other end."""
        part.session = session
        self.parts[session, *part.transfer.key, part.role] = part
        self._by_session.setdefault(session, {})[part] = None
        session.add_live(now)

    def find(self, session: Session, key: Key, role: Role) -> Part | None:
        """The part of this engine, in this role, that a message of a session means."""
        return self.parts.get((session, *key, role))

    def elsewhere(self, session: Session, key: Key, role: Role) -> Part | None:
        """The part with the same life of a peer that began over another of its sessions, and was not granted.

        An engine that is called by several names has a session for each, and what the two say of one
        transfer may come over different ones.
        """
        transfer = self.transfers.get((key, role))
        for part in transfer.parts if transfer is not None else ():
            same = part.session is not None and part.session.life == session.life
            if same and part.state is State.OFFERED:
                return part
        return None

    def rebind(self, part: Part, session: Session, now: int) -> None:
        """The part goes on over another session with the same life of the peer."""
        if part.session is not None:
            self._unbind(part, part.session)
        self.bind(part, session, now)

    def _unbind(self, part: Part, session: Session) -> None:
        self.parts.pop((session, *part.transfer.key, part.role), None)
        others = self._by_session[session]
        del others[part]
        if not others:
            del self._by_session[session]
        session.remove_live()

    def parts_of(self, session: Session) -> list[Part]:
        """Parts that have not ended and go over this session."""
        return list(self._by_session.get(session, ()))

    def hangs(self, session: Session, key: Key, role: Role, now: int) -> bool:
        """Whether a part that is over went into quarantine, so that it may still touch the peer's blocks."""
        transfer = self.transfers.get((key, role))
        if transfer is None:
            stone = self.tombstones.find(key, role, now)
            return stone is not None and not stone.quiet
        lives = [part.session.life for part in transfer.parts if part.quarantined and part.session]
        return session.life in lives

    def shorten(self, part: Part, deadline: int) -> None:
        """The other side's deadline is known; the earlier one holds."""
        if deadline < part.deadline:
            part.deadline = deadline
            self._timers.set(deadline, part)

    def extend(self, part: Part, deadline: int) -> None:
        """A part may take longer than was thought."""
        # Its timer, which is too early then, is set again when it is due: however often somebody
        # extends it, there is one of them.
        part.deadline = max(part.deadline, deadline)

    def step(self, part: Part, event: Event, error: AiokvError | None = None) -> State:
        """Let a part take one event; see ``Life.on``. Returns the state that it is in then."""
        before, after = part.state, part.life.on(event, error)
        if after is not before:
            self.stepped(part, before)
        return after

    def act(self, kind: ActionKind, part: Part, mask: int = 0) -> None:
        """Leave something to do for the layer above."""
        self.actions.append(Action(kind, part, mask))

    # -- the end of parts

    def settle(
        self, part: Part, event: Event, error: AiokvError | None = None, reason: str = "failed"
    ) -> None:
        """Settle a part's outcome, tell the other side, and have this side stop.

        Does nothing to a part whose outcome is settled.

        Args:
            part: The part.
            event: DONE, ABORT or FAIL.
            error: Why, unless DONE.
            reason: The same in one word, for the other side.
        """
        if part.settled:
            return
        self._settle(part, event, error, reason)
        if event is Event.DONE or part.role == "producer":
            return
        # A fetch that lacks one part is worth nothing; its other parts need not go on. Whose offer
        # does not fit is told that, since it may fit another.
        reason = reason if reason == "layout" else "sibling"
        for sibling in part.transfer.parts:
            if not sibling.settled:
                text = f"transfer {part.transfer}: another part failed: {part.transfer.said(part.life.error)}"
                self._settle(sibling, Event.ABORT, TransferAborted(text), reason)

    def _settle(self, part: Part, event: Event, error: AiokvError | None, reason: str) -> None:
        before, after = part.state, self.step(part, event, error)
        if error is not None and part.transfer.error is None:
            part.transfer.error = error
        if event is not Event.DONE:
            self._tell_abort(part, reason, error)
        if after is not State.DRAINING:
            self._end(part)
        else:
            self._drain(part, before, event)

    def _tell_abort(self, part: Part, reason: str, error: AiokvError | None) -> None:
        """The other side hears that we give up, unless it knows."""
        if not part.abort_known and part.session is not None:
            text = as_text(part.transfer.said(error))
            part.session.send(Abort(*part.transfer.key, part.role, reason, text))
            part.abort_known = True

    def _drain(self, part: Part, before: State, event: Event) -> None:
        """Wait for whatever is in flight; who waits for what depends on who touches our blocks."""
        part.drain_by = 0
        self._timers.set(0, part)  # the bound counts from when a timer first sees the part drain
        readable = part.role == "producer" and part.one_sided and before is State.MOVING
        if readable and event is not Event.DONE and part.session is not None:
            # The consumer may read on until it says ABORTED, is certainly dead, or its lease ends.
            # What we confirm to it later is no matter: it reads our ABORT before that.
            part.quiet_at = part.session.lease_given
        else:
            self.act(ActionKind.STOP, part)

    def quiet(self, part: Part) -> None:
        """Nothing in flight on this side, or by the peer, can touch the part's blocks any more."""
        if part.state is State.DRAINING:
            self.step(part, Event.QUIET)
            self._end(part)

    def unreachable(self, part: Part, error: AiokvError) -> None:
        """The part's peer is certainly gone, or its way to our memory is."""
        self.settle(part, Event.FAIL, error)
        if part.role == "producer" and part.one_sided:
            self.quiet(part)

    def _end(self, part: Part) -> None:
        """The part is over: tell the peer, forget it, and see whether its transfer is over too."""
        transfer, session = part.transfer, part.session
        if session is not None:
            self._unbind(part, session)
            if part.quarantined:
                # ABORTED would say that nothing of it is in flight. Who reads our blocks, or lets us
                # read its own, counts on its lease instead.
                self._tell_abort(part, "failed", part.life.error)
            elif part.state is not State.LANDED:
                session.send(Aborted(*transfer.key, part.role))
            elif part.role == "consumer" and part.link:
                session.send(Landed(*transfer.key))
        self.act(ActionKind.ENDED, part)
        if all(each.ended for each in transfer.parts) and not transfer.resolved:
            transfer.resolved = True
            self.transfers.pop((transfer.key, part.role), None)
            self.tombstones.bury(transfer.key, part.role, stone_of(transfer))
            self.act(ActionKind.RESOLVED, part)

    def lost(self, session: Session, error: AiokvError, *, certain: bool) -> None:
        """A session ended, and with it its parts.

        Args:
            session: The session.
            error: Why.
            certain: The peer's process, or its way to our memory, is gone too.
        """
        for part in self.parts_of(session):
            kind = type(error) if isinstance(error, Refused) else PeerLostError
            failure = kind(f"transfer {part.transfer}: {error}")
            if certain:
                self.unreachable(part, failure)
            else:
                self.settle(part, Event.FAIL, failure)

    # -- time

    def next_timer(self) -> int | None:
        """When ``handle_timer`` wants to be called (ns), or None if nothing is pending."""
        return self._timers.next()

    def handle_timer(self, now: int) -> None:
        """Let time pass: deadlines, leases, drain bounds."""
        while (part := self._timers.take(now)) is not None:
            if part.state is State.DRAINING:
                self._draining(part, now)
            elif now >= part.deadline:
                text = f"transfer {part.transfer}: {_passed(part)} at the {part.role}, {self._doing(part)}"
                self.settle(part, Event.FAIL, DeadlineExceeded(text), "deadline")
            else:
                self._timers.set(part.deadline, part)

    def _draining(self, part: Part, now: int) -> None:
        if not part.drain_by:
            part.drain_by = now + self.settings.drain_ns
            self._timers.set(part.drain_by, part)
            if part.quiet_at:
                self._timers.set(part.quiet_at + 1, part)
            elif part.role == "producer" and not part.one_sided:
                part.cut_at = now + self.settings.drain_ns * 3 // 4
                self._timers.set(part.cut_at, part)
        elif part.quiet_at and now > part.quiet_at:
            self.quiet(part)  # what the consumer reads from now on, it counts as failed
        elif part.cut_at and now >= part.cut_at:
            # The consumer is stopped, say. Its link can be had again, blocks in quarantine can't.
            part.cut_at = 0
            part.drain_by = now + self.settings.drain_ns // 4
            self._timers.set(part.drain_by, part)
            self.act(ActionKind.CUT, part)
        elif now >= part.drain_by:
            bound = self.settings.drain_ns / 1e9
            text = f"transfer {part.transfer}: blocks not quiet {bound:g} s after it ended; they stay leased"
            part.quarantined = True
            part.life.outcome = State.FAILED
            part.life.error = part.transfer.error = DeviceError(text)
            self.act(ActionKind.QUARANTINE, part)
            self.quiet(part)

    # -- for people

    def explain(self, part: Part, now: int) -> str:
        """What a part is waiting for, in words, and for how long it still may."""
        doing = self._doing(part)
        return doing if part.settled else f"{doing}, {max(0, part.deadline - now) / 1e9:.1f} s left"

    def _doing(self, part: Part) -> str:
        who = part.session.address if part.session else "nobody" if part.ended else "anybody"
        there = f"{who} ({part.link}) at the other end" if part.link else f"{who} at the other end"
        match part.state:
            case State.OFFERED if part.role == "producer":
                refusal = part.transfer.refusal if isinstance(part.transfer, Offering) else ""
                return f"waiting for GRANT from {who}" + (f" (refused {refusal})" if refusal else "")
            case State.OFFERED if part.session is None:
                return "waiting for OFFER from anybody"
            case State.OFFERED:
                return f"waiting for {'the other sources' if part.linked else f'a connection to {who}'}"
            case State.GRANTED if part.role == "consumer" and part.tokens < 0:
                return f"waiting for ACCEPT from {who} ({part.link}), where it is not offered yet"
            case State.GRANTED:
                return f"waiting for the first layer, {there}"
            case State.MOVING:
                done = (part.landed if part.role == "consumer" else part.ready).bit_count()
                verb = "landed" if part.role == "consumer" else "announced"
                return f"{done} of {self.layout.layers} layers {verb}, {there}"
            case State.DRAINING:
                outcome = part.life.outcome.value if part.life.outcome else "nothing"
                return f"settled as {outcome}, waiting until it is quiet, {there}"
            case _:
                return f"{part.state.value}, {there}"


def _passed(part: Part) -> str:
    offering = part.transfer
    if isinstance(offering, Offering) and part.state is State.OFFERED and part.deadline < offering.deadline:
        return f"hold of {offering.hold / 1e9:g} s passed"
    return "deadline passed"


def _nobody(part: Part, before: State | None) -> None:
    """Is told of steps where nobody else is."""
