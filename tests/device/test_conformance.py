"""The suite that every device passes."""

from __future__ import annotations

import pytest

from aiokv.device.base import Buffer, Stream
from aiokv.device.host import HostBuffer, HostDevice
from aiokv.device.mocked import MockedBuffer, MockedDevice, MockedStream
from aiokv.testing.conformance.devicekit import DeviceKit
from aiokv.testing.conformance.devices import CASES, Case


class HostKit(DeviceKit):
    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.device = HostDevice()

    def make_buffer(self, nbytes: int) -> Buffer:
        return HostBuffer(memoryview(bytearray(nbytes)), owner=None)

    def close_buffer(self, buffer: Buffer) -> None:
        assert isinstance(buffer, HostBuffer)
        buffer.close()

    def store(self, buffer: Buffer, data: bytes) -> None:
        assert isinstance(buffer, HostBuffer)
        buffer.view[: len(data)] = data

    def load(self, buffer: Buffer) -> bytes:
        assert isinstance(buffer, HostBuffer)
        return bytes(buffer.view)

    async def settle(self) -> None:
        pass

    def break_copy(self, stream: Stream, source: Buffer) -> None:
        self.close_buffer(source)


class MockedKit(DeviceKit):
    """Checks besides that the suite itself orders what it does."""

    device: MockedDevice

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.device = MockedDevice(seed, raises=True)

    def make_buffer(self, nbytes: int) -> Buffer:
        return self.device.allocate(nbytes)

    def close_buffer(self, buffer: Buffer) -> None:
        assert isinstance(buffer, MockedBuffer)
        buffer.free()

    def store(self, buffer: Buffer, data: bytes) -> None:
        assert isinstance(buffer, MockedBuffer)
        buffer.write(0, data)

    def load(self, buffer: Buffer) -> bytes:
        assert isinstance(buffer, MockedBuffer)
        return buffer.read(0, buffer.nbytes)

    async def settle(self) -> None:
        self.device.run()

    def break_copy(self, stream: Stream, source: Buffer) -> None:
        assert isinstance(stream, MockedStream)
        self.device.fail(stream)

    def foreign_stream(self) -> object:
        stream = self.device.stream()
        self._kept = stream  # as a framework keeps its own

        class Foreign:
            def __cuda_stream__(self) -> tuple[int, int]:
                return stream.__cuda_stream__()

        return Foreign()


@pytest.mark.asyncio
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("kind", [HostKit, MockedKit])
async def test_device(kind: type[DeviceKit], case: Case, seed: int) -> None:
    async with kind(seed) as kit:
        await case(kit)
