"""What ``shm`` and ``cma`` share: how two processes of one host meet, and learn of the other's end.

The producer listens at an abstract unix socket, which has a random name and no file. A
connection is kept for as long as the link: the kernel closes a dead process's sockets, so its end
of file means that the other side is certainly dead or has given the link up.
"""

from __future__ import annotations

import abc
import contextlib
import os
import secrets
import select
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from aiokv.device.offloop import off_loop
from aiokv.errors import ClosedError, DeviceError, LocalProtocolError, PeerLostError
from aiokv.transports.base import Link, PeerInfo
from aiokv.transports.ends import LinkEnd, keep_until_lost
from aiokv.transports.greeting import greet
from aiokv.transports.handshake import Welcome, new_token
from aiokv.transports.listener import Listener

if TYPE_CHECKING:
    from aiokv.device.cache import KVCache

__all__ = ["LocalEnd", "LocalTransport", "Offer"]

#: Links that consumers may have to one transport at a time.
_MAX_LINKS = 4096
_BACKLOG = 512
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class _Description(msgspec.Struct, frozen=True, array_like=True):
    """What the producer sends in HELLO."""

    #: The kernel's boot id: equal on one host only.
    boot: str
    #: Random part of the socket's name, in hex.
    door: str
    token: bytes


class Offer(msgspec.Struct, frozen=True):
    """What a producer gives to each consumer that it lets in."""

    extra: bytes
    fds: tuple[int, ...] = ()


