"""The consumer's side of transfers: fetches, the offers they wait for, layers that land."""

from __future__ import annotations

from collections.abc import Sequence

from aiokv.errors import InvalidBlocks, LayoutMismatch, RemoteProtocolError
from aiokv.proto.heads import assign_heads
from aiokv.proto.ledger import Ledger
from aiokv.proto.messages import Accept, Grant, Offer, Ready, Refuse, as_text, pack_blocks, unpack_blocks
from aiokv.proto.parts import Event, State
from aiokv.proto.session import Session
from aiokv.proto.transfers import ActionKind, Fetching, Heads, Key, Part
from aiokv.proto.waiting import Waiting

__all__ = ["Consumer"]


class Consumer:
    """Decides about fetches.

    Args:
        ledger: The engine's parts.
        waiting: Requests that wait for their other half.
    """

    def __init__(self, ledger: Ledger, waiting: Waiting) -> None:
        self._ledger = ledger
        self._waiting = waiting
        #: All layers, as a bit mask.
        self._everything = (1 << ledger.layout.layers) - 1

    # -- calls of the user

    def fetch(self, fetching: Fetching, sources: Sequence[Session], parts: int, now: int) -> None:
        """Register a fetch with one part for each source.

        Args:
            fetching: The fetch.
            sources: Sessions of the producers to ask; empty: wait for offers that name us.
            parts: How many offers to wait for where there are no sources.
            now: The time (ns).

        Raises:
            BusyError: This id and attempt is being fetched already, or was.
        """
        self._ledger.register(fetching, "consumer", now)
        peers: Sequence[Session | None] = sources or [None] * parts
        for peer in peers:
            part = self._ledger.add_part(fetching, "consumer", peer, now)
            part.first_token = fetching.first_token
        self.take_parked(fetching.key, now)

    def take_parked(self, key: Key, now: int) -> None:
        """Look again at the offers that waited for this transfer."""
        for parked in self._waiting.claim(key, "producer"):
            if isinstance(parked.message, Offer):
                self.on_offer(parked.session, parked.message, now, parked.deadline)

    # -- reports of the layer above

    def connected(self, part: Part, now: int, link: str, link_id: bytes, *, one_sided: bool) -> None:
        """The link to a part's producer is there. Once all sources have one, they are asked."""
        fetching = part.transfer
        if part.state is not State.OFFERED or part.linked or not isinstance(fetching, Fetching):
            return
        part.link, part.link_id, part.one_sided, part.linked = link, link_id, one_sided, True
        self.take_parked(fetching.key, now)
        if all(each.linked for each in fetching.parts):
            self._grant(fetching, now)

    def _grant(self, fetching: Fetching, now: int) -> None:
        """All sources are known: share the heads out among them, and ask."""
        try:
            shares = self._shares(fetching)
        except LayoutMismatch as found:
            error = LayoutMismatch(f"transfer {fetching}: {found}")
            self._ledger.settle(fetching.parts[0], Event.FAIL, error, "layout")
            return
        for part, heads in zip(fetching.parts, shares, strict=True):
            if part.state is not State.OFFERED or part.session is None:
                continue
            part.heads = heads
            needed = any(low < high for low, high in heads) and fetching.first_token != fetching.tokens
            if not needed:
                part.link, part.link_id = "", b""
            grant = Grant(
                *fetching.key,
                remaining_us=part.remaining_us(now),
                link=part.link,
                link_id=part.link_id,
                first_token=fetching.first_token,
                tokens=fetching.tokens,
                heads=heads,
                blocks=pack_blocks(fetching.blocks) if needed and not part.one_sided else (),
                trace=fetching.trace,
            )
            self._ledger.step(part, Event.GRANT)
            part.session.send(grant)
            if not needed:
                # Nothing will be written here, so there is nothing to wait for: not even the producer.
                self._ledger.settle(part, Event.DONE)

    def _shares(self, fetching: Fetching) -> list[Heads]:
        """Which heads to ask each source for; raises LayoutMismatch where they don't fit."""
        layouts = []
        for part in fetching.parts:
            if part.session is None or part.session.hello is None:
                raise LayoutMismatch("a source went away before it was asked")
            self._ledger.layout.check_compatible(part.session.hello.layout, part.session.address)
            layouts.append(part.session.hello.layout)
        return assign_heads(self._ledger.layout, layouts)

    def copied(self, part: Part, mask: int) -> None:
        """These layers of this part are in place."""
        if not part.active:
            return
        part.landed |= mask
        if part.landed == self._everything:
            self._ledger.settle(part, Event.DONE)

    def moving(self, part: Part) -> None:
        """The first bytes that a producer sent are coming in."""
        if part.state is State.GRANTED:
            self._ledger.step(part, Event.MOVE)

    # -- messages of producers

    def on_offer(self, session: Session, offer: Offer, now: int, deadline: int) -> None:
        """A producer says that this engine may fetch something."""
        key = (offer.tid, offer.attempt)
        fetching = self._ledger.transfers.get((key, "consumer"))
        if fetching is None:
            stone = self._ledger.tombstones.find(key, "consumer", now)
            if stone is not None and stone.reason == "ended" and session.life in stone.lives:
                return  # it hears of that over another session, where what was sent before may be late
            if stone is not None:
                self._refuse(session, offer, stone.reason, f"the fetch {stone.text}")
            elif reason := self._waiting.park(session, offer, "producer", deadline):
                self._refuse(session, offer, reason, "the offer may not wait here for its fetch")
            return
        if fetching.has(session.life):
            return  # this producer is asked anyway, maybe by another name
        part = fetching.unclaimed
        if part is None:
            reason = (
                self._waiting.park(session, offer, "producer", deadline) if fetching.unsure else "sources"
            )
            if reason:
                self._refuse(session, offer, reason, "the fetch has all its sources")
            return
        part.peer_trace = offer.trace
        self._ledger.bind(part, session, now)
        self._ledger.shorten(part, deadline)
        self._ledger.act(ActionKind.CONNECT, part)

    def on_accept(self, session: Session, accept: Accept, now: int) -> None:
        """A producer will serve our grant: both block lists are known now."""
        part = self._ledger.find(session, (accept.tid, accept.attempt), "consumer")
        if part is None or part.state is not State.GRANTED or part.accepted or session.hello is None:
            return  # given up meanwhile, or said twice
        fetching = part.transfer
        if not isinstance(fetching, Fetching):
            return
        part.accepted = True
        part.more = accept.more
        part.peer_blocks = unpack_blocks(accept.blocks, session.hello.layout)
        if part.one_sided:
            session.hold_lease(accept.lease, now)
        part.tokens = fetching.tokens if fetching.tokens >= 0 else accept.tokens
        if part.tokens > accept.tokens:
            raise RemoteProtocolError(f"{session.address} accepted {part.tokens} tokens of {accept.tokens}")
        if part.tokens > fetching.capacity:
            text = f"{part.tokens} tokens are offered, the blocks have room for {fetching.capacity}"
            self._ledger.settle(part, Event.FAIL, InvalidBlocks(f"transfer {fetching}: {text}"))
            return
        offered = {each.tokens for each in fetching.parts if each.accepted}
        if len(offered) > 1:  # some heads would lack the last tokens, and nothing would tell
            text = f"its sources offer different numbers of tokens: {sorted(offered)}"
            self._ledger.settle(part, Event.FAIL, InvalidBlocks(f"transfer {fetching}: {text}"))
            return
        self._ledger.act(ActionKind.START, part)
        self._more(part, accept.ready)

    def on_ready(self, session: Session, ready: Ready) -> None:
        """More layers may be read."""
        part = self._ledger.find(session, (ready.tid, ready.attempt), "consumer")
        if part is not None and part.accepted and part.active:
            self._more(part, ready.ready)

    def _more(self, part: Part, ready: bytes) -> None:
        new = int.from_bytes(ready, "little") & ~part.ready & self._everything
        if new:
            if not part.one_sided and part.session is not None:
                raise RemoteProtocolError(f"{part.session.address} announced layers that it has to send")
            part.ready |= new
            self._ledger.step(part, Event.MOVE)
            self._ledger.act(ActionKind.MOVE, part, new)

    # -- small parts

    def _refuse(self, session: Session, offer: Offer, reason: str, text: str) -> None:
        session.send(Refuse(offer.tid, offer.attempt, "consumer", reason, as_text(text)))
