"""The two ends of one copy on a GPU: what memory, and whether its bytes are packed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from aiokv.device.base import Buffer
from aiokv.device.cudakernels import Shape
from aiokv.device.cudamemory import CudaBuffer, PinnedBuffer
from aiokv.errors import ClosedError, DeviceError
from aiokv.proto.plan import Chunk, Copy, CopyPlan, Section

__all__ = ["End", "Extents", "Fragments", "Move", "checked", "coalesced", "packed", "strided"]

Extents = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]


class End(NamedTuple):
    """One end.

    Attributes:
        memory: Where it is.
        address: What the section's offsets are added to; of the first byte where it is packed.
        packed: Whether the chunk's bytes lie there one after another, in plan order.
        on_host: Whether a GPU reaches it through PCIe.
    """

    memory: CudaBuffer | PinnedBuffer
    address: int
    packed: bool
    on_host: bool

    @classmethod
    def at(cls, memory: CudaBuffer | PinnedBuffer, offset: int, *, packed: bool) -> End:
        """An end at an offset into its memory."""
        return cls(memory, memory.address + offset, packed, isinstance(memory, PinnedBuffer))

    def later(self, nbytes: int) -> End:
        """The same, so many bytes of the chunk later."""
        return self._replace(address=self.address + nbytes) if self.packed else self


class Fragments:
    """Where the pieces of a section begin anew, at each side by itself and at both."""

    def __init__(self, section: Section) -> None:
        self._count = len(section.src)
        self._runs = prod(section.shape)
        #: A piece, as the kernel sees it.
        self.shape = Shape(section.shape, section.run)
        dense = self.shape.dense
        #: Whether a piece is contiguous at that side, in plan order.
        self.src_dense, self.dst_dense = section.src_strides == dense, section.dst_strides == dense
        self._src, self._dst, self._size = section.src, section.dst, section.piece_bytes
        self._firsts = section.firsts
        #: All offsets of a side and its strides, or-ed: what they have in common in alignment.
        self.src_bits = _bits(section.src, section.src_strides)
        self.dst_bits = _bits(section.dst, section.dst_strides)

    @cached_property
    def _src_breaks(self) -> NDArray[np.int64]:
        return np.flatnonzero(np.diff(self._src) != self._size) + 1

    @cached_property
    def _dst_breaks(self) -> NDArray[np.int64]:
        return np.flatnonzero(np.diff(self._dst) != self._size) + 1

    def at_src(self, lo: int, hi: int) -> int:
        """Contiguous ranges that pieces ``lo`` to ``hi`` are at the source."""
        return _between(self._src_breaks, lo, hi) if self.src_dense else (hi - lo) * self._runs

    def at_dst(self, lo: int, hi: int) -> int:
        """The same at the destination."""
        return _between(self._dst_breaks, lo, hi) if self.dst_dense else (hi - lo) * self._runs

    def at_both(self, lo: int, hi: int) -> int:
        """Ranges that are contiguous at both sides."""
        if self._runs > 1 or self._firsts is None:
            return (hi - lo) * self._runs
        return _between(self._firsts, lo, hi)


class Move(NamedTuple):
    """Pieces of a copy, and the two ends."""

    copy: Copy
    lo: int
    hi: int
    src: End
    dst: End
    fragments: Fragments

    @property
    def nbytes(self) -> int:
        """Bytes to move."""
        return (self.hi - self.lo) * self.copy.section.piece_bytes

    @property
    def ranges(self) -> int:
        """Ranges that are contiguous at both ends."""
        if self.src.packed and self.dst.packed:
            return 1
        if self.src.packed:
            return self.fragments.at_dst(self.lo, self.hi)
        if self.dst.packed:
            return self.fragments.at_src(self.lo, self.hi)
        return self.fragments.at_both(self.lo, self.hi)

    @property
    def host_count(self) -> int:
        """Ranges that are contiguous at the host's end alone."""
        if self.src.on_host:
            return 1 if self.src.packed else self.fragments.at_src(self.lo, self.hi)
        return 1 if self.dst.packed else self.fragments.at_dst(self.lo, self.hi)

    def extents(self) -> Extents:
        """Those ranges: addresses at the source and at the destination, and lengths."""
        src, dst, lengths = self.copy.section.extents(self.lo, self.hi)
        if not self.src.packed and not self.dst.packed:
            return src + self.src.address, dst + self.dst.address, lengths
        packed = np.cumsum(lengths) - lengths
        src, dst = (packed if self.src.packed else src), (packed if self.dst.packed else dst)
        src, dst = src + self.src.address, dst + self.dst.address
        return (src, dst, lengths) if self.ranges == len(src) else coalesced(src, dst, lengths)


def coalesced(src: NDArray[np.int64], dst: NDArray[np.int64], lengths: NDArray[np.int64]) -> Extents:
    """Ranges with those joined that adjoin at both ends."""
    ends = src[:-1] + lengths[:-1] == src[1:]
    ends &= dst[:-1] + lengths[:-1] == dst[1:]
    if not ends.any():
        return src, dst, lengths
    firsts = np.flatnonzero(np.concatenate(([True], ~ends)))
    return src[firsts], dst[firsts], np.add.reduceat(lengths, firsts)


def checked(plan: CopyPlan, chunk: Chunk) -> Copy:
    """The copy that a chunk is of.

    Raises:
        DeviceError: There is no such chunk.
    """
    try:
        plan.check(chunk)
    except ValueError as error:
        raise DeviceError(f"no such chunk: {error}") from error
    return plan.copies(chunk.layer)[chunk.copy]


def strided(buffers: Sequence[Buffer], number: int, base: int, reach: int) -> End:
    """The end of a copy in a cache.

    Raises:
        DeviceError: There is no such buffer, or it can't hold the copy.
    """
    if not 0 <= number < len(buffers):
        raise DeviceError(f"there is no buffer {number}, there are {len(buffers)}")
    memory = _usable(buffers[number], base + reach)
    return End.at(memory, base, packed=False)


def packed(staging: Buffer, offset: int, nbytes: int) -> End:
    """The end of a copy in staging memory.

    Raises:
        DeviceError: It can't hold the copy.
    """
    if offset < 0:
        raise DeviceError(f"offset {offset} is before {staging!r}")
    memory = _usable(staging, offset + nbytes)
    return End.at(memory, offset, packed=True)


def _usable(buffer: Buffer, reach: int) -> CudaBuffer | PinnedBuffer:
    if not isinstance(buffer, CudaBuffer | PinnedBuffer):
        raise DeviceError(f"a GPU can't access {buffer!r}; host memory has to be pinned: CudaDevice.pin")
    if buffer.closed:
        raise DeviceError(f"{buffer!r} can't be copied") from ClosedError("the buffer was closed")
    if reach > buffer.nbytes:
        raise DeviceError(f"a copy reaches to byte {reach}, beyond {buffer!r}")
    return buffer


def _between(breaks: NDArray[np.int64], lo: int, hi: int) -> int:
    begin, end = breaks.searchsorted((lo + 1, hi))
    return int(end - begin) + 1


def _bits(offsets: NDArray[np.int64], strides: tuple[int, ...]) -> int:
    found = int(np.bitwise_or.reduce(offsets))
    for stride in strides:
        found |= stride
    return found
