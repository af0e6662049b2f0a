"""What the conformance suite of devices has to be told of one: how to reach its memory, and to break it."""

from __future__ import annotations

import abc
import random
from types import TracebackType

from aiokv.device.base import Buffer, Device, Stream

__all__ = ["DeviceKit"]


class DeviceKit(abc.ABC):
    """One kind of device, and how to reach its memory from a test. An async context manager.

    Args:
        seed: Decides all that the suite draws.
    """

    #: The device under test.
    device: Device

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)  # noqa: S311 - an order, not a secret
        self._buffers: list[Buffer] = []

    @abc.abstractmethod
    def make_buffer(self, nbytes: int) -> Buffer:
        """New memory that the device can copy from and to."""

    @abc.abstractmethod
    def close_buffer(self, buffer: Buffer) -> None:
        """Give that memory back. May be called twice."""

    @abc.abstractmethod
    def store(self, buffer: Buffer, data: bytes) -> None:
        """Put ``data`` at the start of ``buffer``, before the next thing the device does."""

    @abc.abstractmethod
    def load(self, buffer: Buffer) -> bytes:
        """All of ``buffer``, once the events of what was copied there were seen done."""

    @abc.abstractmethod
    async def settle(self) -> None:
        """Let everything enqueued so far complete, or fail."""

    @abc.abstractmethod
    def break_copy(self, stream: Stream, source: Buffer) -> None:
        """Make the next copy from ``source`` on ``stream`` fail, in whichever way the device can."""

    def foreign_stream(self) -> object:
        """A stream of the framework that the device belongs to, or whatever stands for one."""
        return self.device.stream()

    def buffer(self, data: bytes) -> Buffer:
        """Memory that holds ``data`` and is given back at the end."""
        buffer = self.make_buffer(len(data))
        self._buffers.append(buffer)
        self.store(buffer, data)
        return buffer

    def noise(self, nbytes: int) -> bytes:
        """Bytes that are nowhere else."""
        return self.random.randbytes(nbytes)

    async def __aenter__(self) -> DeviceKit:
        """Nothing is made before it is needed."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let the device come to rest, then give its memory back."""
        await self.settle()
        for buffer in self._buffers:
            self.close_buffer(buffer)
