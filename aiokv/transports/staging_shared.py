"""Memory that two processes have, and both may write to."""

from __future__ import annotations

import fcntl
import io
import mmap
import os

from aiokv.device.host import HostBuffer, available_bytes, populate
from aiokv.errors import CapacityError, DeviceError

__all__ = ["map_shared", "shared"]


def shared(nbytes: int) -> HostBuffer:
    """New memory, page aligned, that another process can map to be written, too; see ``map_shared``.

    Raises:
        CapacityError: There isn't so much.
    """
    available = available_bytes()
    if available is not None and nbytes > available:  # the kernel would sooner end a process than say so
        raise CapacityError(f"{nbytes} bytes of shared memory: only {available} are available")
    file = None
    try:
        fd = os.memfd_create("aiokv-staging", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        file = io.FileIO(fd, "r+")
        os.posix_fallocate(fd, 0, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        mapping = _mapped(fd, nbytes)
    except (OSError, ValueError) as error:
        if file is not None:
            file.close()
        raise CapacityError(f"{nbytes} bytes of shared memory can't be had: {error}") from error
    return HostBuffer(memoryview(mapping), file=file, mapping=mapping)


def map_shared(fd: int, nbytes: int) -> HostBuffer:
    """Map what another process's ``shared`` made, of which the descriptor stays the caller's.

    Raises:
        DeviceError: It is smaller, can be cut short, or can't be mapped.
    """
    try:
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK or os.fstat(fd).st_size < nbytes:
            raise DeviceError(f"the shared memory is less than {nbytes} bytes, or could be cut short")
        mapping = _mapped(fd, nbytes)
    except (OSError, ValueError) as error:
        raise DeviceError(f"the shared memory can't be mapped: {error}") from error
    return HostBuffer(memoryview(mapping), mapping=mapping)


def _mapped(fd: int, nbytes: int) -> mmap.mmap:
    mapping = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED)
    populate(mapping)
    return mapping
