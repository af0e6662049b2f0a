"""The session with one life of one peer: streams, acknowledgements, heartbeats, leases.

Each direction is a stream of frames that its sender numbers, HELLO first with sequence number 0.
A stream's own number is never used twice by its sender, so that whatever is left over from an
earlier session is told apart. A session is not mended: a gap, a reset or silence ends it, its
parts fail, and the next contact makes a new one.

Nothing here does I/O or looks at a clock. ``receive`` takes a frame, ``take_frames`` gives what
is to be sent, ``next_timer`` says when ``handle_timer`` wants to be called.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal

import msgspec

from aiokv.errors import AiokvError, PeerLostError, Refused, RemoteProtocolError
from aiokv.proto.messages import (
    OLDEST_VERSION,
    VERSION,
    Bye,
    Frame,
    Hello,
    Message,
    Ping,
    Pong,
    Renew,
    Reset,
    decode_messages,
    encode_frame,
    encode_message,
)
from aiokv.proto.settings import Settings

__all__ = ["Identity", "Phase", "Session", "key_of", "life_of"]

#: Messages that sessions keep to themselves, or don't take.
_OWN = frozenset({Ping, Pong, Bye, Hello, Reset})

#: Body bytes of a frame at most; the header takes less than what is left of MAX_FRAME.
_BODY_LIMIT = 900_000

#: A peer that seems dead gets this long for its input to be read before the verdict.
_GRACE_NS = 20_000_000

#: The first version of the protocol that has RENEW.
_RENEWS = 2

#: What two processes' looks at one clock may differ by.
_CLOCKS_NS = 1_000_000


def key_of(address: str) -> str:
    """The key that an address names; empty where it names none."""
    return address.partition("#")[2]


def life_of(incarnation: bytes, address: str) -> bytes:
    """What tells lives of engines apart: the incarnation that one says, and the key that its address names.

    Incarnations are told to every peer, so that another one with a key could claim it.
    """
    return incarnation + key_of(address).encode()


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this engine is, in this life."""

    #: 16 random bytes, new for each life.
    incarnation: bytes
    #: What it says of itself to every peer.
    hello: Hello


class Phase(enum.Enum):
    """How far a session has come."""

    #: HELLO was sent; the peer's isn't there yet.
    CONTACT = "contact"
    #: Both know each other.
    UP = "up"
    #: Over, by ``Session.error``.
    ENDED = "ended"


