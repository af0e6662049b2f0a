"""The control plane over ZeroMQ: one ROUTER to receive, one DEALER to each peer to send.

ZeroMQ reconnects, queues and keeps message borders, and that is all it is used for. It loses frames
without a word when a peer restarts, so what is inside the frames has to notice. Nothing is ever written to
the ROUTER (one peer that doesn't read would hold up all) and nothing is read from a DEALER.
"""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import errno
import functools
import os
import socket
from collections.abc import Callable
from typing import Any

import zmq
from aiozmq import ZmqProtocol

from aiokv.control.address import Address, bindable, reachable
from aiokv.control.base import MAX_FRAME
from aiokv.control.draining import DrainingTransport
from aiokv.errors import CapacityError, ClosedError, LocalProtocolError

__all__ = ["ZmqChannel", "ZmqPort"]

# Frames that ZeroMQ itself takes for one peer before the rest waits in the port, where it is counted.
_SEND_AHEAD = 256
# Frames from one peer that wait in memory while the loop is busy; then TCP holds that peer back.
_RECEIVE_AHEAD = 256
# A name that couldn't be looked up is tried again after this many seconds.
_LOOKUP_AGAIN = 0.5
_MAX_PORTS = 1 << 14


class ZmqChannel:
    """A ``Channel`` over TCP.

    Two native threads of libzmq belong to it from ``start`` to ``aclose``; none of Python's. While nothing
    arrives and nothing waits, nothing wakes the loop.

    Args:
        bind: ``tcp://host:port``; port 0 takes a free one.
        advertise: The address that peers are told, where it isn't the one bound (containers, NAT). With
            no port or port 0 it gets the bound one's. Needed when ``bind`` stands for all of a host's
            addresses (``0.0.0.0``, ``[::]``, ``*``).
        queue: Frames that may wait for one peer, those included that libzmq holds.

    Raises:
        ValueError: An address is malformed, or ``advertise`` is missing.
    """

    def __init__(self, bind: str, *, advertise: str | None = None, queue: int = 4096) -> None:
        self._bind, self._advertise = bindable(bind, advertise, "tcp")
        if queue < 1:
            raise ValueError(f"queue={queue}: at least one frame must fit")
        self._queue = queue
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None  # None before start and after aclose
        self._receiver: DrainingTransport | None = None  # as the context
        self._ports: set[ZmqPort] = set()
        self._ended: asyncio.Event | None = None  # set once libzmq has let go of everything; None before
        self._closed = False

    async def start(self, receive: Callable[[bytes], None]) -> str:
        """Bind, then call ``receive`` on the loop for each frame; see ``Channel.start``."""
        loop = asyncio.get_running_loop()
        address = self._bind
        if address.ip is None:  # libzmq would look it up on the loop
            found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
            address = address.looked_up(found)
        if self._closed:
            raise ClosedError(f"{self._bind}: the channel is closed")
        if self._context is not None:
            raise LocalProtocolError(f"{self._bind}: the channel is started already")

        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        context.set(zmq.MAX_SOCKETS, _MAX_PORTS)
        sock = None
        try:
            sock = _open_socket(context, zmq.ROUTER, address)
            sock.bind(address.endpoint)
        except zmq.ZMQError as exc:
            if sock is not None:
                sock.close(linger=0)
            await _terminate(context).wait()
            code = exc.errno or errno.EINVAL
            raise OSError(code, f"can't bind {address}: {os.strerror(code)}") from exc
        bound = Address.parse(str(sock.get_string(zmq.LAST_ENDPOINT)))
        self._receiver = DrainingTransport(loop, zmq.ROUTER, sock, _Receiver(receive), name=str(bound))
        self._context = context
        told = self._advertise or bound
        return str(told if told.port else told.with_port(bound.port or 0))

    def open(self, address: str) -> ZmqPort:
        """A port to ``address`` (``tcp://host:port``); see ``Channel.open``.

        A host's name is looked up once, off the loop, and again by the next port.

        Raises:
            ValueError: The address is malformed, or not one to connect to.
            CapacityError: No more sockets can be had.
            ClosedError: The channel is closed.
            LocalProtocolError: The channel was not started.
        """
        peer = reachable(address, "tcp")
        if self._closed:
            raise ClosedError(f"{self._bind}: the channel is closed")
        if self._context is None:
            raise LocalProtocolError(f"{self._bind}: start the channel before opening ports")
        port = ZmqPort(self._context, peer, queue=self._queue, closed=self._ports.discard)
        self._ports.add(port)
        return port

    async def aclose(self) -> None:
        """Close all ports and give the address back; it is free when this returns."""
        self._closed = True
        if self._context is not None and self._receiver is not None:
            for port in tuple(self._ports):
                port.close()
            self._receiver.close()
            self._ended = _terminate(self._context)
            self._context = self._receiver = None
        if self._ended is not None:
            await self._ended.wait()


