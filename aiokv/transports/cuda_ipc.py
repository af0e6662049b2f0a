"""``cuda_ipc``: a consumer on the same host maps the producer's GPU memory, and copies from it.

For caches in a GPU's memory, the same GPU's or one that this one reaches. The producer passes a
handle for each allocation that its buffers are in to consumers that proved themselves. They open
the handles off the loop, once for each incarnation and allocation, and prove the path by reading a
nonce from the producer's GPU.

No events are shared between processes: the producer's control messages say which layers are there,
by the time that its own events were seen done. A wait for another process's event could not be
taken back, and would need that process to live.

When the producer dies, the memory that is mapped here stays as it is until it is unmapped; so a
copy that is in flight ends, and counts for nothing. The socket between the two is kept until no
copy is in flight: its end is what tells the producer that nothing reads its memory any more.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Protocol, cast

import msgspec

from aiokv.device.base import Buffer, Device
from aiokv.device.cache import KVCache
from aiokv.device.gate import gated
from aiokv.device.offloop import off_loop
from aiokv.errors import ClosedError, DeviceError, LocalProtocolError, PeerLostError
from aiokv.transports.base import PeerInfo
from aiokv.transports.cuda_ipc_driver import HANDLE_BYTES, Allocation, CudaIpcDriver, IpcDriver
from aiokv.transports.cuda_ipc_mappings import Mapped, Mappings, Wanted
from aiokv.transports.cuda_ipc_reading import ConsumerEnd, ended, process_of
from aiokv.transports.handshake import MAX_EXTRA, Welcome
from aiokv.transports.local import LocalEnd, LocalTransport, Offer
from aiokv.transports.patience import ended_within

__all__ = ["CudaIpcTransport"]

_log = logging.getLogger(__name__)

_NONCE = 32
#: How long closing waits for copies that are in flight, in seconds.
_PATIENCE_S = 2.0

_Handle = Annotated[bytes, msgspec.Meta(min_length=HANDLE_BYTES, max_length=HANDLE_BYTES)]
_Number = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class _Gpu(Device, Protocol):
    """What is needed of a device of the kind ``cuda``."""

    @property
    def ordinal(self) -> int:
        """Its number in this process."""

    def register(self, address: int, nbytes: int, owner: object) -> Buffer:
        """Memory that there is, as copies take it."""


class _Shared(msgspec.Struct, frozen=True, array_like=True):
    """What a producer says to consumers that it lets in; all addresses are in its own process."""

    nonce: bytes
    #: Handle, address and size of each allocation; the first has the nonce at its start.
    allocations: tuple[tuple[_Handle, _Number, _Number], ...]
    #: For each buffer of its placement, the allocation, its offset in that, and its size.
    buffers: tuple[tuple[_Number, _Number, _Number], ...]

    def check(self, peer: PeerInfo) -> None:
        """Look whether it fits together, and with what ``peer`` said of its buffers.

        Raises:
            PeerLostError: It doesn't.
        """
        if tuple(nbytes for *_, nbytes in self.buffers) != peer.placement.buffers:
            raise PeerLostError("its buffers are not those of its placement")
        if not self.allocations or len(set(self.allocations)) != len(self.allocations):
            raise PeerLostError("it names no allocations, or one twice")
        for number, offset, nbytes in ((0, 0, _NONCE), *self.buffers):
            if number >= len(self.allocations) or offset + nbytes > self.allocations[number][2]:
                raise PeerLostError("its buffers lie outside of its allocations")


class CudaIpcTransport(LocalTransport):
    """One engine's end of the paths between GPU memory on its host; see ``Transport``.

    Args:
        driver: What makes the calls, from the number of the device; the CUDA driver itself.
    """

    def __init__(self, driver: Callable[[int], IpcDriver] = CudaIpcDriver) -> None:
        super().__init__()
        self._make_driver = driver
        #: None until started.
        self._driver: IpcDriver | None = None
        self._mappings: Mappings | None = None
        #: Of the cache.
        self._device: Device | None = None
        self._offered = Offer(b"")
        #: Device memory that only carries the nonce; 0 while there is none.
        self._nonce_at = 0
        #: Done when that was given back; None while it is there.
        self._freeing: asyncio.Future[None] | None = None

    @property
    def name(self) -> str:
        """``"cuda_ipc"``."""
        return "cuda_ipc"

    async def start(self, cache: KVCache, host: str) -> None:
        """Make handles for the cache's memory, off the loop, and listen; ``host`` means nothing here."""
        if self._driver is not None:
            raise LocalProtocolError("this cuda_ipc transport was started before")
        if cache.device.kind != "cuda":
            raise DeviceError(
                f"cuda_ipc: the cache is {cache.device.kind} memory; only a GPU's can be mapped"
            )
        device = cast(_Gpu, cache.device)
        share = partial(_share, self._make_driver, device.ordinal, cache.buffers)
        sharing = off_loop(gated(device, share), "aiokv-cuda-ipc")
        try:
            driver, self._nonce_at, shared = await asyncio.shield(sharing)
        except asyncio.CancelledError:
            sharing.add_done_callback(_take_back)
            raise
        self._driver, self._mappings, self._device = driver, Mappings(driver, device), device
        try:
            extra = msgspec.msgpack.encode(shared)
            if len(extra) > MAX_EXTRA:
                raise DeviceError(f"cuda_ipc: {len(shared.allocations)} allocations are too many to tell of")
            self._offered = Offer(extra)
            await super().start(cache, host)
        except BaseException:
            self._withdraw()
            raise

    def _offer(self, cache: KVCache) -> Offer:
        return self._offered

    def _withdraw(self) -> None:
        if self._nonce_at and self._driver is not None:
            free = gated(self._device, partial(self._driver.free, self._nonce_at))
            self._freeing = off_loop(free, "aiokv-cuda-ipc")
            self._freeing.add_done_callback(_seen)
            self._nonce_at = 0

    async def _open(self, sock: socket.socket, welcome: Welcome, cache: KVCache, peer: PeerInfo) -> LocalEnd:
        try:
            there = msgspec.msgpack.decode(welcome.extra, type=_Shared)
        except msgspec.DecodeError as error:
            raise PeerLostError(f"it doesn't say where its memory is: {error}") from error
        there.check(peer)
        own, gpu = self._is_own(sock), cast(_Gpu, cache.device)
        wanted = [Wanted(peer.incarnation, *each, own) for each in there.allocations]
        if self._mappings is None:
            raise ClosedError("this cuda_ipc transport is not started")
        mapped = await self._mappings.acquire(wanted)
        try:
            await _prove(self._mappings, mapped[0], there.nonce)
            self._opened()
            theirs = [
                gpu.register(mapped[number].base + offset, nbytes, mapped[number])
                for number, offset, nbytes in there.buffers
            ]
            return ConsumerEnd(welcome.link, sock, self.ends, self._mappings, cache.device, theirs, mapped)
        except BaseException:
            self._mappings.release(mapped)
            raise

    def _is_own(self, sock: socket.socket) -> bool:
        """Whether this very process listens at the other end, as the kernel says."""
        return process_of(sock) == os.getpid()

    async def aclose(self) -> None:
        """Close all links, and give back all memory, once no copy is in flight. May be called twice."""
        await super().aclose()
        lingering = [end for end in self.ends if isinstance(end, ConsumerEnd)]
        if lingering:
            reads = [read for end in lingering for read in end.reading]
            waiting = off_loop(partial(ended, reads, _PATIENCE_S), "aiokv-cuda-ipc")
            await ended_within(2 * _PATIENCE_S, {waiting}, "cuda_ipc")
            for end in lingering:
                end.look()
        if self.ends:
            # Better memory that stays mapped than a copy from nowhere.
            _log.warning("cuda_ipc: copies don't end; what %d links read stays mapped", len(self.ends))
        if self._mappings is not None:
            await self._mappings.aclose()
        if self._freeing is not None:
            await ended_within(_PATIENCE_S, {self._freeing}, "cuda_ipc")


