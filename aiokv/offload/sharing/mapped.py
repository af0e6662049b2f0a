"""A tier's places in a pool that it shares: memory of the owner's, mapped here."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial

from aiokv.device.base import Buffer, Device
from aiokv.device.host import HostBuffer
from aiokv.device.offloop import off_loop
from aiokv.engine.bell import Bell
from aiokv.errors import CapacityError, LayoutMismatch
from aiokv.offload.segments import Segment, Segments, close_all
from aiokv.offload.sharing.form import GroupForm, forms_of, shaped
from aiokv.offload.sharing.messages import Room, Welcome
from aiokv.proto.layout import CacheLayout
from aiokv.transports.staging_shared import map_shared

__all__ = ["SharedPool"]


class SharedPool(Segments):
    """Places in the memory of another process, that come one segment after another.

    Args:
        layout: Of the cache.
        device: The cache's; its copies reach the memory.

    Raises:
        InvalidBlocks: As of ``Segments``.
    """

    def __init__(self, layout: CacheLayout, device: Device) -> None:
        super().__init__(layout)
        self._layout = layout
        self._device = device
        #: Segments of an owner that is lost, in which copies may be going on.
        self._old: list[Segment] = []
        #: The first place of the owner that there is: those of owners before it have lower numbers.
        self.base = 0
        #: Segments that are not mapped yet, and their descriptors, which are this pool's.
        self._coming: deque[tuple[Room, int]] = deque()
        self._bell = Bell()
        #: Why no more will come; empty while they may.
        self._shortfall = ""
        self._ended = False

    @property
    def forms(self) -> tuple[GroupForm, ...]:
        """What places would suit the cache."""
        return forms_of(self._layout, self.ratios)

    def __len__(self) -> int:
        """Places there are so far, of the owner that there is."""
        return super().__len__() - self.base if self.segments else 0

    def settle(self, welcome: Welcome) -> None:
        """What places there will be.

        Raises:
            LayoutMismatch: The cache's blocks don't go there.
        """
        self._shape = shaped(self._layout, self.ratios, welcome.groups)
        self.places, self._each = welcome.places, welcome.each
        self._ended, self._shortfall = False, ""
        self.base = -(-self.base // self._each) * self._each

    def lose(self) -> None:
        """The owner is lost. Its segments stay until ``forget``, since copies may be going on in them."""
        self.end()
        if self.segments:
            self.base = self.segments[-1].first + self.segments[-1].places
        self._old += self.segments
        self.segments = []
        self.places = 0

    def forget(self) -> None:
        """Nothing is going on any more in segments of owners that are lost: their memory is given back."""
        old, self._old = self._old, []
        if old:
            _ = off_loop(partial(close_all, old), "aiokv-pool")

    def segment_of(self, place: int) -> Segment:
        """See ``Segments``."""
        if place >= self.base:
            return self.segments[(place - self.base) // self._each]
        return next(each for each in self._old if each.first <= place < each.first + each.places)

    def come(self, room: Room, fd: int) -> None:
        """A segment was given; ``grow`` maps it."""
        self._coming.append((room, fd))
        self._bell.ring()

    def short(self, reason: str) -> None:
        """No more segments will be given."""
        self._shortfall = reason
        self._bell.ring()

    def end(self) -> None:
        """No more segments are wanted, or will be given: ``grow`` gives None from now on."""
        self._ended = True
        while self._coming:
            os.close(self._coming.popleft()[1])
        self._bell.ring()

    async def grow(self) -> Segment | None:
        """Map, and pin, the next segment, once it is given; off the loop.

        Raises:
            CapacityError: There will be no more, or it can't be pinned.
            DeviceError: It can't be mapped.
            LayoutMismatch: It is not what it was to be.
        """
        first = len(self)
        places = min(self._each, self.places - first)
        if not places:
            return None
        while not self._coming:
            if self._ended:
                return None
            if self._shortfall:
                raise CapacityError(f"the pool has no more than {first} places: {self._shortfall}")
            await self._bell.wait()
        room, fd = self._coming.popleft()
        layout, placement = self._laid_out(places)
        nbytes = placement.buffers[0]
        if (room.first, room.places, room.nbytes) != (first, places, nbytes):
            os.close(fd)
            raise LayoutMismatch(f"the pool gave {room}, where {places} places of {nbytes} bytes were due")
        base = self.base
        pin: Callable[[HostBuffer], Buffer] | None = getattr(self._device, "pin_now", None)
        mapping = off_loop(partial(_mapped, fd, nbytes, pin), "aiokv-pool")
        try:
            buffer = await asyncio.shield(mapping)
        except asyncio.CancelledError:
            mapping.add_done_callback(_closed)
            raise
        segment = Segment(base + first, places, layout, placement, buffer)
        if self._ended or base != self.base:  # of an owner that was lost meanwhile
            await off_loop(partial(close_all, [segment]), "aiokv-pool")
            return None
        self.segments.append(segment)
        return segment

    def close(self) -> Awaitable[None]:
        """See ``Segments``."""
        self.lose()
        old, self._old = self._old, []
        return off_loop(partial(close_all, old), "aiokv-pool")


def _mapped(fd: int, nbytes: int, pin: Callable[[HostBuffer], Buffer] | None) -> Buffer:
    """Map a segment, and pin it where the device wants it."""
    try:
        host = map_shared(fd, nbytes)
    finally:
        os.close(fd)
    if pin is None:
        return host
    try:
        return pin(host)
    except BaseException:
        host.close()
        raise


def _closed(mapping: asyncio.Future[Buffer]) -> None:
    """Give back what nobody waited for; off the loop, as it may have to be unpinned."""
    if not mapping.cancelled() and mapping.exception() is None:
        close = getattr(mapping.result(), "close", None)
        if close is not None:
            _ = off_loop(close, "aiokv-pool")
