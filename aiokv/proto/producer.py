"""The producer's side of transfers: offers, grants that match them, layers that become ready."""

from __future__ import annotations

from collections.abc import Sequence

from aiokv.errors import LayoutMismatch, RemoteProtocolError, TransferAborted
from aiokv.proto.ledger import Ledger
from aiokv.proto.messages import (
    Accept,
    Grant,
    Landed,
    Offer,
    Ready,
    Refuse,
    Renew,
    as_text,
    pack_blocks,
    unpack_blocks,
)
from aiokv.proto.parts import Event, State
from aiokv.proto.session import Session
from aiokv.proto.transfers import ActionKind, Key, Offering, Part
from aiokv.proto.waiting import Waiting, Withdrawn

__all__ = ["Producer"]


class Producer:
    """Decides about offers.

    Args:
        ledger: The engine's parts.
        waiting: Requests that wait for their other half.
        withdrawn: Consumers that gave up what was not offered yet.
    """

    def __init__(self, ledger: Ledger, waiting: Waiting, withdrawn: Withdrawn) -> None:
        self._ledger = ledger
        self._waiting = waiting
        self._withdrawn = withdrawn
        #: Parts whose consumer is to be told of more layers at the end of the turn.
        self._news: dict[Part, None] = {}
        self._bitmap_bytes = (ledger.layout.layers + 7) // 8

    # -- calls of the user

    def offer(self, offering: Offering, peers: Sequence[Session | None], now: int) -> None:
        """Register an offer with one part for each reader.

        Args:
            offering: The offer.
            peers: For each reader its session (push), or None for whoever grants first.
            now: The time (ns).

        Raises:
            BusyError: This id and attempt is offered already, or was.
        """
        self._ledger.register(offering, "producer", now)
        for peer in peers:
            self._ledger.add_part(offering, "producer", peer, now)
        self.take_parked(offering.key, now)
        for session, abort in self._withdrawn.claim(offering.key, now):
            part = offering.unclaimed
            if part is not None and not offering.has(session.life):
                self._ledger.bind(part, session, now)
                part.abort_known = True
                text = (
                    f"transfer {offering}: given up by the consumer at {session.address} before: {abort.text}"
                )
                self._ledger.settle(part, Event.ABORT, TransferAborted(text))

    def take_parked(self, key: Key, now: int) -> None:
        """Look again at the grants that waited for this transfer."""
        for parked in self._waiting.claim(key, "consumer"):
            if isinstance(parked.message, Grant):
                self.on_grant(parked.session, parked.message, now, parked.deadline)

    def layers_ready(self, offering: Offering, mask: int) -> None:
        """Layers of an offer are written, and stay as they are."""
        new = mask & ~offering.ready
        if not new or offering.resolved:
            return
        offering.ready |= new
        for part in offering.parts:
            if part.accepted and part.active:
                self._move(part, new)

    # -- reports of the layer above

    def connected(self, part: Part, now: int) -> None:
        """The session with a named reader is up: tell it of the offer, once, however often this is said."""
        session, offering = part.session, part.transfer
        if part.state is not State.OFFERED or part.linked or session is None or session.hello is None:
            return
        part.linked = True
        # Said also where it fails at once: a fetch that waits for this offer then hears why it won't come.
        remaining_us = max(0, offering.deadline - now) // 1000
        session.send(Offer(*offering.key, remaining_us, offering.trace))
        try:
            self._ledger.layout.check_compatible(session.hello.layout, session.address)
        except LayoutMismatch as found:
            error = LayoutMismatch(f"transfer {offering}: {found}")
            self._ledger.settle(part, Event.FAIL, error, "layout")
        self.take_parked(offering.key, now)

    def accept(self, part: Part, now: int) -> None:
        """The layer above can serve the grant that it got START for; say so."""
        session, offering = part.session, part.transfer
        if part.state is not State.GRANTED or session is None or not isinstance(offering, Offering):
            return
        session.send(
            Accept(
                *offering.key,
                tokens=offering.tokens,
                blocks=pack_blocks(offering.blocks),
                ready=self._bitmap(offering.ready if part.one_sided else 0),
                lease=session.extend_lease(now) if part.one_sided else 0,
                more=offering.more,
            )
        )
        part.accepted = True
        if not offering.ready:
            return
        if part.one_sided:
            part.ready = offering.ready
            self._ledger.step(part, Event.MOVE)
        else:
            self._move(part, offering.ready)

    def flush(self) -> None:
        """End of a turn: one cumulative READY for each part that has news."""
        for part in self._news:
            if part.session is not None and part.state is State.MOVING:
                part.session.send(Ready(*part.transfer.key, self._bitmap(part.ready)))
        self._news.clear()

    # -- messages of consumers

    def on_grant(self, session: Session, grant: Grant, now: int, deadline: int) -> None:
        """A consumer reserved its destination and asks for its share."""
        key = (grant.tid, grant.attempt)
        offering = self._ledger.transfers.get((key, "producer"))
        if not isinstance(offering, Offering):
            stone = self._ledger.tombstones.find(key, "producer", now)
            if stone is not None:
                self._refuse(session, grant, stone.reason, f"the offer {stone.text}")
            elif reason := self._waiting.park(session, grant, "consumer", deadline):
                self._refuse(session, grant, reason, "the grant may not wait here for its offer")
            return
        part = self._reader(session, offering)
        if part == "readers" and offering.unsure:
            part = self._waiting.park(session, grant, "consumer", deadline)
            if not part:
                return
        if isinstance(part, str):
            self._refuse(session, grant, part, "the offer has no reader left for this engine", offering)
            return
        reason, text = self._fault(session, offering, grant)
        if reason or session.hello is None:
            self._refuse(session, grant, reason, text, offering)
            return
        try:
            peer_blocks = unpack_blocks(grant.blocks, session.hello.layout) if grant.blocks else ()
        except RemoteProtocolError as error:
            # Refused and not raised: a grant that waited is looked at in the middle of offer().
            self._refuse(session, grant, "blocks", str(error), offering)
            return
        if part.session is not session:
            self._ledger.rebind(part, session, now)
        part.peer_trace = grant.trace
        self._ledger.step(part, Event.GRANT)
        if not grant.link:  # the consumer has it all
            self._ledger.settle(part, Event.DONE)
            return
        part.link, part.link_id, part.heads = grant.link, grant.link_id, grant.heads
        part.one_sided = not grant.blocks
        part.first_token = grant.first_token
        part.tokens = offering.tokens if grant.tokens < 0 else grant.tokens
        part.peer_blocks = peer_blocks
        self._ledger.extend(part, offering.deadline)  # it isn't held for somebody to come any more
        self._ledger.shorten(part, deadline)
        self._ledger.act(ActionKind.START, part)

    def on_landed(self, session: Session, landed: Landed) -> None:
        """The consumer's word decides: it has everything and reads no more, whatever we meant to do."""
        part = self._ledger.find(session, (landed.tid, landed.attempt), "producer")
        if part is None:
            return
        if part.state is State.OFFERED:
            raise RemoteProtocolError(f"{session.address} says LANDED of what it was not granted")
        if part.state is State.DRAINING and part.one_sided:
            self._ledger.quiet(part)
        else:
            self._ledger.settle(part, Event.DONE)

    def on_renew(self, session: Session, renew: Renew, now: int) -> None:
        """A consumer will come: what waits for it, or for whoever comes, is held for as long again.

        It names no time, so that there is nothing to be believed but that somebody wants it; what isn't
        offered, or is asked for already, stays as it is.
        """
        key = (renew.tid, renew.attempt)
        offering = self._ledger.transfers.get((key, "producer"))
        if not isinstance(offering, Offering):
            return
        for part in offering.parts:
            mine = part.session is None or part.session.life == session.life
            if mine and part.state is State.OFFERED:
                self._ledger.extend(part, offering.held_until(now))

    # -- small parts

    def _reader(self, session: Session, offering: Offering) -> Part | str:
        """The part that a grant of this session claims, or the reason why there is none."""
        named = self._ledger.find(session, offering.key, "producer")
        if named is not None:
            return named if named.state is State.OFFERED else "duplicate"
        told = self._ledger.elsewhere(session, offering.key, "producer")
        if told is not None:
            return told
        if offering.has(session.life):
            return "duplicate"
        return offering.unclaimed or "readers"

    def _fault(self, session: Session, offering: Offering, grant: Grant) -> tuple[str, str]:
        """Why a grant can't be served, as (reason, text); empty if it can."""
        if session.hello is None:
            return "session", "no HELLO came before the grant"
        mine, theirs = self._ledger.layout, session.hello.layout
        found = list(mine.differences(theirs))
        if found:
            return "layout", f"the cache of {session.address} differs: " + "; ".join(found)
        if grant.tokens > offering.tokens:
            return "tokens", f"{grant.tokens} tokens asked for, {offering.tokens} are offered"
        if len(grant.heads) != len(mine.groups):
            return "heads", f"heads of {len(grant.heads)} groups asked for, there are {len(mine.groups)}"
        for (low, high), here, there in zip(grant.heads, mine.groups, theirs.groups, strict=True):
            first, last = max(here.heads[0], there.heads[0]), min(here.heads[1], there.heads[1])
            if low < high and not (first <= low and high <= last):
                return "heads", f"heads {low}..{high - 1} asked for; both sides have {first}..{last - 1}"
        return "", ""

    def _move(self, part: Part, new: int) -> None:
        part.ready |= new
        self._ledger.step(part, Event.MOVE)
        if part.one_sided:
            self._news[part] = None
        else:
            self._ledger.act(ActionKind.MOVE, part, new)

    def _bitmap(self, mask: int) -> bytes:
        return mask.to_bytes(self._bitmap_bytes, "little")

    def _refuse(
        self, session: Session, grant: Grant, reason: str, text: str, offering: Offering | None = None
    ) -> None:
        session.send(Refuse(grant.tid, grant.attempt, "producer", reason, as_text(text)))
        if offering is not None:
            offering.refusal = f"{session.address}: {text}"