def _share(
    make: Callable[[int], IpcDriver], ordinal: int, buffers: Sequence[Buffer]
) -> tuple[IpcDriver, int, _Shared]:
    """Make the nonce and the handles. Blocks."""
    driver = make(ordinal)
    found: dict[Allocation, int] = {}
    places = []
    for number, buffer in enumerate(buffers):
        why = driver.refusal(buffer.address)
        if why:
            raise DeviceError(f"cuda_ipc: buffer {number} of the cache {why}")
        allocation = driver.find(buffer.address)
        offset = buffer.address - allocation.base
        if offset + buffer.nbytes > allocation.nbytes:
            raise DeviceError(f"cuda_ipc: buffer {number} of the cache lies in more than one allocation")
        found.setdefault(allocation, 1 + len(found))
        places.append((found[allocation], offset, buffer.nbytes))
    nonce = secrets.token_bytes(_NONCE)
    at = driver.allocate(nonce)
    try:
        allocations = [driver.find(at), *found]
        handles = tuple((driver.export(each.base), each.base, each.nbytes) for each in allocations)
    except BaseException:
        driver.free(at)
        raise
    return driver, at, _Shared(nonce, handles, tuple(places))


def _take_back(sharing: asyncio.Future[tuple[IpcDriver, int, _Shared]]) -> None:
    """Nobody waits for what was made."""
    if sharing.exception() is None:
        driver, at, _ = sharing.result()
        off_loop(partial(driver.free, at), "aiokv-cuda-ipc").add_done_callback(_seen)


def _seen(work: asyncio.Future[None]) -> None:
    work.exception()


async def _prove(mappings: Mappings, mapped: Mapped, nonce: bytes) -> None:
    """Read the nonce through the path.

    Raises:
        PeerLostError: It can't be read, or is another one.
    """
    try:
        found = await mappings.read(mapped, _NONCE)
    except DeviceError as error:
        raise PeerLostError(f"its GPU memory can't be read from here: {error}") from error
    if not hmac.compare_digest(found, nonce):
        raise PeerLostError("what it wrote is not what can be read here")
