from __future__ import annotations

import asyncio
import random

import pytest

from aiokv.device.cache import KVCache
from aiokv.proto.layout import CacheLayout
from aiokv.testing.conformance.transportkit import TransportKit
from aiokv.testing.conformance.transports import CASES, Case
from aiokv.testing.fakenccl import FakeNccl, StagingMockedDevice
from aiokv.transports.base import Transport
from aiokv.transports.nccl import NcclTransport
from aiokv.transports.nccl_calls import Calls


class NcclKit(TransportKit):
    """A mocked device that steps by itself, as a GPU does."""

    staging = 8 << 20

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.device = StagingMockedDevice(seed)
        self.fake = FakeNccl(self.device)
        rng = random.Random(seed)
        self.steps = self.device.autostep(asyncio.get_running_loop(), rng, 1e-6)

    def make_transport(self) -> Transport:
        return NcclTransport(staging=self.staging, calls=Calls(self.fake, kind="mocked"))

    def make_cache(self, layout: CacheLayout) -> KVCache:
        return KVCache.allocate(layout, device=self.device)

    async def __aexit__(self, *error) -> None:
        try:
            await super().__aexit__(*error)
        finally:
            self.fake.close()
            for _ in range(200 if error == (None, None, None) else 0):  # threads that were abandoned
                if self.fake.alive():
                    await asyncio.sleep(0.01)
            self.steps.close()
        assert not self.device.hazards
        assert not self.fake.faults
        assert not self.fake.alive()


@pytest.mark.asyncio
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
async def test_conformance(case: Case, seed: int) -> None:
    async with NcclKit(seed) as kit:
        await case(kit)
