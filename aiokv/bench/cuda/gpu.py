"""A GPU as the benchmarks use it: what is missing for it, its memory, fresh random data, and raw streams."""

from __future__ import annotations

import ctypes
from importlib.util import find_spec
from typing import Any

import numpy as np

from aiokv.device.cuda import CudaBuffer, CudaDevice, PinnedBuffer
from aiokv.device.cudalibrary import load
from aiokv.device.host import HostBuffer
from aiokv.errors import AiokvError

__all__ = ["Gpu", "Named", "gpus", "missing"]


def missing() -> str:
    """What this machine lacks for a benchmark of a GPU; empty if nothing."""
    if find_spec("cupy") is None:
        return "it needs a GPU, and cupy: pip install 'aiokv[cuda13]'"
    try:
        load()
    except AiokvError as error:
        return str(error)
    return ""


def gpus() -> int:
    """How many there are, which makes no context."""
    found: int = load().runtime.getDeviceCount()
    return found


class Named:
    """A raw stream as cupy launches kernels on one."""

    def __init__(self, handle: int) -> None:
        self.ptr = handle


class Gpu:
    """One GPU of this process, and the libraries. Making it blocks for a second or more."""

    def __init__(self, ordinal: int = 0) -> None:
        self.cuda = load()
        # Modules without types of their own.
        self.torch: Any = self.cuda.torch
        self.runtime: Any = self.cuda.runtime
        self.torch.cuda.set_device(ordinal)
        self.torch.zeros(1, device="cuda")
        self.device = CudaDevice(ordinal, cuda=self.cuda)
        self._pinned: list[int] = []

    def kernels(self, source: str, *names: str) -> list[Any]:
        """Kernels of a source, loaded; to be called with grid, block, arguments and ``stream=``."""
        module = self.cuda.cupy.RawModule(code=source, options=("-std=c++17",))
        return [module.get_function(name).kernel for name in names]

    def stream(self) -> Named:
        """A raw stream, which stays until the process ends."""
        return Named(self.runtime.streamCreateWithFlags(1))  # doesn't wait for the default stream

    def synchronize(self) -> None:
        """Wait for all that is enqueued."""
        self.runtime.deviceSynchronize()

    def host_memory(self, nbytes: int) -> int:
        """Address of new pinned memory, in one piece and zeroed; it stays until ``close``."""
        address: int = self.runtime.hostAlloc(nbytes, 0)
        ctypes.memset(address, 0, nbytes)
        self._pinned.append(address)
        return address

    def pinned(self, nbytes: int) -> PinnedBuffer:
        """New pinned memory of aiokv's."""
        return self.device.pin_now(HostBuffer.allocate(nbytes))

    def bytes_at(self, address: int, nbytes: int) -> Any:  # noqa: ANN401 - a tensor
        """Host memory as a flat tensor of bytes."""
        memory = (ctypes.c_uint8 * nbytes).from_address(address)
        return self.torch.from_numpy(np.frombuffer(memoryview(memory), np.uint8))

    def bytes_of(self, buffer: CudaBuffer | PinnedBuffer) -> Any:  # noqa: ANN401 - a tensor
        """A buffer as a flat tensor of bytes."""
        if isinstance(buffer, CudaBuffer):
            return buffer.tensor()
        return self.bytes_at(buffer.address, buffer.nbytes)

    def close(self) -> None:
        """Give everything back; nothing may be in flight."""
        self.synchronize()
        self.device.close()
        pinned, self._pinned = self._pinned, []
        for address in pinned:
            self.runtime.freeHost(address)
