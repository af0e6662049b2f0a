"""A peer that takes no data, or falls silent, costs its own transfers and nothing else."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import pytest

from aiokv.device.cache import KVCache
from aiokv.engine.engine import TransferEngine
from aiokv.errors import AiokvError, PeerLostError, TransferAborted
from aiokv.proto.layout import CacheLayout
from aiokv.proto.settings import SECOND, Settings
from aiokv.testing.faultynetwork import FaultyNetwork
from aiokv.transports.base import Link, PeerInfo, Transport
from aiokv.transports.receiver import Receiver
from aiokv.transports.tcp import TcpTransport

LAYOUT = CacheLayout.attention(layers=2, blocks=8, block_size=64, heads=16, head_size=256, dtype="float32")
BLOCKS = range(8)
PATIENCE_S = 20.0

#: Short bounds, so that what they end ends soon; nothing is asserted of how soon.
QUICK = Settings(
    heartbeat_ns=SECOND // 20,
    lease_ns=SECOND // 5,
    drain_ns=SECOND,
    liveness_ns=SECOND // 2,
    contact_ns=SECOND,
)
#: Bounds that none of these tests reaches but the drain bound.
PATIENT = Settings(heartbeat_ns=SECOND // 20, lease_ns=SECOND // 5, drain_ns=SECOND, liveness_ns=100 * SECOND)


class DeafTransport(TcpTransport):
    """Connects as any other, then doesn't read what it is sent."""

    async def connect(self, description: bytes, peer: PeerInfo) -> Link:
        link = await super().connect(description, peer)
        assert isinstance(link, Receiver)
        for sock in link._socks:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            asyncio.get_running_loop().remove_reader(sock.fileno())
        return link


@pytest.fixture
def caches() -> Iterator[list[KVCache]]:
    """Allocated before the loop runs, which that would block."""
    made = [KVCache.allocate(LAYOUT) for _ in range(3)]
    yield list(made)
    for cache in made:
        cache.close()


@dataclass
class World:
    """Engines that reach each other by the names of ``memory://``."""

    caches: list[KVCache]
    network: FaultyNetwork
    stack: AsyncExitStack

    async def engine(
        self, name: str, settings: Settings, transport: Callable[[], Transport] = TcpTransport
    ) -> TransferEngine:
        engine = TransferEngine(
            self.caches.pop(),
            channel=self.network.channel(f"memory://{name}"),
            transports=[transport()],
            settings=settings,
        )
        return await self.stack.enter_async_context(engine)


@asynccontextmanager
async def world(caches: list[KVCache]) -> AsyncIterator[World]:
    async with asyncio.timeout(PATIENCE_S), AsyncExitStack() as stack:
        yield World(caches, FaultyNetwork(seed=1), stack)


async def until(reached: Callable[[], bool]) -> None:
    while not reached():  # noqa: ASYNC110 - nothing tells of what statistics count
        await asyncio.sleep(0.005)


async def stuck(producer: TransferEngine) -> None:
    """Wait until a chunk was handed over that nobody takes."""
    await until(lambda: producer.statistics().in_flight > 0)


@pytest.mark.asyncio
async def test_a_consumer_that_takes_no_data_holds_up_no_other(caches: list[KVCache]) -> None:
    async with world(caches) as here:
        producer = await here.engine("p", PATIENT)
        deaf = await here.engine("deaf", PATIENT, DeafTransport)
        other = await here.engine("other", PATIENT)
        lost = producer.offer("lost", BLOCKS)
        lost.start()
        for layer in range(2):
            lost.layer_ready(layer)
        waiting = deaf.fetch("lost", BLOCKS, sources=[producer.address])
        waiting.start()
        await stuck(producer)
        for attempt in range(2):
            async with producer.offer("fine", BLOCKS, attempt=attempt):
                fetch = other.fetch("fine", BLOCKS, sources=[producer.address], attempt=attempt)
                fetch.start()
            await fetch.wait()
        assert not lost.done()
        waiting.cancel()
        with pytest.raises(TransferAborted):
            await waiting.wait()
        with pytest.raises(AiokvError):
            await lost.wait()


@pytest.mark.asyncio
async def test_blocks_that_a_socket_does_not_take_are_quiet_once_it_is_cut(caches: list[KVCache]) -> None:
    async with world(caches) as here:
        producer = await here.engine("p", PATIENT)
        deaf = await here.engine("deaf", PATIENT, DeafTransport)
        offer = producer.offer("t", BLOCKS)
        offer.start()
        offer.layer_ready(0)
        fetch = deaf.fetch("t", BLOCKS, sources=[producer.address])
        fetch.start()
        await stuck(producer)
        offer.cancel()
        with pytest.raises(TransferAborted):
            await offer.wait()
        with pytest.raises(TransferAborted):
            await fetch.wait()
        assert producer.statistics().quarantined == 0
        assert producer.statistics().blocks_held == 0


@pytest.mark.asyncio
async def test_blocks_being_sent_to_a_silent_consumer_are_quiet_once_it_is_given_up(
    caches: list[KVCache],
) -> None:
    async with world(caches) as here:
        producer = await here.engine("p", QUICK)
        deaf = await here.engine("deaf", PATIENT, DeafTransport)
        offer = producer.offer("t", BLOCKS)
        offer.start()
        offer.layer_ready(0)
        fetch = deaf.fetch("t", BLOCKS, sources=[producer.address])
        fetch.start()
        await stuck(producer)
        here.network.cut(deaf.address, producer.address)
        with pytest.raises(PeerLostError, match="silent"):
            await offer.wait()
        assert producer.statistics().quarantined == 0
        assert producer.statistics().blocks_held == 0
        fetch.cancel()
        with pytest.raises(AiokvError):
            await fetch.wait()
