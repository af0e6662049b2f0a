"""Transfer tables joined by their sessions: all that the protocol decides, without a loop, bytes or a clock.

A ``Net`` carries frames between its ``Member``s when it is run, and time passes when it is told so::

    net = Net()
    prefill, decode = net.add("prefill"), net.add("decode")
    offer = prefill.offer("t", [0, 1])
    fetch = decode.fetch("t", [5, 6], sources=[prefill])
    net.run()
    prefill.ready(offer)
    net.run()
    decode.land(fetch)
    net.run()
    assert offer.resolved and fetch.resolved

Each frame goes through encoding and decoding. What an engine's data plane would report is said by the test
(``land``, ``rest``), and what it would be asked to do is noted (``moves``, ``kinds``).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from aiokv.errors import AiokvError, PeerLostError, RemoteProtocolError
from aiokv.proto.layout import CacheLayout
from aiokv.proto.messages import (
    OLDEST_VERSION,
    VERSION,
    Frame,
    Hello,
    Message,
    decode_frame,
    decode_messages,
)
from aiokv.proto.placement import Placement
from aiokv.proto.plan import GroupBlocks
from aiokv.proto.session import Identity, Phase, Session
from aiokv.proto.settings import SECOND, Settings
from aiokv.proto.table import Table
from aiokv.proto.transfers import Action, ActionKind, Fetching, Offering, Part, Transfer

__all__ = ["LAYOUT", "START", "Member", "Net"]

#: When the net's time starts (ns).
START = 1000 * SECOND

#: Rounds that answers to answers may take.
_MOST_ROUNDS = 1000

#: Four layers, blocks of four tokens, four heads.
LAYOUT = CacheLayout.attention(
    layers=4, blocks=16, block_size=4, heads=4, head_size=8, dtype="uint8", model=b"m"
)


class Net:
    """Members, what is under way between them, and the time.

    Args:
        settings: Of all members that are added without their own.

    Attributes:
        now: The time (ns).
        wire: Frames under way, by sender and receiver.
        held: Ways, as (sender, receiver), on which nothing is carried for the time being.
    """

    def __init__(self, settings: Settings | None = None) -> None:
        self.now = START
        self.settings = settings or Settings()
        self.members: dict[str, Member] = {}
        self.wire: dict[tuple[str, str], deque[bytes]] = {}
        self.held: set[tuple[str, str]] = set()

    def add(
        self,
        name: str,
        layout: CacheLayout = LAYOUT,
        *,
        heads: tuple[int, int] | None = None,
        settings: Settings | None = None,
        versions: tuple[int, int] = (OLDEST_VERSION, VERSION),
    ) -> Member:
        """A new member, which keeps a half-open range of heads, or all of its layout's."""
        if heads is not None:
            groups = tuple(msgspec.structs.replace(group, heads=heads) for group in layout.groups)
            layout = msgspec.structs.replace(layout, groups=groups)
        member = self.members[name] = Member(self, name, layout, settings or self.settings, versions)
        return member

    def run(self) -> None:
        """Let everybody take turns, and carry frames, until nothing is under way but what is held.

        Raises:
            RecursionError: They go on answering each other for ever.
        """
        for _ in range(_MOST_ROUNDS):
            busy = [member.turn() for member in self.members.values()]
            if not any(busy) and not self.carry():
                return
        raise RecursionError("the members go on answering each other")

    def carry(self, most: int | None = None) -> int:
        """Carry frames, each way's in order; gives how many.

        Args:
            most: On each way; all by default.
        """
        carried = 0
        for way, frames in list(self.wire.items()):
            if way in self.held:
                continue
            for _ in range(len(frames) if most is None else min(most, len(frames))):
                self.members[way[1]].receive(frames.popleft())
                carried += 1
        return carried

    def hold(self, *members: Member) -> None:
        """Carry nothing between these any more."""
        self.held |= {(a.name, b.name) for a in members for b in members if a is not b}

    def release(self) -> None:
        """Carry everything again."""
        self.held.clear()

    def wait(self, ns: int) -> None:
        """Let time pass, then look at every timer, and run."""
        self.now += ns
        for member in self.members.values():
            member.tick()
        self.run()

    def wait_for_timer(self) -> bool:
        """Let time pass until the next timer of anybody is due; False if there is none."""
        timers = [when for member in self.members.values() if (when := member.next_timer()) is not None]
        if not timers:
            return False
        self.wait(max(0, min(timers) - self.now))
        return True


