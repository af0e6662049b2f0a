"""A fetch whose caller's stream is busy waits for that; no other does."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from aiokv.device.mocked import MockedDevice, MockedStream
from aiokv.engine.engine import TransferEngine
from aiokv.engine.transfer import Fetch, Offer
from aiokv.errors import DeviceError, TransferAborted
from aiokv.proto.settings import Settings
from aiokv.testing.pairs import LAYOUT, Engines, check_idle, settle, virtual_time

#: A window that one transfer fills.
NARROW = Settings(chunk_bytes=64, window_bytes=256)


class Gate:
    """A device of which nothing gets done before the test has it be."""

    def __init__(self) -> None:
        self.device = MockedDevice(3, name="gate")
        self.buffer = self.device.allocate(16)
        self.stream = self.device.stream()
        self.stream.write(self.buffer, 0, b"later")

    def block(self, stream: MockedStream) -> None:
        """What is enqueued on ``stream`` from now on waits for the gate."""
        stream.wait(self.stream.record())


class World:
    """A producer in host memory, and a consumer whose device steps by itself."""

    def __init__(self, producer: TransferEngine, consumer: TransferEngine, device: MockedDevice) -> None:
        self.producer = producer
        self.consumer = consumer
        self.device = device
        self.gate = Gate()

    def begin(self, tid: str, block: int, stream: MockedStream | None = None) -> tuple[Offer, Fetch]:
        """Offer a block with all its layers, and fetch it."""
        offer = self.producer.offer(tid, [block])
        offer.start()
        for layer in range(LAYOUT.layers):
            offer.layer_ready(layer)
        fetch = self.consumer.fetch(tid, [block], sources=[self.producer.address], stream=stream)
        fetch.start()
        return offer, fetch


@asynccontextmanager
async def world() -> AsyncIterator[World]:
    async with Engines(settings=NARROW) as engines:
        device = MockedDevice(1, name="b")
        here = World(await engines.add("a"), await engines.add("b", device=device), device)
        device.autostep(asyncio.get_running_loop(), random.Random(1), 1e-5)
        yield here
        here.gate.device.run()
        await settle(here.producer, here.consumer)
        check_idle(here.producer, here.consumer)
        assert device.hazards == []


@virtual_time
async def test_a_busy_stream_holds_up_its_own_fetches_alone() -> None:
    async with world() as here:
        busy = here.device.stream()
        here.gate.block(busy)
        late = [here.begin(f"late{block}", block, busy) for block in range(8)]
        offer, fetch = here.begin("fine", 8)
        await fetch.wait()
        await offer.wait()
        assert not any(handle.done() for pair in late for handle in pair)
        here.gate.device.run()
        for pair in late:
            for handle in pair:
                await handle.wait()


@virtual_time
async def test_a_stream_that_fails_ends_the_fetch_that_waits_for_it() -> None:
    async with world() as here:
        busy = here.device.stream()
        here.gate.block(busy)
        offer, fetch = here.begin("t", 0, busy)
        await settle(here.producer, here.consumer)
        here.gate.device.fail(here.gate.stream)
        here.gate.device.run()
        with pytest.raises(DeviceError):
            await fetch.wait()
        with pytest.raises(TransferAborted):
            await offer.wait()
