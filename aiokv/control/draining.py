"""aiozmq's transport, made safe: it sleeps only when its socket has nothing left to do.

A ZeroMQ socket's descriptor is edge-triggered: it tells of a change once, and any call into the socket may
swallow that. aiozmq 1.0.0 looks at one event and returns to sleep, so an exception in the protocol, or a
look at the socket's state, leaves the socket deaf for ever. Here a turn goes on until ``EVENTS`` says that
neither input nor output that waits can go on; what could swallow a change is followed by a look.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import zmq
from aiozmq import ZmqProtocol
from aiozmq.core import _ZmqLooplessTransportImpl

from aiokv.errors import CapacityError, ClosedError

__all__ = ["DrainingTransport"]

# One turn's share of the loop: a peer that floods us gets its next turn behind everybody else's callbacks.
# A turn of small frames takes about a millisecond, and copying its bytes about as long.
TURN_FRAMES = 256
TURN_BYTES = 4 << 20

# pyzmq looks enum members up at each call; plain numbers take half the time.
EVENTS = int(zmq.EVENTS)
POLLIN = int(zmq.POLLIN)
POLLOUT = int(zmq.POLLOUT)
NOBLOCK = int(zmq.NOBLOCK)


class DrainingTransport(_ZmqLooplessTransportImpl):  # type: ignore[misc]
    """Serves one ZeroMQ socket on the loop, and owns it: closing the transport closes the socket at once.

    Args:
        loop: The loop that runs everything here.
        zmq_type: ``zmq.DEALER`` and so on.
        sock: A socket with all its options set; LINGER must be 0.
        protocol: What gets the messages, as lists of parts. An exception out of it is reported to the
            loop's exception handler, and the next message is delivered as if nothing had happened.
        name: How errors and ``repr`` call it: the address at the other end.
        bound: Messages that may wait here beyond what the socket itself takes.
        named: Put the name under which ZAP let the sender in before each message, in place of the first part.
    """

    _closing: bool
    _soon_call: asyncio.Handle | None  # the turn that is on its way; None: the descriptor will tell

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        zmq_type: int,
        sock: zmq.Socket[bytes],
        protocol: ZmqProtocol,
        *,
        name: str,
        bound: int = 0,
        named: bool = False,
    ) -> None:
        self._name = name
        self._named = named
        self._bound = bound
        # Nobody waits for the waiter: with no await between the socket and its owner, no cancellation can
        # part them. (aiozmq's create_zmq_connection leaks the socket there.)
        super().__init__(loop, zmq_type, sock, protocol, loop.create_future())
        self._look_soon()

    def __repr__(self) -> str:
        state = "closed" if self._closing else f"{len(self._buffer)} queued"
        return f"<DrainingTransport {self.ZMQ_TYPES[self._zmq_type]} {self._name} {state}>"

    def is_closing(self) -> bool:
        """Whether it was closed, by its owner or by an error."""
        return self._closing

    def write(self, data: Sequence[bytes]) -> None:
        """Send one message, or queue it behind those that wait.

        Raises:
            CapacityError: As many wait as may; the peer doesn't read, or can't be reached.
            ClosedError: The transport is closed.
        """
        if self._closing:
            raise ClosedError(f"{self._name}: closed")
        try:
            if not self._buffer and self._do_send(data):
                return
        except zmq.ZMQError as exc:
            self._fatal_error(exc, f"{self._name}: the socket failed")
            return
        if len(self._buffer) >= self._bound:
            raise CapacityError(
                f"{self._name}: {self._bound} more frames wait; the peer doesn't read or isn't there"
            )
        size = sum(map(len, data))
        self._buffer.append((size, data))
        self._buffer_size += size

    def getsockopt(self, option: int) -> int | bytes | str:
        """The socket's option; also ``EVENTS``, which swallows the news of a change."""
        value: int | bytes | str = super().getsockopt(option)
        if option == EVENTS:
            self._look_soon()
        return value

    def connect_now(self, endpoint: str) -> None:
        """Begin to connect the socket; what waits goes out with the next turn."""
        self.connect(endpoint).result()  # aiozmq returns a future that is done
        self._look_soon()

    def close(self) -> None:
        """Close the socket now. What waits is dropped: a peer that isn't there would keep it for ever."""
        self._force_close(None)

    # -- what aiozmq calls ------------------------------------------------------------------------

    def _read_ready(self) -> None:
        # The descriptor's callback. With a turn already on its way a second one would only multiply.
        if self._soon_call is None and not self._closing:
            self._take_turn()

    def _do_resume_reading(self) -> None:
        self._look_soon()

    def _do_send(self, data: Sequence[bytes]) -> bool:
        try:
            if len(data) == 1:
                self._zmq_sock.send(data[0], NOBLOCK)
            else:
                self._zmq_sock.send_multipart(data, NOBLOCK)
        except zmq.Again:
            return False
        if not self._paused:
            self._look_soon()  # sending may have swallowed the news of a message
        return True

    def _force_close(self, exc: BaseException | None) -> None:
        if self._closing:
            return
        self._closing = True
        self._conn_lost += 1
        self._buffer.clear()
        self._buffer_size = 0
        if self._soon_call is not None:
            self._soon_call.cancel()
        # In this order, and both now: the number of a closed descriptor is soon somebody else's.
        self._loop.remove_reader(self._fd)
        self._zmq_sock.close(linger=0)
        self._loop.call_soon(self._call_connection_lost, exc)

    # -- turns ------------------------------------------------------------------------------------

    def _look_soon(self) -> None:
        if self._soon_call is None and not self._closing:
            self._soon_call = self._loop.call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._soon_call = None
        self._take_turn()

    def _take_turn(self) -> None:
        idle = False
        try:
            idle = self._serve()
        except zmq.ZMQError as exc:
            self._fatal_error(exc, f"{self._name}: the socket failed")
        finally:
            # Also when KeyboardInterrupt comes by: the socket must not be left deaf.
            if not idle:
                self._look_soon()

    def _serve(self) -> bool:
        """Receive and send in turn; says whether nothing more can be done, so the descriptor will tell."""
        frames, space = TURN_FRAMES, TURN_BYTES
        while frames > 0 and space > 0 and not self._closing:
            frames -= 1
            events = self._zmq_sock.getsockopt(EVENTS)
            can_read = events & POLLIN and not self._paused
            can_write = events & POLLOUT and self._buffer
            if not can_read and not can_write:
                return True
            if can_write:
                space -= self._send_first()
            if can_read:
                space -= self._receive_one()
        return False

    def _send_first(self) -> int:
        size, data = self._buffer[0]
        if self._do_send(data):
            self._buffer.popleft()
            self._buffer_size -= size
        return int(size)

    def _receive_one(self) -> int:
        try:
            frame = self._zmq_sock.recv(NOBLOCK, copy=False)
            parts = [frame.bytes]
            while frame.more:
                frame = self._zmq_sock.recv(NOBLOCK, copy=False)
                parts.append(frame.bytes)
        except zmq.Again:
            return 0
        if self._named:
            parts[0] = _sender(frame)
        try:
            self._protocol.msg_received(parts)
        except Exception as exc:  # noqa: BLE001 (the callback's, and none of the socket's business)
            self._loop.call_exception_handler(
                {"message": f"{self._name}: error in the callback for a message", "exception": exc}
            )
        return sum(map(len, parts))


def _sender(frame: zmq.Frame) -> bytes:
    """The name under which ZAP let the sender of a message in; empty if there is none."""
    try:
        return str(frame.get("User-Id")).encode()
    except zmq.ZMQError:
        return b""
