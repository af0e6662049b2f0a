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
from collections.abc import Callable, Collection
from typing import Any

import zmq
from aiozmq import ZmqProtocol

from aiokv.control.address import Address, bindable, reachable
from aiokv.control.base import MAX_FRAME
from aiokv.control.draining import DrainingTransport
from aiokv.control.keys import Keys, checked_key
from aiokv.control.zap import ENDPOINT, Gate, secure_client, secure_server
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
        keys: This engine's own. Then all traffic is encrypted (CURVE), addresses name keys, and only those
            in ``allow`` are talked to.
        allow: Public keys of the peers, in hexadecimal.
        queue: Frames that may wait for one peer, those included that libzmq holds.

    Raises:
        ValueError: An address or a key is malformed; ``advertise``, or one of ``keys`` and ``allow``, is
        missing.
    """

    def __init__(
        self,
        bind: str,
        *,
        advertise: str | None = None,
        keys: Keys | None = None,
        allow: Collection[str] = (),
        queue: int = 4096,
    ) -> None:
        self._bind, self._advertise = bindable(bind, advertise, "tcp")
        if queue < 1:
            raise ValueError(f"queue={queue}: at least one frame must fit")
        self._keys, self._allow = keys, frozenset(map(checked_key, allow))
        if (keys is None) != (not self._allow):
            raise ValueError(
                "keys= is this engine's own, allow= lists those of its peers: one needs the other"
            )
        self._queue = queue
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None  # None before start and after aclose
        self._receiver: DrainingTransport | None = None  # as the context
        self._gate: DrainingTransport | None = None  # as the context; and None without keys
        self._inbox: _Receiver | None = None  # None before start
        self._ports: set[ZmqPort] = set()
        self._ended: asyncio.Event | None = None  # set once libzmq has let go of everything; None before
        self._closed = False

    @property
    def sender(self) -> str:
        """Public key of who sent the frame that is being received; see ``Channel.sender``."""
        return self._inbox.sender if self._inbox is not None else ""

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
        socks: list[zmq.Socket[bytes]] = []
        try:
            socks.append(_open_socket(context, zmq.ROUTER, address))
            if self._keys is not None:
                secure_server(socks[0], self._keys.secret)
                socks.append(_open_socket(context, zmq.ROUTER, address))
                socks[1].bind(ENDPOINT)
            socks[0].bind(address.endpoint)
        except zmq.ZMQError as exc:
            for sock in socks:
                sock.close(linger=0)
            await _terminate(context).wait()
            code = exc.errno or errno.EINVAL
            raise OSError(code, f"can't bind {address}: {os.strerror(code)}") from exc
        bound = Address.parse(str(socks[0].get_string(zmq.LAST_ENDPOINT)))
        keyed = self._keys is not None
        self._inbox = _Receiver(receive, keyed=keyed)
        self._receiver = DrainingTransport(
            loop, zmq.ROUTER, socks[0], self._inbox, name=str(bound), named=keyed
        )
        if keyed:
            self._gate = DrainingTransport(loop, zmq.ROUTER, socks[1], Gate(self._allow), name=ENDPOINT)
        self._context = context
        told = self._advertise or bound
        told = told if told.port else told.with_port(bound.port or 0)
        return str(told.with_key(self._keys.public) if self._keys is not None else told)

    def open(self, address: str) -> ZmqPort:
        """A port to ``address`` (``tcp://host:port``); see ``Channel.open``.

        A host's name is looked up once, off the loop, and again by the next port.

        Raises:
            ValueError: The address is malformed, not one to connect to, or names a key that isn't allowed
            here. CapacityError: No more sockets can be had.
            ClosedError: The channel is closed.
            LocalProtocolError: The channel was not started.
        """
        peer = reachable(address, "tcp")
        if (self._keys is not None) != bool(peer.key):
            wants = "names no key" if self._keys is not None else "names a key, and there are none here"
            raise ValueError(f"{address!r} {wants}")
        if peer.key and peer.key not in self._allow:
            raise ValueError(f"{address!r} names a key that is not allowed")
        if self._closed:
            raise ClosedError(f"{self._bind}: the channel is closed")
        if self._context is None:
            raise LocalProtocolError(f"{self._bind}: start the channel before opening ports")
        port = ZmqPort(self._context, peer, keys=self._keys, queue=self._queue, closed=self._ports.discard)
        self._ports.add(port)
        return port

    async def aclose(self) -> None:
        """Close all ports and give the address back; it is free when this returns."""
        self._closed = True
        if self._context is not None and self._receiver is not None:
            for port in tuple(self._ports):
                port.close()
            self._receiver.close()
            if self._gate is not None:
                self._gate.close()
            self._ended = _terminate(self._context)
            self._context = self._receiver = self._gate = None
        if self._ended is not None:
            await self._ended.wait()


class ZmqPort:
    """A ``Port`` over its own DEALER; ``ZmqChannel.open`` makes it."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        peer: Address,
        *,
        keys: Keys | None,
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
        if keys is not None:
            secure_client(sock, keys.public, keys.secret, server=peer.key)
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
    """Takes the sender's name off: its key, or the identity that ROUTER makes up for each connection."""

    def __init__(self, receive: Callable[[bytes], None], *, keyed: bool) -> None:
        self._receive = receive
        self._keyed = keyed
        #: Key of who sent the frame that is being received; empty while none is, and without keys.
        self.sender = ""

    def msg_received(self, data: list[bytes]) -> None:
        if len(data) != 2:  # a message of several parts is none of ours
            return
        if self._keyed:
            self.sender = data[0].decode()
        try:
            self._receive(data[1])
        finally:
            self.sender = ""


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
