"""Those who send to a control port what they like: over ZeroMQ, and over bare connections."""

from __future__ import annotations

import contextlib
import random
import socket
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import zmq

from aiokv.control.base import MAX_FRAME
from aiokv.testing.fuzz.mutation import Mutator

__all__ = ["Intruders", "Known"]

#: Of those that intruders play, how many go on talking.
_PERSONAS = 40
#: Connections at a time that say half of something and then no more.
_SLOW = 12
#: The first bytes of a connection of ZeroMQ's.
_GREETING = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0NULL" + bytes(48)
#: Positions of a frame's fields.
_SRC, _DST, _REPLY, _MINE, _YOURS, _SEQ, _ACK, _BODY = range(8)
_HELLO, _RESET = 1, 5


@dataclass(frozen=True, slots=True)
class Known:
    """What intruders know of those whom they disturb. Nobody tells them a good peer's incarnation."""

    #: Where the port is: ``tcp://host:port``.
    endpoint: str
    #: The engine's own incarnation, which it tells everybody.
    incarnation: bytes
    #: Greeting of a genuine engine, whose layout fits.
    hello: bytes


@dataclass(slots=True)
class _Persona:
    """Somebody whom intruders play: an engine that lives at an address and talks in one stream."""

    address: str
    incarnation: bytes
    stream: int = 1
    seq: int = 0
    said: deque[bytes] = field(default_factory=lambda: deque(maxlen=30))


