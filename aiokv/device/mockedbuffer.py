"""Memory of a mocked device."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from aiokv.device.base import Buffer
from aiokv.device.hazards import Access, Hazard, History, Point
from aiokv.errors import DeviceError

__all__ = ["MockedBuffer", "check_range"]

#: What memory holds after it was freed.
FREED = 0xDD


class Notebook(Protocol):
    """Where hazards are noted: the mocked device."""

    def note(self, found: list[Hazard]) -> None:
        """Keep what was found."""


class MockedBuffer:
    """Host memory that plays a device's. Its device's streams access it, and the host may too."""

    def __init__(self, device: Notebook, name: str, nbytes: int) -> None:
        self.device = device
        self.name = name
        self.history = History(name, nbytes)
        self.bytes: NDArray[np.uint8] = np.zeros(nbytes, dtype=np.uint8)

    def __repr__(self) -> str:
        return f"<{self.name}, {self.nbytes} bytes>"

    @property
    def address(self) -> int:
        """Address of the first byte, in this process."""
        return int(self.bytes.ctypes.data)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return len(self.bytes)

    @property
    def view(self) -> memoryview:
        """All bytes, writable, past the check for hazards."""
        return self.bytes.data

    def read(self, offset: int, nbytes: int) -> bytes:
        """Read on the host, at once. A hazard unless the host has seen all writes to it done."""
        self._access("host read", offset, nbytes, writes=False)
        return self.bytes[offset : offset + nbytes].tobytes()

    def write(self, offset: int, data: bytes) -> None:
        """Write on the host, at once. A hazard unless the host has seen all accesses to it done."""
        self._access("host write", offset, len(data), writes=True)
        self.bytes[offset : offset + len(data)] = np.frombuffer(data, np.uint8)

    def free(self) -> None:
        """Give the memory back. A hazard unless the host has seen all accesses to it done.

        The bytes are overwritten, and what still comes for them finds that. May be called twice.
        """
        self.bytes[:] = FREED
        self.device.note(self.history.free())

    #: Like any other buffer.
    close = free

    def _access(self, what: str, offset: int, nbytes: int, *, writes: bool) -> None:
        check_range(self, offset, nbytes)
        self.device.note(self.history.add(access_of(what, offset, nbytes, writes=writes, point=None)))


def check_range(buffer: Buffer, offset: int, nbytes: int) -> None:
    """Raise DeviceError unless the range lies within ``buffer``."""
    if offset < 0 or nbytes < 0 or offset + nbytes > buffer.nbytes:
        raise DeviceError(f"{nbytes} bytes at {offset} reach beyond {buffer!r}")


def access_of(what: str, offset: int, nbytes: int, *, writes: bool, point: Point | None) -> Access:
    """One range as an access."""
    return Access(what, np.array([offset]), np.array([nbytes]), writes=writes, point=point)
