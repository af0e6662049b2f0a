"""What this engine offers and fetches, and what becomes of each: the transfer table.

The table decides and does nothing: it takes calls of the user, messages of peers and reports of
the data plane, each with the time, sends messages by the peers' sessions and leaves ``actions``
for the layer above. It knows block lists only as something to pass on.

A transfer has parts, one for each pair of engines. On the producer an ``Offering`` has as many
parts as readers; on the consumer a ``Fetching`` has as many as sources. Parts are found by
(session, transfer id, attempt), so nothing of an old session or attempt can find one.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from aiokv.errors import (
    AiokvError,
    BusyError,
    CapacityError,
    DeadlineExceeded,
    DeviceError,
    InvalidBlocks,
    LayoutMismatch,
    PeerLostError,
    Refused,
    RemoteProtocolError,
    TransferAborted,
)
from aiokv.proto.heads import assign_heads
from aiokv.proto.layout import CacheLayout
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
    Role,
    pack_blocks,
    unpack_blocks,
)
from aiokv.proto.parts import Event, Life, State
from aiokv.proto.plan import GroupBlocks
from aiokv.proto.session import Phase, Session
from aiokv.proto.settings import Settings

__all__ = ["Action", "ActionKind", "Fetching", "Offering", "Part", "Table", "Transfer"]

_Key = tuple[str, int]
Heads = tuple[tuple[int, int], ...]


@dataclass(eq=False, slots=True, kw_only=True)
class Transfer:
    """What both kinds of transfer have."""

    tid: str
    attempt: int
    #: When it must be over, on this engine's clock (ns).
    deadline: int
    #: This engine's block lists, one for each group.
    blocks: tuple[GroupBlocks, ...]
    #: W3C trace context that travels along, or empty.
    trace: str = ""
    parts: list[Part] = field(default_factory=list)
    #: First error of a part; None while all is well.
    error: AiokvError | None = None
    resolved: bool = False

    @property
    def key(self) -> _Key:
        """Id and attempt."""
        return self.tid, self.attempt

    def __str__(self) -> str:
        return f"{self.tid!r}" + (f" attempt {self.attempt}" if self.attempt else "")


@dataclass(eq=False, slots=True, kw_only=True)
class Offering(Transfer):
    """A transfer's producer side."""

    #: Tokens offered.
    tokens: int
    #: Layers ready so far, as a bit mask.
    ready: int = 0


@dataclass(eq=False, slots=True, kw_only=True)
class Fetching(Transfer):
    """A transfer's consumer side."""

    #: Tokens before this one are there already.
    first_token: int = 0
    #: Tokens wanted; -1: as many as are offered.
    tokens: int = -1
    #: Tokens that this side's blocks have room for.
    capacity: int = 0
    priority: int = 0


@dataclass(eq=False, slots=True, kw_only=True)
class Part:
    """One pair of engines' share of a transfer, on one side."""

    transfer: Transfer
    role: Role
    #: None until it is known who the other side is.
    session: Session | None = None
    life: Life = field(default_factory=Life)
    #: When this part must be over (ns); the earlier of the two sides' deadlines as far as known.
    deadline: int = 0
    #: In DRAINING: when the consumer's lease on our blocks ends, 0 where no lease is out (ns).
    quiet_at: int = 0
    #: In DRAINING: when we give up waiting (ns).
    drain_by: int = 0
    link: str = ""
    link_id: bytes = b""
    one_sided: bool = True
    #: Consumer: a link to the producer is there.
    linked: bool = False
    heads: Heads = ()
    first_token: int = 0
    #: Tokens that this part moves up to; -1 while that isn't known.
    tokens: int = -1
    #: The other side's blocks; empty where they aren't needed or not known yet.
    peer_blocks: tuple[GroupBlocks, ...] = ()
    #: Layers that may be read (consumer) or that the consumer was told of (producer), as a bit mask.
    ready: int = 0
    #: Consumer: layers that are in place, as a bit mask.
    landed: int = 0
    #: The other side was told that we give up, or told us.
    abort_known: bool = False

    @property
    def state(self) -> State:
        """Where the part is in its life."""
        return self.life.state

    @property
    def ended(self) -> bool:
        """Whether the part is over."""
        return self.life.ended

    def __str__(self) -> str:
        peer = self.session.address if self.session else "nobody yet"
        return f"part of {self.transfer} with {peer} ({self.role}, {self.state.value})"


