"""Host memory as a device: registered memory, streams that are trivial, copies done at once.

A copy is executed inside ``HostDevice.copy``, so everything enqueued is done by the time the
call returns, and every event is done from the start. Callers keep chunks small: a chunk is a
slice of the event loop's time.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import mmap
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from aiokv.device.base import Buffer, Event, Stream
from aiokv.device.hostcopy import copy_pieces
from aiokv.errors import CapacityError, ClosedError, DeviceError
from aiokv.proto.plan import Chunk, CopyPlan

if TYPE_CHECKING:
    import torch

__all__ = ["HostBuffer", "HostDevice", "HostStream", "available_bytes", "populate"]


#: F_SEAL_FUTURE_WRITE of Linux 5.1, which ``fcntl`` has no name for: mappings that are there may write,
#: but nobody who is given the descriptor.
_SEAL_FUTURE_WRITE = 0x10
#: MADV_POPULATE_WRITE of Linux 5.14, likewise.
_POPULATE_WRITE = 23


class HostBuffer:
    """A range of host memory. Use ``allocate``, ``map`` or ``from_tensor`` to get one.

    Whoever makes it closes it. Memory that views still refer to stays mapped until the last of
    them is gone, whatever ``close`` was told.
    """

    def __init__(
        self,
        view: memoryview,
        *,
        owner: object = None,
        file: io.FileIO | None = None,
        mapping: mmap.mmap | None = None,
    ) -> None:
        self._view: memoryview | None = view
        self._owner = owner
        self._file = file
        self._mapping = mapping
        self._address = int(np.frombuffer(view, dtype=np.uint8).ctypes.data)
        self._nbytes = view.nbytes

    @classmethod
    def allocate(cls, nbytes: int) -> HostBuffer:
        """New zeroed memory, page aligned, that other processes can be given by descriptor.

        On Linux it is an anonymous memfd with all its pages present, sealed so that nobody can
        change its size under those who map it. Elsewhere it is private, and ``fd`` is None.

        Raises:
            CapacityError: There isn't so much memory.
        """
        if nbytes <= 0:
            raise ValueError(f"a buffer needs at least one byte, got {nbytes}")
        # The kernel would sooner end a process than refuse the pages of a memfd.
        available = available_bytes()
        if available is not None and nbytes > available:
            raise CapacityError(f"{nbytes} bytes of host memory: only {available} are available")
        if not hasattr(os, "memfd_create"):
            try:
                mapping = mmap.mmap(-1, nbytes)
            except (OSError, ValueError, OverflowError) as error:
                raise CapacityError(f"{nbytes} bytes of host memory can't be had: {error}") from error
            return cls(memoryview(mapping), mapping=mapping)
        import fcntl  # not everywhere

        file = None
        try:
            fd = os.memfd_create("aiokv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            # As a file it is closed, with a warning, also when the buffer is forgotten.
            file = io.FileIO(fd, "r+")
            os.posix_fallocate(fd, 0, nbytes)
            mapping = _mmap(fd, nbytes, mmap.PROT_READ | mmap.PROT_WRITE)
            # Pages are all there; their table entries too, so that no copy has to fault them in.
            populate(mapping)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        except (OSError, ValueError, OverflowError) as error:
            if file is not None:
                file.close()
            raise CapacityError(f"{nbytes} bytes of host memory can't be had: {error}") from error
        return cls(memoryview(mapping), file=file, mapping=mapping)

    @classmethod
    def map(cls, fd: int, nbytes: int) -> HostBuffer:
        """Map the first ``nbytes`` of a descriptor, such as another process's memfd, to be read.

        The descriptor stays the caller's, who may close it at once. Make sure that it is sealed
        against shrinking: touching a page that is gone kills the process.

        Raises:
            OSError: It can't be mapped.
            ValueError: It is shorter than ``nbytes``.
        """
        if nbytes <= 0:
            raise ValueError(f"a buffer needs at least one byte, got {nbytes}")
        mapping = _mmap(fd, nbytes, mmap.PROT_READ)
        return cls(memoryview(mapping), mapping=mapping)

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> HostBuffer:
        """Borrow a contiguous CPU tensor's memory and keep the tensor alive until ``close``.

        Raises:
            ValueError: The tensor is elsewhere, or not contiguous.
        """
        import torch

        if tensor.device.type != "cpu":
            raise ValueError(f"the tensor is on {tensor.device}, not in host memory")
        if not tensor.is_contiguous():
            raise ValueError("the tensor isn't contiguous")
        flat: memoryview = tensor.detach().reshape(-1).view(torch.uint8).numpy().data
        return cls(flat, owner=tensor)

    @property
    def address(self) -> int:
        """Address of the first byte, in this process."""
        return self._address

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self._nbytes

    @property
    def fd(self) -> int | None:
        """Descriptor of the memory, to be given to other processes; the buffer's own. None if it has none."""
        return None if self._file is None else self._file.fileno()

    @property
    def view(self) -> memoryview:
        """All of it as a flat memoryview of bytes, writable unless it was mapped read-only.

        Raises:
            ClosedError: The buffer was closed.
        """
        if self._view is None:
            raise ClosedError("this host buffer was closed")
        return self._view

    def close(self) -> None:
        """Give the memory back, as soon as no view refers to it. May be called twice."""
        view, self._view = self._view, None
        file, self._file = self._file, None
        mapping, self._mapping = self._mapping, None
        self._owner = None
        if file is not None:
            file.close()
        # Views of arrays and tensors may be alive: then the last of them unmaps the memory.
        with contextlib.suppress(BufferError):
            if view is not None:
                view.release()
            if mapping is not None:
                mapping.close()

    def __repr__(self) -> str:
        return f"<HostBuffer of {self._nbytes} bytes{' closed' if self._view is None else ''}>"


