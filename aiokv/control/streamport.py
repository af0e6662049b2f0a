"""The way to one peer over a stream: a queue, and one connection after the other that takes from it."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from aiokv.control.address import Address
from aiokv.control.base import MAX_FRAME
from aiokv.control.connection import CONTACT, Connection
from aiokv.control.tls import Tls, TlsEnd
from aiokv.control.told import Told
from aiokv.control.wire import GREETING, greeted, pack
from aiokv.errors import CapacityError, ClosedError, RemoteProtocolError

__all__ = ["Bounds", "StreamPort"]

_log = logging.getLogger("aiokv")

# Seconds until an address is tried again, doubled with each attempt in vain. Past the second figure it is
# tried with the next frame; nobody who still hopes for an answer is held up by the third.
_AGAIN_FIRST, _AGAIN_PATIENT, _AGAIN_MOST = 0.02, 0.5, 30.0
# Frames are handed to the transport in pieces of about so many bytes.
_PIECE = 1 << 16


@dataclass(frozen=True, slots=True)
class Bounds:
    """What may wait for one peer, beyond the 64 KiB that its transport takes, and the kernel."""

    frames: int
    size: int  # bytes


class StreamPort:
    """A ``Port`` over one TCP connection at a time; ``StreamChannel.open`` makes it.

    It connects when there is something to send, and again when there still is after a connection was lost.
    While nothing waits it has no timer and no task.
    """

    def __init__(
        self,
        peer: Address,
        memory: memoryview,
        tls: Tls | None,
        bounds: Bounds,
        members: set[object],
        gone: Callable[[object], None],
        told: Told,
    ) -> None:
        self._peer = peer
        self._memory = memory
        self._tls = tls
        self._bounds = bounds
        #: What the channel waits for when it closes, and whom to tell that something is gone.
        self._members = members
        self._gone = gone
        self._told = told
        self._where = peer.host, peer.port or 0
        self._loop = asyncio.get_running_loop()
        self._queue: deque[bytes] = deque()
        self._size = 0  # bytes in the queue
        self._connection: Outgoing | None = None  # None while there is none that frames can go out by
        self._attempt: asyncio.Task[None] | None = None  # None unless it is being connected
        self._again: asyncio.TimerHandle | None = None  # the next attempt; None when none is planned
        self._delay = _AGAIN_FIRST
        self._closed = False
        members.add(self)

    def send(self, frame: bytes) -> None:
        """Send one frame, or queue it; see ``Port.send``."""
        if len(frame) > MAX_FRAME:
            raise ValueError(f"{self._peer}: a frame of {len(frame)} bytes; {MAX_FRAME} is the most")
        if self._closed:
            raise ClosedError(f"{self._peer}: closed")
        connection = self._connection
        if connection is not None and not self._queue and not connection.full and not connection.closing:
            connection.write(pack(frame))
            return
        if len(self._queue) >= self._bounds.frames or self._size + len(frame) > self._bounds.size:
            raise CapacityError(
                f"{self._peer}: {len(self._queue)} frames of {self._size} bytes wait; "
                "the peer doesn't read or isn't there"
            )
        self._queue.append(frame)
        self._size += len(frame)
        if connection is None and self._attempt is None:
            if self._again is None:
                self._connect()
            elif self._delay > _AGAIN_PATIENT:
                self._again.cancel()
                self._delay = _AGAIN_PATIENT
                self._connect()

    def close(self) -> None:
        """Give up the port and what it has queued."""
        self._closed = True
        self._queue.clear()
        self._size = 0
        if self._again is not None:
            self._again.cancel()
            self._again = None
        if self._connection is not None:  # an attempt that made it ends by itself
            self._connection.close()
        elif self._attempt is not None:
            self._attempt.cancel()
        self._gone(self)

    # -- connecting

    def _connect(self) -> None:
        self._again = None
        self._attempt = self._loop.create_task(self._reach())
        self._members.add(self._attempt)
        self._attempt.add_done_callback(self._attempted)

    async def _reach(self) -> None:
        """Connect, and wait until the peer has greeted."""
        tls = None if self._tls is None else self._tls.client_end(self._peer.host.partition("%")[0])
        connection = Outgoing(self, self._peer, self._memory, tls, self._told)
        try:
            async with asyncio.timeout(CONTACT):
                await self._loop.create_connection(lambda: connection, *self._where)
                await connection.up
        except BaseException:
            connection.give_up()
            raise

    def _attempted(self, attempt: asyncio.Task[None]) -> None:
        self._attempt = None
        self._gone(attempt)
        if not attempt.cancelled() and (error := attempt.exception()) is not None:
            _log.debug("%s can't be reached: %r", self._peer, error)
        if self._queue and self._connection is None:
            self._again = self._loop.call_later(self._delay, self._connect)
            self._delay = min(self._delay * 2, _AGAIN_MOST)

    # -- what its connections tell

    def made(self, connection: Connection) -> None:
        """A connection is there; not yet one to send on."""
        self._members.add(connection)

    def came_up(self, connection: Outgoing) -> None:
        """The peer has greeted on a connection."""
        if self._closed:
            connection.abort()
            return
        self._connection, self._delay = connection, _AGAIN_FIRST
        self.flush()

    def flush(self) -> None:
        """Hand over what waits, as much as the transport takes."""
        while self._queue and self._connection is not None and not self._connection.full:
            piece, size = [], 0
            while self._queue and size < _PIECE:
                frame = self._queue.popleft()
                piece.append(pack(frame))
                size += len(frame)
            self._size -= size
            self._connection.write(b"".join(piece))

    def lost(self, connection: Connection) -> None:
        """A connection is gone."""
        self._gone(connection)
        if connection is self._connection:
            self._connection = None
            if self._queue and self._attempt is None:
                self._connect()


class Outgoing(Connection):
    """A connection that this side opened. All that it may hear is the greeting."""

    def __init__(
        self, port: StreamPort, peer: Address, memory: memoryview, tls: TlsEnd | None, told: Told
    ) -> None:
        super().__init__(f"connection to {peer}", memory, tls, port.lost, told)
        self._scheme = peer.scheme
        self._port = port
        self._key = peer.key
        #: Done once the peer has greeted; an error if the connection ended before.
        self.up: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The TCP connection is there."""
        self._port.made(self)
        super().connection_made(transport)

    def secured(self) -> None:
        """Greet, if this is whom the address names."""
        if self._key and self._key != self.peer:
            self.cut("who answers there isn't whom the address names, but " + (self.peer or "nobody known"))
            return
        self.write(GREETING)

    def heard(self) -> None:
        """The greeting; nothing else is sent this way."""
        if not self.greeted and greeted(self.arrived):
            self.greeted = True
            if not self.up.done():
                self.up.set_result(None)
            self._port.came_up(self)
        if self.greeted and self.arrived:
            raise RemoteProtocolError("it sends what it must not")

    def resume_writing(self) -> None:
        """The transport can take more."""
        super().resume_writing()
        self._port.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is left of it."""
        if not self.greeted and not self.ended_here:
            self.tell(f"closed by the other side before it greeted: is it bound to {self._scheme}://, too?")
        if not self.up.done():
            self.up.set_exception(exc or ConnectionResetError("cut before the peer had greeted"))
            self.up.exception()  # nobody may wait any more, and that is fine
        super().connection_lost(exc)
