"""Copies between host buffers: how the pieces of one chunk get from one to the other.

Everything here holds the GIL but for large extents. Giving it up at each fragment costs more than
it brings: measured beside a busy thread with fragments of 32 KiB, copies took a third longer, and
a thread that ran Python or small torch operations got no further than beside copies that held the
GIL for a chunk of 1 MiB at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from aiokv.proto.plan import Copy, Section

__all__ = ["copy_pieces"]

#: From this size on, in bytes, a single run gives up the GIL while it is copied.
RELEASE_BYTES = 1 << 20

#: Below this size, in bytes, a piece costs more in the interpreter than in memory, so that numpy
#: gathers many in one call, at the price of copying twice.
GATHER_BELOW = 2048

#: Size of what numpy gathers at a time, in bytes; it is to stay in the cache.
GATHER_BYTES = 256 << 10


def copy_pieces(copy: Copy, lo: int, hi: int, src: Sequence[memoryview], dst: Sequence[memoryview]) -> None:
    """Copy pieces ``lo`` to ``hi`` of each tensor.

    Args:
        copy: The copy.
        lo: The first piece.
        hi: The end of the range of pieces.
        src: Flat view of the buffer that each tensor is in, at the source.
        dst: The same at the destination.

    Raises:
        ValueError: The copy reaches beyond a view, or a view was released.
        TypeError: A destination is read-only.
    """
    section = copy.section
    tensors = [
        (source, here, target, there)
        for source, (_, here), target, (_, there) in zip(src, copy.src, dst, copy.dst, strict=True)
    ]
    for source, here, target, there in tensors:
        if here + section.src_reach > len(source) or there + section.dst_reach > len(target):
            raise ValueError(f"pieces of {section.piece_bytes} bytes reach beyond a buffer")
        if target.readonly:
            raise TypeError("the destination is read-only")
    if section.piece_bytes < GATHER_BELOW and section.firsts is None:
        for tensor in tensors:
            _gather(section, lo, hi, *_strided(section, *tensor))
    elif section.shape:
        pairs = list(zip(section.src[lo:hi].tolist(), section.dst[lo:hi].tolist(), strict=True))
        for tensor in tensors:
            runs, places = _strided(section, *tensor)
            for at, to in pairs:
                places[to] = runs[at]
    else:
        extents = [array.tolist() for array in section.extents(lo, hi)]
        for tensor in tensors:
            _extents(extents, *tensor)


def _extents(extents: list[list[int]], src: memoryview, here: int, dst: memoryview, there: int) -> None:
    for start, end, size in zip(*extents, strict=True):
        at, to = here + start, there + end
        if size < RELEASE_BYTES:
            dst[to : to + size] = src[at : at + size]
        else:
            np.frombuffer(dst, np.uint8, size, to)[:] = np.frombuffer(src, np.uint8, size, at)


def _gather(section: Section, lo: int, hi: int, source: NDArray[np.void], target: NDArray[np.void]) -> None:
    step = max(1, GATHER_BYTES // section.piece_bytes)
    for first in range(lo, hi, step):
        last = min(first + step, hi)
        target[section.dst[first:last]] = source[section.src[first:last]]


def _strided(
    section: Section, src: memoryview, here: int, dst: memoryview, there: int
) -> tuple[NDArray[np.void], NDArray[np.void]]:
    """Both tensors as arrays whose first index is a byte offset, and whose element is a run."""
    run = np.dtype((np.void, section.run))
    source: NDArray[np.void] = np.ndarray(
        (section.last_src + 1, *section.shape), run, src, here, (1, *section.src_strides)
    )
    target: NDArray[np.void] = np.ndarray(
        (section.last_dst + 1, *section.shape), run, dst, there, (1, *section.dst_strides)
    )
    return source, target
