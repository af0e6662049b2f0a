"""Memory of another process, mapped read-only, with what takes long done off the loop.

Two things about a mapping take long. The first touch of a page costs a page fault, which made
copying from a fresh mapping 5 to 20 times slower than from one whose pages are present; making a
GiB of pages present takes about 60 ms. Giving a GiB back takes 20 ms and more. A daemon thread
does both, page tables a slice at a time, and is not waited for when the process ends.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading

from aiokv.device.host import HostBuffer
from aiokv.device.offloop import off_loop

__all__ = ["Mapping"]

#: Bytes made present in one call, which can't be interrupted: some milliseconds.
_SLICE = 64 << 20
#: madvise(2): make pages present for reading. Linux 5.14; not in Python's mmap.
_MADV_POPULATE_READ = 22


class Mapping:
    """The start of a descriptor's memory, mapped read-only for as long as a link is there.

    Args:
        fd: Stays the caller's, who may close it at once.
        nbytes: How much of it to map, from its start.

    Raises:
        OSError: It can't be mapped.
        ValueError: The descriptor's file is shorter than ``nbytes``.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        #: What copies read from.
        self.buffer = HostBuffer.map(fd, nbytes)
        self._wanted = True
        #: Held by the thread that works on the mapping, never by the loop.
        self._working = threading.Lock()

    def populate(self) -> asyncio.Future[None]:
        """Make all pages present, until closed. Where the kernel can't, pages come when touched."""
        return off_loop(self._populate, "aiokv-populate")

    def _populate(self) -> None:
        libc = ctypes.CDLL(None)
        base, nbytes = self.buffer.address, self.buffer.nbytes
        with self._working:
            for start in range(0, nbytes, _SLICE):
                size = min(_SLICE, nbytes - start)
                if not self._wanted or libc.madvise(
                    ctypes.c_void_p(base + start), ctypes.c_size_t(size), _MADV_POPULATE_READ
                ):
                    return

    def close(self) -> asyncio.Future[None]:
        """Unmap, once; the future is done when it is.

        If something still holds a view of the memory, it is unmapped when the last view goes: a
        mapping kept too long is better than a pointer to nowhere.
        """
        self._wanted = False
        return off_loop(self._close, "aiokv-unmap")

    def _close(self) -> None:
        with self._working:
            self.buffer.close()
