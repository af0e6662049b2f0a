"""``shm`` for a GPU's memory: through a ring of pinned memory that both processes have mapped.

The producer makes the ring, a memfd, and passes it to the consumer; both pin it for their own
GPU. The producer gathers chunks to its slots and says so over the socket between the two; the
consumer scatters them, and says when a slot is free again. So the bytes cross PCIe twice, and
both directions are busy at once, a chunk in each.

Unlike ``shm`` for host memory, whose consumers read, this is two-sided. The two ends of a link
are to have the same kind of memory.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import struct
from functools import partial

from aiokv.device.cache import KVCache
from aiokv.device.host import HostBuffer
from aiokv.errors import CapacityError, ClosedError, DeviceError, PeerLostError
from aiokv.transports.base import PeerInfo
from aiokv.transports.ends import keep_until_lost
from aiokv.transports.greeting import receive
from aiokv.transports.handshake import Welcome
from aiokv.transports.local import LocalEnd, LocalTransport, Offer
from aiokv.transports.staging import PINNED_BYTES, STAGING_BYTES, Ring, Staging
from aiokv.transports.staging_shared import map_shared, shared
from aiokv.transports.staging_shm_ends import ConsumerEnd, ProducerEnd

__all__ = ["StagedShmTransport"]

#: Links that consumers may have to one transport at a time: each costs pinned memory.
_MAX_LINKS = 256
#: Tells the two kinds of ``shm`` apart.
_STAGED = b"staged"
#: What goes with the memory: a nonce that is at its start, its size, and the size of a slot.
_RING = struct.Struct("!32sQQ")


class StagedShmTransport(LocalTransport):
    """One engine's end of the staged shared-memory paths on its host; see ``Transport``.

    Args:
        staging: Bytes of pinned memory that each link takes, at each end.
        pinned: Bytes that all links take here at most; one is made in any case.
    """

    def __init__(self, staging: int = STAGING_BYTES, pinned: int = PINNED_BYTES) -> None:
        super().__init__()
        self._staging_bytes, self._pinned_bytes = staging, pinned
        #: None until started.
        self._staging: Staging | None = None

    @property
    def name(self) -> str:
        """``"shm"``."""
        return "shm"

    @property
    def one_sided(self) -> bool:
        """False: producers send."""
        return False

    def _offer(self, cache: KVCache) -> Offer:
        if cache.device.kind != "cuda":
            raise DeviceError(f"shm: {cache.device.kind} memory needs no staging")
        self._staging = Staging(cache, self._staging_bytes, self._pinned_bytes)
        return Offer(_STAGED)

    def _withdraw(self) -> None:
        pass

    def _admit(self, socks: list[socket.socket], link: bytes) -> None:
        (sock,) = socks
        if self._staging is None or len(self._accepted) >= _MAX_LINKS:
            sock.close()
            return
        end = ProducerEnd(link, self.name, sock, self.ends, self._staging)
        keep_until_lost(self._accepted, end)
        self._staging.request(partial(_pass_on, end, self._staging.slot_bytes), shared)

    async def _open(self, sock: socket.socket, welcome: Welcome, cache: KVCache, peer: PeerInfo) -> LocalEnd:
        if welcome.extra != _STAGED or welcome.fds:
            raise PeerLostError("its memory is the host's, and this end's a GPU's")
        fds: list[int] = []
        try:
            nonce, nbytes, slot_bytes = _RING.unpack(await receive(sock, _RING.size, fds))
            if len(fds) != 1:
                raise PeerLostError(f"it passed {len(fds)} descriptors instead of one")
            if self._staging is None:
                raise ClosedError("this shm transport is not started")
            ring = await _theirs(self._staging, fds[0], nonce, nbytes, slot_bytes)
        finally:
            for fd in fds:
                os.close(fd)
        try:
            self._opened()
            return ConsumerEnd(welcome.link, self.name, sock, self.ends, self._staging, ring)
        except BaseException as error:
            ring.retire()
            if isinstance(error, DeviceError):
                raise PeerLostError(f"its staging memory can't be used here: {error}") from error
            raise

    async def aclose(self) -> None:
        """Close all links, and give back all memory, once no copy is in flight. May be called twice."""
        await super().aclose()
        if self._staging is not None:
            await self._staging.aclose()


def _pass_on(end: ProducerEnd, slot_bytes: int, ring: Ring | None, error: BaseException | None) -> None:
    """A producer's ring was made, or not: give it to the consumer."""
    if ring is None:
        end.cut(f"it has no staging memory: {error}")
    elif end.lost:
        ring.retire()
    else:
        nonce = secrets.token_bytes(32)
        ring.memory.view[: len(nonce)] = nonce
        end.begin(ring, _RING.pack(nonce, ring.memory.nbytes, slot_bytes), ring.memory.fd)


async def _theirs(staging: Staging, fd: int, nonce: bytes, nbytes: int, slot_bytes: int) -> Ring:
    """The producer's ring, mapped and pinned here.

    Raises:
        PeerLostError: It isn't what the producer says, or can't be had.
    """
    if nbytes > staging.most:
        raise PeerLostError(f"it passed memory of {nbytes} bytes, and at most {staging.most} are pinned here")
    if not (4096 <= slot_bytes <= nbytes and nbytes % slot_bytes == 0):
        raise PeerLostError(f"it passed memory of {nbytes} bytes in slots of {slot_bytes}")
    try:
        staging.check(nbytes)
    except CapacityError as error:
        raise PeerLostError(f"its staging memory can't be used here: {error}") from error
    own = os.dup(fd)  # for the thread, which may outlive this call

    def mapped(nbytes: int) -> HostBuffer:
        try:
            return map_shared(own, nbytes)
        finally:
            os.close(own)

    try:
        ring = await staging.ring(mapped, slot_bytes, nbytes)
    except (CapacityError, DeviceError) as error:
        raise PeerLostError(f"its staging memory can't be used here: {error}") from error
    if not hmac.compare_digest(ring.memory.view[: len(nonce)], nonce):
        ring.retire()
        raise PeerLostError("what it wrote is not what can be read here")
    return ring
