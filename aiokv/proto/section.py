"""Pieces of one shape: where each is at both ends, and the loops inside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
from numpy.typing import NDArray

__all__ = ["Copy", "Loop", "Offsets", "Section", "Tensors", "find_joins", "minimal", "spread"]

Offsets = NDArray[np.int64]

#: One loop inside a piece: how often, and the byte strides at the source and the destination.
Loop = tuple[int, int, int]

#: Buffer number and byte offset in it, for each of some tensors.
Tensors = tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class Section:
    """Pieces of one shape; shared by all layers of a group, so offsets are from where a tensor begins.

    Attributes:
        src: Byte offset of each piece at the source, from where its tensor begins.
        dst: Byte offset of each piece at the destination, from where its tensor begins.
        shape: Loops inside a piece, outermost first; empty when a piece is one run.
        src_strides: Byte stride of each loop at the source.
        dst_strides: Byte stride of each loop at the destination.
        run: Bytes that are contiguous on both sides, innermost.
    """

    src: Offsets
    dst: Offsets
    shape: tuple[int, ...]
    src_strides: tuple[int, ...]
    dst_strides: tuple[int, ...]
    run: int

    @cached_property
    def piece_bytes(self) -> int:
        """Bytes of one piece."""
        return prod(self.shape) * self.run

    @cached_property
    def last_src(self) -> int:
        """The highest offset of a piece at the source."""
        return int(self.src.max())

    @cached_property
    def last_dst(self) -> int:
        """The highest offset of a piece at the destination."""
        return int(self.dst.max())

    @property
    def src_reach(self) -> int:
        """Bytes from where a tensor begins to the end of its farthest piece, at the source."""
        return self.last_src + self._span(self.src_strides) + self.run

    @property
    def dst_reach(self) -> int:
        """Bytes from where a tensor begins to the end of its farthest piece, at the destination."""
        return self.last_dst + self._span(self.dst_strides) + self.run

    @cached_property
    def firsts(self) -> Offsets | None:
        """Indexes of the pieces that don't begin where the one before them ends, on both sides.

        None when that is every piece, which is the common case of scattered blocks.
        """
        src_size = self._span(self.src_strides) + self.run
        dst_size = self._span(self.dst_strides) + self.run
        joins = find_joins(self.src, self.dst, src_size, dst_size)
        return None if joins is None else np.flatnonzero(np.concatenate(([True], ~joins)))

    @cached_property
    def inner(self) -> tuple[Offsets, Offsets]:
        """Offsets of the runs of one piece from the piece's own, at both sides."""
        return _steps(self.shape, self.src_strides), _steps(self.shape, self.dst_strides)

    def extents(self, lo: int, hi: int) -> tuple[Offsets, Offsets, Offsets]:
        """Pieces ``lo`` to ``hi`` as contiguous ranges: offsets at both sides, and lengths (bytes).

        In plan order; neighbours that adjoin on both sides are one range.
        """
        firsts, run = self.firsts, self.run
        if firsts is None:
            src, dst = self._runs(lo, hi)
            return src, dst, np.full(len(src), run, dtype=np.int64)
        hi = min(hi, len(self.src))
        begin, end = firsts.searchsorted((lo + 1, hi))
        edges = np.concatenate(([lo], firsts[begin:end], [hi]))
        heads = edges[:-1]
        if not self.shape:
            return self.src[heads], self.dst[heads], (edges[1:] - heads) * run
        # Those of two pieces may adjoin; inside one it would be by chance, since the loops are minimal.
        src, dst = self._runs(lo, hi)
        per_piece = len(src) // (hi - lo)
        first = np.ones(len(src), dtype=np.bool_)
        first[::per_piece] = False
        first[(heads - lo) * per_piece] = True
        where = np.flatnonzero(first)
        return src[where], dst[where], np.diff(where, append=len(src)) * run

    def _runs(self, lo: int, hi: int) -> tuple[Offsets, Offsets]:
        """Every run of these pieces, in order."""
        if not self.shape:
            return self.src[lo:hi], self.dst[lo:hi]
        src, dst = self.inner
        return np.add.outer(self.src[lo:hi], src).ravel(), np.add.outer(self.dst[lo:hi], dst).ravel()

    def _span(self, strides: tuple[int, ...]) -> int:
        return sum((count - 1) * stride for count, stride in zip(self.shape, strides, strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """One section for all the tensors that have it, of one layer or of several.

    Attributes:
        section: The pieces.
        src: For each tensor, layer by layer, its buffer number in the source's placement, and the byte
            offset in that buffer to which the section's offsets are added.
        dst: The same at the destination.
    """

    section: Section
    src: Tensors
    dst: Tensors

    @property
    def nbytes(self) -> int:
        """Bytes that this copy moves."""
        return len(self.src) * len(self.section.src) * self.section.piece_bytes

    def extents(self, lo: int, hi: int) -> Iterator[tuple[int, Offsets, int, Offsets, Offsets]]:
        """Pieces ``lo`` to ``hi`` of each tensor as contiguous ranges, in plan order.

        Yields:
            For each tensor: the source's buffer, offsets in it, the destination's buffer, offsets in it,
            and lengths (bytes). Neighbours that adjoin on both sides are one range.
        """
        src, dst, lengths = self.section.extents(lo, hi)
        for (source, here), (target, there) in zip(self.src, self.dst, strict=True):
            yield source, src + here, target, dst + there, lengths


def spread(starts: Sequence[int], offsets: Offsets) -> Offsets:
    """The same offsets from each of these places, one place after another."""
    if len(starts) == 1:
        return offsets + starts[0]
    found: Offsets = np.add.outer(np.array(starts, dtype=np.int64), offsets).ravel()
    return found


def minimal(loops: list[Loop], run: int) -> tuple[list[Loop], int]:
    """The fewest loops that walk the same bytes: outermost first, with the run inside them."""
    left = [loop for loop in loops if loop[0] > 1]
    absorbed = True
    while absorbed:
        absorbed = False
        for loop in left:
            if loop[1] == run == loop[2]:
                run *= loop[0]
                left.remove(loop)
                absorbed = True
                break
    left.sort(key=lambda loop: (loop[2], loop[1]))
    merged: list[Loop] = []
    for count, stride_a, stride_b in left:
        if merged:
            inner, inner_a, inner_b = merged[-1]
            if stride_a == inner * inner_a and stride_b == inner * inner_b:
                merged[-1] = (inner * count, inner_a, inner_b)
                continue
        merged.append((count, stride_a, stride_b))
    merged.reverse()
    return merged, run


def find_joins(src: Offsets, dst: Offsets, src_span: int, dst_span: int) -> NDArray[np.bool_] | None:
    """Where a piece ends on both sides as the next one begins; None when nowhere."""
    found: NDArray[np.bool_] = src[1:] - src[:-1] == src_span
    if not np.count_nonzero(found):
        return None
    found &= dst[1:] - dst[:-1] == dst_span
    return found if np.count_nonzero(found) else None


def _steps(shape: tuple[int, ...], strides: tuple[int, ...]) -> Offsets:
    """Offsets of all steps of nested loops, the last loop fastest."""
    steps: Offsets = np.zeros(1, dtype=np.int64)
    for count, stride in zip(shape, strides, strict=True):
        steps = np.add.outer(steps, np.arange(count, dtype=np.int64) * stride).ravel()
    return steps
