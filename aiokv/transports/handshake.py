"""How a consumer's connections are let in: each side proves that it knows a secret of the producer's.

The token came through the control session and is never sent, so that neither who listens on the
wire, nor who got hold of a dead producer's port, can use or learn it. A link has one stream, or
several, each a connection of its own. Over each of them, on any stream socket::

    producer -> consumer   16 random bytes
    consumer -> producer   16 random bytes; the link that this stream joins (zeros for a new one),
                           the stream's number in it, how many streams are wanted; a proof over all
    producer -> consumer   the link's id, a proof, how many streams it has, the length of what
                           follows, what the transport says to its consumers (and descriptors)

The first stream's proofs use the token. Those of the others use a key that only the two who said
both random numbers of the first stream can derive from the token, and each number is let in once:
so a stream joins the link that it was meant for, and nobody else's. Nothing that was said on one
connection proves anything on another, since the producer's random bytes differ.

This module is what goes over the wire; ``listener`` is the producer's end and ``greeting`` the
consumer's.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from dataclasses import dataclass

__all__ = ["MAX_EXTRA", "MAX_STREAMS", "NONCE", "STREAMS", "WELCOME", "Ask", "Secret", "Welcome", "new_token"]

#: Size of each side's random bytes.
NONCE = 16
#: Link id, proof, number of streams, and length of what follows.
WELCOME = struct.Struct("!16s32sBI")
#: Most that a transport says to its consumers, in bytes.
MAX_EXTRA = 1 << 16
#: Most streams that a link can have.
MAX_STREAMS = 16
#: Those that it has unless something else is asked for.
STREAMS = 2
#: The consumer's random bytes, the link, the stream's number, streams wanted, and the proof.
_ASK = struct.Struct("!16s16sBB32s")


def new_token() -> bytes:
    """A token for one life of one transport: 32 random bytes."""
    return secrets.token_bytes(32)


@dataclass(frozen=True, slots=True)
class Ask:
    """What a consumer says of a connection that it opened."""

    #: The link that it joins; all zeros for a new one.
    link: bytes = bytes(16)
    #: Its number in the link; 0 for the first, which opens the link.
    number: int = 0
    #: How many streams the consumer would like the link to have.
    streams: int = 1

    #: Size of an ask on the wire.
    SIZE = _ASK.size

    @property
    def opens(self) -> bool:
        """Whether it is the first of a new link."""
        return not any(self.link) and not self.number

    def pack(self, nonce: bytes, proof: bytes) -> bytes:
        """On the wire, with the consumer's random bytes and the proof."""
        return _ASK.pack(nonce, self.link, self.number, self.streams, proof)

    @classmethod
    def unpack(cls, data: bytes) -> tuple[bytes, Ask, bytes]:
        """The consumer's random bytes, what it asks, and the proof."""
        nonce, link, number, streams, proof = _ASK.unpack(data)
        return nonce, cls(link, number, streams), proof


class Secret:
    """What both ends know: the token, or what they derived from it for one link.

    Args:
        key: 32 bytes; never shown.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key

    def __repr__(self) -> str:
        """Without the key."""
        return "<Secret>"

    def of_consumer(self, producer: bytes, consumer: bytes, ask: Ask) -> bytes:
        """The consumer's proof over both sides' random bytes and what it asks."""
        return self._proof(b"consumer", producer, ask.pack(consumer, b""))

    def of_producer(self, producer: bytes, consumer: bytes, ask: Ask, link: bytes, streams: int) -> bytes:
        """The producer's proof over all of that, the link's id and how many streams it has."""
        return self._proof(b"producer", producer, ask.pack(consumer, b""), link, bytes([streams]))

    def of_link(self, producer: bytes, consumer: bytes, link: bytes) -> Secret:
        """What the other streams of a link prove, from the random bytes of its first."""
        return Secret(self._proof(b"link", producer, consumer, link))

    def _proof(self, *said: bytes) -> bytes:
        return hmac.digest(self._key, b"".join(said), "sha256")


@dataclass(frozen=True, slots=True)
class Welcome:
    """What a consumer was told when its first stream was let in."""

    link: bytes
    #: How many streams the link has: as many as were asked for, or fewer.
    streams: int
    #: What the others prove.
    secret: Secret
    #: What the transport says to its consumers.
    extra: bytes
    #: Descriptors that came with it; the receiver closes them.
    fds: tuple[int, ...]
