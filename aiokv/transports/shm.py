"""``shm``: a consumer on the same host maps the producer's memory, and copies from it.

For host caches made by ``KVCache.allocate``, whose buffers are memfds: memory with a descriptor
and no name. The producer passes the descriptors to consumers that proved themselves; they map
them read-only. The seal against shrinking is what makes that safe: a file cut short under a
mapping would kill the reader with SIGBUS.
"""

from __future__ import annotations

import asyncio
import fcntl
import hmac
import os
import secrets
import socket
from collections.abc import Sequence

from aiokv.device.base import Buffer, Device, Event, Stream
from aiokv.device.cache import KVCache
from aiokv.errors import DeviceError, PeerLostError
from aiokv.proto.plan import Chunk, CopyPlan
from aiokv.transports.base import PeerInfo
from aiokv.transports.handshake import Welcome
from aiokv.transports.listener import MAX_FDS
from aiokv.transports.local import LocalEnd, LocalTransport, Offer
from aiokv.transports.mapping import Mapping

__all__ = ["ShmTransport"]

_NONCE = 32
#: How long a connect waits for pages to become present; the rest follows while it is used already.
_POPULATE_S = 0.5


class ShmTransport(LocalTransport):
    """One engine's end of the shared-memory paths on its host; see ``Transport``."""

    def __init__(self) -> None:
        super().__init__()
        #: Memory that only carries the nonce that proves the path; -1 while closed.
        self._nonce_fd = -1
        #: Peers' memory that is being unmapped.
        self._unmapping: set[asyncio.Future[None]] = set()

    @property
    def name(self) -> str:
        """``"shm"``."""
        return "shm"

    def _offer(self, cache: KVCache) -> Offer:
        fds = []
        for number, buffer in enumerate(cache.buffers):
            fd = getattr(buffer, "fd", None)
            if fd is None:
                raise DeviceError(
                    f"shm: buffer {number} of the cache has no descriptor to share; "
                    "KVCache.allocate on the host makes such buffers, from_tensors doesn't"
                )
            fds.append(fd)
        if len(fds) > MAX_FDS - 1:
            raise DeviceError(f"shm: {len(fds)} buffers are more than the {MAX_FDS - 1} that can be passed")
        nonce = secrets.token_bytes(_NONCE)
        self._nonce_fd = os.memfd_create("aiokv-nonce", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.pwrite(self._nonce_fd, nonce, 0)
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(self._nonce_fd, fcntl.F_ADD_SEALS, seals)
        return Offer(nonce, (self._nonce_fd, *fds))

    async def _open(self, sock: socket.socket, welcome: Welcome, cache: KVCache, peer: PeerInfo) -> LocalEnd:
        sizes = (_NONCE, *peer.placement.buffers)
        if len(welcome.fds) != len(sizes):
            raise PeerLostError(f"it passed {len(welcome.fds)} descriptors instead of {len(sizes)}")
        maps: list[Mapping] = []
        try:
            for fd, size in zip(welcome.fds, sizes, strict=True):
                maps.append(_map(fd, size))
            if not hmac.compare_digest(maps[0].buffer.view, welcome.extra):
                raise PeerLostError("what it wrote is not what can be read here")
            present = [mapping.populate() for mapping in maps[1:]]
            if present:
                await asyncio.wait(present, timeout=_POPULATE_S)
            self._opened()
            return _ConsumerEnd(welcome.link, sock, self, cache.device, maps)
        except BaseException:
            self.unmap(maps)
            raise

    def unmap(self, maps: Sequence[Mapping]) -> None:
        """Give a producer's memory back, off the loop; ``aclose`` waits for it."""
        for mapping in maps:
            future = mapping.close()
            self._unmapping.add(future)
            future.add_done_callback(self._unmapping.discard)

    def _withdraw(self) -> None:
        if self._nonce_fd >= 0:
            os.close(self._nonce_fd)
            self._nonce_fd = -1

    async def aclose(self) -> None:
        """Close all links, and give back all memory. May be called twice."""
        await super().aclose()
        if self._unmapping:
            await asyncio.wait(self._unmapping)


def _map(fd: int, size: int) -> Mapping:
    """Map what the peer passed, after a look at whether it is what it should be."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        actual = os.fstat(fd).st_size
        if not seals & fcntl.F_SEAL_SHRINK:
            raise PeerLostError("it passed memory that it could cut short")
        if actual < size:
            raise PeerLostError(f"it passed {actual} bytes instead of {size}")
        return Mapping(fd, size)
    except OSError as error:
        raise PeerLostError(f"what it passed can't be mapped: {error}") from error


class _ConsumerEnd(LocalEnd):
    """Copies from the producer's memory, which stays mapped while the link is there."""

    def __init__(
        self, link: bytes, sock: socket.socket, owner: ShmTransport, device: Device, maps: Sequence[Mapping]
    ) -> None:
        super().__init__(link, owner.name, sock, owner.ends)
        self._owner = owner
        self._device = device
        self._maps = maps
        self._theirs = [mapping.buffer for mapping in maps[1:]]

    def read(self, plan: CopyPlan, chunk: Chunk, dst: Sequence[Buffer], *, stream: Stream) -> Event:
        """Copy on this engine's own device: host memory, so it is over when this returns."""
        if self.lost:
            raise self.lost_error()
        self._device.copy(plan, chunk, self._theirs, dst, stream=stream)
        if not self.alive():  # the memory may have held anything by the time it was read
            raise self.lost_error()
        return stream.record()

    def close(self) -> None:
        """Read no more, and tell the producer."""
        self._end("closed at this end")

    def abandon(self) -> None:
        """Let go of the socket and the memory."""
        if self._maps:
            self._owner.unmap(self._maps)
            self._maps = ()
        super().abandon()
