"""A GPU's memory over the host's transports, on a CUDA that is played by host memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from aiokv.device.cache import KVCache
from aiokv.device.cuda import CudaDevice
from aiokv.device.host import HostDevice
from aiokv.proto.layout import CacheLayout
from aiokv.testing.conformance.transportkit import TransportKit
from aiokv.testing.conformance.transports import CASES, Case
from aiokv.testing.fakecuda import FakeCuda
from aiokv.transports.base import Transport
from aiokv.transports.staging_shm import StagedShmTransport
from aiokv.transports.tcp import TcpTransport

LAYOUT = CacheLayout.attention(layers=3, blocks=32, block_size=16, heads=4, head_size=64, dtype="float16")


class Gpu:
    """A device on a CUDA of fakes."""

    def __init__(self) -> None:
        self.fake = FakeCuda()
        self.device = CudaDevice(0, cuda=self.fake.libraries())
        self.before = self.fake.allocated


@pytest.fixture(scope="module")
def gpu() -> Iterator[Gpu]:
    import torch

    assert torch.float16
    made = Gpu()
    yield made
    made.device.close()


class StagedKit(TransportKit):
    """Both ends on a GPU, and rings so small that most things wait for slots."""

    staging = 1 << 20

    def __init__(self, seed: int, gpu: Gpu) -> None:
        super().__init__(seed)
        self.gpu, self.device = gpu, gpu.device

    def make_transport(self) -> Transport:
        return TcpTransport(streams=self.random.randint(1, 4), staging=self.staging)

    def make_cache(self, layout: CacheLayout) -> KVCache:
        return KVCache.allocate(layout, device=self.device)

    async def __aexit__(self, *error: object) -> None:
        await super().__aexit__(*error)
        if error[0] is None:
            gc.collect()  # memory goes with the last that refers to it
            assert self.gpu.fake.allocated == self.gpu.before


class MixedKit(StagedKit):
    """GPU and host, in turn."""

    staging = 32 << 20
    made = 0

    def make_cache(self, layout: CacheLayout) -> KVCache:
        self.made += 1
        return KVCache.allocate(layout, device=self.device if self.made % 2 else HostDevice())


class ShmKit(StagedKit):
    def make_transport(self) -> Transport:
        return StagedShmTransport(self.staging)


KITS = {"tcp": StagedKit, "mixed": MixedKit, "shm": ShmKit}


@pytest.mark.asyncio
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("kind", KITS)
async def test_conformance(kind: str, case: Case, gpu: Gpu, seed: int) -> None:
    async with KITS[kind](seed, gpu) as kit:
        await case(kit)