class Member:
    """One engine's table and sessions.

    Args:
        net: Where it belongs.
        name: Its name; its address is ``memory://name``.
        layout: Of its cache.
        settings: Timers and bounds.
        versions: Of the protocol, the lowest and the highest that it speaks.

    Attributes:
        table: The transfer table.
        sessions: By the peer's address.
        moves: Layers of each part that may be copied or sent, as a bit mask, and were not said to land.
        busy: Parts with something in flight: they become quiet by ``rest`` only.
        stopped: Parts that were told to stop.
        kinds: What the table asked for, in order.
        sent: Messages sent, in order.
        heard: Messages for the table that came, in order.
        faults: What peers did that they must not.
        one_sided: Whether it reads, or is sent to, where it fetches.
        link_error: Why it can't open links; None while it can.
    """

    def __init__(
        self,
        net: Net,
        name: str,
        layout: CacheLayout,
        settings: Settings,
        versions: tuple[int, int] = (OLDEST_VERSION, VERSION),
    ) -> None:
        self.net = net
        self.name = name
        self.address = f"memory://{name}"
        hello = Hello(versions, self.address, layout, Placement.dense(layout), {})
        self.me = Identity(name.encode().ljust(16, b"."), hello)
        self.settings = settings
        self.table = Table(layout, settings)
        self.sessions: dict[str, Session] = {}
        self.moves: Counter[Part] = Counter()
        self.busy: set[Part] = set()
        self.stopped: set[Part] = set()
        self.kinds: list[ActionKind] = []
        self.sent: list[Message] = []
        self.heard: list[Message] = []
        self.faults: list[RemoteProtocolError] = []
        self.one_sided = True
        self.link_error: AiokvError | None = None
        self._streams = 0

    # -- what a user does

    def offer(
        self,
        tid: str,
        blocks: Sequence[int] = (0, 1),
        *,
        to: Iterable[Member] = (),
        readers: int | None = None,
        tokens: int | None = None,
        deadline: float = 30,
        hold: float = 0,
        attempt: int = 0,
        ready: bool = False,
    ) -> Offering:
        """Offer blocks; ``ready`` announces all layers at once."""
        named: list[Session | None] = [self.session(member) for member in to]
        readers = max(1, len(named)) if readers is None else readers
        offering = Offering(
            tid=tid,
            attempt=attempt,
            deadline=self.net.now + int(deadline * SECOND),
            blocks=self._listed(blocks),
            tokens=len(blocks) * self.block_size if tokens is None else tokens,
            hold=int(hold * SECOND),
        )
        self.table.producer.offer(offering, named + [None] * (readers - len(named)), self.net.now)
        if ready:
            self.ready(offering)
        return offering

    def fetch(
        self,
        tid: str,
        blocks: Sequence[int] = (0, 1),
        *,
        sources: Iterable[Member] = (),
        parts: int = 1,
        tokens: int = -1,
        first_token: int = 0,
        deadline: float = 30,
        attempt: int = 0,
    ) -> Fetching:
        """Fetch into blocks."""
        fetching = Fetching(
            tid=tid,
            attempt=attempt,
            deadline=self.net.now + int(deadline * SECOND),
            blocks=self._listed(blocks),
            first_token=first_token,
            tokens=tokens,
            capacity=len(blocks) * self.block_size,
        )
        sessions = [self.session(member) for member in sources]
        self.table.consumer.fetch(fetching, sessions, parts, self.net.now)
        return fetching

    def renew(self, tid: str, *sources: Member, attempt: int = 0) -> None:
        """Say to the sources, or to whoever offered it, that something will be fetched."""
        named = [self.session(member) for member in sources]
        for session in named or self.table.waiting.sessions((tid, attempt), "producer"):
            session.renew((tid, attempt))

    def ready(self, offering: Offering, *layers: int) -> None:
        """Layers are written; all by default."""
        mask = sum(1 << layer for layer in layers) if layers else (1 << self.table.ledger.layout.layers) - 1
        self.table.producer.layers_ready(offering, mask)

    def land(self, transfer: Transfer, *layers: int) -> None:
        """Layers of a fetch are in place; by default all that may be read, or all where it is sent to."""
        everything = (1 << self.table.ledger.layout.layers) - 1
        for part in transfer.parts:
            mask = self.moves[part] if part.one_sided else everything
            if layers:
                mask = sum(1 << layer for layer in layers)
            self.table.consumer.moving(part)
            self.table.consumer.copied(part, mask)
            self.moves[part] &= ~mask

    def rest(self, part: Part) -> None:
        """Nothing of a part is in flight any more."""
        self.busy.discard(part)
        if part in self.stopped:
            self.table.ledger.quiet(part)

    def abort(self, transfer: Transfer, error: AiokvError, reason: str = "cancelled") -> None:
        """Give a transfer up."""
        self.table.abort(transfer, error, reason)

    @property
    def block_size(self) -> int:
        """Tokens of a block of its first group."""
        return self.table.ledger.layout.groups[0].block_size

    def _listed(self, blocks: Sequence[int]) -> tuple[GroupBlocks, ...]:
        groups = self.table.ledger.layout.groups
        return tuple(GroupBlocks(0, np.array(blocks, dtype=np.int64)) for _ in groups)

    # -- sessions

    def session(self, member: Member | str) -> Session:
        """The session with another member; begins one if there is none."""
        address = member if isinstance(member, str) else member.address
        if address not in self.sessions:
            self._streams += 1
            me, settings = self.me, self.settings
            self.sessions[address] = Session(me, self._streams, address, settings, self.net.now)
        return self.sessions[address]

    def lose(self, member: Member, *, certain: bool, error: AiokvError | None = None) -> None:
        """The session with another member is over, on this side."""
        error = error or PeerLostError(f"{member.address} is gone")
        session = self.sessions.pop(member.address)
        session.end(error)
        self.table.lost(session, error, certain=certain)

    def _lost(self, session: Session, error: AiokvError) -> None:
        if self.sessions.get(session.address) is session:
            del self.sessions[session.address]
        session.end(error)
        self.table.lost(session, error, certain=False)

    # -- turns, frames and time

    def turn(self) -> bool:
        """Do what the table wants done, and put frames on the wire; whether there was anything to do."""
        before = len(self.kinds)
        self._act()
        self.table.producer.flush()
        frames = 0
        for session in list(self.sessions.values()):
            way = (self.name, session.address.removeprefix("memory://"))
            for frame in session.take_frames():
                frames += 1
                self.sent += decode_messages(decode_frame(frame))
                self.net.wire.setdefault(way, deque()).append(frame)
        return frames > 0 or len(self.kinds) > before

    def receive(self, data: bytes) -> None:
        """Take a frame."""
        frame, now = decode_frame(data), self.net.now
        if not frame.seq:
            for message in decode_messages(frame):
                if isinstance(message, Hello):
                    self._greeted(frame, message)
            return
        session = self.sessions.get(frame.reply)
        if session is None or session.theirs != frame.mine:
            return  # of a session that is over
        try:
            for message in session.receive(frame, now):
                self.heard.append(message)
                self.table.receive(session, message, now)
        except RemoteProtocolError as error:
            self.faults.append(error)
            self._lost(session, error)

    def _greeted(self, frame: Frame, hello: Hello) -> None:
        """As an engine does it, but for resets: what is left over is dropped, and times out."""
        session = self.session(frame.reply)
        if session.theirs and session.theirs < frame.mine:
            self._lost(session, PeerLostError(f"{frame.reply} began a new session"))
            session = self.session(frame.reply)
        if session.theirs > frame.mine or (not session.theirs and frame.yours not in (0, session.mine)):
            return
        session.receive_hello(frame, hello, self.net.now)
        for part in self.table.parts_of(session):
            self._connect(part)

    def next_timer(self) -> int | None:
        """When ``tick`` should come next (ns)."""
        timers = [self.table.next_timer(), *(session.next_timer() for session in self.sessions.values())]
        return min((when for when in timers if when is not None), default=None)

    def tick(self) -> None:
        """Look at every timer."""
        self.table.handle_timer(self.net.now)
        for session in list(self.sessions.values()):
            session.handle_timer(self.net.now)
            if session.phase is Phase.ENDED and session.error is not None:
                self._lost(session, session.error)

    def _act(self) -> None:
        actions = self.table.actions
        while actions:
            pending, actions[:] = actions[:], []
            for action in pending:
                self.kinds.append(action.kind)
                self._do(action)

    def _do(self, action: Action) -> None:
        part = action.part
        match action.kind:
            case ActionKind.CONNECT:
                self._connect(part)
            case ActionKind.START if part.role == "producer":
                self.table.producer.accept(part, self.net.now)
            case ActionKind.MOVE:
                self.moves[part] |= action.mask
            case ActionKind.STOP:
                self.stopped.add(part)
                if part not in self.busy:
                    self.table.ledger.quiet(part)
            case ActionKind.ENDED:
                self.table.ended(part, self.net.now)
            case _:
                pass

    def _connect(self, part: Part) -> None:
        session, now = part.session, self.net.now
        if session is None or session.phase is not Phase.UP or part.ended:
            return
        if part.role == "producer":
            self.table.producer.connected(part, now)
        elif self.link_error is not None:
            self.table.fail(part, self.link_error)
        else:
            name = "read" if self.one_sided else "sent"
            self.table.consumer.connected(part, now, name, b"link", one_sided=self.one_sided)