class Session:
    """One session, from HELLO until it ends.

    Args:
        me: This engine.
        stream: Number of this side's stream; higher than any that this engine used before.
        address: Where the peer's control channel listens.
        settings: Timers.
        now: The time, in nanoseconds.
        talking: Where the session enters itself when it has something to send.
        timed: Where it stands while it has a timer.
    """

    def __init__(
        self,
        me: Identity,
        stream: int,
        address: str,
        settings: Settings,
        now: int,
        talking: dict[Session, None] | None = None,
        timed: dict[Session, None] | None = None,
    ) -> None:
        self.me = me
        self.address = address
        #: Number of this side's stream.
        self.mine = stream
        #: Number of the peer's stream; 0 until its HELLO came.
        self.theirs = 0
        #: The peer's incarnation; empty until its HELLO came.
        self.incarnation = b""
        #: Which life of which engine the peer is (``life_of``); empty until its HELLO came.
        self.life = b""
        #: What the peer said of itself; None until its HELLO came.
        self.hello: Hello | None = None
        #: Protocol version that both speak; 0 until the peer's HELLO came.
        self.version = 0
        self.phase = Phase.CONTACT
        #: Why the session ended; None before.
        self.error: AiokvError | None = None
        #: Parts that this session carries. Heartbeats flow only while there are any.
        self.live = 0
        #: Requests of the peer's that wait here for their other half.
        self.parked = 0
        #: Whether it ever carried one: this side, and not the peer alone, had a use for it.
        self.used = False
        #: Producer side: the latest lease that the peer was told of (ns).
        self.lease_given = 0
        #: Consumer side: the latest lease that the peer confirmed (ns); reads count until then.
        self.lease_held = 0
        #: Number of the frame to be sent next, and to be received next.
        self.next_send = 1
        self.next_receive = 1
        #: How many of our frames the peer has read, as far as it told us.
        self.acked = 0
        #: The peer said goodbye.
        self.farewell = False
        self._settings = settings
        self._talking = {} if talking is None else talking
        self._timed = {} if timed is None else timed
        self._timed[self] = None
        self._outbox: list[bytes] = []
        #: What is to be renewed once it is known whether the peer understands that.
        self._renewals: dict[tuple[str, int], None] = {}
        self.greet()
        self._contact_by = now + settings.contact_ns
        self._greet_again = now + settings.contact_ns // 4
        self._heard = now
        self._pinged = now
        self._suspected = 0

    def __repr__(self) -> str:
        return f"<Session {self.mine}/{self.theirs} with {self.address} {self.phase.value} live={self.live}>"

    @property
    def busy(self) -> bool:
        """Whether its end would be the end of something, or keep something from being said."""
        return bool(self.live or self.parked or self.wants_to_send)

    # -- what is to be sent

    def send(self, message: Message) -> None:
        """Queue a message; it goes out with the next frame. Nothing once the session has ended."""
        if self.phase is not Phase.ENDED:
            self._outbox.append(encode_message(message))
            self._talking[self] = None

    def greet(self) -> None:
        """Say HELLO (again)."""
        self._greet = True
        self._talking[self] = None

    def renew(self, key: tuple[str, int]) -> None:
        """Say that a transfer will be fetched, once the peer is known; nothing to one of an older version."""
        self.used = True
        if self.phase is Phase.CONTACT:
            self._renewals[key] = None
        elif self.version >= _RENEWS:
            self.send(Renew(*key))

    @property
    def wants_to_send(self) -> bool:
        """Whether ``take_frames`` has something."""
        return self.phase is not Phase.ENDED and (self._greet or bool(self._outbox))

    @property
    def unacked(self) -> int:
        """Frames sent that the peer has not yet told us it read."""
        return self.next_send - self.acked

    def take_frames(self) -> list[bytes]:
        """Everything queued, packed into as few frames as possible."""
        if self.phase is Phase.ENDED:
            return []
        frames = []
        if self._greet:
            self._greet = False
            hello = msgspec.structs.replace(self.me.hello, called=self.address)
            frames.append(self._frame(0, [encode_message(hello)]))
        while self._outbox:
            size = count = 0
            for raw in self._outbox:
                size += len(raw)
                if count and size > _BODY_LIMIT:
                    break
                count += 1
            body, self._outbox = self._outbox[:count], self._outbox[count:]
            frames.append(self._frame(self.next_send, body))
            self.next_send += 1
        return frames

    def _frame(self, seq: int, body: list[bytes]) -> bytes:
        return encode_frame(
            Frame(
                src=self.me.incarnation,
                dst=self.incarnation,
                reply=self.me.hello.address,
                mine=self.mine,
                yours=self.theirs,
                seq=seq,
                ack=self.next_receive,
                body=[msgspec.Raw(raw) for raw in body],
            )
        )

    # -- what arrives

    def receive_hello(self, frame: Frame, hello: Hello, now: int) -> None:
        """The peer's HELLO: the session is up, or ends because no version is spoken by both."""
        if self.phase is Phase.ENDED:
            return
        if self.theirs:  # sent again: the peer may have missed ours
            if frame.yours != self.mine:
                self.greet()
            return
        self.incarnation = frame.src
        self.life = life_of(frame.src, self.address)
        self.theirs = frame.mine
        self._heard = now
        low, high = hello.versions
        version = min(high, VERSION)
        if not max(low, OLDEST_VERSION) <= version:
            text = (
                f"{self.address} speaks protocol {low}..{high}, "
                f"{self.me.hello.address} speaks {OLDEST_VERSION}..{VERSION}"
            )
            self.end(Refused(text))
            return
        self.version = version
        self.hello = hello
        # A peer that greeted without knowing our stream has not seen our HELLO if that was sent
        # before; it is in order before whatever we send next, or will be asked for again.
        self.phase = Phase.UP
        self._note_timer()
        renewals, self._renewals = self._renewals, {}
        for key in renewals:
            self.renew(key)

    def receive(self, frame: Frame, now: int) -> list[Message]:
        """Take a frame of the peer's stream and return the messages that are not the session's own.

        Raises:
            RemoteProtocolError: Frames are missing, or a message is malformed: the session must end.
        """
        if self.phase is not Phase.UP or frame.yours not in (0, self.mine):
            return []  # meant for an earlier session of ours; its end is on the way
        if frame.seq < self.next_receive:
            return []  # said twice
        if frame.seq > self.next_receive:
            missing = frame.seq - self.next_receive
            raise RemoteProtocolError(f"{missing} control frames from {self.address} were lost")
        messages = decode_messages(frame)
        self.next_receive += 1
        self._heard = now
        self._suspected = 0
        if frame.yours:
            self.acked = max(self.acked, min(frame.ack, self.next_send))
        return [message for message in messages if type(message) not in _OWN or self._own(message, now)]

    def _own(self, message: Message, now: int) -> Literal[False]:
        """Take a message of the session's own, which is nobody else's business."""
        match message:
            case Ping():
                self.send(Pong(self.extend_lease(now)))
            case Pong():
                self.hold_lease(message.lease, now)
            case Bye():
                self.farewell = True
            case _:
                raise RemoteProtocolError(f"{type(message).__name__} in mid-stream from {self.address}")
        return False

    # -- leases of one-sided reads

    def extend_lease(self, now: int) -> int:
        """Producer: promise that blocks which the peer reads stay for a while; returns until when."""
        self.lease_given = max(self.lease_given, now + self._settings.lease_ns)
        return self.lease_given

    def hold_lease(self, until: int, now: int) -> None:
        """Consumer: the peer confirmed its promise.

        Raises:
            RemoteProtocolError: It ends later than if it were given now: the two clocks differ, as those
                of two time namespaces do.
        """
        if until > now + self._settings.lease_ns + _CLOCKS_NS:
            raise RemoteProtocolError(
                f"{self.address} gave a lease that ends in {(until - now) / 1e9:.1f} s: "
                "its clock is not ours, or its lease_ns"
            )
        self.lease_held = max(self.lease_held, until)

    # -- time

    def add_live(self, now: int) -> None:
        """One more part depends on the peer's life."""
        if self.live == 0:
            self._heard = now  # silence while nobody asked means nothing
            self._pinged = now
            self._suspected = 0
        self.live += 1
        self.used = True
        self._note_timer()

    def remove_live(self) -> None:
        """A part ended."""
        self.live -= 1
        self._note_timer()

    def _note_timer(self) -> None:
        if self.phase is Phase.CONTACT or (self.phase is Phase.UP and self.live):
            self._timed[self] = None
        else:
            self._timed.pop(self, None)

    def ask(self) -> None:
        """Ask for a sign of life now: it acknowledges what was sent so far, and extends the lease."""
        self.send(Ping())

    def next_timer(self) -> int | None:
        """When ``handle_timer`` wants to be called (ns), or None if nothing is pending."""
        if self.phase is Phase.CONTACT:
            return min(self._contact_by, self._greet_again)
        if self.phase is Phase.ENDED or not self.live:
            return None
        verdict = self._heard + self._settings.liveness_ns
        if self._suspected:
            verdict = max(verdict, self._suspected + _GRACE_NS)
        return min(self._pinged + self._settings.heartbeat_ns, verdict)

    def handle_timer(self, now: int) -> None:
        """Greet again, ask for a sign of life, or end the session for want of one."""
        if self.phase is Phase.CONTACT:
            pause = self._settings.contact_ns // 4
            stood_still = now > self._greet_again + pause
            if now >= self._contact_by and not stood_still:
                waited = self._settings.contact_ns / 1e9
                # Both ways have to work, and which one doesn't can often be seen by the address.
                told = f"it was told to answer to {self.me.hello.address}"
                self.end(PeerLostError(f"no answer from {self.address} within {waited:g} s; {told}"))
            elif now >= self._greet_again:
                # We may not even have said HELLO before we stood still; it gets its time to be answered.
                self.greet()
                self._greet_again = now + pause
                if stood_still:
                    self._contact_by = max(self._contact_by, now + pause)
            return
        if self.phase is Phase.ENDED or not self.live:
            return
        if now >= self._heard + self._settings.liveness_ns:
            # What the peer said may lie unread before us: it gets one more look before the verdict.
            if not self._suspected:
                self._suspected = now
            elif now >= self._suspected + _GRACE_NS:
                silent = (now - self._heard) / 1e9
                self.end(PeerLostError(f"{self.address} has been silent for {silent:.1f} s"))
                return
        if now >= self._pinged + self._settings.heartbeat_ns:
            self._pinged = now
            self.send(Ping())

    def forgive(self, now: int) -> None:
        """This side was late (stopped, or its loop was held): what it did not hear proves nothing."""
        self._heard = now
        self._suspected = 0
        if self.phase is Phase.CONTACT:
            self._contact_by = now + self._settings.contact_ns

    def end(self, error: AiokvError) -> None:
        """The session is over; the first reason stays."""
        if self.phase is not Phase.ENDED:
            self.phase = Phase.ENDED
            self.error = error
            self._outbox.clear()
            self._note_timer()
