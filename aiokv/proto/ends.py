"""One side of a copy: which blocks take part, and where the pieces of them are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from aiokv.errors import InvalidBlocks
from aiokv.proto.layout import CacheLayout, GroupLayout
from aiokv.proto.placement import Placement
from aiokv.proto.section import Offsets

__all__ = ["End", "GroupBlocks", "Side", "cut"]


@dataclass(frozen=True, slots=True, eq=False)
class GroupBlocks:
    """The blocks of one request in one KV cache group, in token order.

    Where a group keeps a window only, the list may start later than at token 0.

    Attributes:
        start: Index of the first listed block's first token; a multiple of the block size.
        ids: Block ids.

    Raises:
        TypeError: ``ids`` is not a vector of int64.
    """

    start: int
    ids: Offsets

    def __post_init__(self) -> None:
        """Refuse ids of another type: their bytes are looked at as 64-bit integers."""
        if self.ids.dtype != np.int64 or self.ids.ndim != 1:
            raise TypeError(f"block ids must be a vector of int64, not {self.ids.ndim}-d {self.ids.dtype}")


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """One end of a copy.

    Attributes:
        layout: What its cache holds.
        placement: Where.
        blocks: Which of its blocks take part; one entry for each group of the layout.
    """

    layout: CacheLayout
    placement: Placement
    blocks: tuple[GroupBlocks, ...]


class End:
    """One side of one group, with what the offsets of its pieces are computed from."""

    def __init__(self, side: Side, index: int, heads: tuple[int, int], what: str) -> None:
        self.what = f"group {index} of the {what}"
        self.group: GroupLayout = side.layout.groups[index]
        self.placement = side.placement
        self.place = side.placement.groups[index]
        self.blocks = side.blocks[index]
        self.size = self.group.block_size
        self.heads = heads
        first, last = self.group.heads
        if heads[0] < heads[1] and not first <= heads[0] < heads[1] <= last:
            raise ValueError(f"{self.what} keeps the heads {self.group.heads}, not all of {self.heads}")
        if self.blocks.start < 0 or self.blocks.start % self.size:
            raise InvalidBlocks(
                f"{self.what}: its blocks start at token {self.blocks.start}, which is not a multiple "
                f"of the block size {self.size}"
            )
        self.first_block = self.blocks.start // self.size
        stride_h = self.place.strides[3]
        self.head_offset = (self.heads[0] - first) * stride_h

    def check_start(self, first_token: int, tokens: int) -> None:
        """Refuse a block list that starts after a token which is needed: it would be left out unnoticed."""
        if self.group.kind == "state":
            return
        needed = max(first_token, tokens - self.group.window) if self.group.window else first_token
        if self.blocks.start > needed:
            raise InvalidBlocks(
                f"{self.what}: its blocks start at token {self.blocks.start}, but token {needed} is needed"
            )

    def check(self, lo: int, hi: int) -> None:
        """Refuse block lists that don't reach ``hi``, and any that would lead out of the buffers."""
        listed = self.blocks.start + len(self.blocks.ids) * self.size
        if listed < hi:
            raise InvalidBlocks(f"{self.what}: {len(self.blocks.ids)} blocks end at token {listed} of {hi}")
        used = self.blocks.ids[lo // self.size - self.first_block : -(-hi // self.size) - self.first_block]
        # One pass for both ends of the range: as an unsigned number, a negative id is a huge one.
        most = int(used.view(np.uint64).max())
        if most >= self.group.blocks:
            raise InvalidBlocks(
                f"{self.what}: ids {used.min()}..{used.max()} are not in 0..{self.group.blocks - 1}"
            )
        # In Python's integers, since a made-up placement could overflow 64 bits.
        stride_b, stride_s, stride_t, stride_h = self.place.strides
        reach = most * stride_b + (self.size - 1) * stride_t + self.group.head_bytes
        reach += self.head_offset + (self.heads[1] - self.heads[0] - 1) * stride_h
        if self.group.halves > self.group.planes:
            reach += stride_s
        room = [size - reach for size in self.placement.buffers]
        for planes in self.place.layers:
            for buffer, offset in planes:
                if not 0 <= offset <= room[buffer]:
                    raise InvalidBlocks(f"{self.what}: block {most} reaches beyond buffer {buffer}")

    def offsets(self, starts: range | Offsets) -> Offsets:
        """Byte offsets from a tensor's base of the pieces that begin at the tokens ``starts``."""
        stride_b, _, stride_t, _ = self.place.strides
        ids = self.blocks.ids
        if isinstance(starts, range):
            step, rest = divmod(starts.step, self.size)
            if not rest or len(starts) == 1:
                first = starts[0] // self.size - self.first_block
                picked = ids[first : first + (len(starts) - 1) * step + 1 : step or 1]
                offsets: Offsets = picked * stride_b
                offsets += starts[0] % self.size * stride_t + self.head_offset
                return offsets
            starts = np.arange(starts.start, starts.stop, starts.step, dtype=np.int64)
        block, token = np.divmod(starts, self.size)
        offsets = ids[block - self.first_block] * stride_b
        offsets += token * stride_t
        offsets += self.head_offset
        return offsets

    def plane(self, half: int) -> tuple[int, int]:
        """Which tensor of a layer K (0) or V (1) is in, and how far from its start."""
        return (half, 0) if self.group.split else (0, half * self.place.strides[1])


def cut(lo: int, hi: int, size_a: int, size_b: int) -> Iterator[tuple[int, range | Offsets]]:
    """Cut tokens ``lo`` to ``hi`` where either side's blocks end; pieces by their token count.

    Yields:
        Token count, and the first tokens of the pieces of so many tokens.
    """
    fine, coarse = sorted((size_a, size_b))
    if coarse % fine:
        edges = [np.arange(lo // size * size, hi, size, dtype=np.int64) for size in (fine, coarse)]
        cuts = np.unique(np.clip(np.concatenate([*edges, [lo, hi]]), lo, hi))
        counts = np.diff(cuts)
        for count in np.unique(counts)[::-1].tolist():
            yield count, cuts[:-1][counts == count]
        return
    whole, end = -(-lo // fine) * fine, hi // fine * fine
    if lo < whole:
        yield min(whole, hi) - lo, range(lo, lo + 1)
    if whole < end:
        yield fine, range(whole, end, fine)
    if whole <= end < hi:
        yield hi - end, range(end, end + 1)
