"""The producer's end of the handshake: it lets connections in, in callbacks and without a task."""

from __future__ import annotations

import asyncio
import errno
import hmac
import secrets
import socket
from array import array
from collections.abc import Callable, Sequence

from aiokv.transports.handshake import MAX_EXTRA, MAX_STREAMS, NONCE, WELCOME, Ask, Secret

__all__ = ["MAX_FDS", "Listener"]

#: Most descriptors that one message can carry (SCM_MAX_FD).
MAX_FDS = 253
#: How long a connection may take to prove itself, and a link to get all of its streams, in seconds.
_PATIENCE_S = 2.0
#: Connections that may be proving themselves at a time, and links that may lack streams; the oldest
#: gives way to a new one.
_MAX_PENDING = 64
#: What accept() says when this process or machine is short of descriptors or memory.
_SHORT = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class Listener:
    """A listening socket that hands over those links whose connections all proved themselves.

    Args:
        sock: Bound, listening and non-blocking; the listener owns it.
        token: What connections must know.
        extra: What they are told when let in, at most 64 KiB.
        fds: Descriptors that they are given; they stay the caller's.
        streams: How many connections one link may have, 1 to 16.
        admit: Called on the loop with a link's connections, in the order of their numbers, and its
            id; owns the connections.
    """

    def __init__(
        self,
        sock: socket.socket,
        token: bytes,
        *,
        admit: Callable[[list[socket.socket], bytes], None],
        extra: bytes = b"",
        fds: Sequence[int] = (),
        streams: int = 1,
    ) -> None:
        if len(extra) > MAX_EXTRA or len(fds) > MAX_FDS:
            raise ValueError(f"at most {MAX_EXTRA} bytes and {MAX_FDS} descriptors fit into a welcome")
        if not 1 <= streams <= MAX_STREAMS:
            raise ValueError(f"a link has 1 to {MAX_STREAMS} streams, not {streams}")
        self._sock = sock
        self._secret = Secret(token)
        self._extra = extra
        self._fds = tuple(fds)
        self._streams = streams
        self._admit = admit
        self._loop = asyncio.get_running_loop()
        #: Connections that have not proved themselves yet, oldest first.
        self._pending: dict[_Candidate, None] = {}
        #: Links that have not all of their streams yet, oldest first.
        self._forming: dict[bytes, _Forming] = {}
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
        for link in list(self._forming):
            self._give_up(link)

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

    def forget(self, candidate: _Candidate) -> None:
        """It was dropped, or judged."""
        self._pending.pop(candidate, None)

    def judge(self, sock: socket.socket, ours: bytes, answer: bytes) -> None:
        """Let a connection in, or close it, by its answer to the nonce ``ours``."""
        theirs, ask, proof = Ask.unpack(answer)
        forming = self._forming.get(ask.link)
        secret = forming.secret if forming is not None else self._secret
        proven = hmac.compare_digest(proof, secret.of_consumer(ours, theirs, ask))
        if not proven or not (ask.opens and ask.streams if forming is None else forming.lacks(ask.number)):
            sock.close()
            return
        if forming is None:
            streams, link = min(ask.streams, self._streams), secrets.token_bytes(16)
        else:
            streams, link = forming.streams, ask.link
        if not self._welcome(sock, secret.of_producer(ours, theirs, ask, link, streams), link, streams, ask):
            sock.close()
        elif forming is not None:
            forming.socks[ask.number] = sock
            if len(forming.socks) == streams:
                forming.timer.cancel()
                del self._forming[link]
                self._admit([forming.socks[number] for number in range(streams)], link)
        elif streams == 1:
            self._admit([sock], link)
        else:
            while len(self._forming) >= _MAX_PENDING:
                self._give_up(next(iter(self._forming)))
            timer = self._loop.call_later(_PATIENCE_S, self._give_up, link)
            self._forming[link] = _Forming(secret.of_link(ours, theirs, link), streams, sock, timer)

    def _welcome(self, sock: socket.socket, proof: bytes, link: bytes, streams: int, ask: Ask) -> bool:
        extra, fds = (self._extra, self._fds) if ask.opens else (b"", ())
        message = WELCOME.pack(link, proof, streams, len(extra)) + extra
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
        try:
            sent = sock.sendmsg([message], rights)
        except OSError:
            return False
        return sent == len(message)  # a fresh socket's buffer takes it all, or something is very wrong

    def _give_up(self, link: bytes) -> None:
        """A link lacks streams for too long, or gives way to others."""
        forming = self._forming.pop(link)
        forming.timer.cancel()
        for sock in forming.socks.values():
            sock.close()


class _Forming:
    """A link whose first stream is there, and some of the others."""

    def __init__(
        self, secret: Secret, streams: int, first: socket.socket, timer: asyncio.TimerHandle
    ) -> None:
        self.secret = secret
        self.streams = streams
        self.socks = {0: first}
        self.timer = timer

    def lacks(self, number: int) -> bool:
        """Whether this stream is one of the link's, and is not there yet."""
        return number < self.streams and number not in self.socks


class _Candidate:
    """One connection that has not proved itself yet."""

    def __init__(self, listener: Listener, sock: socket.socket) -> None:
        self._listener = listener
        self._sock = sock
        self._nonce = secrets.token_bytes(NONCE)
        self._answer = b""
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(_PATIENCE_S, self.drop)
        self._loop.add_reader(sock.fileno(), self._readable)

    def challenge(self) -> None:
        try:
            sent = self._sock.send(self._nonce)
        except OSError:
            sent = 0
        if sent != NONCE:
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
            data = self._sock.recv(Ask.SIZE - len(self._answer))
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        self._answer += data
        if not data:
            self.drop()
        elif len(self._answer) == Ask.SIZE:
            self._stop()
            self._listener.judge(self._sock, self._nonce, self._answer)
