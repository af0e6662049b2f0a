"""Where the places of a tier are: segments, each a cache of its own in host memory.

In a segment the blocks of a layer lie one after another, so that neighbouring places are one run in each
layer. A *place* is room for one block of every group.
"""

from __future__ import annotations

import abc
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import lcm

import msgspec
import numpy as np

from aiokv.device.base import Buffer
from aiokv.device.offloop import off_loop
from aiokv.errors import InvalidBlocks
from aiokv.proto.layout import CacheLayout
from aiokv.proto.placement import Placement
from aiokv.proto.plan import CopyPlan, GroupBlocks, Side, plan_copy

__all__ = ["Segment", "Segments", "close_all"]

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


class Segments(abc.ABC):
    """The places that a tier has so far.

    Args:
        layout: Of the cache.

    Attributes:
        tokens: Tokens of a place: a multiple of every group's block size.
        ratios: Blocks of each group that a place has room for.
        place_bytes: Bytes of a place.
        places: How many places there will be.
        segments: Those that there are.

    Raises:
        InvalidBlocks: The groups' block sizes have no common multiple that makes sense.
    """

    def __init__(self, layout: CacheLayout) -> None:
        self.tokens = lcm(*(group.block_size for group in layout.groups))
        if self.tokens > _MOST_TOKENS:
            sizes = [group.block_size for group in layout.groups]
            raise InvalidBlocks(f"blocks of {sizes} tokens have only {self.tokens} tokens in common")
        self.ratios = tuple(self.tokens // group.block_size for group in layout.groups)
        self.place_bytes = sum(
            ratio * group.block_bytes * len(group.layers)
            for ratio, group in zip(self.ratios, layout.groups, strict=True)
        )
        self.places = 0
        self.segments: list[Segment] = []
        #: Of a segment; the last one may have fewer places.
        self._each = 1
        # The block outermost: what is one run within a block of the cache is one here, too, and neighbours
        # adjoin.
        self._shape = CacheLayout(
            groups=tuple(
                msgspec.structs.replace(group, axes="b" + group.axes.replace("b", ""))
                for group in layout.groups
            ),
            model=layout.model,
        )
        self._heads = tuple(group.heads for group in layout.groups)

    def __len__(self) -> int:
        """Places there are so far."""
        return self.segments[-1].first + self.segments[-1].places if self.segments else 0

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it has so far."""
        return sum(segment.buffer.nbytes for segment in self.segments)

    @abc.abstractmethod
    async def grow(self) -> Segment | None:
        """One segment more; None if there are all that there will be.

        Raises:
            CapacityError: There isn't the memory, or it can't be pinned.
        """

    def _laid_out(self, places: int) -> tuple[CacheLayout, Placement]:
        """What is in a segment of so many places, and where."""
        groups = tuple(
            msgspec.structs.replace(group, blocks=places * ratio)
            for group, ratio in zip(self._shape.groups, self.ratios, strict=True)
        )
        layout = CacheLayout(groups=groups, model=self._shape.model)
        return layout, Placement.dense(layout)

    def close(self) -> Awaitable[None]:
        """Give the memory back, off the loop; nothing may be in flight."""
        segments, self.segments = self.segments, []
        return off_loop(partial(close_all, segments), "aiokv-pool")

    # -- where a place is

    def segment_of(self, place: int) -> Segment:
        """The segment that a place is in."""
        return self.segments[place // self._each]

    def cut(self, places: Sequence[int], part_bytes: int) -> list[int]:
        """Where to cut a batch so that each part is in one segment, and about so large: ends of the parts."""
        most = max(1, part_bytes // self.place_bytes)
        within = np.array(places, dtype=np.int64) // self._each
        ends: list[int] = []
        start = 0
        for end in [*(np.flatnonzero(np.diff(within)) + 1).tolist(), len(places)]:
            ends += range(start + most, end, most)
            if end:
                ends.append(end)
            start = end
        return ends

    def nbytes_of(self, blocks: Sequence[GroupBlocks]) -> int:
        """Bytes of blocks of the cache, in all layers."""
        return sum(
            listed.ids.size * group.block_bytes * len(group.layers)
            for listed, group in zip(blocks, self._shape.groups, strict=True)
        )

    def plan(self, cache: Side, places: Sequence[int], *, store: bool) -> tuple[CopyPlan, Segment]:
        """How to move blocks between the cache and places of one segment.

        Args:
            cache: The cache, and its blocks; what a group's list begins behind is left out.
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
        firsts = [listed.start for listed in cache.blocks]
        plan = plan_copy(src, dst, first_token=firsts, tokens=len(places) * self.tokens, heads=self._heads)
        return plan, segment

    def views(self, place: int) -> Iterator[memoryview]:
        """All bytes of a place, in a fixed order, in pieces."""
        segment = self.segment_of(place)
        view: memoryview = segment.buffer.view  # type: ignore[attr-defined]
        for offset, length in segment.fragments(place, self.ratios):
            yield view[offset : offset + length]


def close_all(segments: Sequence[Segment]) -> None:
    """Give memory back; it may take long."""
    for segment in segments:
        close = getattr(segment.buffer, "close", None)
        if close is not None:
            close()
