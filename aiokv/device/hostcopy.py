"""Copies between host buffers: how the pieces of one chunk get from one to the other.

Everything here holds the GIL but for large extents. Giving it up at each fragment costs more than
it brings: measured beside a busy thread with fragments of 32 KiB, copies took a third longer, and
a thread that ran Python or small torch operations got no further than beside copies that held the
GIL for a chunk of 1 MiB at a time.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from aiokv.proto.plan import Copy

__all__ = ["copy_pieces"]

#: From this size on, in bytes, a single run gives up the GIL while it is copied.
RELEASE_BYTES = 1 << 20

#: Below this size, in bytes, a piece costs more in the interpreter than in memory, so that numpy
#: gathers many in one call, at the price of copying twice.
GATHER_BELOW = 2048

#: Size of what numpy gathers at a time, in bytes; it is to stay in the cache.
GATHER_BYTES = 256 << 10


def copy_pieces(copy: Copy, lo: int, hi: int, src: memoryview, dst: memoryview) -> None:
    """Copy pieces ``lo`` to ``hi`` from ``src`` to ``dst``, flat views of the copy's two buffers.

    Raises:
        ValueError: The copy reaches beyond a view, or a view was released.
        TypeError: ``dst`` is read-only.
    """
    section = copy.section
    if copy.src_base + section.src_reach > len(src) or copy.dst_base + section.dst_reach > len(dst):
        raise ValueError(f"pieces of {section.piece_bytes} bytes reach beyond a buffer")
    if dst.readonly:
        raise TypeError("the destination is read-only")
    if section.piece_bytes < GATHER_BELOW and section.firsts is None:
        _gather(copy, lo, hi, src, dst)
    elif section.shape:
        source, target = _strided(copy, src, dst)
        pairs = zip(section.src[lo:hi].tolist(), section.dst[lo:hi].tolist(), strict=True)
        for at, to in pairs:
            target[to] = source[at]
    else:
        _extents(copy, lo, hi, src, dst)


def _extents(copy: Copy, lo: int, hi: int, src: memoryview, dst: memoryview) -> None:
    starts, targets, lengths = (array.tolist() for array in copy.extents(lo, hi))
    for at, to, size in zip(starts, targets, lengths, strict=True):
        if size < RELEASE_BYTES:
            dst[to : to + size] = src[at : at + size]
        else:
            np.frombuffer(dst, np.uint8, size, to)[:] = np.frombuffer(src, np.uint8, size, at)


def _gather(copy: Copy, lo: int, hi: int, src: memoryview, dst: memoryview) -> None:
    section = copy.section
    source, target = _strided(copy, src, dst)
    step = max(1, GATHER_BYTES // section.piece_bytes)
    for first in range(lo, hi, step):
        last = min(first + step, hi)
        target[section.dst[first:last]] = source[section.src[first:last]]


def _strided(copy: Copy, src: memoryview, dst: memoryview) -> tuple[NDArray[np.void], NDArray[np.void]]:
    """Both buffers as arrays whose first index is a byte offset, and whose element is a run."""
    section = copy.section
    run = np.dtype((np.void, section.run))
    source: NDArray[np.void] = np.ndarray(
        (section.last_src + 1, *section.shape), run, src, copy.src_base, (1, *section.src_strides)
    )
    target: NDArray[np.void] = np.ndarray(
        (section.last_dst + 1, *section.shape), run, dst, copy.dst_base, (1, *section.dst_strides)
    )
    return source, target
