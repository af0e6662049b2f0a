"""TCP sockets of data connections: where to listen, what to say of it, and how to dial."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
from collections.abc import Sequence
from typing import Annotated
from urllib.parse import urlsplit

import msgspec

from aiokv.errors import DeviceError, PeerLostError
from aiokv.transports.base import PeerInfo
from aiokv.transports.handshake import new_token

__all__ = ["Place", "dial_more", "open_place"]

_BACKLOG = 512
#: A numeric address, in the shapes that getaddrinfo gives.
_Address = tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where a producer's data connections come in: what it says of that in HELLO."""

    #: Where to dial; empty for the host of the control address.
    host: str
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    #: What consumers prove that they know.
    token: bytes

    def encode(self) -> bytes:
        """As it goes over the wire."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, description: bytes) -> Place:
        """The place that a producer described.

        Raises:
            PeerLostError: It described none.
        """
        try:
            return msgspec.msgpack.decode(description, type=cls)
        except msgspec.DecodeError as error:
            raise PeerLostError(f"not a description: {error}") from error

    async def dial(self, peer: PeerInfo) -> socket.socket:
        """A connection there.

        Raises:
            OSError, ValueError: It can't be reached.
        """
        return await _dial(self.host or _host_of(peer.address), self.port)


async def open_place(
    name: str, host: str, ports: Sequence[int], advertise: str | None
) -> tuple[socket.socket, Place]:
    """Listen for consumers of a transport.

    Args:
        name: Of the transport.
        host: Where to listen.
        ports: The first of them that can be had.
        advertise: Host that consumers are told to dial; None: the one that is listened at, or where that is
            all of them, the one that control messages go to.

    Raises:
        DeviceError: None of the ports can be had.
    """
    try:
        sock = await _listening(host, ports)
    except OSError as error:
        which = ", ".join(map(str, ports))
        raise DeviceError(f"{name}: can't listen at {host}, port {which}: {error}") from error
    at, port = sock.getsockname()[:2]
    everywhere = ipaddress.ip_address(at.partition("%")[0]).is_unspecified
    return sock, Place(advertise or ("" if everywhere else at), port, new_token())


def _host_of(address: str) -> str:
    """Where a peer's data connections come in that told nothing of it: the host of its control address.

    Raises:
        ValueError: There is none in it.
    """
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
    """A socket that listens at the first of the ports that can be had.

    Raises:
        OSError: None of them can.
    """
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
    """A connected, non-blocking socket; the first address that answers.

    Raises:
        OSError: None does.
    """
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


async def dial_more(socks: list[socket.socket], count: int) -> None:
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
