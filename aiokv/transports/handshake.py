"""How a consumer's connection is let in: each side proves that it knows the producer's token.

The token itself came through the control session and is never sent, so that neither who listens
on the wire, nor who got hold of a dead producer's port, can use or learn it. Over any stream
socket::

    producer -> consumer   16 random bytes
    consumer -> producer   16 random bytes, and a proof over both
    producer -> consumer   the link's id, a proof over both and the id, the length of what follows,
                           what the transport says to its consumers (and descriptors, if any)

Both ends then know that the path works and whom it leads to. The producer's end runs in
callbacks, without a task; the consumer's end is awaited.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import os
import secrets
import socket
import struct
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from aiokv.errors import PeerLostError

__all__ = ["MAX_EXTRA", "MAX_FDS", "Listener", "Welcome", "greet", "new_token"]

_NONCE = 16
_PROOF = 32
#: Link id, proof, and length of what follows.
_WELCOME = struct.Struct("!16s32sI")
#: Most that a transport says to its consumers, in bytes.
MAX_EXTRA = 1 << 16
#: Most descriptors that one message can carry (SCM_MAX_FD).
MAX_FDS = 253
#: How long a connection may take to prove itself, in seconds.
_PATIENCE_S = 2.0
#: Connections that may be proving themselves at a time; the oldest gives way to a new one.
_MAX_PENDING = 64
#: What accept() says when this process or machine is short of descriptors or memory.
_SHORT = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


def new_token() -> bytes:
    """A token for one life of one transport: 32 random bytes."""
    return secrets.token_bytes(32)


def _proof(token: bytes, *said: bytes) -> bytes:
    return hmac.digest(token, b"".join(said), "sha256")


@dataclass(frozen=True, slots=True)
class Welcome:
    """What a consumer was told when it was let in."""

    link: bytes
    #: What the transport says to its consumers.
    extra: bytes
    #: Descriptors that came with it; the receiver closes them.
    fds: tuple[int, ...]


# -- the producer's end ---------------------------------------------------------------------------


class Listener:
    """A listening socket that hands over those connections which proved themselves.

    Args:
        sock: Bound, listening and non-blocking; the listener owns it.
        token: What connections must know.
        extra: What they are told when let in, at most 64 KiB.
        fds: Descriptors that they are given; they stay the caller's.
        admit: Called on the loop with each connection and its link's id, and owns the connection.
    """

    def __init__(
        self,
        sock: socket.socket,
        token: bytes,
        *,
        extra: bytes,
        fds: Sequence[int],
        admit: Callable[[socket.socket, bytes], None],
    ) -> None:
        if len(extra) > MAX_EXTRA or len(fds) > MAX_FDS:
            raise ValueError(f"at most {MAX_EXTRA} bytes and {MAX_FDS} descriptors fit into a welcome")
        self._sock = sock
        self._token = token
        self._extra = extra
        self._fds = tuple(fds)
        self._admit = admit
        self._loop = asyncio.get_running_loop()
        #: Connections that have not proved themselves yet, oldest first.
        self._pending: dict[_Candidate, None] = {}
        #: Set while accepting pauses for want of descriptors.
        self._pause: asyncio.TimerHandle | None = None
        self._loop.add_reader(sock.fileno(), self._accept)

    def close(self) -> None:
        """Stop listening and drop who has not proved itself. May be called twice."""
        if self._sock.fileno() < 0:
            return
        self._loop.remove_reader(self._sock.fileno())
        if self._pause is not None:
            self._pause.cancel()
        self._sock.close()
        for candidate in list(self._pending):
            candidate.drop()

    def _accept(self) -> None:
        try:
            sock, _ = self._sock.accept()
        except OSError as error:
            if error.errno in _SHORT:
                # The socket stays readable, so going on would spin; others may give some back.
                self._loop.remove_reader(self._sock.fileno())
                self._pause = self._loop.call_later(1.0, self._resume)
            return
        sock.setblocking(False)
        while len(self._pending) >= _MAX_PENDING:
            next(iter(self._pending)).drop()
        candidate = _Candidate(self, sock)
        self._pending[candidate] = None
        candidate.challenge()

    def _resume(self) -> None:
        self._pause = None
        self._loop.add_reader(self._sock.fileno(), self._accept)

    def check(self, ours: bytes, answer: bytes) -> bool:
        """Whether ``answer`` proves that who was sent the nonce ``ours`` knows the token."""
        theirs, proof = answer[:_NONCE], answer[_NONCE:]
        return hmac.compare_digest(proof, _proof(self._token, b"consumer", ours, theirs))

    def forget(self, candidate: _Candidate) -> None:
        """It was dropped, or let in."""
        self._pending.pop(candidate, None)

    def let_in(self, sock: socket.socket, ours: bytes, theirs: bytes) -> None:
        """Say welcome and hand the connection over."""
        link = secrets.token_bytes(16)
        proof = _proof(self._token, b"producer", theirs, ours, link)
        message = _WELCOME.pack(link, proof, len(self._extra)) + self._extra
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", self._fds))] if self._fds else []
        try:
            sent = sock.sendmsg([message], rights)
        except OSError:
            sent = 0
        if sent != len(message):  # a fresh socket's buffer takes it all, or something is very wrong
            sock.close()
            return
        self._admit(sock, link)


class _Candidate:
    """One connection that has not proved itself yet."""

    def __init__(self, listener: Listener, sock: socket.socket) -> None:
        self._listener = listener
        self._sock = sock
        self._nonce = secrets.token_bytes(_NONCE)
        self._answer = b""
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(_PATIENCE_S, self.drop)
        self._loop.add_reader(sock.fileno(), self._readable)

    def challenge(self) -> None:
        try:
            sent = self._sock.send(self._nonce)
        except OSError:
            sent = 0
        if sent != _NONCE:
            self.drop()

    def drop(self) -> None:
        self._stop()
        self._sock.close()

    def _stop(self) -> None:
        self._timer.cancel()
        self._loop.remove_reader(self._sock.fileno())
        self._listener.forget(self)

    def _readable(self) -> None:
        try:
            data = self._sock.recv(_NONCE + _PROOF - len(self._answer))
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        self._answer += data
        if not data:
            self.drop()
        elif len(self._answer) == _NONCE + _PROOF:
            if self._listener.check(self._nonce, self._answer):
                self._stop()
                self._listener.let_in(self._sock, self._nonce, self._answer[:_NONCE])
            else:
                self.drop()


# -- the consumer's end ---------------------------------------------------------------------------


async def greet(sock: socket.socket, token: bytes) -> Welcome:
    """Prove to the producer at the other end of ``sock`` that the token is known, and it to us.

    Args:
        sock: Connected and non-blocking; stays the caller's.
        token: From the producer's description.

    Raises:
        PeerLostError: The connection ended, or the other end doesn't know the token.
    """
    fds: list[int] = []
    try:
        theirs = await _receive(sock, _NONCE, fds)
        ours = secrets.token_bytes(_NONCE)
        with _translated():
            sock.send(ours + _proof(token, b"consumer", theirs, ours))
        head = await _receive(sock, _WELCOME.size, fds)
        link, proof, size = _WELCOME.unpack(head)
        if not hmac.compare_digest(proof, _proof(token, b"producer", ours, theirs, link)):
            raise PeerLostError("who answers there does not know the producer's token")
        if size > MAX_EXTRA:
            raise PeerLostError(f"the producer announces {size} bytes, more than a handshake can have")
        extra = await _receive(sock, size, fds)
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return Welcome(link, extra, tuple(fds))


async def _receive(sock: socket.socket, size: int, fds: list[int]) -> bytes:
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
