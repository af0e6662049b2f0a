"""What the two ends of an NCCL link say to each other beside the data, and the socket that it goes over.

The producer's end and the consumer's make a communicator together, whenever one is wanted; each that
they make has the next number, its epoch. One has a life like this::

    producer   WAKE epoch                  I have bytes to send, and memory to gather them in
    consumer   MAKE epoch, nonce, size, id I have memory to receive into: let us meet under this id
    both                                   make it, and the producer sends the nonce through it
    consumer   CREDIT epoch, n             so many messages more may be announced
    producer   CHUNK ...                   posted just now, to be received after all that was announced before
    producer   REST epoch                  nothing is in flight, all credits are back: I have let go of it

``NUDGE`` asks a producer that has nothing to send to let go at once, and ``YIELD epoch`` one that has: others
wait for memory, and it will get some again when it is its turn. ``DEAD epoch`` says that one end of a
communicator is broken or given up: the other is to be aborted, too, since it may wait for ever.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

from aiokv.proto.plan import Chunk
from aiokv.transports.broken import Broken
from aiokv.transports.frames import HEADER_BYTES, pack, unpack

__all__ = [
    "MOST_RUNS",
    "Announced",
    "Credit",
    "Dead",
    "Line",
    "Make",
    "Nudge",
    "Rest",
    "Said",
    "Wake",
    "Yield",
    "decode",
]

#: Messages that one chunk is sent as, at most.
MOST_RUNS = 32
_READ = 64 << 10


class Wake(NamedTuple):
    """Producer: a communicator is wanted."""

    epoch: int


class Make(NamedTuple):
    """Consumer: make this one."""

    epoch: int
    #: What the producer is to send through it first.
    nonce: bytes
    #: Bytes of the longest message that can be received.
    longest: int
    #: NCCL's unique id.
    name: bytes


class Announced(NamedTuple):
    """Producer: a chunk was posted."""

    tag: bytes
    chunk: Chunk
    #: Bytes of each message that it is sent as; more than one: each is one run of the plan.
    lengths: tuple[int, ...]


class Rest(NamedTuple):
    """Producer: the communicator is not needed."""

    epoch: int


class Credit(NamedTuple):
    """Consumer: so many chunks more may be posted."""

    epoch: int
    chunks: int


class Nudge(NamedTuple):
    """Consumer: let go of the communicator, if it is not needed."""


class Yield(NamedTuple):
    """Consumer: post nothing more through this one, and rest."""

    epoch: int


class Dead(NamedTuple):
    """Either: the communicator is given up."""

    epoch: int


Said = Wake | Make | Announced | Rest | Credit | Nudge | Yield | Dead

_NUMBERS: dict[type, tuple[int, struct.Struct]] = {
    Wake: (1, struct.Struct("!I")),
    Make: (2, struct.Struct("!I16sI128s")),
    Rest: (4, struct.Struct("!I")),
    Credit: (5, struct.Struct("!IH")),
    Nudge: (6, struct.Struct("!")),
    Dead: (7, struct.Struct("!I")),
    Yield: (8, struct.Struct("!I")),
}
_KINDS = {number: (kind, layout) for kind, (number, layout) in _NUMBERS.items()}
_CHUNK = 3


def encode(said: Said) -> bytes:
    """What is said, as it goes over the line."""
    if isinstance(said, Announced):
        count = len(said.lengths)
        return struct.pack(
            f"!B{HEADER_BYTES}sB{count}I", _CHUNK, pack(said.tag, said.chunk), count, *said.lengths
        )
    number, layout = _NUMBERS[type(said)]
    return bytes([number]) + layout.pack(*said)


def decode(data: bytes) -> tuple[list[Said], bytes]:
    """All that is complete in ``data``, and the rest of it.

    Raises:
        ValueError: This is not what either end says.
    """
    found: list[Said] = []
    at = 0
    while at < len(data):
        if data[at] == _CHUNK:
            start = at + 1 + HEADER_BYTES
            if start >= len(data):
                break
            count = data[start]
            if not 1 <= count <= MOST_RUNS:
                raise ValueError(f"a chunk of {count} messages")
            end = start + 1 + 4 * count
            if end > len(data):
                break
            lengths = struct.unpack_from(f"!{count}I", data, start + 1)
            found.append(Announced(*unpack(data[at + 1 : start]), lengths))
        else:
            if data[at] not in _KINDS:
                raise ValueError(f"a message of kind {data[at]}")
            kind, layout = _KINDS[data[at]]
            end = at + 1 + layout.size
            if end > len(data):
                break
            found.append(kind(*layout.unpack_from(data, at + 1)))
        at = end
    return found, data[at:]


class Line:
    """The socket. What it doesn't take at once is kept: no more than there can be credits for.

    Args:
        sock: Connected and non-blocking; owned from now on.
        loop: The loop to read on.
        heard: Told what the other end said.
        broke: Told, once, why nothing more will be heard.
    """

    def __init__(
        self,
        sock: socket.socket,
        loop: asyncio.AbstractEventLoop,
        heard: Callable[[Sequence[Said]], None],
        broke: Callable[[str], None],
    ) -> None:
        self._sock = sock
        self._fd = sock.fileno()
        self._loop = loop
        self._heard = heard
        self._broke = broke
        self._unread = b""
        self._unsent = b""
        self._closed = False
        self._over = Broken(self._fd)
        #: Reads on, where the loop won't say that there is more.
        self._again: asyncio.Handle | None = None
        loop.add_reader(self._fd, self._readable)

    def say(self, *said: Said) -> None:
        """Say this after all that was said before; nothing when it is closed."""
        if self._closed:
            return
        waits = bool(self._unsent)
        self._unsent += b"".join(encode(each) for each in said)
        if not waits:
            self._write()

    def close(self) -> None:
        """Hear and say nothing more. May be called twice."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._fd)
            self._loop.remove_writer(self._fd)
            self._sock.close()

    def _write(self) -> None:
        try:
            sent = self._sock.send(self._unsent)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            sent = len(self._unsent)  # the reader will say that it is broken
        self._unsent = self._unsent[sent:]
        if self._unsent:
            self._loop.add_writer(self._fd, self._write)
        else:
            self._loop.remove_writer(self._fd)

    def _readable(self) -> None:
        try:
            data = self._sock.recv(_READ)
            if not data:
                self._end("the peer closed it, or is dead")
                return
            said, self._unread = decode(self._unread + data)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._end(f"the connection broke: {error}")
            return
        except ValueError as error:
            self._end(f"the peer said what it must not: {error}")
            return
        if said:
            self._heard(said)
        if self._again is None and not self._closed and self._over:
            self._again = self._loop.call_soon(self._read_on)

    def _read_on(self) -> None:
        self._again = None
        if not self._closed:
            self._readable()

    def _end(self, why: str) -> None:
        self.close()
        self._broke(why)