class Intruders:
    """Draws cases and sends them; a case is a message, or something done to a connection.

    Args:
        chance: Decides everything.
        frames: Genuine ones, of sessions between others.
        known: Of the port that they send to.
        addresses: Where they say that they live.
    """

    def __init__(
        self, chance: random.Random, frames: list[bytes], known: Known, addresses: list[str]
    ) -> None:
        self.chance = chance
        self.mutator = Mutator(chance)
        self.counts: Counter[str] = Counter()
        self._frames = frames
        self._known = known
        self._addresses = addresses
        self._personas = [_Persona(address, chance.randbytes(16)) for address in addresses[:_PERSONAS]]
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._socks = [self._open() for _ in range(4)]
        host, _, port = known.endpoint.removeprefix("tcp://").rpartition(":")
        self._place = (host, int(port))
        self._slow: deque[socket.socket] = deque()
        self._ways: dict[str, tuple[int, Callable[[], list[bytes] | None]]] = {
            "noise": (6, lambda: [self.mutator.noise()]),
            "spoilt": (12, lambda: [self.mutator.spoil(self._genuine(), self._genuine())]),
            "changed": (12, lambda: [self.mutator.change(self._genuine())]),
            "replayed": (8, lambda: [self._genuine()]),
            "in a stream": (30, self._in_stream),
            "said twice or out of order": (6, self._again),
            "greetings": (8, self._greeting),
            "forged": (12, self._forged),
            "of several parts": (5, self._parts),
            "connections that come and go": (2, self._come_and_go),
            "slow connections": (2, self._slowly),
        }

    def close(self) -> None:
        """Go away."""
        for sock in self._socks:
            sock.close(linger=0)
        for each in self._slow:
            each.close()
        self._context.term()

    def strike(self) -> None:
        """Play one case."""
        kind = "very large" if self.chance.random() < 0.001 else self._draw()
        parts = self._large() if kind == "very large" else self._ways[kind][1]()
        self.counts[kind] += 1
        if parts is not None:
            with contextlib.suppress(zmq.Again):  # it is held back, as it should be
                self.chance.choice(self._socks).send_multipart(parts, zmq.NOBLOCK)

    def _draw(self) -> str:
        weights = [weight for weight, _ in self._ways.values()]
        return self.chance.choices(list(self._ways), weights)[0]

    def _open(self, identity: bytes = b"") -> zmq.Socket[bytes]:
        sock = self._context.socket(zmq.DEALER)
        if identity:
            sock.setsockopt(zmq.ROUTING_ID, identity)
        sock.setsockopt(zmq.LINGER, 0)
        sock.connect(self._known.endpoint)
        return sock

    # -- single frames

    def _genuine(self) -> bytes:
        """A recorded frame, as if one of the personas had sent it."""
        frame = msgspec.msgpack.decode(self.chance.choice(self._frames))
        persona = self.chance.choice(self._personas)
        frame[_SRC], frame[_DST], frame[_REPLY] = persona.incarnation, b"", persona.address
        frame[_YOURS] = 0
        if frame[_BODY] and frame[_BODY][0][0] == _HELLO:
            frame[_BODY][0][2] = persona.address
        return msgspec.msgpack.encode(frame)

    def _say(self, persona: _Persona, body: list[object]) -> bytes:
        yours = self.chance.choice((0, 0, 0, self.chance.randrange(200)))
        said = [persona.incarnation, b"", persona.address, persona.stream, yours, persona.seq, 0, body]
        persona.seq += 1
        data = msgspec.msgpack.encode(said)
        persona.said.append(data)
        return data

    def _in_stream(self) -> list[bytes]:
        """The next frame of a persona's stream, with messages of others, changed or not."""
        persona = self.chance.choice(self._personas)
        if not persona.seq or self.chance.random() < 0.1:
            return self._greet(persona)
        said = self._say(persona, msgspec.msgpack.decode(self.chance.choice(self._frames))[_BODY])
        return [self.mutator.change_body(said) if self.chance.random() < 0.7 else said]

    def _greet(self, persona: _Persona) -> list[bytes]:
        pick = self.chance.random()
        persona.stream, persona.seq = persona.stream + 1, 0
        if pick < 0.3:  # another life
            persona.incarnation = self.chance.randbytes(16)
        hello = msgspec.msgpack.decode(self._known.hello)
        hello[2] = persona.address
        return [self._say(persona, [hello])]

    def _again(self) -> list[bytes]:
        persona = self.chance.choice(self._personas)
        if persona.said and self.chance.random() < 0.5:
            return [self.chance.choice(persona.said)]
        persona.seq += self.chance.choice((1, 2, 1000))
        return [self._say(persona, [[2]])]

    def _greeting(self) -> list[bytes]:
        """HELLO, changed or of somebody whom nobody heard of."""
        address = self.chance.choice(self._addresses)
        hello = msgspec.msgpack.decode(self._known.hello)
        hello[2] = address
        frame = [self.chance.randbytes(16), b"", address, self.chance.randrange(9), 0, 0, 0, [hello]]
        data = msgspec.msgpack.encode(frame)
        return [self.mutator.change_body(data) if self.chance.random() < 0.7 else data]

    def _forged(self) -> list[bytes]:
        """Well-formed frames with other people's numbers, as far as they can be known or guessed."""
        frame = msgspec.msgpack.decode(self._genuine())
        dst = self.chance.choice((b"", self._known.incarnation, self.chance.randbytes(16)))
        frame[_SRC] = self.chance.choice((self.chance.randbytes(16), self._known.incarnation, frame[_SRC]))
        frame[_DST] = dst
        for field_ in (_MINE, _YOURS, _SEQ, _ACK):
            frame[field_] = self.chance.choice((0, 1, 2, 3, 2**48 - 1, self.chance.randrange(100)))
        if self.chance.random() < 0.3:
            reason = self.chance.choice(("session", "protocol", "version", "internal"))
            frame[_SEQ], frame[_BODY] = 0, [[_RESET, self.chance.randrange(20), reason, "forged"]]
        return [msgspec.msgpack.encode(frame)]

    def _parts(self) -> list[bytes]:
        count = self.chance.choice((2, 2, 3, 50))
        return [self.chance.choice((b"", self._genuine(), self.mutator.noise())) for _ in range(count)]

    def _large(self) -> list[bytes]:
        size = self.chance.choice((MAX_FRAME, MAX_FRAME + 1, 3 * MAX_FRAME))
        return [self._genuine() + bytes(size) if self.chance.random() < 0.5 else bytes(size)]

    # -- connections

    def _come_and_go(self) -> None:
        """A connection that is closed at once, or one that takes the name of another."""
        if self.chance.random() < 0.5:
            sock = self._open(b"somebody")
            with contextlib.suppress(zmq.Again):
                sock.send(self._genuine(), zmq.NOBLOCK)
            sock.close(linger=0)
            return
        at = self.chance.randrange(len(self._socks))
        self._socks[at].close(linger=0)
        self._socks[at] = self._open(self.chance.choice((b"", b"somebody", self.chance.randbytes(9))))

    def _slowly(self) -> None:
        """A bare connection that says part of a greeting, nonsense, or that a very long frame follows."""
        if len(self._slow) >= _SLOW:
            self._slow.popleft().close()
        sock = socket.socket()
        sock.setblocking(False)
        sock.connect_ex(self._place)
        self._slow.append(sock)
        for each in self._slow:
            begun = _GREETING[: self.chance.randrange(1, len(_GREETING))]
            long = _GREETING + b"\x04\x05\x05READY\x02" + b"\xff" * 8
            with contextlib.suppress(OSError):
                each.send(self.chance.choice((begun, long, self.mutator.noise() or b"x")))