class ZmqPort:
    """A ``Port`` over its own DEALER; ``ZmqChannel.open`` makes it."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        peer: Address,
        *,
        queue: int,
        closed: Callable[[ZmqPort], None],
    ) -> None:
        self._peer = peer
        self._closed = closed
        self._lookup: asyncio.Future[list[Any]] | None = None  # None when none is under way
        self._again: asyncio.TimerHandle | None = None  # the next lookup; None when none is planned
        self._loop = asyncio.get_running_loop()
        ahead = max(1, min(_SEND_AHEAD, queue // 2))
        try:
            sock = _open_socket(context, zmq.DEALER, peer)
        except zmq.ZMQError as exc:
            raise CapacityError(f"{peer}: no socket for another port: {exc.strerror}") from exc
        sock.setsockopt(zmq.SNDHWM, ahead)
        self._transport = DrainingTransport(
            self._loop, zmq.DEALER, sock, ZmqProtocol(), name=str(peer), bound=queue - ahead
        )
        self._transport.pause_reading()
        if peer.ip is None:
            self._look_up()
        else:
            self._transport.connect_now(peer.endpoint)

    def send(self, frame: bytes) -> None:
        """Send one frame, or queue it; see ``Port.send``."""
        if len(frame) > MAX_FRAME:
            raise ValueError(f"{self._peer}: a frame of {len(frame)} bytes; {MAX_FRAME} is the most")
        self._transport.write((frame,))

    def close(self) -> None:
        """Give up the port and what it has queued."""
        if self._lookup is not None:
            self._lookup.cancel()
        if self._again is not None:
            self._again.cancel()
        self._transport.close()
        self._closed(self)

    def _look_up(self) -> None:
        # Not left to libzmq, whose only I/O thread it would stop, and all other peers with it. A future of
        # the loop's executor and no task, since nobody here could own one.
        lookup = functools.partial(
            socket.getaddrinfo, self._peer.host, self._peer.port, type=socket.SOCK_STREAM
        )
        self._again = None
        self._lookup = self._loop.run_in_executor(None, lookup)
        self._lookup.add_done_callback(self._found)

    def _found(self, lookup: asyncio.Future[list[Any]]) -> None:
        self._lookup = None
        if lookup.cancelled() or self._transport.is_closing():
            return
        if lookup.exception() is not None:  # as with any peer that isn't there: nobody is told
            self._again = self._loop.call_later(_LOOKUP_AGAIN, self._look_up)
            return
        address = self._peer.looked_up(lookup.result())
        if address.ipv6:
            self._transport.setsockopt(zmq.IPV6, 1)
        self._transport.connect_now(address.endpoint)


class _Receiver(ZmqProtocol):  # type: ignore[misc]
    """Takes the sender's identity off, which ROUTER puts before each message."""

    def __init__(self, receive: Callable[[bytes], None]) -> None:
        self._receive = receive

    def msg_received(self, data: list[bytes]) -> None:
        if len(data) == 2:  # a message of several parts is none of ours
            self._receive(data[1])


def _open_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int, address: Address) -> zmq.Socket[bytes]:
    """A socket with the options that both kinds have; not connected, not bound."""
    sock = context.socket(kind)
    options = {
        zmq.LINGER: 0,  # else closing waits for peers that will never come
        zmq.IPV6: address.ipv6,
        zmq.MAXMSGSIZE: MAX_FRAME,
        zmq.RCVHWM: _RECEIVE_AHEAD if kind == zmq.ROUTER else 1,
        zmq.RECONNECT_IVL: 20,
        zmq.RECONNECT_IVL_MAX: 500,
        # The kernel finds hosts that vanished, so that their connections don't pile up; no timer of ours.
        zmq.TCP_KEEPALIVE: 1,
        zmq.TCP_KEEPALIVE_IDLE: 60,
        zmq.TCP_KEEPALIVE_INTVL: 10,
        zmq.TCP_KEEPALIVE_CNT: 6,
    }
    if kind == zmq.ROUTER:
        options[zmq.ROUTER_HANDOVER] = 1  # who comes back under its old identity is not refused
        options[zmq.BACKLOG] = 1024
    for option, value in options.items():
        sock.setsockopt(option, int(value))
    return sock


def _terminate(context: zmq.Context[zmq.Socket[bytes]]) -> asyncio.Event:
    """End a context whose sockets are closed; the event is set when all of it is gone.

    libzmq's own threads are waited for: 0.2 ms, or as long as a busy machine takes to run them, and that
    is not the loop's to spend. The thread ends by itself, also when nobody waits any more.
    """
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def terminate() -> None:
        context.term()
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(ended.set)

    _thread.start_new_thread(terminate, ())
    return ended
