"""Scattered memory as the kernel takes it: vectors of (address, length), and the calls on them.

One call moves up to a thousand fragments between a socket or another process and their own
places, with nothing of Python done for each of them. Vectors are filled by numpy from a plan's
extents. They are plain addresses: whoever makes one keeps the memory where it is until the vector
is worked off or dropped.
"""

from __future__ import annotations

import ctypes
import os

import numpy as np
from numpy.typing import NDArray

__all__ = ["Vector", "VectorIO"]

#: Most entries of one call (IOV_MAX).
_MAX_ENTRIES = 1024
#: A call that may move more bytes than this gives up the GIL. Below, that would cost more than it
#: gives: beside a thread that runs Python, getting it back takes up to 5 ms.
_RELEASE_BYTES = 1 << 20


class Vector:
    """A list of memory ranges that is worked off from its start.

    Args:
        addresses: Of the ranges, in this or another process.
        lengths: Of the ranges in bytes, none of them 0.
    """

    __slots__ = ("_base", "_ends", "_entries", "_first", "done", "total")

    def __init__(self, addresses: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
        #: A struct iovec each. The first that is not worked off has been cut down to what is left.
        self._entries = np.empty((len(addresses), 2), dtype=np.int64)
        self._entries[:, 0] = addresses
        self._entries[:, 1] = lengths
        self._base = self._entries.ctypes.data
        #: Bytes up to the end of each entry, from the start of all.
        self._ends = np.cumsum(lengths)
        #: The first entry that is not worked off.
        self._first = 0
        #: Bytes worked off.
        self.done = 0
        #: Bytes in all.
        self.total = int(self._ends[-1])

    @property
    def left(self) -> int:
        """Bytes that are not worked off."""
        return self.total - self.done

    def begin(self, limit: int) -> tuple[int, int, int]:
        """What one call shall do: address of the first entry, number of entries, their bytes.

        The bytes are at most ``limit``, for which the last entry is cut short until ``end``.
        """
        last = min(int(self._ends.searchsorted(self.done + limit)), self._first + _MAX_ENTRIES - 1)
        last = min(last, len(self._ends) - 1)
        nbytes = int(self._ends[last]) - self.done
        if nbytes > limit:
            self._entries[last, 1] -= nbytes - limit
        return self._base + 16 * self._first, last - self._first + 1, min(nbytes, limit)

    def end(self, count: int, asked: int, moved: int) -> None:
        """One call is over.

        Args:
            count: Number of entries, as told by ``begin``.
            asked: Their bytes, as told by ``begin``.
            moved: How many of those were moved.
        """
        last = self._first + count - 1
        cut = int(self._ends[last]) - self.done - asked
        if cut:
            self._entries[last, 1] += cut
        if not moved:
            return
        self.done += moved
        first = int(self._ends.searchsorted(self.done, side="right"))
        if first < len(self._ends):
            left = int(self._ends[first]) - self.done
            self._entries[first, 0] += self._entries[first, 1] - left
            self._entries[first, 1] = left
        self._first = first


class VectorIO:
    """The system calls that take vectors. None of them waits for anybody."""

    def __init__(self) -> None:
        # PyDLL keeps the GIL during a call, CDLL doesn't.
        self._libraries = ctypes.PyDLL(None, use_errno=True), ctypes.CDLL(None, use_errno=True)
        for library in self._libraries:
            for name in ("readv", "writev"):
                getattr(library, name).restype = ctypes.c_ssize_t
                getattr(library, name).argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
            if hasattr(library, "process_vm_readv"):  # Linux
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
        return self._move("readv", fd, into, limit)

    def write(self, fd: int, out: Vector, limit: int) -> int:
        """Write to a non-blocking descriptor from where ``out`` goes on.

        Returns:
            How many bytes, at most ``limit``.

        Raises:
            OSError: As writev(2); BlockingIOError when there is no room.
        """
        return self._move("writev", fd, out, limit)

    def _move(self, name: str, fd: int, vector: Vector, limit: int) -> int:
        address, count, asked = vector.begin(limit)
        moved: int = getattr(self._libraries[asked > _RELEASE_BYTES], name)(fd, address, count)
        vector.end(count, asked, max(moved, 0))
        if moved < 0:
            raise _last_error()
        return moved

    def read_process(self, pid: int, into: Vector, out: Vector) -> int:
        """Read from the memory of another process, or this one, on this host.

        Args:
            pid: The process.
            into: Where to, here.
            out: Where from, there; the same lengths as ``into``, and as far worked off.

        Returns:
            How many bytes were read: not all where there are many ranges, or where memory ends.

        Raises:
            OSError: As process_vm_readv(2).
        """
        to, count, asked = into.begin(into.left)
        at, _, _ = out.begin(into.left)
        library = self._libraries[asked > _RELEASE_BYTES]
        moved: int = library.process_vm_readv(pid, to, count, at, count, 0)
        for vector in (into, out):
            vector.end(count, asked, max(moved, 0))
        if moved < 0:
            raise _last_error()
        return moved


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
