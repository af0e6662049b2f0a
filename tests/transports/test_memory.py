from __future__ import annotations

import asyncio

import numpy as np
import pytest

from aiokv.device.cache import KVCache
from aiokv.device.mocked import MockedDevice
from aiokv.errors import PeerLostError
from aiokv.proto.layout import CacheLayout
from aiokv.proto.plan import GroupBlocks, Side, plan_copy
from aiokv.transports.base import PeerInfo
from aiokv.transports.memory import MemoryHub, MemoryTransport

LAYOUT = CacheLayout.attention(layers=2, blocks=4, block_size=4, heads=2, head_size=8, dtype="float16")


class Pair:
    """A producer and a consumer on one mocked device, which is stepped by hand."""

    def __init__(self, seed: int) -> None:
        self.hub = MemoryHub(b"the test")
        self.device = MockedDevice(seed)
        self.caches = [KVCache.allocate(LAYOUT, device=self.device) for _ in range(2)]
        self.producer, self.consumer = MemoryTransport(self.hub), MemoryTransport(self.hub)
        blocks = (GroupBlocks(0, np.arange(4)),)
        sides = [Side(LAYOUT, cache.placement, blocks) for cache in self.caches]
        self.plan = plan_copy(*sides, first_token=0, tokens=16, heads=(0, 2))
        self.chunk = next(self.plan.chunks((0,), 1 << 20))
        self.stream = self.device.stream()

    async def connect(self):
        await self.producer.start(self.caches[0], "")
        await self.consumer.start(self.caches[1], "")
        info = PeerInfo("memory", b"i" * 16, self.caches[0].placement)
        self.link = await self.consumer.connect(self.producer.describe(), info)
        self.end = self.producer.accepted(self.link.id)
        self.lost = []
        self.link.on_lost(lambda: self.lost.append("consumer"))
        self.end.on_lost(lambda: self.lost.append("producer"))

    def read(self):
        return self.link.read(self.plan, self.chunk, self.caches[1].buffers, stream=self.stream)

    async def close(self) -> None:
        await self.consumer.aclose()
        await self.producer.aclose()
        assert not self.device.hazards


@pytest.mark.asyncio
async def test_a_producer_that_is_killed(seed: int) -> None:
    pair = Pair(seed)
    await pair.connect()
    event = pair.read()
    pair.hub.kill(pair.producer)
    assert pair.link.lost
    assert pair.lost == []
    await asyncio.sleep(0)
    assert pair.lost == ["consumer"]
    with pytest.raises(PeerLostError, match="died"):
        pair.read()
    with pytest.raises(PeerLostError):
        await pair.consumer.connect(b"\0" * 15 + b"\1", PeerInfo("memory", b"", pair.caches[0].placement))
    pair.device.run()  # what was in flight ends
    assert event.done()
    await pair.close()


@pytest.mark.asyncio
async def test_a_consumer_that_is_killed(seed: int) -> None:
    pair = Pair(seed)
    await pair.connect()
    pair.hub.kill(pair.consumer)
    assert pair.end.lost
    assert not pair.link.lost  # the dead learn nothing
    await asyncio.sleep(0)
    assert pair.lost == ["producer"]
    assert pair.producer.accepted(pair.link.id) is None
    await pair.close()


@pytest.mark.asyncio
async def test_a_producers_end_outlives_what_may_be_in_flight(seed: int) -> None:
    """The producer closed it, but only the consumer knows when its copies have ended."""
    pair = Pair(seed)
    await pair.connect()
    event = pair.read()
    pair.end.close()
    await asyncio.sleep(0)
    assert pair.lost == ["consumer"]
    assert not pair.end.lost
    pair.device.run()
    assert event.done()
    pair.link.close()
    assert pair.end.lost
    await asyncio.sleep(0)
    assert pair.lost == ["consumer", "producer"]
    await pair.close()


@pytest.mark.asyncio
async def test_reads_on_the_stream_that_it_is_given(seed: int) -> None:
    pair = Pair(seed)
    await pair.connect()
    source, target = (cache.buffers[0] for cache in pair.caches)
    written = bytes(range(256)) * (source.nbytes // 256)
    pair.stream.write(source, 0, written)
    event = pair.read()
    assert not event.done()
    pair.device.run()
    assert event.done()
    assert target.read(0, 64) == written[:64]
    await pair.close()


@pytest.mark.asyncio
async def test_the_same_calls_give_the_same_ids(seed: int) -> None:
    ids = []
    for _ in range(2):
        pair = Pair(seed)
        await pair.connect()
        ids.append((pair.producer.describe(), pair.consumer.describe(), pair.link.id))
        await pair.close()
    assert ids[0] == ids[1]
