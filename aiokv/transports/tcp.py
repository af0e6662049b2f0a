"""``tcp``: the producer sends host memory over TCP, by one connection or several for each link.

The consumer dials. Bytes go from memory to the socket and from the socket to memory, without
serialization and without a copy in between. Each connection proves that both ends know the token;
the data on them is neither encrypted nor authenticated.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import msgspec

from aiokv.errors import ClosedError, DeviceError, LocalProtocolError, PeerLostError
from aiokv.transports.base import Link, PeerInfo
from aiokv.transports.ends import keep_until_lost
from aiokv.transports.greeting import greet, join
from aiokv.transports.handshake import MAX_STREAMS, STREAMS, new_token
from aiokv.transports.listener import Listener
from aiokv.transports.receiver import Receiver
from aiokv.transports.sender import Sender
from aiokv.transports.stream import StreamEnd
from aiokv.transports.vectors import VectorIO

if TYPE_CHECKING:
    from aiokv.device.cache import KVCache

__all__ = ["TcpTransport"]

#: Links that consumers may have to one transport at a time.
_MAX_LINKS = 4096
_BACKLOG = 512
#: A numeric address, in the shapes that getaddrinfo gives.
_Address = tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]


class _Description(msgspec.Struct, frozen=True, array_like=True):
    """What the producer sends in HELLO."""

    #: Where to dial; empty for the host of the control address.
    host: str
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    token: bytes


class TcpTransport:
    """One engine's end of the TCP paths; see ``Transport`` for the contract.

    Args:
        ports: To listen at, the first of them that can be had; none for any that is free.
        advertise: Host name or address that consumers are told to dial. By default the one that
            is listened at, or where that is all of them, the one that control messages go to.
        streams: Connections of each link, 1 to 16: what this end would like, and the most that it
            lets a consumer have. The lower of the two ends' numbers is used.

    Raises:
        ValueError: There can't be so many streams.
    """

    def __init__(
        self, ports: Sequence[int] = (), advertise: str | None = None, *, streams: int = STREAMS
    ) -> None:
        if not 1 <= streams <= MAX_STREAMS:
            raise ValueError(f"a link has 1 to {MAX_STREAMS} streams, not {streams}")
        self._streams = streams
        self._ports = tuple(ports) or (0,)
        self._advertise = advertise
        self._started = False
        #: None until started and when closed.
        self._listener: Listener | None = None
        self._description = _Description("", 0, b"")
        self._io = VectorIO()
        #: Ends at this engine that are not lost: senders and receivers.
        self._ends: set[StreamEnd] = set()
        self._accepted: dict[bytes, Sender] = {}

    @property
    def name(self) -> str:
        """``"tcp"``."""
        return "tcp"

    @property
    def one_sided(self) -> bool:
        """False: producers send."""
        return False

    async def start(self, cache: KVCache, host: str) -> None:
        """Listen for consumers at ``host``."""
        if self._started:
            raise LocalProtocolError("this tcp transport was started before")
        if cache.device.kind != "host":
            raise DeviceError(
                f"tcp: the cache is {cache.device.kind} memory, and only the host's can be sent"
            )
        try:
            sock = await _listening(host, self._ports)
        except OSError as error:
            which = ", ".join(map(str, self._ports))
            raise DeviceError(f"tcp: can't listen at {host}, port {which}: {error}") from error
        at, port = sock.getsockname()[:2]
        everywhere = ipaddress.ip_address(at.partition("%")[0]).is_unspecified
        told = self._advertise or ("" if everywhere else at)
        self._description = _Description(told, port, new_token())
        self._listener = Listener(sock, self._description.token, streams=self._streams, admit=self._admit)
        self._started = True

    def _admit(self, socks: list[socket.socket], link: bytes) -> None:
        if len(self._accepted) >= _MAX_LINKS:
            for sock in socks:
                sock.close()
            return
        keep_until_lost(self._accepted, Sender(link, self.name, socks, self._io, self._ends))

    def describe(self) -> bytes:
        """Host, port and token."""
        self._check_open()
        return msgspec.msgpack.encode(self._description)

    def _check_open(self) -> None:
        if self._listener is None:
            raise ClosedError("this tcp transport is not started, or it is closed")

    async def connect(self, description: bytes, peer: PeerInfo) -> Link:
        """Dial the producer and prove, both ways, that the token is known."""
        self._check_open()
        try:
            there = msgspec.msgpack.decode(description, type=_Description)
        except msgspec.DecodeError as error:
            raise PeerLostError(f"tcp to {peer.address}: not a description: {error}") from error
        socks: list[socket.socket] = []
        try:
            try:
                socks.append(await _dial(there.host or _host_of(peer.address), there.port))
                welcome = await greet(socks[0], there.token, self._streams)
                await _dial_more(socks, welcome.streams)
                await join(socks[1:], welcome)
            except (OSError, ValueError, PeerLostError) as error:
                raise PeerLostError(f"tcp to {peer.address}: {error}") from error
            self._check_open()
        except BaseException:
            for sock in socks:
                sock.close()
            raise
        return Receiver(welcome.link, self.name, socks, self._io, self._ends)

    def accepted(self, link: bytes) -> Link | None:
        """This engine's end of a link that a consumer opened, until it is lost."""
        return self._accepted.get(link)

    async def aclose(self) -> None:
        """Close all links and the socket. May be called twice."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for end in list(self._ends):
            end.close()
        self._accepted.clear()


def _host_of(address: str) -> str:
    host = urlsplit(address).hostname
    if not host:
        raise ValueError(f"it told no data address, and {address!r} names no host")
    return host


async def _resolve(host: str, port: int) -> list[tuple[int, _Address]]:
    """Families and numeric socket addresses; a name is looked up off the loop, by the loop's means."""
    for family, kind in ((socket.AF_INET, ipaddress.IPv4Address), (socket.AF_INET6, ipaddress.IPv6Address)):
        with contextlib.suppress(ValueError):
            if "%" not in host:  # a scope takes a look-up, too
                return [(family, (str(kind(host)), port))]
    infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [(family, address) for family, _, _, _, address in infos]


async def _listening(host: str, ports: Sequence[int]) -> socket.socket:
    """A socket that listens at the first of the ports that can be had."""
    failure = OSError("there is no port to listen at")
    for port in ports:
        family, address = (await _resolve(host, port))[0]
        sock = _socket(family)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen(_BACKLOG)
            return sock
        except OSError as error:
            sock.close()
            failure = error
    raise failure


def _socket(family: int) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setblocking(False)
    # A chunk is complete when it was given to the socket: holding its end back gains nothing. What
    # a listening socket is set to, the connections that it accepts are.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


async def _dial(host: str, port: int) -> socket.socket:
    """A connected, non-blocking socket; the first address that answers."""
    failure = OSError(f"{host} has no address")
    for family, address in await _resolve(host, port):
        sock = _socket(family)
        try:
            with contextlib.suppress(BlockingIOError):
                sock.connect(address)
            await _connected(sock)
            return sock
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
    raise failure


async def _dial_more(socks: list[socket.socket], count: int) -> None:
    """Append connections to where the first one leads until there are ``count``, all dialled at once."""
    first, family = socks[0].getpeername(), socks[0].family
    while len(socks) < count:
        socks.append(_socket(family))
        with contextlib.suppress(BlockingIOError):
            socks[-1].connect(first)
    for sock in socks[1:]:
        await _connected(sock)


async def _connected(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_writer(sock.fileno(), ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_writer(sock.fileno())
    if error := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        raise OSError(error, os.strerror(error))
