"""Scattered memory as the kernel takes it: vectors of (address, length), and the calls on them.

One call moves up to a thousand fragments between a socket or another process and their own
places, with nothing of Python done for each of them. Vectors are filled by numpy from a plan's
extents. They are plain addresses: whoever makes one keeps the memory where it is until the vector
is worked off or dropped.
"""

from __future__ import annotations

import ctypes
import os
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

__all__ = ["MAX_ENTRIES", "Vector", "VectorIO"]

#: Most entries of one call (IOV_MAX).
MAX_ENTRIES = 1024
#: A read from a process that moves more bytes than this gives up the GIL. Below, that would cost
#: more than it gives: beside a thread that runs Python, getting it back takes up to 5 ms. Calls on
#: sockets, which are bounded by their callers, always keep it.
_RELEASE_BYTES = 1 << 20


class Vector:
    """A list of memory ranges that is worked off from its start.

    Args:
        addresses: Of the ranges.
        lengths: Of the ranges in bytes, none of them 0.
        before: Address and length of one more range, that goes first.
        after: Address and length of one more range, that goes last.
    """

    __slots__ = ("_base", "_ends", "_entries", "_first", "done", "total")

    def __init__(
        self,
        addresses: NDArray[np.int64],
        lengths: NDArray[np.int64],
        *,
        before: tuple[int, int] | tuple[()] = (),
        after: tuple[int, int] | tuple[()] = (),
    ) -> None:
        #: A struct iovec each. The first that is not worked off has been cut down to what is left.
        self._entries = array("q", before)
        self._entries.frombytes(_iovecs(addresses, lengths).tobytes())
        self._entries.extend(after)
        self._base = self._entries.buffer_info()[0]
        #: Bytes up to the end of each entry, from the start of all.
        self._ends = list(accumulate(self._entries[1::2]))
        #: The first entry that is not worked off.
        self._first = 0
        #: Bytes worked off.
        self.done = 0
        #: Bytes in all.
        self.total = self._ends[-1]

    @property
    def left(self) -> int:
        """Bytes that are not worked off."""
        return self.total - self.done

    def begin(self, limit: int) -> tuple[int, int, int]:
        """What one call shall do: address of the first entry, number of entries, their bytes.

        The bytes are at most ``limit``, for which the last entry is cut short until ``end``.
        """
        ends, first = self._ends, self._first
        last = min(bisect_left(ends, self.done + limit, first), first + MAX_ENTRIES - 1, len(ends) - 1)
        nbytes = ends[last] - self.done
        if nbytes > limit:
            self._entries[2 * last + 1] -= nbytes - limit
            nbytes = limit
        return self._base + 16 * first, last - first + 1, nbytes

    def end(self, count: int, asked: int, moved: int) -> None:
        """One call is over.

        Args:
            count: Number of entries, as told by ``begin``.
            asked: Their bytes, as told by ``begin``.
            moved: How many of those were moved.
        """
        ends, last = self._ends, self._first + count - 1
        cut = ends[last] - self.done - asked
        if cut:
            self._entries[2 * last + 1] += cut
        self.done += moved
        if self.done == ends[last]:
            self._first = last + 1
        elif moved:
            self._first = first = bisect_right(ends, self.done, self._first, last)
            left = ends[first] - self.done
            self._entries[2 * first] += self._entries[2 * first + 1] - left
            self._entries[2 * first + 1] = left


def _iovecs(addresses: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    entries = np.empty((len(addresses), 2), dtype=np.int64)
    entries[:, 0] = addresses
    entries[:, 1] = lengths
    return entries


class VectorIO:
    """The system calls that take vectors. None of them waits for anybody."""

    def __init__(self) -> None:
        # PyDLL keeps the GIL during a call, CDLL doesn't.
        self._keeping, self._releasing = ctypes.PyDLL(None, use_errno=True), ctypes.CDLL(None, use_errno=True)
        for function in (self._keeping.readv, self._keeping.writev):
            function.restype = ctypes.c_ssize_t
            function.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
        #: Whether ``read_process`` is there: on Linux.
        self.reads_processes = hasattr(self._keeping, "process_vm_readv")
        for library in (self._keeping, self._releasing):
            if self.reads_processes:
                library.process_vm_readv.restype = ctypes.c_ssize_t
                vector = (ctypes.c_void_p, ctypes.c_ulong)
                library.process_vm_readv.argtypes = (ctypes.c_int, *vector, *vector, ctypes.c_ulong)

    def read(self, fd: int, into: Vector, limit: int) -> int:
        """Read from a non-blocking descriptor to where ``into`` goes on.

        Returns:
            How many bytes, at most ``limit``; 0 at the end of file.

        Raises:
            OSError: As readv(2); BlockingIOError when nothing is there.
        """
        return self._move(self._keeping.readv, fd, into, limit)

    def write(self, fd: int, out: Vector, limit: int) -> int:
        """Write to a non-blocking descriptor from where ``out`` goes on.

        Returns:
            How many bytes, at most ``limit``.

        Raises:
            OSError: As writev(2); BlockingIOError when there is no room.
        """
        return self._move(self._keeping.writev, fd, out, limit)

    def _move(self, call: Callable[[int, int, int], int], fd: int, vector: Vector, limit: int) -> int:
        address, count, asked = vector.begin(limit)
        moved = call(fd, address, count)
        vector.end(count, asked, max(moved, 0))
        if moved < 0:
            raise _last_error()
        return moved

    def read_process(
        self, pid: int, into: NDArray[np.int64], out: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> int:
        """Read ranges of the memory of a process on this host, this one included.

        Args:
            pid: The process.
            into: Where to: addresses here.
            out: Where from: addresses there.
            lengths: Of the ranges in bytes; of more than ``MAX_ENTRIES`` only the first are read.

        Returns:
            How many bytes were read; fewer than asked for where memory ends.

        Raises:
            OSError: As process_vm_readv(2).
        """
        lengths = lengths[:MAX_ENTRIES]
        count = len(lengths)
        here, there = _iovecs(into[:count], lengths), _iovecs(out[:count], lengths)
        library = self._releasing if lengths.sum() > _RELEASE_BYTES else self._keeping
        moved: int = library.process_vm_readv(pid, here.ctypes.data, count, there.ctypes.data, count, 0)
        if moved < 0:
            raise _last_error()
        return moved


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
