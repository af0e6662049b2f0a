"""The control plane over plain TCP, with TLS or without: ``tls://host:port`` and ``stream://host:port``.

It does what the channel over ZeroMQ does, with the loop's own connections and no thread. Each side sends on
the connections that it opened and receives on those that it accepted.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import Callable, Collection
from typing import Any

from aiokv.control.accepted import MAX_MEMBERS, Accepted, Door
from aiokv.control.address import Address, bindable, reachable
from aiokv.control.keys import checked_key
from aiokv.control.streamport import Bounds, StreamPort
from aiokv.control.tls import Tls
from aiokv.control.told import Told
from aiokv.errors import CapacityError, ClosedError, LocalProtocolError

__all__ = ["StreamChannel"]

# Bytes received in one go.
_MEMORY = 1 << 16
_BACKLOG = 256


class StreamChannel:
    """A ``Channel`` over TCP connections of the loop, on asyncio and on uvloop.

    Beyond what waits here, the transport of each port takes up to 64 KiB and one frame, and the kernel what
    its socket buffers hold. Each peer that sends holds at most a frame and 64 KiB here; reading from it
    pauses while the loop is busy with what came.

    Args:
        bind: ``tls://host:port``, or ``stream://host:port`` without TLS; port 0 takes a free one.
        advertise: The address that peers are told, where it isn't the one bound; see ``ZmqChannel``.
        tls: The certificates, for ``tls://``.
        allow: Fingerprints of the certificates that may connect and be connected to; None: all that the
            authority vouches for.
        queue: Frames that may wait for one peer.
        queue_bytes: Their bytes, at most.

    Raises:
        ValueError: An address is malformed, ``advertise`` or ``tls`` is missing.
    """

    def __init__(
        self,
        bind: str,
        *,
        advertise: str | None = None,
        tls: Tls | None = None,
        allow: Collection[str] | None = None,
        queue: int = 4096,
        queue_bytes: int = 16 << 20,
    ) -> None:
        self._scheme = "stream" if tls is None else "tls"
        if tls is None and bind.startswith("tls://"):
            raise ValueError(f"{bind!r}: pass tls=, the certificates")
        self._bind, self._advertise = bindable(bind, advertise, self._scheme)
        if queue < 1 or queue_bytes < 1:
            raise ValueError(f"queue={queue}, queue_bytes={queue_bytes}: at least one frame must fit")
        self._bounds = Bounds(queue, queue_bytes)
        self._tls = tls
        self._keyed = tls is not None and tls.mutual  # addresses name certificates
        self._allow = None if allow is None else frozenset(map(checked_key, allow))
        self._memory = memoryview(bytearray(_MEMORY))
        self._server: asyncio.Server | None = None  # None before start and after aclose
        self._door: Door | None = None  # None before start
        #: Ports, connections and attempts to connect: what there is to be closed.
        self._members: set[object] = set()
        self._told = Told()
        self._closed = False
        self._ended = asyncio.Event()

    @property
    def sender(self) -> str:
        """Fingerprint of who sent the frame that is being received; see ``Channel.sender``."""
        return self._door.sender if self._door is not None else ""

    async def start(self, receive: Callable[[bytes], None]) -> str:
        """Bind, then call ``receive`` on the loop for each frame; see ``Channel.start``."""
        loop = asyncio.get_running_loop()
        family, where = await _looked_up(loop, self._bind)
        if self._closed:
            raise ClosedError(f"{self._bind}: the channel is closed")
        if self._server is not None:
            raise LocalProtocolError(f"{self._bind}: the channel is started already")
        key = self._tls.fingerprint() if self._keyed and self._tls else ""
        try:
            sock = _listening(family, where)
        except OSError as exc:
            code = exc.errno or errno.EINVAL
            raise OSError(code, f"can't bind {self._bind}: {os.strerror(code)}") from exc
        host, port = sock.getsockname()[:2]
        self._door = door = Door(
            self._memory, self._tls, self._allow, receive, self._members, self._gone, self._told
        )
        # With a socket, and not serving yet, this waits for nothing: no cancellation leaks the socket.
        self._server = await loop.create_server(door.accept, sock=sock, backlog=_BACKLOG, start_serving=False)
        await self._server.start_serving()
        told = self._advertise or Address(self._scheme, host, port)
        return str((told if told.port else told.with_port(port)).with_key(key))

    def open(self, address: str) -> StreamPort:
        """A port to ``address``; it connects once there is something to send. See ``Channel.open``.

        Raises:
            ValueError: It is malformed, not one to connect to, doesn't say whose certificate is there, or
            names one that isn't allowed here.
            CapacityError: There are too many ports.
            ClosedError: The channel is closed.
            LocalProtocolError: The channel was not started.
        """
        peer = reachable(address, self._scheme)
        if self._keyed != bool(peer.key):
            wants = "names no certificate" if self._keyed else "names a certificate, and there are none here"
            raise ValueError(f"{address!r} {wants}")
        if peer.key and self._allow is not None and peer.key not in self._allow:
            raise ValueError(f"{address!r} names a certificate that is not allowed")
        if self._closed:
            raise ClosedError(f"{self._bind}: the channel is closed")
        if self._server is None:
            raise LocalProtocolError(f"{self._bind}: start the channel before opening ports")
        if len(self._members) >= MAX_MEMBERS:
            raise CapacityError(f"{self._bind}: {len(self._members)} ports and connections are open")
        return StreamPort(peer, self._memory, self._tls, self._bounds, self._members, self._gone, self._told)

    async def aclose(self) -> None:
        """Close all ports and give the address back; it is free when this returns.

        What the transports of the ports hold has a quarter of a second to go out; what is queued is dropped.
        """
        if not self._closed:
            self._closed = True
            if self._server is not None:
                self._server.close()
                self._server = None
            if self._door is not None:
                self._door.close()
            for member in list(self._members):
                if isinstance(member, StreamPort):
                    member.close()
                elif isinstance(member, Accepted):
                    member.abort()
            self._gone(None)
        await self._ended.wait()

    def _gone(self, member: object) -> None:
        self._members.discard(member)
        if self._closed and not self._members:
            self._ended.set()


async def _looked_up(loop: asyncio.AbstractEventLoop, address: Address) -> tuple[int, tuple[Any, ...]]:
    """The address to bind, as sockets take it. Names, and IPv6 scopes, take a lookup off the loop."""
    if address.ip is not None and "%" not in address.host:
        return (socket.AF_INET6 if address.ipv6 else socket.AF_INET), (address.host, address.port)
    found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    family, _, _, _, where = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return family, where


def _listening(family: int, where: tuple[Any, ...]) -> socket.socket:
    """A socket that listens there."""
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            with contextlib.suppress(OSError):  # not where the kernel can't
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(where)
        sock.listen(_BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock
