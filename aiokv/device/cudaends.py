"""The two ends of a copy on a GPU: what memory, and whether its bytes are packed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from aiokv.proto.section import Tensors, spread

__all__ = ["End", "Extents", "Fragments", "Move", "checked", "coalesced", "packed", "strided"]

Extents = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]


_Memory = CudaBuffer | PinnedBuffer


class End(NamedTuple):
    """One end.

    Attributes:
        memory: Where each tensor is.
        addresses: What the section's offsets are added to, for each tensor; where it is packed, of the
            first byte of what moves of it.
        packed: Whether the bytes lie there one after another, in plan order.
        on_host: Whether a GPU reaches it through PCIe.
    """

    memory: Sequence[_Memory]
    addresses: Sequence[int]
    packed: bool
    on_host: bool

    @classmethod
    def at(cls, memory: _Memory, offset: int, *, packed: bool, tensors: int = 1, nbytes: int = 0) -> End:
        """An end at an offset into its memory; what there is of several tensors is ``nbytes`` apart."""
        start = memory.address + offset
        addresses = [start + number * nbytes for number in range(tensors)]
        return cls([memory] * tensors, addresses, packed, isinstance(memory, PinnedBuffer))

    def part(self, first: int, last: int, past: int) -> End:
        """Some of its tensors, of each the pieces that come so many bytes later in plan order."""
        addresses = self.addresses[first:last]
        if self.packed and past:
            addresses = [address + past for address in addresses]
        return self._replace(memory=self.memory[first:last], addresses=addresses)


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
    """The same pieces of some tensors, and the two ends."""

    section: Section
    lo: int
    hi: int
    src: End
    dst: End
    fragments: Fragments

    @property
    def tensors(self) -> int:
        """How many."""
        return len(self.src.addresses)

    @property
    def nbytes(self) -> int:
        """Bytes to move."""
        return self.tensors * (self.hi - self.lo) * self.section.piece_bytes

    @property
    def ranges(self) -> int:
        """Ranges that are contiguous at both ends, as far as that is seen in one tensor."""
        if self.src.packed and self.dst.packed:
            return 1
        if self.src.packed:
            return self.tensors * self.fragments.at_dst(self.lo, self.hi)
        if self.dst.packed:
            return self.tensors * self.fragments.at_src(self.lo, self.hi)
        return self.tensors * self.fragments.at_both(self.lo, self.hi)

    @property
    def host_count(self) -> int:
        """Ranges that are contiguous at the host's end alone."""
        if self.src.on_host:
            return 1 if self.src.packed else self.tensors * self.fragments.at_src(self.lo, self.hi)
        return 1 if self.dst.packed else self.tensors * self.fragments.at_dst(self.lo, self.hi)

    def cut(self, limit: int) -> Iterator[Move]:
        """Moves of at most ``limit`` bytes, in plan order; a larger piece is one alone."""
        if self.nbytes <= limit:
            yield self
            return
        size = self.section.piece_bytes
        each = (self.hi - self.lo) * size
        tensors = max(1, limit // each)
        pieces = self.hi - self.lo if each <= limit else max(1, limit // size)
        for first in range(0, self.tensors, tensors):
            last = min(first + tensors, self.tensors)
            for lo in range(self.lo, self.hi, pieces):
                past = (lo - self.lo) * size
                src, dst = self.src.part(first, last, past), self.dst.part(first, last, past)
                yield self._replace(lo=lo, hi=min(lo + pieces, self.hi), src=src, dst=dst)

    def extents(self) -> Extents:
        """Those ranges: addresses at the source and at the destination, and lengths."""
        src, dst, lengths = self.section.extents(self.lo, self.hi)
        if self.src.packed or self.dst.packed:
            packed = np.cumsum(lengths) - lengths
            src, dst = (packed if self.src.packed else src), (packed if self.dst.packed else dst)
        src, dst = spread(self.src.addresses, src), spread(self.dst.addresses, dst)
        if self.tensors > 1:
            lengths = np.tile(lengths, self.tensors)
        if not self.src.packed and not self.dst.packed:
            return src, dst, lengths
        # Tensors may lie in buffers of their own, also where these adjoin.
        return (src, dst, lengths) if self.ranges == len(src) else coalesced(src, dst, lengths, self.tensors)


def coalesced(
    src: NDArray[np.int64], dst: NDArray[np.int64], lengths: NDArray[np.int64], parts: int = 1
) -> Extents:
    """Ranges with those joined that adjoin at both ends, but none across the border of equally long parts."""
    ends = src[:-1] + lengths[:-1] == src[1:]
    ends &= dst[:-1] + lengths[:-1] == dst[1:]
    if parts > 1:
        each = len(src) // parts
        ends[each - 1 :: each] = False
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
    return plan.copy(chunk)


def strided(buffers: Sequence[Buffer], tensors: Tensors, reach: int) -> End:
    """The end of a copy in a cache.

    Raises:
        DeviceError: There is no such buffer, it can't hold the copy, or tensors are on the host and on a GPU.
    """
    farthest: dict[int, int] = {}  # many of the tensors may be in one buffer
    for number, base in tensors:
        if base > farthest.get(number, -1):
            farthest[number] = base
    found: dict[int, _Memory] = {}
    for number, base in farthest.items():
        if not 0 <= number < len(buffers):
            raise DeviceError(f"there is no buffer {number}, there are {len(buffers)}")
        found[number] = _usable(buffers[number], base + reach)
    on_host = sum(isinstance(buffer, PinnedBuffer) for buffer in found.values())
    if on_host not in (0, len(found)):
        raise DeviceError(f"{on_host} of {len(found)} buffers of one copy are on the host, the others aren't")
    starts = {number: buffer.address for number, buffer in found.items()}
    return End(
        [found[number] for number, _ in tensors],
        [starts[number] + base for number, base in tensors],
        packed=False,
        on_host=on_host > 0,
    )


def packed(staging: Buffer, offset: int, tensors: int, nbytes: int) -> End:
    """The end of a copy in staging memory, of so many bytes in all.

    Raises:
        DeviceError: It can't hold the copy.
    """
    if offset < 0:
        raise DeviceError(f"offset {offset} is before {staging!r}")
    memory = _usable(staging, offset + nbytes)
    return End.at(memory, offset, packed=True, tensors=tensors, nbytes=nbytes // tensors)


def _usable(buffer: Buffer, reach: int) -> _Memory:
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
