"""The producer's end of a link over stream sockets."""

from __future__ import annotations

import asyncio
import socket
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from aiokv.device.base import Buffer, Event, Stream
from aiokv.errors import DeviceError, PeerLostError
from aiokv.proto.plan import Chunk, CopyPlan
from aiokv.transports.base import PartId
from aiokv.transports.extents import Extents, addresses
from aiokv.transports.frames import pack, tag_of
from aiokv.transports.stream import StreamEnd, slice_of
from aiokv.transports.vectors import Vector, VectorIO

__all__ = ["Sender", "Taken"]

#: Bytes that wait for a socket, beside which it still makes sense to send more: enough to keep
#: the socket busy while the loop comes round.
_AHEAD = 1 << 20


class Taken(Protocol):
    """Is told of what becomes of a frame: one of the two is set, once."""

    #: The socket has taken all of it.
    over: bool
    #: It never will.
    failure: DeviceError | None


class _Sent:
    """Done when the socket has taken all of a chunk, or never will."""

    __slots__ = ("failure", "over")

    def __init__(self) -> None:
        self.over = False
        self.failure: DeviceError | None = None

    def done(self) -> bool:
        """Whether the memory is read no more."""
        if self.failure is not None:
            raise self.failure
        return self.over


class Sender(StreamEnd):
    """Gives each chunk to the socket that has the least to send, and each socket its chunks in order."""

    def __init__(
        self,
        link: bytes,
        name: str,
        socks: Sequence[socket.socket],
        io: VectorIO,
        table: set[StreamEnd],
    ) -> None:
        super().__init__(link, name, socks, table)
        #: Those that were longest without a chunk come first.
        self._outlets = [_Outlet(self, sock, io, self._loop, slice_of(len(socks))) for sock in socks]
        self._extents = Extents()
        self._on_writable: list[Callable[[], None]] = []

    def send(
        self, part: PartId, plan: CopyPlan, chunk: Chunk, src: Sequence[Buffer], *, stream: Stream
    ) -> Event:
        """Send one chunk; on the host ``stream`` has nothing to wait for."""
        if self._lost:
            raise self.lost_error()
        copy = plan.copy(chunk)
        where, lengths = self._extents.sources(copy, chunk.lo, chunk.hi, addresses(copy.src, src))
        event = _Sent()
        self.put(part, chunk, where, lengths, event)
        return event

    def put(
        self,
        part: PartId,
        chunk: Chunk,
        addresses: NDArray[np.int64],
        lengths: NDArray[np.int64],
        taken: Taken,
    ) -> None:
        """Send host memory as a frame of one chunk; it stays as it is until ``taken`` is told."""
        header = array("B", pack(tag_of(part), chunk))
        vector = Vector(addresses, lengths, before=header.buffer_info())
        outlet = min(self._outlets, key=_waiting)
        self._outlets.remove(outlet)
        self._outlets.append(outlet)
        outlet.put(vector, header, taken)

    @property
    def writable(self) -> bool:
        """Whether little enough waits for some socket that more should be sent."""
        return not self._lost and any(outlet.waiting <= _AHEAD for outlet in self._outlets)

    def on_writable(self, callback: Callable[[], None]) -> None:
        """Call this whenever ``writable`` becomes true again."""
        self._on_writable.append(callback)

    def tell_writable(self) -> None:
        """It became writable again."""
        for callback in self._on_writable:
            callback()

    def cut(self, reason: str) -> None:
        """Let go of the sockets, and of the memory of all that they had not taken."""
        super().cut(reason)
        for outlet in self._outlets:
            outlet.drop(self.lost_error())


def _waiting(outlet: _Outlet) -> int:
    return outlet.waiting


class _Outlet:
    """One socket of a sender, and what it has not taken."""

    def __init__(
        self,
        sender: Sender,
        sock: socket.socket,
        io: VectorIO,
        loop: asyncio.AbstractEventLoop,
        slice_bytes: int,
    ) -> None:
        self._sender = sender
        self._sock = sock
        self._fd = sock.fileno()
        self._io = io
        self._loop = loop
        self._slice = slice_bytes
        #: What the socket has not taken: ranges, the header that the first of them is in, and the event.
        self._queue: deque[tuple[Vector, array[int], Taken]] = deque()
        #: Bytes of all of them.
        self.waiting = 0
        loop.add_reader(self._fd, self._readable)

    def put(self, vector: Vector, header: array[int], taken: Taken) -> None:
        """Send this after what is there."""
        self._queue.append((vector, header, taken))
        self.waiting += vector.total
        if len(self._queue) == 1:
            self._write()
            if self._queue:
                self._loop.add_writer(self._fd, self._flush)

    def drop(self, reason: PeerLostError) -> None:
        """Nothing more is sent: what waits fails."""
        while self._queue:
            *_, taken = self._queue.popleft()
            failure = DeviceError("not all of the chunk was sent")
            failure.__cause__ = reason
            taken.failure = failure
        self.waiting = 0

    def _flush(self) -> None:
        was_writable = self._sender.writable
        self._write()
        if self._sender.lost:
            return
        if not self._queue:
            self._loop.remove_writer(self._fd)
        if not was_writable and self._sender.writable:
            self._sender.tell_writable()

    def _write(self) -> None:
        """Give the socket what it takes, and at most a slice."""
        budget = self._slice
        try:
            while self._queue and budget:
                vector, _, taken = self._queue[0]
                moved = self._io.write(self._fd, vector, budget)
                budget -= moved
                self.waiting -= moved
                if vector.left:
                    # Full, or a slice is over. A vector of many entries takes several calls.
                    continue
                self._queue.popleft()
                taken.over = True
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._sender.cut(f"a connection broke: {error}")

    def _readable(self) -> None:
        """The consumer never says anything, so this is its end."""
        try:
            said = self._sock.recv(1)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._sender.cut(f"a connection broke: {error}")
            return
        self._sender.cut(
            "the consumer said what it must not" if said else "the consumer closed it, or is dead"
        )
