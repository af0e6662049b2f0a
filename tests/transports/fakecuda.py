"""A GPU that isn't there: mocked memory and streams that say they are CUDA's, and a driver of fakes."""

from __future__ import annotations

import struct
import threading

from aiokv.device.base import Buffer
from aiokv.device.cache import KVCache
from aiokv.device.gate import Gate
from aiokv.device.mocked import MockedBuffer, MockedDevice
from aiokv.errors import DeviceError
from aiokv.proto.layout import CacheLayout
from aiokv.testing.conformance.transportkit import TransportKit
from aiokv.transports.base import Transport
from aiokv.transports.cuda_ipc import CudaIpcTransport
from aiokv.transports.cuda_ipc_driver import HANDLE_BYTES, Allocation

GRANULE = 2 << 20


class FakeCuda(MockedDevice):
    kind = "cuda"
    ordinal = 0

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.gate = Gate()
        self.memory: list[MockedBuffer] = []

    def allocate(self, nbytes: int) -> MockedBuffer:
        buffer = super().allocate(nbytes)
        self.memory.append(buffer)
        return buffer

    def register(self, address: int, nbytes: int, owner: object) -> Buffer:
        for buffer in self.memory:
            if (buffer.address, buffer.nbytes) == (address, nbytes):
                return buffer  # whose hazards are found
            if buffer.address <= address < buffer.address + buffer.nbytes:
                return Part(buffer, address - buffer.address, nbytes)
        raise DeviceError(f"no memory at {address:#x}")


class Part:
    """A part of a fake allocation."""

    def __init__(self, of: MockedBuffer, offset: int, nbytes: int) -> None:
        self.address, self.nbytes = of.address + offset, nbytes
        self.view = of.view[offset : offset + nbytes]


class FakeDriver:
    """The calls, on the memory of one ``FakeCuda``; what it was asked is counted, for tests to look at."""

    def __init__(self, device: FakeCuda) -> None:
        self.device = device
        self.lock = threading.Lock()
        self.opened: list[int] = []
        self.closed: list[int] = []
        self.reached: list[int] = []
        self.made: dict[int, MockedBuffer] = {}
        self.refuses = ""
        self.fails = ""

    def _at(self, address: int) -> MockedBuffer:
        with self.lock:
            for buffer in [*self.device.memory, *self.made.values()]:
                if buffer.address <= address < buffer.address + buffer.nbytes:
                    return buffer
        raise DeviceError(f"no memory at {address:#x}")

    def find(self, address: int) -> Allocation:
        buffer = self._at(address)
        return Allocation(buffer.address, buffer.nbytes)

    def refusal(self, address: int) -> str:
        return self.refuses

    def export(self, base: int) -> bytes:
        return struct.pack("q", base).ljust(HANDLE_BYTES, b"h")

    def open(self, handle: bytes) -> Allocation:
        if self.fails == "open":
            raise DeviceError("peer access is not supported")
        found = self.find(struct.unpack_from("q", handle)[0])
        with self.lock:
            self.opened.append(found.base)
        return found

    def reach(self, address: int) -> None:
        if self.fails == "reach":
            raise DeviceError("memory of GPU 1 can't be reached")
        self.reached.append(self._at(address).address)

    def close(self, base: int) -> None:
        with self.lock:
            self.closed.append(base)

    def allocate(self, data: bytes) -> int:
        buffer = MockedBuffer(self.device, "nonce", GRANULE)
        buffer.bytes[: len(data)] = list(data)
        with self.lock:
            self.made[buffer.address] = buffer
        return buffer.address

    def free(self, base: int) -> None:
        with self.lock:
            del self.made[base]

    def read(self, address: int, nbytes: int) -> bytes:
        if self.fails == "read":
            raise DeviceError("an illegal memory access was encountered")
        buffer = self._at(address)
        offset = address - buffer.address
        return buffer.bytes[offset : offset + nbytes].tobytes()


class Apart(CudaIpcTransport):
    """One that takes every producer for another process."""

    def _is_own(self, sock: object) -> bool:
        return False


class IpcKit(TransportKit):
    kind: type[CudaIpcTransport] = Apart

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.device = FakeCuda(seed)
        self.driver = FakeDriver(self.device)

    def make_transport(self) -> Transport:
        return self.kind(lambda ordinal: self.driver)

    def make_cache(self, layout: CacheLayout) -> KVCache:
        return KVCache.allocate(layout, device=self.device)

    async def drive(self) -> None:
        self.device.run()
        assert not self.device.hazards

    async def __aexit__(self, *error: object) -> None:
        await super().__aexit__(*error)
        if error[0] is None:
            assert not self.driver.made
            assert sorted(self.driver.opened) == sorted(self.driver.closed)


class OwnIpcKit(IpcKit):
    kind = CudaIpcTransport
