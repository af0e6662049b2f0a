"""Peers: who lives at which address, the session with it, and the link to read from it.

The pump between the channel and the sessions is here: a frame that arrives is given to the
session it belongs to, and what the sessions want to send goes out at the end of the turn. What
it means for transfers is the table's business.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Sequence

import msgspec

from aiokv.control.base import Channel, Port
from aiokv.engine.linking import open_link
from aiokv.errors import (
    AiokvError,
    CapacityError,
    ClosedError,
    PeerLostError,
    Refused,
    RemoteProtocolError,
)
from aiokv.proto.messages import (
    Bye,
    Frame,
    Hello,
    Message,
    Reset,
    decode_frame,
    decode_messages,
    encode_frame,
    encode_message,
)
from aiokv.proto.session import Identity, Phase, Session
from aiokv.proto.settings import Settings
from aiokv.transports.base import Link, PeerInfo, Transport

__all__ = ["Peer", "Peers"]

_log = logging.getLogger("aiokv")


class Peer:
    """One address, and the engine that lives there now."""

    __slots__ = ("address", "link", "opening", "port", "session", "transport")

    def __init__(self, address: str, port: Port) -> None:
        self.address = address
        self.port = port
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
        up: Called when a session is up.
        message: Called for each message of a session that is not the session's own.
        lease: Called when a session's lease was extended.
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
        up: Callable[[Session], None],
        message: Callable[[Session, Message], None],
        lease: Callable[[Session], None],
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
        self._up = up
        self._message = message
        self._lease = lease
        self._ended = ended
        self._linked = linked
        self._retire = retire
        self._wake = wake
        self._streams = itertools.count(1)
        self._peers: dict[str, Peer] = {}
        self._sessions: dict[int, Peer] = {}  # by the number of our stream
        #: Sessions that are up, by the peer's incarnation and the number of its stream.
        self._up_with: dict[bytes, dict[int, Session]] = {}
        self._talking: dict[Session, None] = {}  # sessions with something to send
        self._timed: dict[Session, None] = {}  # sessions that have a timer
        #: Tasks that open links.
        self.tasks: set[asyncio.Task[None]] = set()
        #: Control frames sent, received, and received in vain (malformed, stale, for somebody else).
        self.frames_sent = self.frames_received = self.frames_stray = 0
        #: Sessions that ended other than by their owner's wish.
        self.sessions_lost = 0

    # -- getting at peers

    def session(self, address: str) -> Session:
        """The session with whoever lives at ``address``; begins one if there is none.

        Raises:
            ValueError: The control channel can't reach such an address.
            CapacityError: There are too many peers.
        """
        peer = self._peer(address)
        if peer.session is None:
            self._begin(peer)
        assert peer.session is not None  # noqa: S101
        return peer.session

    def peer_of(self, session: Session) -> Peer | None:
        """The peer whose current session this is; None if the session is over."""
        return self._sessions.get(session.mine)

    @property
    def sessions(self) -> list[Session]:
        """Sessions that are not over."""
        return [peer.session for peer in self._sessions.values() if peer.session is not None]

    def _peer(self, address: str) -> Peer:
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
        """Make room: forget one peer that nothing goes on with."""
        for peer in self._peers.values():
            if peer.session is None or (not peer.session.live and not peer.session.wants_to_send):
                if peer.session is not None:
                    self.end(peer.session, PeerLostError("idle, and room was needed"), tell=True)
                peer.port.close()
                self._peers = {name: other for name, other in self._peers.items() if other is not peer}
                return
        raise CapacityError(f"there are {len(self._peers)} peers with live transfers, as many as allowed")

    def _begin(self, peer: Peer) -> Session:
        stream = next(self._streams)
        session = Session(
            self._me, stream, peer.address, self._settings, self._clock(), self._talking, self._timed
        )
        peer.session = session
        self._sessions[stream] = peer
        self._wake()
        return session

    # -- what arrives

    def receive(self, data: bytes) -> None:
        """Take one frame from the channel."""
        self.frames_received += 1
        self._wake()
        try:
            frame = decode_frame(data)
        except RemoteProtocolError as error:
            self._stray("%s", error)
            return
        if not frame.seq:
            self._outside(frame)
            return
        session = self._up_with.get(frame.src, {}).get(frame.mine)
        if frame.dst and frame.dst != self._me.incarnation:
            self._reset(frame, "incarnation", "the engine that this was meant for is gone")
        elif session is None:
            self._reset(frame, "session", "this session is not known here")
        else:
            self._within(session, frame)

    def _within(self, session: Session, frame: Frame) -> None:
        """A frame of a session's own stream."""
        now, held = self._clock(), session.lease_held
        try:
            for message in session.receive(frame, now):
                self._message(session, message)
        except RemoteProtocolError as error:
            self._tell_reset(session, "protocol", str(error))
            self.end(session, error)
            return
        except Exception as error:
            # What was left of the frame is lost, which nothing would mend: somebody would wait for it.
            self._tell_reset(session, "internal", "a message could not be taken")
            self.end(session, PeerLostError(f"a message of {session.address} could not be taken: {error!r}"))
            raise
        if session.lease_held > max(held, now):  # what is over already helps nobody
            self._lease(session)
        if session.farewell:
            self.end(session, PeerLostError(f"{session.address} closed"))

    def _outside(self, frame: Frame) -> None:
        """HELLO or RESET, which begin and end streams."""
        try:
            messages = decode_messages(frame)
        except RemoteProtocolError as error:
            self._stray("from %s: %s", frame.reply, error)
            return
        match messages:
            case [Hello() as hello]:
                self._on_hello(frame, hello)
            case [Reset() as reset]:
                self._on_reset(frame, reset)
            case _:
                self._stray("neither HELLO nor RESET from %s", frame.reply)

    def _on_hello(self, frame: Frame, hello: Hello) -> None:
        if frame.dst and frame.dst != self._me.incarnation:
            self._reset(frame, "incarnation", "the engine that this was meant for is gone")
            return
        answered = self._sessions.get(frame.yours)
        try:
            hello.placement.check(hello.layout)
            # Whom we greeted may call itself otherwise than we called it (localhost, 127.0.0.1).
            peer = answered or self._peer(hello.address)
        except (ValueError, CapacityError) as error:
            self._stray("HELLO from %s: %s", frame.reply, error)
            return
        if self._was_heard(frame, hello):
            return
        session = self._greeted(frame, hello, peer)
        if session is None:
            return
        session.receive_hello(frame, hello, self._clock())
        if session.phase is Phase.UP:
            self._up_with.setdefault(frame.src, {})[frame.mine] = session
            self._peers.setdefault(hello.address, self._sessions[session.mine])
            self._up(session)
        elif session.error is not None:
            self._reset(frame, "version", str(session.error))
            self._finish(session, session.error, certain=False)

    def _was_heard(self, frame: Frame, hello: Hello) -> bool:
        """Whether a greeting is of a session that is up, or of one before; if not, those are asked."""
        others = self._up_with.get(frame.src, {})
        if frame.mine in others:
            others[frame.mine].receive_hello(frame, hello, self._clock())
        elif not others or frame.mine > max(others):
            for other in others.values():
                # The peer gave it up, and says so when asked. Or it calls us by several names, and
                # doesn't know that they are one engine's: then all go on.
                other.ask()
            return False
        return True

    def _greeted(self, frame: Frame, hello: Hello, peer: Peer) -> Session | None:
        """The session of ours that a new greeting is for; None if that is over."""
        session = peer.session
        if session is not None and session.theirs:
            if session.incarnation != frame.src:
                # Another life of whoever lived here. The old one may still run, behind a NAT say,
                # so its death is not certain; its links say more.
                for old in list(self._up_with.get(session.incarnation, {}).values()):
                    self.end(old, PeerLostError(f"{hello.address} was restarted"))
            elif not frame.yours:
                peer = self._peers[hello.address] = Peer(peer.address, peer.port)
            session = None
        if session is None and frame.yours:
            self._reset(frame, "session", "this session is not known here")
            return None
        if session is None:
            return self._begin(peer)
        # An answer to an earlier greeting of ours is none to the current one, which will come.
        return session if frame.yours in (0, session.mine) else None

    def _on_reset(self, frame: Frame, reset: Reset) -> None:
        peer = self._sessions.get(reset.stream)
        session = peer.session if peer else None
        if session is None or (
            session.incarnation and session.incarnation != frame.src and reset.reason != "incarnation"
        ):
            return
        text = f"{session.address} reset the session ({reset.reason}): {reset.text}"
        kind = Refused if reset.reason == "version" else PeerLostError
        self.end(session, kind(text))

    def _reset(self, frame: Frame, reason: str, text: str) -> None:
        """Tell the sender of a frame that its stream means nothing here."""
        self.frames_stray += 1
        try:
            port = self._peer(frame.reply).port
        except (ValueError, CapacityError):
            return
        self._send_outside(port, frame.src, Reset(frame.mine, reason, text[:2048]))

    def _tell_reset(self, session: Session, reason: str, text: str) -> None:
        peer = self.peer_of(session)
        if peer is not None and session.theirs:
            self._send_outside(peer.port, session.incarnation, Reset(session.theirs, reason, text[:2048]))

    def _send_outside(self, port: Port, dst: bytes, message: Reset) -> None:
        """Send it if that can be: a peer that doesn't read finds out by itself, sooner or later."""
        frame = Frame(
            src=self._me.incarnation,
            dst=dst,
            reply=self._me.hello.address,
            mine=0,
            yours=0,
            seq=0,
            ack=0,
            body=[msgspec.Raw(encode_message(message))],
        )
        with contextlib.suppress(CapacityError, ClosedError):
            self._send(port, encode_frame(frame))

    def _stray(self, text: str, *args: object) -> None:
        self.frames_stray += 1
        _log.debug("dropped a control frame: " + text, *args)

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

    def _send(self, port: Port, frame: bytes) -> None:
        self.frames_sent += 1
        port.send(frame)

    # -- the end of a session

    def end(self, session: Session, error: AiokvError, *, certain: bool = False, tell: bool = False) -> None:
        """End a session: its parts fail, its link closes. The first reason stays."""
        if session.phase is Phase.ENDED:
            return
        peer = self.peer_of(session)
        if tell and peer is not None and session.phase is Phase.UP:
            session.send(Bye(str(error)[:2048]))
            self.flush()
            if self.peer_of(session) is None:
                return  # it doesn't read, so it was ended for that
        session.end(error)
        self._finish(session, error, certain=certain)

    def _finish(self, session: Session, error: AiokvError, *, certain: bool) -> None:
        peer = self._sessions.pop(session.mine, None)
        others = self._up_with.get(session.incarnation, {})
        if others.get(session.theirs) is session:
            del others[session.theirs]
            if not others:
                del self._up_with[session.incarnation]
        if peer is not None and peer.session is session:
            peer.session = None
            if peer.opening is not None:
                peer.opening.cancel()
                peer.opening = None
            link, peer.link, peer.transport = peer.link, None, None
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
                self._finish(session, session.error, certain=False)

    def forgive(self, now: int) -> None:
        """This side was late; nobody's silence counts."""
        for session in self.sessions:
            session.forgive(now)

    # -- links

    def open_link(self, session: Session) -> None:
        """Open the link to the peer of a session that is up, unless it is there or being opened.

        ``linked`` is called once it is there, or can't be had.
        """
        peer = self.peer_of(session)
        if peer is not None and peer.link is None and peer.opening is None:
            peer.opening = asyncio.get_running_loop().create_task(self._open(peer, session))
            self.tasks.add(peer.opening)
            peer.opening.add_done_callback(self.tasks.discard)

    async def _open(self, peer: Peer, session: Session) -> None:
        hello = session.hello
        assert hello is not None  # noqa: S101  # the session is up
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