class LocalEnd(LinkEnd):
    """One end of a link between two processes of one host; the producer's is no more than this."""

    def __init__(self, link: bytes, name: str, sock: socket.socket, table: set[LocalEnd]) -> None:
        super().__init__(link, name)
        self._sock = sock
        #: Where this end is kept until it is lost or abandoned.
        self._table = table
        table.add(self)
        # Says in one call whether anything happened, which is asked after every read.
        self._poll = select.poll()
        self.watch(sock.fileno())

    def watch(self, fd: int) -> None:
        """Look at the link when ``fd`` can be read: its socket, or a pidfd whose process has ended."""
        self._poll.register(fd, select.POLLIN)
        self._loop.add_reader(fd, self.alive)

    def alive(self) -> bool:
        """Whether, looked at now, the other end is there; a link lost this way becomes ``lost``."""
        if self._sock.fileno() < 0:
            return False
        if not self._poll.poll(0):
            return True
        try:
            said = self._sock.recv(1)
            reason = "the peer said what it must not" if said else "the peer closed it, or is dead"
        except BlockingIOError:
            reason = "the peer's process has ended"
        except OSError as error:
            reason = f"the connection broke: {error}"
        self._end(reason)
        return False

    def _end(self, reason: str) -> None:
        self.abandon()
        self._lose(reason)

    def close(self) -> None:
        """Tell the other end. This one is lost when that one answers, and so reads no more."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def abandon(self) -> None:
        """Let go of the socket, whether or not the other end has; this end may never become lost."""
        if self._sock.fileno() < 0:
            return
        self._loop.remove_reader(self._sock.fileno())
        self._sock.close()
        self._table.discard(self)


class LocalTransport(abc.ABC):
    """A transport between two processes of one host; see ``Transport`` for the contract."""

    def __init__(self) -> None:
        #: The cache that is served, and whose device copies; None until started.
        self._cache: KVCache | None = None
        #: None until started and when closed.
        self._listener: Listener | None = None
        self._description = _Description("", "", b"")
        #: Ends at this engine that are not lost: of links that it reads through, and that others do.
        self.ends: set[LocalEnd] = set()
        self._accepted: dict[bytes, LocalEnd] = {}

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """What peers compare."""

    @property
    def one_sided(self) -> bool:
        """True: consumers read."""
        return True

    @abc.abstractmethod
    def _offer(self, cache: KVCache) -> Offer:
        """What consumers are given; raises DeviceError when ``cache`` can't be served."""

    @abc.abstractmethod
    def _withdraw(self) -> None:
        """Give back what ``_offer`` took."""

    @abc.abstractmethod
    async def _open(self, sock: socket.socket, welcome: Welcome, cache: KVCache, peer: PeerInfo) -> LocalEnd:
        """Prove the path and make the consumer's end, which then owns ``sock``.

        Args:
            sock: Connected; closed by the caller if this raises.
            welcome: Its descriptors are closed by the caller, whatever happens.
            cache: This engine's own.
            peer: The producer.

        Raises:
            PeerLostError: The producer's memory can't be reached.
        """

    async def start(self, cache: KVCache, host: str) -> None:
        """Listen for consumers on this host; ``host`` means nothing here."""
        if self._cache is not None:
            raise LocalProtocolError(f"this {self.name} transport was started before")
        if sys.platform != "linux":
            raise DeviceError(f"{self.name} needs Linux")
        boot = await off_loop(_BOOT_ID.read_text, "aiokv-boot-id")
        offer = self._offer(cache)
        description = _Description(boot, secrets.token_hex(16), new_token())
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.bind(_address(description.door))
            sock.listen(_BACKLOG)
        except OSError as error:
            sock.close()
            self._withdraw()
            raise DeviceError(f"{self.name} can't listen: {error}") from error
        self._listener = Listener(
            sock, description.token, extra=offer.extra, fds=offer.fds, admit=self._admit
        )
        self._description, self._cache = description, cache

    def _admit(self, socks: list[socket.socket], link: bytes) -> None:
        (sock,) = socks
        if len(self._accepted) >= _MAX_LINKS:
            sock.close()
            return
        keep_until_lost(self._accepted, LocalEnd(link, self.name, sock, self.ends))

    def describe(self) -> bytes:
        """Boot id, name of the socket, and token."""
        self._opened()
        return msgspec.msgpack.encode(self._description)

    def _opened(self) -> KVCache:
        if self._cache is None or self._listener is None:
            raise ClosedError(f"this {self.name} transport is not started, or it is closed")
        return self._cache

    async def connect(self, description: bytes, peer: PeerInfo) -> Link:
        """Meet the producer at its socket and prove that its memory can be read."""
        cache = self._opened()
        try:
            there = msgspec.msgpack.decode(description, type=_Description)
        except msgspec.DecodeError as error:
            raise PeerLostError(f"{self.name} to {peer.address}: not a description: {error}") from error
        if there.boot != self._description.boot:
            raise PeerLostError(f"{self.name} to {peer.address}: it is on another host, or boot")
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        fds: tuple[int, ...] = ()
        try:
            _dial(sock, there.door)
            welcome = await greet(sock, there.token)
            fds = welcome.fds
            return await self._open(sock, welcome, cache, peer)
        except PeerLostError as error:
            sock.close()
            raise PeerLostError(f"{self.name} to {peer.address}: {error}") from error
        except BaseException:
            sock.close()
            raise
        finally:
            for fd in fds:
                os.close(fd)

    def accepted(self, link: bytes) -> Link | None:
        """This engine's end of a link that a consumer opened, until it is lost."""
        return self._accepted.get(link)

    async def aclose(self) -> None:
        """Close all links and the socket. May be called twice."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for end in list(self.ends):
            end.close()
            end.abandon()
        self._accepted.clear()
        self._withdraw()


def _address(door: str) -> bytes:
    # A leading zero byte: the abstract namespace, which has no files.
    return f"\0aiokv-{door}".encode()


def _dial(sock: socket.socket, door: str) -> None:
    sock.setblocking(False)
    try:
        sock.connect(_address(door))  # at once, or not at all: unix sockets don't connect behind the back
    except (OSError, ValueError) as error:
        raise PeerLostError(f"nobody is at its socket, or too many are: {error}") from error
