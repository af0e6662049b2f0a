"""A tier's own memory: segments that are made, and pinned, one after another while the first are in use."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import cast

from aiokv.device.base import Buffer, Device
from aiokv.device.host import HostBuffer, available_bytes
from aiokv.device.offloop import off_loop
from aiokv.errors import CapacityError
from aiokv.offload.numa import cpus_near
from aiokv.offload.segments import Segment, Segments
from aiokv.proto.layout import CacheLayout

__all__ = ["Pool"]


class Pool(Segments):
    """Places for the blocks of one cache, in host memory.

    Args:
        layout: Of the cache.
        device: The cache's; its copies reach the pool's memory.
        capacity: Bytes in all, at most.
        segment_bytes: Of one segment, about.

    Raises:
        CapacityError: There is no room for a single place.
        InvalidBlocks: As of ``Segments``.
    """

    def __init__(self, layout: CacheLayout, device: Device, capacity: int, segment_bytes: int) -> None:
        super().__init__(layout)
        self.places = capacity // self.place_bytes
        if not self.places:
            raise CapacityError(
                f"capacity: {capacity} bytes have no room for one block, which takes {self.place_bytes}"
            )
        self._device = device
        self._each = max(1, min(self.places, segment_bytes // self.place_bytes))

    async def check(self) -> None:
        """Look whether the machine has so much memory, before any is taken.

        Raises:
            CapacityError: It hasn't.
        """
        available = await off_loop(available_bytes, "aiokv-pool")
        wanted = self.places * self.place_bytes
        if available is not None and wanted > available:
            raise CapacityError(f"capacity: {wanted} bytes of host memory, and {available} are available")

    async def grow(self) -> Segment | None:
        """One segment more, made off the loop; None if it has all that it is to have.

        When this is cancelled, the segment is closed as soon as it is made.

        Raises:
            CapacityError: There isn't the memory, or it can't be pinned.
        """
        first = len(self)
        places = min(self._each, self.places - first)
        if not places:
            return None
        layout, placement = self._laid_out(places)
        making = self._memory(placement.buffers[0])
        try:
            buffer = await asyncio.shield(making)
        except asyncio.CancelledError:
            making.add_done_callback(_closed)
            raise
        segment = Segment(first, places, layout, placement, buffer)
        self.segments.append(segment)
        return segment

    def _memory(self, nbytes: int) -> asyncio.Future[Buffer]:
        pinned = getattr(self._device, "pinned", None)
        if self._device.kind == "mocked":
            allocate = cast("Callable[[int], Buffer]", self._device.allocate)  # type: ignore[attr-defined]
            return off_loop(partial(allocate, nbytes), "aiokv-pool")
        make: Callable[[int], Buffer] = HostBuffer.allocate
        pin: Callable[[HostBuffer], Buffer] | None = getattr(self._device, "pin_now", None)
        if pinned is not None and pin is not None:
            make = partial(_pinned, pin)
        return off_loop(partial(_near, self._device, make, nbytes), "aiokv-pool")


def _pinned(pin: Callable[[HostBuffer], Buffer], nbytes: int) -> Buffer:
    host = HostBuffer.allocate(nbytes)
    try:
        return pin(host)
    except BaseException:
        host.close()
        raise


def _near(device: Device, make: Callable[[int], Buffer], nbytes: int) -> Buffer:
    """Make memory on the NUMA node that the device is at: pages come from where the thread that asks runs."""
    cpus = cpus_near(device)
    if cpus:
        with suppress(OSError):  # a container may allow others only
            os.sched_setaffinity(0, cpus)  # of this thread alone, which ends with this
    return make(nbytes)


def _closed(making: asyncio.Future[Buffer]) -> None:
    """Give back what nobody waited for; off the loop, as it may have to be unpinned."""
    if not making.cancelled() and making.exception() is None:
        close = getattr(making.result(), "close", None)
        if close is not None:
            _ = off_loop(close, "aiokv-pool")