class _Done:
    """The event of a device that has always just finished."""

    __slots__ = ()

    def done(self) -> bool:
        """True: copies are executed when they are enqueued."""
        return True


class HostStream:
    """A stream whose work is done as it is enqueued."""

    __slots__ = ("_done",)

    def __init__(self, done: Event) -> None:
        self._done = done

    def record(self) -> Event:
        """The point after all enqueued so far, which is done. From any thread."""
        return self._done

    def wait(self, event: Event) -> None:
        """Go on after ``event``.

        Raises:
            DeviceError: It isn't done, and the host can't wait for it without blocking.
        """
        if not event.done():
            raise DeviceError("a host stream can't wait for an event that isn't done; await it first")


class HostDevice:
    """Host memory, with the calls of a device."""

    def __init__(self) -> None:
        self._stream = HostStream(_Done())

    @property
    def kind(self) -> str:
        """``"host"``."""
        return "host"

    @property
    def budget_s(self) -> float:
        """Seconds that copies may hold the event loop in one turn."""
        return 0.5e-3

    def allocate(self, nbytes: int) -> HostBuffer:
        """New memory; see ``HostBuffer.allocate``. The caller closes it."""
        return HostBuffer.allocate(nbytes)

    def stream(self) -> Stream:
        """A stream. All are the same, as none has anything pending."""
        return self._stream

    def adopt(self, stream: object | None) -> Stream:
        """The caller's stream: whatever it is, host memory has no queue to order after."""
        return self._stream

    def copy(
        self,
        plan: CopyPlan,
        chunk: Chunk,
        src: Sequence[Buffer],
        dst: Sequence[Buffer],
        *,
        stream: Stream,
    ) -> None:
        """Copy one chunk, now, between buffers that have a ``view``.

        Raises:
            DeviceError: A buffer is closed, too short, read-only or not host memory. Checked
                before any byte is copied.
        """
        try:
            copy = plan.copy(chunk)
            sources = [src[number].view for number, _ in copy.src]  # type: ignore[attr-defined]
            targets = [dst[number].view for number, _ in copy.dst]  # type: ignore[attr-defined]
            copy_pieces(copy, chunk.lo, chunk.hi, sources, targets)
        except (AttributeError, BufferError, ClosedError, LookupError, TypeError, ValueError) as error:
            raise DeviceError(f"{chunk} can't be copied on the host: {error}") from error


def _mmap(fd: int, nbytes: int, access: int) -> mmap.mmap:
    if sys.version_info >= (3, 13):
        return mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=access, trackfd=False)
    # Before 3.13 the mapping keeps a duplicate of the descriptor for as long as it is mapped.
    return mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=access)


def populate(mapping: mmap.mmap) -> None:
    """Have the page table entries of a writable mapping made now. Takes 0.1 ms a MiB, without the GIL.

    ``MAP_POPULATE`` would do it within ``mmap``, which keeps the GIL: a loop in another thread stands still.
    Before Linux 5.14 this does nothing, and each page's entry is made when it is touched first.
    """
    memory = np.frombuffer(mapping, np.uint8)
    address, nbytes = ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(memory.nbytes)
    ctypes.CDLL(None).madvise(address, nbytes, _POPULATE_WRITE)


def available_bytes() -> int | None:
    """Bytes that can be had without swapping, as the kernel estimates; None where it doesn't say."""
    found = []
    with contextlib.suppress(OSError, ValueError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found += [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    with contextlib.suppress(OSError, ValueError):  # a container's limit; "max" is none
        found.append(int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    return min(found, default=None)
