"""Peers: who lives at which address, the sessions with it, and the link to read from it.

What sessions want to send goes out from here at the end of the turn. What arrives is led to them
by the demultiplexer, and what it means for transfers is the table's business.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import msgspec

from aiokv.control.base import Channel, Port
from aiokv.engine.linking import open_link
from aiokv.errors import AiokvError, CapacityError, ClosedError, PeerLostError
from aiokv.proto.messages import Bye, Frame, Hello, Reset, as_text, encode_frame, encode_message
from aiokv.proto.session import Identity, Phase, Session
from aiokv.proto.settings import Settings
from aiokv.transports.base import Link, PeerInfo, Transport

__all__ = ["Peer", "Peers"]

_log = logging.getLogger("aiokv")

#: Sessions with one life of a peer that are remembered as over while others with it go on.
_MOST_OVER = 64


class Peer:
    """One address, and the engine that lives there now."""

    __slots__ = ("address", "link", "opening", "port", "session", "transport", "worn")

    def __init__(self, address: str, port: Port) -> None:
        self.address = address
        self.port = port
        #: Somebody was heard from there, and the session with him ended, since the port was opened.
        self.worn = False
        #: The current session; None before the first, and after the last has ended.
        self.session: Session | None = None
        #: Consumer side: the path to read from (or be sent to by) this peer; None until opened.
        self.link: Link | None = None
        #: The transport that ``link`` belongs to.
        self.transport: Transport | None = None
        #: The task that opens ``link``; None when none does.
        self.opening: asyncio.Task[None] | None = None


class Peers:
    """All peers of one engine.

    Args:
        me: This engine.
        channel: Its control channel, started.
        transports: The transports that may be used, best first, all started.
        settings: Timers.
        clock: The time (ns).
        ended: Called when a session ended, with why, and whether the peer is certainly gone.
        linked: Called when the link to a session's peer was opened, or couldn't be (then with why).
        retire: Closes a link once nothing in flight uses it.
        wake: Asks for another turn.
    """

    def __init__(
        self,
        me: Identity,
        channel: Channel,
        transports: Sequence[Transport],
        settings: Settings,
        *,
        clock: Callable[[], int],
        ended: Callable[[Session, AiokvError, bool], None],
        linked: Callable[[Session, AiokvError | None], None],
        retire: Callable[[Link], None],
        wake: Callable[[], None],
    ) -> None:
        self._me = me
        self._channel = channel
        self._transports = transports
        self._settings = settings
        self._clock = clock
        self._ended = ended
        self._linked = linked
        self._retire = retire
        self._wake = wake
        self._streams = itertools.count(1)
        self._peers: dict[str, Peer] = {}
        self._sessions: dict[int, Peer] = {}  # by the number of our stream
        #: Sessions that are up, by the peer's life and the number of its stream.
        self._up_with: dict[bytes, dict[int, Session]] = {}
        #: Streams of a life's sessions that are over, while others with it are up: left-overs of theirs
        #: begin nothing.
        self._over_with: dict[bytes, deque[int]] = {}
        self._talking: dict[Session, None] = {}  # sessions with something to send
        self._timed: dict[Session, None] = {}  # sessions that have a timer
        #: Tasks that open links.
        self.tasks: set[asyncio.Task[None]] = set()
        #: Control frames sent.
        self.frames_sent = 0
        #: Sessions that ended other than by their owner's wish.
        self.sessions_lost = 0

    # -- getting at peers

    def session(self, address: str) -> Session:
        """The session with whoever lives at ``address``; begins one if there is none.

        Raises:
            ValueError: The control channel can't reach such an address.
            CapacityError: There are too many peers.
        """
        peer = self.at(address)
        if peer.session is not None:
            return peer.session
        for other in reversed(self.sessions):  # the latest is the least likely to be over at the other end
            if other.hello is not None and other.hello.address == address:
                return other  # whoever lives there began one
        return self.begin(peer)

    def peer_of(self, session: Session) -> Peer | None:
        """The peer whose current session this is; None if the session is over."""
        return self._sessions.get(session.mine)

    def by_stream(self, stream: int) -> Peer | None:
        """The peer with whom this stream of ours is that of the current session."""
        return self._sessions.get(stream)

    def sessions_with(self, life: bytes) -> Mapping[int, Session]:
        """Sessions that are up with one life of an engine (``life_of``), by the numbers of its streams."""
        return self._up_with.get(life, {})

    def was_up(self, life: bytes, stream: int) -> bool:
        """Whether a session by that stream of theirs is over, though others with this life go on."""
        return stream in self._over_with.get(life, ())

    @property
    def sessions(self) -> list[Session]:
        """Sessions that are not over. May be called from any thread."""
        return [peer.session for peer in list(self._sessions.values()) if peer.session is not None]

    def at(self, address: str) -> Peer:
        """The peer at ``address``, known from now on.

        Raises:
            ValueError: The control channel can't reach such an address, or it is this engine's own.
            CapacityError: There are too many peers.
        """
        peer = self._peers.pop(address, None)
        if peer is not None:
            self._peers[address] = peer  # last: the one not used for longest gives way first
        else:
            if address == self._me.hello.address:
                raise ValueError(f"{address} is this engine itself; it has nothing to fetch from itself")
            if len(self._peers) >= self._settings.peers:
                self._drop_idle()
            peer = self._peers[address] = Peer(address, self._channel.open(address))
        return peer

    def _drop_idle(self) -> None:
        """Make room: forget one peer that nothing goes on with.

        Who only said something gives way before those with whom there was a transfer, or whoever says HELLO
        from enough addresses would drive these out.
        """
        sessions: dict[str, list[Session]] = {}  # with its twins
        for session in self.sessions:
            sessions.setdefault(session.address, []).append(session)
        idle = [
            peer
            for peer in self._peers.values()
            if not any(each.busy for each in sessions.get(peer.address, ()))
        ]
        if not idle:
            raise CapacityError(f"there are {len(self._peers)} peers with live transfers, as many as allowed")
        # Of equals the first: the one that was not used for longest.
        gone = min(idle, key=lambda peer: _worth(sessions.get(peer.address, ())))
        for session in sessions.get(gone.address, ()):
            self.end(session, PeerLostError("idle, and room was needed"), tell=True)
        gone.port.close()
        self._peers = {name: other for name, other in self._peers.items() if other is not gone}

    def twin(self, peer: Peer) -> Session:
        """A new session with whoever lives where ``peer`` does, beside the one that there is.

        Raises:
            CapacityError: The control channel has no more ports.
        """
        return self.begin(Peer(peer.address, self._channel.open(peer.address)))

    def begin(self, peer: Peer) -> Session:
        """A new session with a peer that has none.

        Raises:
            CapacityError: The control channel has no more ports.
        """
        if peer.worn:
            # The old port may still be connected to a process that is gone, and lose what it is given.
            port = self._channel.open(peer.address)
            peer.port.close()
            peer.port, peer.worn = port, False
        stream = next(self._streams)
        session = Session(
            self._me, stream, peer.address, self._settings, self._clock(), self._talking, self._timed
        )
        peer.session = session
        self._sessions[stream] = peer
        self._wake()
        return session

    def note_up(self, session: Session, address: str) -> None:
        """A session is up, with an engine that calls itself by this address."""
        self._up_with.setdefault(session.life, {})[session.theirs] = session
        self._peers.setdefault(address, self._sessions[session.mine])

    # -- what is sent

    def flush(self) -> None:
        """Send what the sessions have queued."""
        while self._talking:
            session, _ = self._talking.popitem()
            peer = self.peer_of(session)
            if peer is None:
                continue
            try:
                for frame in session.take_frames():
                    self._send(peer.port, frame)
            except (CapacityError, ClosedError) as error:
                self.end(
                    session, PeerLostError(f"{peer.address} does not read its control messages: {error}")
                )

    def send_reset(self, port: Port, dst: bytes, reset: Reset) -> None:
        """Send it if that can be: a peer that doesn't read finds out by itself, sooner or later.

        Args:
            port: The way to the peer.
            dst: Its incarnation.
            reset: Says which of its streams means nothing here.
        """
        frame = Frame(
            src=self._me.incarnation,
            dst=dst,
            reply=self._me.hello.address,
            mine=0,
            yours=0,
            seq=0,
            ack=0,
            body=[msgspec.Raw(encode_message(reset))],
        )
        with contextlib.suppress(CapacityError, ClosedError):
            self._send(port, encode_frame(frame))

    def _send(self, port: Port, frame: bytes) -> None:
        self.frames_sent += 1
        port.send(frame)

    # -- the end of a session

    def end(self, session: Session, error: AiokvError, *, certain: bool = False, tell: bool = False) -> None:
        """End a session: its parts fail, its link closes. The first reason stays."""
        if session.phase is Phase.ENDED:
            return
        peer = self.peer_of(session)
        if tell and peer is not None:  # also whom we haven't heard yet: it may have heard us
            session.send(Bye(as_text(error)))
            self.flush()
            if self.peer_of(session) is None:
                return  # it doesn't read, so it was ended for that
        session.end(error)
        self.finish(session, error, certain=certain)

    def finish(self, session: Session, error: AiokvError, *, certain: bool = False) -> None:
        """A session has ended, by itself or by ``end``: its parts fail, its link closes."""
        peer = self._sessions.pop(session.mine, None)
        life = session.life
        others = self._up_with.get(life, {})
        if others.get(session.theirs) is session:
            del others[session.theirs]
            if others:
                over = self._over_with.setdefault(life, deque(maxlen=_MOST_OVER))
                over.append(session.theirs)
            else:
                del self._up_with[life]
                self._over_with.pop(life, None)
        if peer is not None and peer.session is session:
            peer.session, peer.worn = None, bool(session.incarnation)
            if peer.opening is not None:
                peer.opening.cancel()
                peer.opening = None
            link, peer.link, peer.transport = peer.link, None, None
            if peer not in self._peers.values():
                peer.port.close()  # a twin has its address
        else:
            link = None
        if session.live:
            self.sessions_lost += 1
            _log.info("session with %s ended: %s", session.address, error)
        self._ended(session, error, certain)
        if link is not None:
            self._retire(link)
        self._wake()

    # -- time

    def next_timer(self) -> int | None:
        """The earliest time that any session wants to be called (ns)."""
        timers = [when for s in self._timed if (when := s.next_timer()) is not None]
        return min(timers, default=None)

    def handle_timer(self, now: int) -> None:
        """Let time pass in every session."""
        for session in list(self._timed):
            session.handle_timer(now)
            if session.phase is Phase.ENDED and session.error is not None:
                self.finish(session, session.error)

    def forgive(self, now: int) -> None:
        """This side was late; nobody's silence counts."""
        for session in self.sessions:
            session.forgive(now)

    # -- links

    def open_link(self, session: Session) -> None:
        """Open the link to the peer of a session that is up, unless it is there or being opened.

        ``linked`` is called once it is there, or can't be had.
        """
        peer, hello = self.peer_of(session), session.hello
        if peer is not None and hello is not None and peer.link is None and peer.opening is None:
            peer.opening = asyncio.get_running_loop().create_task(self._open(peer, session, hello))
            self.tasks.add(peer.opening)
            peer.opening.add_done_callback(self.tasks.discard)

    async def _open(self, peer: Peer, session: Session, hello: Hello) -> None:
        info = PeerInfo(address=peer.address, incarnation=session.incarnation, placement=hello.placement)
        timeout = self._settings.contact_ns / 1e9
        try:
            transport, link = await open_link(self._transports, hello.transports, info, timeout)
        except Exception as error:  # noqa: BLE001 - whatever it is, somebody waits for the link
            peer.opening = None
            lost = PeerLostError(f"no data path to {peer.address}: {error!r}")
            self._linked(session, error if isinstance(error, AiokvError) else lost)
            self._wake()
            return
        if peer.session is not session:
            link.close()
            return
        peer.opening, peer.link, peer.transport = None, link, transport
        text = f"the {transport.name} link to {peer.address} is lost"
        link.on_lost(lambda: self.link_lost(session, text, certain=False))
        self._linked(session, None)
        self._wake()

    def link_lost(self, session: Session, text: str, *, certain: bool) -> None:
        """A link of this session broke.

        Args:
            session: The session, which may be over by now.
            text: What broke, in words.
            certain: It was the peer's way to our memory, which it can't read any more. Our own way
                to the peer's says nothing of that.
        """
        if session.phase is not Phase.ENDED:
            self.end(session, PeerLostError(text), certain=certain)
        elif certain:
            self._ended(session, PeerLostError(text), True)  # no lease needs to be waited for
            self._wake()

    def close(self) -> None:
        """Give up all sessions and ports."""
        for session in self.sessions:
            self.end(session, ClosedError("this engine was closed"))
        for peer in self._peers.values():
            peer.port.close()
        self._peers.clear()


def _worth(sessions: Sequence[Session]) -> int:
    """How much a peer with these sessions is worth keeping."""
    return 2 if any(session.used for session in sessions) else 1 if sessions else 0
