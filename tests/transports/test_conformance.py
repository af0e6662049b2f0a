from __future__ import annotations

import pytest

from aiokv.device.cache import KVCache
from aiokv.device.mocked import MockedDevice
from aiokv.proto.layout import CacheLayout
from aiokv.testing.conformance.transportkit import TransportKit
from aiokv.testing.conformance.transports import CASES, Case
from aiokv.transports.base import Transport
from aiokv.transports.cma import CmaTransport
from aiokv.transports.memory import MemoryHub, MemoryTransport
from aiokv.transports.shm import ShmTransport
from aiokv.transports.tcp import TcpTransport


class MemoryKit(TransportKit):
    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.hub = MemoryHub()

    def make_transport(self) -> Transport:
        return MemoryTransport(self.hub)


class MockedKit(MemoryKit):
    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.device = MockedDevice(seed)

    def make_cache(self, layout: CacheLayout) -> KVCache:
        return KVCache.allocate(layout, device=self.device)

    async def drive(self) -> None:
        self.device.run()
        assert not self.device.hazards


class ShmKit(TransportKit):
    def make_transport(self) -> Transport:
        return ShmTransport()


class CmaKit(TransportKit):
    def make_transport(self) -> Transport:
        return CmaTransport()


class TcpKit(TransportKit):
    def make_transport(self) -> Transport:
        return TcpTransport()


class ManyStreamsKit(TransportKit):
    def make_transport(self) -> Transport:
        return TcpTransport(streams=self.random.randint(3, 16))  # at each end another number


KITS = {
    "memory": MemoryKit,
    "mocked": MockedKit,
    "shm": ShmKit,
    "cma": CmaKit,
    "tcp": TcpKit,
    "streams": ManyStreamsKit,
}


@pytest.mark.asyncio
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("kind", KITS)
async def test_conformance(kind: str, case: Case, seed: int) -> None:
    async with KITS[kind](seed) as kit:
        await case(kit)
