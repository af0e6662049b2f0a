"""The consumer's end of the handshake, which is awaited."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import secrets
import socket
from array import array
from collections.abc import Iterator, Sequence

from aiokv.errors import PeerLostError
from aiokv.transports.handshake import MAX_EXTRA, NONCE, WELCOME, Ask, Secret, Welcome
from aiokv.transports.listener import MAX_FDS

__all__ = ["greet", "join", "receive"]


async def greet(sock: socket.socket, token: bytes, streams: int = 1) -> Welcome:
    """Open a link over ``sock``: prove to the producer that the token is known, and have it prove the same.

    Args:
        sock: Connected and non-blocking; stays the caller's.
        token: From the producer's description.
        streams: How many streams the link should have; what it has is in the answer, and those
            after the first are to be brought by ``join``.

    Raises:
        PeerLostError: The connection ended, or the other end doesn't know the token.
    """
    fds: list[int] = []
    secret, ask = Secret(token), Ask(streams=streams)
    try:
        theirs, ours = await _prove(sock, secret, ask, fds)
        link, granted, extra = await _hear(sock, secret, ask, theirs, ours, fds)
        if not 1 <= granted <= streams:
            raise PeerLostError(f"the producer wants {granted} streams where {streams} were offered")
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return Welcome(link, granted, secret.of_link(theirs, ours, link), extra, tuple(fds))


async def join(socks: Sequence[socket.socket], welcome: Welcome) -> None:
    """Make connections the second and further streams of the link that was opened by ``greet``.

    Args:
        socks: Connected and non-blocking, one for each; stay the caller's.
        welcome: What ``greet`` returned.

    Raises:
        PeerLostError: A connection ended, or leads to somebody else.
    """
    fds: list[int] = []
    asked = []
    try:
        for number, sock in enumerate(socks, 1):
            ask = Ask(welcome.link, number, welcome.streams)
            asked.append((sock, ask, *await _prove(sock, welcome.secret, ask, fds)))
        for sock, ask, theirs, ours in asked:
            link, streams, _ = await _hear(sock, welcome.secret, ask, theirs, ours, fds)
            if (link, streams) != (welcome.link, welcome.streams):
                raise PeerLostError("the producer let a stream into another link")
    finally:
        for fd in fds:  # none was asked for
            os.close(fd)


async def _prove(sock: socket.socket, secret: Secret, ask: Ask, fds: list[int]) -> tuple[bytes, bytes]:
    """Answer the producer's challenge; returns its random bytes, and ours."""
    theirs = await receive(sock, NONCE, fds)
    ours = secrets.token_bytes(NONCE)
    with _translated():
        sock.send(ask.pack(ours, secret.of_consumer(theirs, ours, ask)))
    return theirs, ours


async def _hear(
    sock: socket.socket, secret: Secret, ask: Ask, theirs: bytes, ours: bytes, fds: list[int]
) -> tuple[bytes, int, bytes]:
    """Take the producer's welcome: the link's id, how many streams it has, and what is said beside."""
    link, proof, streams, size = WELCOME.unpack(await receive(sock, WELCOME.size, fds))
    if not hmac.compare_digest(proof, secret.of_producer(theirs, ours, ask, link, streams)):
        raise PeerLostError("who answers there does not know the producer's token")
    if size > MAX_EXTRA:
        raise PeerLostError(f"the producer announces {size} bytes, more than a handshake can have")
    return link, streams, await receive(sock, size, fds)


async def receive(sock: socket.socket, size: int, fds: list[int]) -> bytes:
    """Exactly ``size`` bytes; descriptors that come along are appended to ``fds``."""
    data = b""
    while len(data) < size:
        await _readable(sock)
        try:
            with _translated():
                part, rights, flags, _ = sock.recvmsg(
                    size - len(data), socket.CMSG_SPACE(4 * MAX_FDS), socket.MSG_CMSG_CLOEXEC
                )
        except (BlockingIOError, InterruptedError):
            continue
        for level, kind, payload in rights:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.extend(array("i", payload[: len(payload) // 4 * 4]))
        if flags & socket.MSG_CTRUNC:
            raise PeerLostError("this process may not open as many descriptors as the producer passes")
        if not part:
            raise PeerLostError("the producer closed the connection (wrong token, or too many at once)")
        data += part
    return data


async def _readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(sock.fileno(), ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(sock.fileno())


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Make socket errors, but for "not now", those of a lost peer."""
    try:
        yield
    except (BlockingIOError, InterruptedError):
        raise
    except OSError as error:
        raise PeerLostError(f"the connection broke in the handshake: {error}") from error
