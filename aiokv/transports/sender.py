"""The producer's end of a link over one stream socket."""

from __future__ import annotations

import socket
from array import array
from collections import deque
from collections.abc import Callable, Sequence

from aiokv.device.base import Buffer, Event, Stream
from aiokv.errors import DeviceError
from aiokv.proto.plan import Chunk, CopyPlan
from aiokv.transports.base import PartId
from aiokv.transports.frames import pack, tag_of
from aiokv.transports.stream import SLICE, StreamEnd
from aiokv.transports.vectors import Vector, VectorIO

__all__ = ["Sender"]

#: Bytes that wait for the socket, beside which it still makes sense to send more: enough to keep
#: the socket busy while the loop comes round.
_AHEAD = 1 << 20


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
    """Gives chunks to the socket in the order in which they were sent."""

    def __init__(
        self, link: bytes, name: str, sock: socket.socket, io: VectorIO, table: set[StreamEnd]
    ) -> None:
        super().__init__(link, name, sock, io, table)
        #: What the socket has not taken: ranges, the header that the first of them is in, and the event.
        self._queue: deque[tuple[Vector, array[int], _Sent]] = deque()
        #: Bytes of all of them.
        self._waiting = 0
        self._on_writable: list[Callable[[], None]] = []

    def send(
        self, part: PartId, plan: CopyPlan, chunk: Chunk, src: Sequence[Buffer], *, stream: Stream
    ) -> Event:
        """Send one chunk, after those before it; on the host ``stream`` has nothing to wait for."""
        if self._lost:
            raise self.lost_error()
        copy = plan.copies(chunk.layer)[chunk.copy]
        offsets, _, lengths = copy.extents(chunk.lo, chunk.hi)
        header = array("B", pack(tag_of(part), chunk))
        vector = Vector(offsets + src[copy.src_buffer].address, lengths, before=header.buffer_info())
        event = _Sent()
        self._queue.append((vector, header, event))
        self._waiting += vector.total
        if len(self._queue) == 1:
            self._write()
            if self._queue and not self._lost:
                self._loop.add_writer(self._fd, self._flush)
        return event

    @property
    def writable(self) -> bool:
        """Whether little enough waits for the socket that more should be sent."""
        return not self._lost and self._waiting <= _AHEAD

    def on_writable(self, callback: Callable[[], None]) -> None:
        """Call this whenever ``writable`` becomes true again."""
        self._on_writable.append(callback)

    def _flush(self) -> None:
        was_writable = self.writable
        self._write()
        if self._lost:
            return
        if not self._queue:
            self._loop.remove_writer(self._fd)
        if not was_writable and self.writable:
            for callback in self._on_writable:
                callback()

    def _write(self) -> None:
        """Give the socket what it takes, and at most a slice."""
        budget = SLICE
        try:
            while self._queue and budget:
                vector, _, event = self._queue[0]
                moved = self._io.write(self._fd, vector, budget)
                budget -= moved
                self._waiting -= moved
                if vector.left:
                    # Full, or a slice is over. A vector of many entries takes several calls.
                    continue
                self._queue.popleft()
                event.over = True
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._end(f"the connection broke: {error}")

    def _readable(self) -> None:
        """The consumer never says anything, so this is its end."""
        try:
            said = self._sock.recv(1)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._end(f"the connection broke: {error}")
            return
        self._end("the consumer said what it must not" if said else "the consumer closed it, or is dead")

    def _end(self, reason: str) -> None:
        super()._end(reason)
        while self._queue:
            *_, event = self._queue.popleft()
            event.failure = DeviceError("not all of the chunk was sent")
            event.failure.__cause__ = self.lost_error()
        self._waiting = 0