class ActionKind(Enum):
    """What the layer above has to do."""

    #: Bring up a session with the part's peer; at a consumer also a link to it. Then ``connected``.
    CONNECT = "connect"
    #: Both block lists are known: make the copy plan.
    START = "start"
    #: The layers in ``mask`` may be copied (consumer of a one-sided link) or sent (producer).
    MOVE = "move"
    #: Commit nothing more of this part, and report ``quiet`` once nothing is in flight.
    STOP = "stop"
    #: The part ended without being quiet: its blocks stay leased for the engine's life.
    QUARANTINE = "quarantine"
    #: The part ended.
    ENDED = "ended"
    #: All parts of the part's transfer ended.
    RESOLVED = "resolved"


@dataclass(frozen=True, slots=True)
class Action:
    """Something for the layer above to do."""

    kind: ActionKind
    part: Part
    mask: int = 0


@dataclass(slots=True, eq=False)
class _Parked:
    """A grant or an offer that waits for its other half."""

    session: Session
    message: Grant | Offer
    deadline: int
    gone: bool = False


class Table:
    """All transfers of one engine.

    Args:
        layout: This engine's cache layout.
        settings: Timers and bounds.
    """

    def __init__(self, layout: CacheLayout, settings: Settings) -> None:
        self.layout = layout
        self.settings = settings
        #: For the layer above, in order; it empties the list.
        self.actions: list[Action] = []
        self.offerings: dict[_Key, Offering] = {}
        self.fetchings: dict[_Key, Fetching] = {}
        #: Parts that have a session and have not ended.
        self.parts: dict[tuple[Session, str, int, Role], Part] = {}
        #: Ended transfers: what became of them, and until when that is remembered.
        self.tombstones: OrderedDict[tuple[_Key, Role], tuple[str, int]] = OrderedDict()
        self._parked: dict[tuple[_Key, Role], list[_Parked]] = {}
        self._parked_count: dict[Session, int] = {}
        self._timers: list[tuple[int, int, Part | _Parked]] = []
        self._order = itertools.count()
        self._dirty: dict[Part, None] = {}

    # -- calls of the user

    def offer(self, offering: Offering, peers: Sequence[Session | None], now: int) -> None:
        """Register an offer with one part for each reader.

        Args:
            offering: The offer; its parts are made here.
            peers: For each reader its session (push), or None for whoever grants first.
            now: The time.

        Raises:
            BusyError: This id and attempt is offered already, or was.
        """
        self._check_new(offering, self.offerings, "producer", now)
        self.offerings[offering.key] = offering
        for peer in peers:
            part = Part(transfer=offering, role="producer", deadline=offering.deadline)
            offering.parts.append(part)
            self._arm(offering.deadline, part)
            if peer is not None:
                self._bind(part, peer, now)
                self._act(ActionKind.CONNECT, part)
        for parked in self._unpark(offering.key, "consumer"):
            if isinstance(parked.message, Grant):
                self._on_grant(parked.session, parked.message, now, parked.deadline)

    def fetch(self, fetching: Fetching, sources: Sequence[Session], parts: int, now: int) -> None:
        """Register a fetch with one part for each source.

        Args:
            fetching: The fetch; its parts are made here.
            sources: Sessions of the producers to ask; empty: wait for offers that name us.
            parts: How many offers to wait for where there are no sources.
            now: The time.

        Raises:
            BusyError: This id and attempt is being fetched already, or was.
        """
        self._check_new(fetching, self.fetchings, "consumer", now)
        self.fetchings[fetching.key] = fetching
        peers: Sequence[Session | None] = sources or [None] * parts
        for peer in peers:
            part = Part(transfer=fetching, role="consumer", deadline=fetching.deadline)
            part.first_token = fetching.first_token
            fetching.parts.append(part)
            self._arm(fetching.deadline, part)
            if peer is not None:
                self._bind(part, peer, now)
                self._act(ActionKind.CONNECT, part)
        for parked in self._unpark(fetching.key, "producer"):
            if isinstance(parked.message, Offer):
                self._on_offer(parked.session, parked.message, now)

    def layers_ready(self, offering: Offering, mask: int, now: int) -> None:
        """Layers of an offer are written, and stay as they are."""
        new = mask & ~offering.ready
        if not new or offering.resolved:
            return
        offering.ready |= new
        for part in offering.parts:
            if part.state in (State.GRANTED, State.MOVING):
                self._move_producer(part, new)

    def abort(self, transfer: Transfer, error: AiokvError, reason: str) -> None:
        """Give a whole transfer up, on this side's decision."""
        for part in list(transfer.parts):
            self.settle(part, Event.ABORT, error, reason)

    def _check_new(
        self, transfer: Transfer, live: dict[_Key, Offering] | dict[_Key, Fetching], role: Role, now: int
    ) -> None:
        verb = "offered" if role == "producer" else "fetched"
        if transfer.key in live:
            raise BusyError(f"transfer {transfer} is being {verb} already")
        if (outcome := self._tombstone(transfer.key, role, now)) is not None:
            raise BusyError(f"transfer {transfer} was {verb} before and {outcome}; use a new attempt number")

    # -- reports of the layer above

    def connected(self, part: Part, now: int, *, link: str = "", link_id: bytes = b"", one_sided: bool = True) -> None:
        """The part's session is up, and at a consumer the link to its producer is there."""
        if part.state is not State.OFFERED or part.session is None:
            return
        if part.role == "producer":
            assert part.session.hello is not None  # noqa: S101  # the session is up
            found = list(self.layout.differences(part.session.hello.layout))
            if found:
                who = part.session.address
                self.fail(part, LayoutMismatch(f"this cache and that of {who} differ: " + "; ".join(found)))
                return
            transfer = part.transfer
            remaining = max(0, part.deadline - now) // 1000
            part.session.send(Offer(transfer.tid, transfer.attempt, remaining, transfer.trace))
            return
        part.link, part.link_id, part.one_sided, part.linked = link, link_id, one_sided, True
        fetching = part.transfer
        if all(each.linked for each in fetching.parts) and isinstance(fetching, Fetching):
            self._grant(fetching, now)

    def _grant(self, fetching: Fetching, now: int) -> None:
        """All sources are known: share the heads out among them, and ask."""
        layouts = []
        for part in fetching.parts:
            assert part.session is not None and part.session.hello is not None  # noqa: S101
            found = list(self.layout.differences(part.session.hello.layout))
            if found:
                who = part.session.address
                self.fail(part, LayoutMismatch(f"this cache and that of {who} differ: " + "; ".join(found)))
                return
            layouts.append(part.session.hello.layout)
        try:
            shares = assign_heads(self.layout, layouts)
        except LayoutMismatch as error:
            self.fail(fetching.parts[0], error)
            return
        for part, heads in zip(fetching.parts, shares, strict=True):
            if part.state is not State.OFFERED or part.session is None:
                continue
            part.heads = heads
            needed = any(low < high for low, high in heads) and fetching.first_token != fetching.tokens
            message = Grant(
                tid=fetching.tid,
                attempt=fetching.attempt,
                remaining_us=max(0, part.deadline - now) // 1000,
                link=part.link if needed else "",
                link_id=part.link_id if needed else b"",
                first_token=fetching.first_token,
                tokens=fetching.tokens,
                heads=heads,
                blocks=() if part.one_sided or not needed else pack_blocks(fetching.blocks),
                trace=fetching.trace,
            )
            part.life.on(Event.GRANT)
            part.session.send(message)
            if not needed:
                part.link = ""
                # Nothing will be written here, so there is nothing to wait for: not even the producer.
                self.settle(part, Event.DONE)

    def unlinked(self, part: Part, error: AiokvError) -> None:
        """The session or the link that the part needs can't be had, or is lost."""
        self.settle(part, Event.FAIL, error)
        if part.role == "producer" and part.one_sided:
            self.quiet(part)  # whoever could read our blocks can't any more

    def fail(self, part: Part, error: AiokvError) -> None:
        """Something that the part needs went wrong on this side."""
        self.settle(part, Event.FAIL, error, "failed")

    def copied(self, part: Part, mask: int) -> None:
        """Consumer: these layers of this part are in place."""
        if part.state not in (State.GRANTED, State.MOVING):
            return
        part.landed |= mask
        if part.landed == (1 << self.layout.layers) - 1:
            self.settle(part, Event.DONE)

    def moving(self, part: Part) -> None:
        """The first chunk of a part that this side sends or receives is on its way."""
        if part.state is State.GRANTED:
            part.life.on(Event.MOVE)

    def quiet(self, part: Part) -> None:
        """Nothing in flight on this side, or by the peer, can touch the part's blocks any more."""
        if part.state is State.DRAINING:
            part.life.on(Event.QUIET)
            self._ended(part)

    # -- settling

    def settle(
        self, part: Part, event: Event, error: AiokvError | None = None, reason: str = "failed"
    ) -> None:
        """Settle a part's outcome, tell the other side, and have this side stop.

        Does nothing to a part whose outcome is settled.
        """
        if part.ended or part.state is State.DRAINING:
            return
        before = part.state
        after = part.life.on(event, error)
        if error is not None and part.transfer.error is None:
            part.transfer.error = error
        session = part.session
        up = session is not None and session.phase is Phase.UP
        tell = event is not Event.DONE and not part.abort_known and up
        if tell and session is not None:
            transfer = part.transfer
            session.send(Abort(transfer.tid, transfer.attempt, part.role, reason, str(error)[:2048]))
        part.abort_known = True
        if after is State.DRAINING:
            self._drain(part, before, event)
        else:
            self._ended(part)
        if event is not Event.DONE and part.role == "consumer":
            self._abort_siblings(part)

    def _drain(self, part: Part, before: State, event: Event) -> None:
        """Wait for whatever is in flight; who waits for what depends on who touches our blocks."""
        lease_out = part.role == "producer" and part.one_sided and before is State.MOVING
        if lease_out and event is not Event.DONE:
            session = part.session
            part.quiet_at = session.lease_given if session else 0
            self._drain_bound(part)
            return  # the consumer's ABORTED, its certain death, or the end of the lease
        self._drain_bound(part)
        self._act(ActionKind.STOP, part)

    def _drain_bound(self, part: Part) -> None:
        # The bound counts from when a timer first sees the part drain, since settle() knows no time.
        part.drain_by = 0
        self._arm(0, part)

    def _abort_siblings(self, part: Part) -> None:
        for sibling in part.transfer.parts:
            if sibling is not part and not sibling.ended:
                error = TransferAborted(f"transfer {part.transfer}: another part failed: {part.life.error}")
                self.settle(sibling, Event.ABORT, error, "sibling")

    def _ended(self, part: Part) -> None:
        """The part is over: tell the peer, forget it, and see whether its transfer is over too."""
        transfer, session = part.transfer, part.session
        if session is not None:
            self.parts.pop((session, *transfer.key, part.role), None)
            session.remove_live()
            if part.state is not State.LANDED:
                session.send(Aborted(transfer.tid, transfer.attempt, part.role))
            elif part.role == "consumer" and part.link:
                session.send(Landed(transfer.tid, transfer.attempt))
        self._dirty.pop(part, None)
        self._act(ActionKind.ENDED, part)
        if all(each.ended for each in transfer.parts) and not transfer.resolved:
            transfer.resolved = True
            live: dict[_Key, Offering] | dict[_Key, Fetching]
            live = self.offerings if part.role == "producer" else self.fetchings
            live.pop(transfer.key, None)
            self._bury(transfer, part.role)
            self._act(ActionKind.RESOLVED, part)

    # -- messages of peers

    def receive(self, session: Session, message: Message, now: int) -> None:
        """Take one message of a peer's session.

        Raises:
            RemoteProtocolError: The peer must not say this; its session has to end.
        """
        match message:
            case Grant():
                self._on_grant(session, message, now, now + message.remaining_us * 1000)
            case Offer():
                self._on_offer(session, message, now)
            case Accept():
                self._on_accept(session, message, now)
            case Ready():
                part = self.parts.get((session, message.tid, message.attempt, "consumer"))
                if part is not None:
                    self._on_ready(part, int.from_bytes(message.ready, "little"))
            case Landed():
                part = self.parts.get((session, message.tid, message.attempt, "producer"))
                if part is not None:
                    self._on_landed(part)
            case Refuse():
                self._on_refuse(session, message)
            case Abort():
                self._on_abort(session, message)
            case Aborted():
                part = self.parts.get((session, message.tid, message.attempt, _other(message.role)))
                if part is not None:
                    self._on_aborted(part)
            case _:
                raise RemoteProtocolError(f"unexpected {type(message).__name__} from {session.address}")

    def _on_grant(self, session: Session, grant: Grant, now: int, deadline: int) -> None:
        key = (grant.tid, grant.attempt)
        offering = self.offerings.get(key)
        if offering is None:
            if (outcome := self._tombstone(key, "producer", now)) is not None:
                self._refuse(session, grant, "producer", "ended", f"the offer {outcome}")
            else:
                self._park(session, grant, "consumer", deadline)
            return
        if (session, *key, "producer") in self.parts:
            part: Part | None = self.parts[session, *key, "producer"]
            if part is not None and part.state is not State.OFFERED:
                self._refuse(session, grant, "producer", "duplicate", "this part was granted before")
                return
        else:
            if any(each.session is not None and each.session.incarnation == session.incarnation
                   for each in offering.parts):
                self._refuse(session, grant, "producer", "duplicate", "this part was granted before")
                return
            part = next((p for p in offering.parts if p.session is None and not p.ended), None)
        if part is None:
            self._refuse(session, grant, "producer", "readers", "the offer has all its readers, or names others")
            return
        reason, text = self._grant_fault(session, offering, grant)
        if reason:
            self._refuse(session, grant, "producer", reason, text)
            return
        if part.session is None:
            self._bind(part, session, now)
        part.life.on(Event.GRANT)
        if not grant.link:
            self.settle(part, Event.DONE)
            return
        part.link, part.link_id, part.heads = grant.link, grant.link_id, grant.heads
        part.one_sided = not grant.blocks
        part.first_token = grant.first_token
        part.tokens = offering.tokens if grant.tokens < 0 else grant.tokens
        if grant.blocks and session.hello is not None:
            part.peer_blocks = unpack_blocks(grant.blocks, session.hello.layout)
        if deadline < part.deadline:
            part.deadline = deadline
            self._arm(deadline, part)
        self._act(ActionKind.START, part)

    def accept(self, part: Part, now: int) -> None:
        """Producer: the layer above can serve the grant that it got START for; say so."""
        if part.state is not State.GRANTED or part.session is None:
            return
        offering = part.transfer
        assert isinstance(offering, Offering)  # noqa: S101
        part.session.send(
            Accept(
                tid=offering.tid,
                attempt=offering.attempt,
                tokens=offering.tokens,
                blocks=pack_blocks(offering.blocks),
                ready=self._bitmap(offering.ready if part.one_sided else 0),
                lease=part.session.extend_lease(now) if part.one_sided else 0,
            )
        )
        if offering.ready:
            if part.one_sided:
                part.ready = offering.ready
                part.life.on(Event.MOVE)
            else:
                self._move_producer(part, offering.ready)

    def _grant_fault(self, session: Session, offering: Offering, grant: Grant) -> tuple[str, str]:
        """Why a grant can't be served, as (reason, text); empty if it can."""
        assert session.hello is not None  # noqa: S101  # the session is up
        theirs = session.hello.layout
        found = list(self.layout.differences(theirs))
        if found:
            return "layout", f"the cache of {session.address} differs: " + "; ".join(found)
        if grant.tokens > offering.tokens:
            return "tokens", f"{grant.tokens} tokens asked for, {offering.tokens} are offered"
        if len(grant.heads) != len(self.layout.groups):
            return "heads", f"heads of {len(grant.heads)} groups asked for"
        for asked, mine, other in zip(grant.heads, self.layout.groups, theirs.groups, strict=True):
            low, high = asked
            if low < high and not (
                max(mine.heads[0], other.heads[0]) <= low and high <= min(mine.heads[1], other.heads[1])
            ):
                return "heads", f"heads {low}..{high - 1} asked for, of {mine.heads} here and {other.heads} there"
        return "", ""

    def _on_offer(self, session: Session, offer: Offer, now: int) -> None:
        key = (offer.tid, offer.attempt)
        deadline = now + offer.remaining_us * 1000
        fetching = self.fetchings.get(key)
        if fetching is None:
            if (outcome := self._tombstone(key, "consumer", now)) is not None:
                self._refuse(session, offer, "consumer", "ended", f"the fetch {outcome}")
            else:
                self._park(session, offer, "producer", deadline)
            return
        if (session, *key, "consumer") in self.parts:
            return  # we ask this producer anyway
        part = next((p for p in fetching.parts if p.session is None and not p.ended), None)
        if part is None:
            self._refuse(session, offer, "consumer", "sources", "the fetch has all its sources")
            return
        self._bind(part, session, now)
        if deadline < part.deadline:
            part.deadline = deadline
            self._arm(deadline, part)
        self._act(ActionKind.CONNECT, part)

    def _on_accept(self, session: Session, accept: Accept, now: int) -> None:
        part = self.parts.get((session, accept.tid, accept.attempt, "consumer"))
        if part is None or part.state is not State.GRANTED or part.tokens >= 0:
            return  # given up meanwhile, or said twice
        fetching = part.transfer
        if session.hello is None or not isinstance(fetching, Fetching):
            return
        part.peer_blocks = unpack_blocks(accept.blocks, session.hello.layout)
        if part.one_sided:
            session.hold_lease(accept.lease, now)
        wanted = fetching.tokens if fetching.tokens >= 0 else accept.tokens
        if wanted > accept.tokens:
            raise RemoteProtocolError(f"{session.address} accepted {wanted} tokens of {accept.tokens}")
        if wanted > fetching.capacity:
            text = f"{wanted} tokens are offered, the blocks have room for {fetching.capacity}"
            self.fail(part, InvalidBlocks(f"transfer {fetching}: {text}"))
            return
        part.tokens = wanted
        self._act(ActionKind.START, part)
        self._on_ready(part, int.from_bytes(accept.ready, "little"))

    def _on_ready(self, part: Part, mask: int) -> None:
        if part.state not in (State.GRANTED, State.MOVING) or part.tokens < 0:
            return
        new = mask & ~part.ready & ((1 << self.layout.layers) - 1)
        if new:
            part.ready |= new
            part.life.on(Event.MOVE)
            self._act(ActionKind.MOVE, part, new)

    def _on_landed(self, part: Part) -> None:
        # The consumer's word decides: it has everything and reads no more, whatever we meant to do.
        if part.state is State.OFFERED:
            raise RemoteProtocolError("LANDED without a grant")
        if part.state is State.DRAINING and part.one_sided:
            self.quiet(part)
        else:
            self.settle(part, Event.DONE)

    def _on_refuse(self, session: Session, refuse: Refuse) -> None:
        part = self.parts.get((session, refuse.tid, refuse.attempt, _other(refuse.role)))
        if part is None or part.state not in (State.OFFERED, State.GRANTED):
            return
        text = f"transfer {part.transfer}: {session.address} refused ({refuse.reason}): {refuse.text}"
        kind = LayoutMismatch if refuse.reason == "layout" else Refused
        error: AiokvError = CapacityError(text) if refuse.reason == "capacity" else kind(text)
        part.abort_known = True
        self.settle(part, Event.FAIL, error)

    def _on_abort(self, session: Session, abort: Abort) -> None:
        mine = _other(abort.role)
        self._forget_parked(session, (abort.tid, abort.attempt), abort.role)
        part = self.parts.get((session, abort.tid, abort.attempt, mine))
        if part is None:
            session.send(Aborted(abort.tid, abort.attempt, mine))
            return
        if part.state is State.DRAINING:
            return  # both gave up at once; ABORTED follows when this side is quiet
        text = f"transfer {part.transfer}: given up by the {abort.role} at {session.address}: {abort.text}"
        error: AiokvError = DeadlineExceeded(text) if abort.reason == "deadline" else TransferAborted(text)
        part.abort_known = True
        self.settle(part, Event.ABORT, error)

    def _on_aborted(self, part: Part) -> None:
        if part.role == "producer" and part.one_sided and part.state is State.DRAINING:
            self.quiet(part)
        elif part.state is not State.DRAINING:
            text = f"transfer {part.transfer}: given up by the other side"
            part.abort_known = True
            self.settle(part, Event.ABORT, TransferAborted(text))

    # -- loss of a peer

    def lost(self, session: Session, error: AiokvError, *, certain: bool) -> None:
        """A session ended. ``certain``: the peer's process, or its way to our memory, is gone too."""
        for key, parked in list(self._parked.items()):
            for each in parked:
                each.gone = each.gone or each.session is session
            self._parked[key] = [each for each in parked if not each.gone]
            if not self._parked[key]:
                del self._parked[key]
        self._parked_count.pop(session, None)
        for part in [p for p in self.parts.values() if p.session is session]:
            text = f"transfer {part.transfer}: {error}"
            kind = type(error) if isinstance(error, Refused) else PeerLostError
            self.settle(part, Event.FAIL, kind(text))
            if certain and part.role == "producer" and part.one_sided:
                self.quiet(part)

    # -- time

    def next_timer(self) -> int | None:
        """When ``handle_timer`` wants to be called (ns), or None if nothing is pending."""
        while self._timers:
            when, _, thing = self._timers[0]
            if thing.gone if isinstance(thing, _Parked) else thing.ended:
                heapq.heappop(self._timers)
                continue
            return when
        return None

    def handle_timer(self, now: int) -> None:
        """Let time pass: deadlines, leases, drain bounds, parked grants."""
        while self._timers and self._timers[0][0] <= now:
            _, _, thing = heapq.heappop(self._timers)
            if isinstance(thing, _Parked):
                self._parked_timer(thing, now)
            elif not thing.ended:
                self._part_timer(thing, now)

    def _part_timer(self, part: Part, now: int) -> None:
        if part.state is State.DRAINING:
            if not part.drain_by:
                part.drain_by = now + self.settings.drain_ns
                self._arm(part.drain_by, part)
                if part.quiet_at:
                    self._arm(part.quiet_at + 1, part)
            elif part.quiet_at and now > part.quiet_at:
                self.quiet(part)  # what the consumer reads from now on, it counts as failed
            elif now >= part.drain_by:
                self._quarantine(part)
        elif now >= part.deadline:
            text = f"transfer {part.transfer}: deadline passed at the {part.role} ({self.explain(part, now)})"
            self.settle(part, Event.FAIL, DeadlineExceeded(text), "deadline")

    def _quarantine(self, part: Part) -> None:
        bound = self.settings.drain_ns / 1e9
        text = f"transfer {part.transfer}: blocks not quiet {bound:g} s after it ended; they stay leased"
        part.life.outcome = State.FAILED
        part.life.error = DeviceError(text)
        part.transfer.error = part.life.error
        self._act(ActionKind.QUARANTINE, part)
        self.quiet(part)

    def _parked_timer(self, parked: _Parked, now: int) -> None:
        if parked.gone:
            return
        message = parked.message
        role: Role = "producer" if isinstance(message, Grant) else "consumer"
        self._forget_parked(parked.session, (message.tid, message.attempt), _other(role))
        verb = "offered" if role == "producer" else "fetched"
        self._refuse(parked.session, message, role, "unknown", f"it was not {verb} before its deadline")

    def flush(self) -> None:
        """End of a turn: one cumulative READY for each part that has news."""
        for part in self._dirty:
            if part.session is not None and part.state is State.MOVING:
                transfer = part.transfer
                part.session.send(Ready(transfer.tid, transfer.attempt, self._bitmap(part.ready)))
        self._dirty.clear()

    def explain(self, part: Part, now: int) -> str:
        """What a part is waiting for, for a person."""
        who = part.session.address if part.session else "anybody"
        left = f"{max(0, part.deadline - now) / 1e9:.1f} s left"
        match part.state:
            case State.OFFERED if part.role == "producer":
                return f"waiting for GRANT from {who}, {left}"
            case State.OFFERED if part.session is None:
                return f"waiting for OFFER from anybody, {left}"
            case State.OFFERED:
                what = "the other sources" if part.linked else f"a connection to {who}"
                return f"waiting for {what}, {left}"
            case State.GRANTED if part.role == "consumer" and part.tokens < 0:
                return f"waiting for ACCEPT from {who}: not offered yet there, {left}"
            case State.GRANTED:
                return f"waiting for the first layer of {who if part.role == 'consumer' else 'the model'}, {left}"
            case State.MOVING:
                done = (part.landed if part.role == "consumer" else part.ready).bit_count()
                verb = "landed" if part.role == "consumer" else "announced"
                return f"{done} of {self.layout.layers} layers {verb}, {who} at the other end, {left}"
            case State.DRAINING:
                return f"settled as {part.life.outcome and part.life.outcome.value}, waiting until quiet, {who}"
            case _:
                return f"{part.state.value}, {who}"

    # -- small parts

    def _act(self, kind: ActionKind, part: Part, mask: int = 0) -> None:
        self.actions.append(Action(kind, part, mask))

    def _arm(self, when: int, thing: Part | _Parked) -> None:
        heapq.heappush(self._timers, (when, next(self._order), thing))

    def _bind(self, part: Part, session: Session, now: int) -> None:
        part.session = session
        self.parts[session, *part.transfer.key, part.role] = part
        session.add_live(now)

    def _move_producer(self, part: Part, new: int) -> None:
        part.ready |= new
        part.life.on(Event.MOVE)
        if part.one_sided:
            self._dirty[part] = None
        else:
            self._act(ActionKind.MOVE, part, new)

    def _bitmap(self, mask: int) -> bytes:
        return mask.to_bytes((self.layout.layers + 7) // 8, "little")

    def _refuse(self, session: Session, message: Grant | Offer, role: Role, reason: str, text: str) -> None:
        session.send(Refuse(message.tid, message.attempt, role, reason, text[:2048]))

    def _park(self, session: Session, message: Grant | Offer, sender: Role, deadline: int) -> None:
        if self._parked_count.get(session, 0) >= self.settings.parked_per_peer:
            text = f"{self.settings.parked_per_peer} of your requests wait here already"
            self._refuse(session, message, _other(sender), "capacity", text)
            return
        parked = _Parked(session, message, deadline)
        waiting = self._parked.setdefault(((message.tid, message.attempt), sender), [])
        if any(each.session is session for each in waiting):
            self._refuse(session, message, _other(sender), "duplicate", "the same request waits here already")
            return
        waiting.append(parked)
        self._parked_count[session] = self._parked_count.get(session, 0) + 1
        self._arm(deadline, parked)

    def _unpark(self, key: _Key, sender: Role) -> list[_Parked]:
        waiting = self._parked.pop((key, sender), [])
        for parked in waiting:
            parked.gone = True
            self._parked_count[parked.session] -= 1
        return waiting

    def _forget_parked(self, session: Session, key: _Key, sender: Role) -> None:
        waiting = self._parked.get((key, sender), [])
        for parked in waiting:
            if parked.session is session:
                parked.gone = True
                self._parked_count[session] -= 1
        kept = [each for each in waiting if not each.gone]
        if kept:
            self._parked[key, sender] = kept
        else:
            self._parked.pop((key, sender), None)

    @property
    def parked(self) -> int:
        """Grants and offers that wait for their other half."""
        return sum(self._parked_count.values())

    def _bury(self, transfer: Transfer, role: Role) -> None:
        outcome = "landed" if transfer.error is None else f"ended: {transfer.error}"
        stones = self.tombstones
        stones[transfer.key, role] = (outcome, max(part.deadline for part in transfer.parts))
        while len(stones) > self.settings.tombstones:
            stones.popitem(last=False)

    def _tombstone(self, key: _Key, role: Role, now: int) -> str | None:
        """What became of an ended transfer, or None. Forgets what is too old on the way."""
        stones = self.tombstones
        while stones:
            first = next(iter(stones))
            if stones[first][1] + self.settings.tombstone_ns > now:
                break
            del stones[first]
        stone = stones.get((key, role))
        return stone[0] if stone else None


def _other(role: Role) -> Role:
    return "consumer" if role == "producer" else "producer"
