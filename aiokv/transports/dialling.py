"""TCP sockets of data connections: where to listen, and how to dial."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

__all__ = ["dial", "dial_more", "host_of", "listening"]

_BACKLOG = 512
#: A numeric address, in the shapes that getaddrinfo gives.
_Address = tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]


def host_of(address: str) -> str:
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


async def listening(host: str, ports: Sequence[int]) -> socket.socket:
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


async def dial(host: str, port: int) -> socket.socket:
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
