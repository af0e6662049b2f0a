"""What a lost link says, and of whom: only the peer's own way to our memory tells that it reads no more."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from aiokv.control.memory import MemoryNetwork
from aiokv.device.cache import KVCache
from aiokv.device.mocked import MockedDevice
from aiokv.engine.engine import TransferEngine
from aiokv.errors import PeerLostError
from aiokv.proto.layout import CacheLayout
from aiokv.proto.settings import SECOND, Settings
from aiokv.transports.memory import MemoryHub, MemoryTransport

LAYOUT = CacheLayout.attention(layers=2, blocks=8, block_size=4, heads=2, head_size=8, dtype="float32")

#: No lease, drain or silence ends within a test, so that whatever ends has another reason.
PATIENT = Settings(
    heartbeat_ns=SECOND, lease_ns=100 * SECOND, drain_ns=200 * SECOND, liveness_ns=300 * SECOND
)


class Side:
    """One engine on a device that moves when it is stepped."""

    def __init__(self, network: MemoryNetwork, hub: MemoryHub, name: str) -> None:
        self.device = MockedDevice(seed=1, name=name)
        self.transport = MemoryTransport(hub)
        self.engine = TransferEngine(
            KVCache.allocate(LAYOUT, device=self.device),
            channel=network.channel(f"memory://{name}"),
            transports=[self.transport],
            settings=PATIENT,
        )


async def turns() -> None:
    """Let everything happen that needs no time."""
    for _ in range(50):
        await asyncio.sleep(0)


@pytest.mark.asyncio
async def test_the_loss_of_our_own_link_does_not_free_what_the_peer_still_reads() -> None:
    network, hub = MemoryNetwork(), MemoryHub()
    a, b = Side(network, hub, "a"), Side(network, hub, "b")
    async with asyncio.timeout(20), AsyncExitStack() as stack:
        await stack.enter_async_context(a.engine)
        await stack.enter_async_context(b.engine)
        read = a.engine.offer("read", [0, 1])
        reading = b.engine.fetch("read", [2, 3], sources=[a.engine.address])
        other = b.engine.offer("other", [0, 1])
        own = a.engine.fetch("other", [2, 3], sources=[b.engine.address])
        for handle in (read, reading, other, own):
            handle.start()
        read.layer_ready(0)
        a.device.run()
        while not b.engine.statistics().in_flight or not a.transport._reading:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        (link,) = a.transport._reading.values()
        link.producer_gone("cut by the test")
        with pytest.raises(PeerLostError):
            await own.wait()
        await turns()
        assert b.engine.statistics().in_flight > 0
        assert not read.done()
        b.device.run()
        with pytest.raises(PeerLostError):
            await reading.wait()
        with pytest.raises(PeerLostError):
            await read.wait()
        with pytest.raises(PeerLostError):
            await other.wait()
        assert a.engine.statistics().blocks_held == b.engine.statistics().blocks_held == 0
