"""What arrives: each frame is led to the session that it belongs to, or told off where there is none."""

from __future__ import annotations

import logging
from collections.abc import Callable

from aiokv.engine.peer import Peer, Peers
from aiokv.errors import CapacityError, ClosedError, PeerLostError, Refused, RemoteProtocolError
from aiokv.proto.messages import Frame, Hello, Message, Reset, as_text, decode_frame, decode_messages
from aiokv.proto.session import Identity, Phase, Session, key_of, life_of

__all__ = ["Demultiplexer"]

_log = logging.getLogger("aiokv")

#: Sessions that one life of one peer may have with this engine: one for each name that it calls us by.
_MOST_SESSIONS = 8


class Demultiplexer:
    """Takes the frames of one engine's control channel.

    Args:
        me: This engine.
        peers: Those who send them.
        clock: The time (ns).
        up: Called when a session is up.
        message: Called for each message of a session that is not the session's own.
        lease: Called when a session's lease was extended.
        wake: Asks for another turn.
    """

    def __init__(
        self,
        me: Identity,
        peers: Peers,
        *,
        clock: Callable[[], int],
        up: Callable[[Session], None],
        message: Callable[[Session, Message], None],
        lease: Callable[[Session], None],
        wake: Callable[[], None],
    ) -> None:
        self._me = me
        self._peers = peers
        self._clock = clock
        self._up = up
        self._message = message
        self._lease = lease
        self._wake = wake
        #: Control frames received, and received in vain (malformed, stale, for somebody else).
        self.frames_received = self.frames_stray = 0

    def receive(self, data: bytes, sender: str = "") -> None:
        """Take one frame from the channel.

        Args:
            data: The frame.
            sender: Key of who sent it; see ``Channel.sender``. Each may speak for its own address only.
        """
        self.frames_received += 1
        self._wake()
        try:
            frame = decode_frame(data)
        except RemoteProtocolError as error:
            self._stray("%s", error)
            return
        if key_of(frame.reply) != sender:
            self._stray("who says to be at %s has the key %r", frame.reply, sender)
            return
        if not frame.seq:
            self._outside(frame)
            return
        session = self._peers.sessions_with(_life(frame)).get(frame.mine)
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
            self._peers.end(session, error)
            return
        except Exception as error:
            # What was left of the frame is lost, which nothing would mend: somebody would wait for it.
            self._tell_reset(session, "internal", "a message could not be taken")
            text = f"a message of {session.address} could not be taken: {error!r}"
            self._peers.end(session, PeerLostError(text))
            raise
        if session.lease_held > max(held, now):  # what is over already helps nobody
            self._lease(session)
        if session.farewell:
            self._peers.end(session, PeerLostError(f"{session.address} closed"))

    # -- what begins and ends streams

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
        answered = self._peers.by_stream(frame.yours)
        if any(
            not _same_key(each, frame.reply)
            for each in (hello.address, answered and answered.address)
            if each
        ):
            self._stray("HELLO in the name of another from %s", frame.reply)
            return
        try:
            hello.placement.check(hello.layout)
            # Whom we greeted may call itself otherwise than we called it (localhost, 127.0.0.1).
            peer = answered or self._peers.at(hello.address)
        except (ValueError, CapacityError) as error:
            self._stray("HELLO from %s: %s", frame.reply, error)
            return
        if self._was_heard(frame, hello):
            return
        try:
            session = self._greeted(frame, hello, peer)
        except (CapacityError, ClosedError) as error:
            self._stray("HELLO from %s: %s", frame.reply, error)
            return
        if session is None:
            return
        session.receive_hello(frame, hello, self._clock())
        if session.phase is Phase.UP:
            self._peers.note_up(session, hello.address)
            self._up(session)
        elif session.error is not None:
            self._reset(frame, "version", str(session.error))
            self._peers.finish(session, session.error)

    def _was_heard(self, frame: Frame, hello: Hello) -> bool:
        """Whether a greeting is of a session that is up, or was; if neither, the others are asked."""
        others = self._peers.sessions_with(_life(frame))
        if frame.mine in others:
            others[frame.mine].receive_hello(frame, hello, self._clock())
            return True
        if self._peers.was_up(_life(frame), frame.mine):
            self._reset(frame, "session", "this session is over")
            return True
        if len(others) >= _MOST_SESSIONS:
            # Idle ones first, and of those the oldest.
            oldest = min(others, key=lambda stream: (others[stream].busy, stream))
            self._peers.end(others[oldest], PeerLostError(f"{hello.address} began others"))
        for other in others.values():
            # The peer gave it up, and says so when asked. Or it calls us by several names, and
            # doesn't know that they are one engine's: then all go on.
            other.ask()
        return False

    def _greeted(self, frame: Frame, hello: Hello, peer: Peer) -> Session | None:
        """The session of ours that a new greeting is for; None if that is over."""
        for old in self._peers.sessions:
            # Another life of whoever lived here. The old one may still run, behind a NAT say, so its
            # death is not certain; its links say more.
            if old.hello and old.hello.address == hello.address and old.incarnation != frame.src:
                self._peers.end(old, PeerLostError(f"{hello.address} was restarted"))
        session = peer.session
        if session is not None and not frame.yours and (session.theirs or not self._crossed(hello)):
            return self._peers.twin(peer)
        if frame.yours and (session is None or session.theirs):
            self._reset(frame, "session", "this session is not known here")
            return None
        if session is None:
            return self._peers.begin(peer)
        # An answer to an earlier greeting of ours is none to the current one, which will come.
        return session if frame.yours in (0, session.mine) else None

    def _crossed(self, hello: Hello) -> bool:
        """Whether a greeting and ours to the same engine are for one session.

        They are if both call the other what it calls itself, which both can see. Otherwise each is
        answered for itself, since only one of the two might know that the names mean one engine.
        """
        return hello.called == self._me.hello.address

    def _on_reset(self, frame: Frame, reset: Reset) -> None:
        if frame.dst != self._me.incarnation:
            return  # for who lived here before, whose streams had the same numbers
        peer = self._peers.by_stream(reset.stream)
        session = peer.session if peer else None
        if session is not None and not _same_key(session.address, frame.reply):
            self._stray("RESET in the name of another from %s", frame.reply)
            return
        if session is None or (
            session.incarnation and session.incarnation != frame.src and reset.reason != "incarnation"
        ):
            return
        text = f"{session.address} reset the session ({reset.reason}): {reset.text}"
        kind = Refused if reset.reason == "version" else PeerLostError
        others = self._peers.sessions_with(session.life)
        self._peers.end(session, kind(text))
        for other in others.values():
            other.ask()  # it may be over there, too, and the next transfer would be lost to find out

    # -- what means nothing here

    def _reset(self, frame: Frame, reason: str, text: str) -> None:
        """Tell the sender of a frame that its stream means nothing here."""
        self.frames_stray += 1
        try:
            port = self._peers.at(frame.reply).port
        except (ValueError, CapacityError):
            return
        self._peers.send_reset(port, frame.src, Reset(frame.mine, reason, as_text(text)))

    def _tell_reset(self, session: Session, reason: str, text: str) -> None:
        peer = self._peers.peer_of(session)
        if peer is not None and session.theirs:
            reset = Reset(session.theirs, reason, as_text(text))
            self._peers.send_reset(peer.port, session.incarnation, reset)

    def _stray(self, text: str, *args: object) -> None:
        self.frames_stray += 1
        _log.debug("dropped a control frame: " + text, *args)


def _life(frame: Frame) -> bytes:
    """Whose frame it is: the incarnation that it says, of who has the key to its address."""
    return life_of(frame.src, frame.reply)


def _same_key(address: str, other: str) -> bool:
    """Whether two addresses are of who has the same key; all are where there are none."""
    return key_of(address) == key_of(other)
