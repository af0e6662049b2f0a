"""What the conformance suite of devices has to be told of a ``CudaDevice``, real or on a ``FakeCuda``."""

from __future__ import annotations

import mmap

from aiokv.device.base import Buffer, Stream
from aiokv.device.cuda import CudaBuffer, CudaDevice, PinnedBuffer
from aiokv.device.host import HostBuffer
from aiokv.testing.conformance.devicekit import DeviceKit

__all__ = ["CudaKit"]


class CudaKit(DeviceKit):
    """A GPU, whose buffers are drawn to be in its own memory or in pinned memory of the host.

    Args:
        seed: Decides all that is drawn.
        device: The GPU; stays the caller's.
        pinned: The share of buffers that are in pinned memory.
    """

    device: CudaDevice

    def __init__(self, seed: int, device: CudaDevice, *, pinned: float = 0.5) -> None:
        super().__init__(seed)
        self.device = device
        self._pinned = pinned

    def make_buffer(self, nbytes: int) -> Buffer:
        """New memory of either kind."""
        if self.random.random() < self._pinned:
            mapping = mmap.mmap(-1, nbytes)
            return self.device.pin_now(HostBuffer(memoryview(mapping), mapping=mapping))
        return self.device.allocate(nbytes)

    def close_buffer(self, buffer: Buffer) -> None:
        """Give it back."""
        assert isinstance(buffer, CudaBuffer | PinnedBuffer)
        buffer.close()

    def store(self, buffer: Buffer, data: bytes) -> None:
        """Write from the host, and wait for it."""
        import torch

        if isinstance(buffer, PinnedBuffer):
            buffer.view[: len(data)] = data
            return
        assert isinstance(buffer, CudaBuffer)
        buffer.tensor()[: len(data)].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        self._synchronize()

    def load(self, buffer: Buffer) -> bytes:
        """Read on the host."""
        if isinstance(buffer, PinnedBuffer):
            return bytes(buffer.view)
        assert isinstance(buffer, CudaBuffer)
        return bytes(buffer.tensor().cpu().numpy().data)

    async def settle(self) -> None:
        """Wait for the whole GPU."""
        self._synchronize()

    def break_copy(self, stream: Stream, source: Buffer) -> None:
        """Close the source: a GPU has no other way to fail that it recovers from."""
        self.close_buffer(source)

    def foreign_stream(self) -> object:
        """A stream of torch's."""
        return self.device.context.cuda.torch.cuda.Stream(device=self.device.place)

    def _synchronize(self) -> None:
        self.device.context.cuda.torch.cuda.synchronize(self.device.ordinal)
