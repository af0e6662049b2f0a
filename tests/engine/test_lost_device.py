"""A GPU on which nothing works any more: the engine says so and closes; others hear of it."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Iterator

import pytest

from aiokv.device.cache import KVCache
from aiokv.device.cuda import CudaDevice
from aiokv.device.cudacosts import TYPICAL
from aiokv.errors import AiokvError, DeviceError, TransferAborted
from aiokv.testing.fakecuda import FakeCuda
from aiokv.testing.pairs import LAYOUT, Engines


@pytest.fixture
def fakes() -> list[FakeCuda]:
    return [FakeCuda(), FakeCuda()]


@pytest.fixture
def caches(fakes: list[FakeCuda]) -> Iterator[list[KVCache]]:
    devices = [
        CudaDevice(0, cuda=fake.libraries(), costs=TYPICAL, staging_bytes=1 << 16, offsets_bytes=1 << 16)
        for fake in fakes
    ]
    made = [KVCache.allocate(LAYOUT, device=device) for device in devices]
    for cache in made:
        ctypes.memmove(cache.buffers[0].address, os.urandom(cache.buffers[0].nbytes), cache.buffers[0].nbytes)
    yield made
    for cache, device in zip(made, devices, strict=True):
        cache.close()
        device.close()


def bytes_of(cache: KVCache) -> bytes:
    return ctypes.string_at(cache.buffers[0].address, cache.buffers[0].nbytes)


@pytest.mark.asyncio
async def test_an_engine_on_a_gpu_moves_blocks(fakes: list[FakeCuda], caches: list[KVCache]) -> None:
    async with Engines() as engines:
        producer = await engines.add("a", cache=caches[0])
        # In one process the consumer's GPU reads the producer's memory.
        fakes[1]._ranges.update(fakes[0]._ranges)
        consumer = await engines.add("b", cache=caches[1])
        blocks = list(range(LAYOUT.groups[0].blocks))
        async with (
            producer.offer("t", blocks) as offer,
            consumer.fetch("t", blocks, sources=[producer.address]) as fetch,
        ):
            for layer in range(LAYOUT.layers):
                offer.layer_ready(layer)
            await fetch.wait()
        assert bytes_of(caches[0]) == bytes_of(caches[1])
    for address in set(fakes[1]._ranges) & set(fakes[0]._ranges):
        del fakes[1]._ranges[address]


@pytest.mark.asyncio
async def test_the_engine_closes_and_says_so(
    fakes: list[FakeCuda], caches: list[KVCache], caplog: pytest.LogCaptureFixture
) -> None:
    async with Engines() as engines:
        producer = await engines.add("a", cache=caches[0])
        consumer = await engines.add("b", cache=caches[1])
        offer = producer.offer("t", [0, 1])
        offer.start()
        fetch = consumer.fetch("t", [2, 3], sources=[producer.address])
        fetch.start()
        fakes[1].status = 700
        with caplog.at_level(logging.ERROR), pytest.raises(DeviceError, match="illegal|700"):
            for layer in range(LAYOUT.layers):
                offer.layer_ready(layer)
            await fetch.wait()
        with pytest.raises(AiokvError):
            await offer.wait()
        assert "closes: CUDA device 0 is lost" in caplog.text
        with pytest.raises(DeviceError, match="is lost to this process"):
            consumer.fetch("other", [0], sources=[producer.address])
        await consumer.aclose()
        with pytest.raises(DeviceError, match="the engine is closed: CUDA device 0 is lost"):
            consumer.offer("other", [0])
        # The other engine, and the process, go on.
        again = producer.offer("again", [4, 5])
        again.start()
        again.cancel()
        with pytest.raises(TransferAborted):
            await again.wait()
