"""The tier's memory: segments that are made, and pinned, one after another while the first are in use.

A segment is a cache of its own in host memory, in which the blocks of a layer lie one after another, so that
neighbouring places are one run in each layer. A *place* is room for one block of every group.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import lcm
from typing import cast

import msgspec
import numpy as np

from aiokv.device.base import Buffer, Device
from aiokv.device.host import HostBuffer, available_bytes
from aiokv.device.offloop import off_loop
from aiokv.errors import CapacityError, InvalidBlocks
from aiokv.offload.numa import cpus_near
from aiokv.proto.layout import CacheLayout
from aiokv.proto.placement import Placement
from aiokv.proto.plan import CopyPlan, GroupBlocks, Side, plan_copy

__all__ = ["Pool", "Segment"]

#: Where the places of two groups with different block sizes would be of more tokens, something is wrong.
_MOST_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class Segment:
    """Memory of some places.

    Attributes:
        first: The first place.
        places: How many.
        layout: What is in it: as many blocks of each group as its places have.
        placement: Where.
        buffer: The memory.
    """

    first: int
    places: int
    layout: CacheLayout
    placement: Placement
    buffer: Buffer

    def fragments(self, place: int, ratios: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Offsets and lengths of all bytes of a place, in a fixed order."""
        for group, where, ratio in zip(self.layout.groups, self.placement.groups, ratios, strict=True):
            size = group.block_bytes // group.planes
            start = (place - self.first) * ratio * size
            for planes in where.layers:
                for _, offset in planes:
                    yield offset + start, ratio * size


class Pool:
    """Places for the blocks of one cache, in host memory.

    Args:
        layout: Of the cache.
        device: The cache's; its copies reach the pool's memory.
        capacity: Bytes in all, at most.
        segment_bytes: Of one segment, about.

    Attributes:
        tokens: Tokens of a place: a multiple of every group's block size.
        ratios: Blocks of each group that a place has room for.
        place_bytes: Bytes of a place.
        places: How many places there will be.

    Raises:
        CapacityError: There is no room for a single place.
        InvalidBlocks: The groups' block sizes have no common multiple that makes sense.
    """

    def __init__(self, layout: CacheLayout, device: Device, capacity: int, segment_bytes: int) -> None:
        self.tokens = lcm(*(group.block_size for group in layout.groups))
        if self.tokens > _MOST_TOKENS:
            sizes = [group.block_size for group in layout.groups]
            raise InvalidBlocks(f"blocks of {sizes} tokens have only {self.tokens} tokens in common")
        self.ratios = tuple(self.tokens // group.block_size for group in layout.groups)
        self.place_bytes = sum(
            ratio * group.block_bytes * len(group.layers)
            for ratio, group in zip(self.ratios, layout.groups, strict=True)
        )
        self.places = capacity // self.place_bytes
        if not self.places:
            raise CapacityError(
                f"capacity: {capacity} bytes have no room for one block, which takes {self.place_bytes}"
            )
        self._layout = layout
        self._device = device
        self._each = max(1, min(self.places, segment_bytes // self.place_bytes))
        self._heads = tuple(group.heads for group in layout.groups)
        self.segments: list[Segment] = []

    def __len__(self) -> int:
        """Places there are so far."""
        return self.segments[-1].first + self.segments[-1].places if self.segments else 0

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it has so far."""
        return sum(segment.buffer.nbytes for segment in self.segments)

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
        groups = tuple(
            msgspec.structs.replace(
                group,
                blocks=places * ratio,
                # The block outermost: what is one run within a block on the GPU is one here, too, and
                # neighbours adjoin.
                axes="b" + group.axes.replace("b", ""),
            )
            for group, ratio in zip(self._layout.groups, self.ratios, strict=True)
        )
        layout = CacheLayout(groups=groups, model=self._layout.model)
        placement = Placement.dense(layout)
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

    def close(self) -> Awaitable[None]:
        """Give the memory back, off the loop; nothing may be in flight."""
        segments, self.segments = self.segments, []
        return off_loop(partial(_close_all, segments), "aiokv-pool")

    # -- where a place is

    def segment_of(self, place: int) -> Segment:
        """The segment that a place is in."""
        return self.segments[place // self._each]

    def cut(self, places: Sequence[int], part_bytes: int) -> list[int]:
        """Where to cut a batch so that each part is in one segment, and about so large: ends of the parts."""
        most = max(1, part_bytes // self.place_bytes)
        ends: list[int] = []
        start = 0
        for index in range(1, len(places)):
            if index - start >= most or places[index] // self._each != places[index - 1] // self._each:
                ends.append(index)
                start = index
        if places:
            ends.append(len(places))
        return ends

    def plan(self, cache: Side, places: Sequence[int], *, store: bool) -> tuple[CopyPlan, Segment]:
        """How to move blocks between the cache and places of one segment.

        Args:
            cache: The cache, and its blocks.
            places: As many places as there are blocks.
            store: Towards the pool; else from it.
        """
        segment = self.segment_of(places[0])
        local = np.array(places, dtype=np.int64) - segment.first
        blocks = tuple(
            GroupBlocks(0, local if ratio == 1 else (local[:, None] * ratio + np.arange(ratio)).ravel())
            for ratio in self.ratios
        )
        pool = Side(segment.layout, segment.placement, blocks)
        src, dst = (cache, pool) if store else (pool, cache)
        plan = plan_copy(src, dst, first_token=0, tokens=len(places) * self.tokens, heads=self._heads)
        return plan, segment

    def views(self, place: int) -> Iterator[memoryview]:
        """All bytes of a place, in a fixed order, in pieces."""
        segment = self.segment_of(place)
        view: memoryview = segment.buffer.view  # type: ignore[attr-defined]
        for offset, length in segment.fragments(place, self.ratios):
            yield view[offset : offset + length]


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


def _close_all(segments: Sequence[Segment]) -> None:
    for segment in segments:
        close = getattr(segment.buffer, "close", None)
        if close is not None:
            close()
