"""Order on the device: copies wait for the streams they are told of, and what comes later sees them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from aiokv.device.mocked import MockedDevice, MockedRead, MockedStream
from aiokv.engine.engine import TransferEngine
from aiokv.errors import DeviceError, TransferAborted
from aiokv.testing.pairs import LAYOUT, Engines, check_idle, settle, virtual_time

LAYERS = LAYOUT.layers
#: Bytes of K of one block.
BLOCK_BYTES = LAYOUT.groups[0].block_bytes // 2


class Rank:
    """An engine on a device of its own, and what a model does with its blocks."""

    def __init__(self, engine: TransferEngine, device: MockedDevice) -> None:
        self.engine = engine
        self.device = device
        self.stream = device.stream()

    def place(self, layer: int, block: int) -> int:
        """Where K of a block is in the cache's only buffer."""
        group = self.engine.cache.placement.groups[0]
        return group.layers[layer][0][1] + block * group.strides[0]

    def write(self, layer: int, block: int, byte: int, stream: MockedStream | None = None) -> None:
        """A kernel that writes a block takes its place in a queue."""
        buffer = self.engine.cache.buffers[0]
        (stream or self.stream).write(buffer, self.place(layer, block), bytes([byte]) * BLOCK_BYTES)

    def read(self, layer: int, block: int, stream: MockedStream | None = None) -> MockedRead:
        """A kernel that reads a block takes its place in a queue."""
        buffer = self.engine.cache.buffers[0]
        return (stream or self.stream).read(buffer, self.place(layer, block), BLOCK_BYTES)

    def holds(self, layer: int, block: int) -> bytes:
        """What a block holds, as seen by the host."""
        return self.engine.cache.buffers[0].read(self.place(layer, block), BLOCK_BYTES)


@asynccontextmanager
async def ranks(*, steps: bool = True) -> AsyncIterator[tuple[Rank, Rank]]:
    """Two ranks whose devices step at random times, or only when a test has them do so."""
    async with Engines() as engines:
        made = []
        for number, name in enumerate("ab"):
            device = MockedDevice(number, name=name)
            made.append(Rank(await engines.add(name, device=device), device))
        if steps:
            for rank in made:
                rank.device.autostep(asyncio.get_running_loop(), random.Random(rank.device.seed), 1e-4)
        yield made[0], made[1]
        for rank in made:
            rank.device.run()
        check_idle(*(rank.engine for rank in made))


def hazards(*given: Rank) -> list[str]:
    return [str(hazard) for rank in given for hazard in rank.device.hazards]


def filled(byte: int) -> bytes:
    return bytes([byte]) * BLOCK_BYTES


# -- the producer's writes --------------------------------------------------------------------------


@virtual_time
async def test_a_layer_moves_when_the_stream_that_writes_it_has_got_there() -> None:
    async with ranks() as (a, b):
        async with (
            b.engine.fetch("t", [5], sources=[a.engine.address]) as fetch,
            a.engine.offer("t", [3]) as t,
        ):
            for layer in reversed(range(LAYERS)):
                a.write(layer, 3, layer + 1)
                t.layer_ready(layer, stream=a.stream)
                await fetch.layer(layer)
                assert b.holds(layer, 5) == filled(layer + 1)
        assert hazards(a, b) == []


@virtual_time
async def test_nothing_moves_before_it_is_written() -> None:
    async with ranks(steps=False) as (a, b):
        fetch, offer = b.engine.fetch("t", [5], sources=[a.engine.address]), a.engine.offer("t", [3])
        fetch.start()
        offer.start()
        for layer in range(LAYERS):
            a.write(layer, 3, 7)
            offer.layer_ready(layer, stream=a.stream)
        await asyncio.sleep(1)
        assert offer.progress.layers == 0
        assert b.engine.statistics().in_flight == 0
        a.device.run()
        await asyncio.sleep(1)
        assert offer.progress.layers == LAYERS
        b.device.run()
        await fetch.wait()
        await offer.wait()
        assert hazards(a, b) == []


@virtual_time
async def test_a_layer_announced_on_another_stream_than_writes_it_is_found() -> None:
    """The proof that these tests would find a missing order: here the caller leaves it out."""
    async with ranks(steps=False) as (a, b):
        async with b.engine.fetch("t", [5], sources=[a.engine.address]), a.engine.offer("t", [3]) as offer:
            a.write(0, 3, 7)
            other = a.device.stream()
            for layer in range(LAYERS):
                offer.layer_ready(layer, stream=other)
            while a.device.step(other):
                pass
            while not offer.done():
                await settle(a.engine, b.engine)
                await asyncio.sleep(0.01)
                b.device.run()
        assert {hazard.kind for hazard in b.device.hazards} == {"read before ready"}


@virtual_time
async def test_by_default_it_is_the_callers_current_stream() -> None:
    async with ranks() as (a, b):
        current = a.device.adopt(None)
        async with b.engine.fetch("t", [5], sources=[a.engine.address]), a.engine.offer("t", [3]):
            for layer in range(LAYERS):
                a.write(layer, 3, 9, stream=current)
        assert [b.holds(layer, 5) for layer in range(LAYERS)] == [filled(9)] * LAYERS
        assert hazards(a, b) == []


@virtual_time
async def test_a_kernel_that_fails_ends_the_offer_that_announced_its_layer() -> None:
    async with ranks() as (a, b):
        fetch, offer = b.engine.fetch("t", [5], sources=[a.engine.address]), a.engine.offer("t", [3])
        fetch.start()
        offer.start()
        a.device.fail(a.stream, "out of resources")
        a.write(0, 3, 7)
        offer.layer_ready(0, stream=a.stream)
        with pytest.raises(DeviceError, match="out of resources"):
            await offer.wait()
        with pytest.raises(TransferAborted, match="out of resources"):
            await fetch.wait()


# -- the consumer's stream --------------------------------------------------------------------------


@virtual_time
async def test_what_is_enqueued_after_a_layer_is_ordered_sees_it_before_it_is_there() -> None:
    async with ranks(steps=False) as (a, b):
        a.write(1, 3, 42)
        a.device.run()
        fetch, offer = (
            b.engine.fetch("t", [5], sources=[a.engine.address], stream=b.stream),
            a.engine.offer("t", [3]),
        )
        fetch.start()
        offer.start()
        offer.layer_ready(1, stream=a.stream)
        a.device.run()
        await fetch.layer_ordered(1)
        assert fetch.progress.layers == 0  # nothing was copied yet, and the host need not wait for it
        seen = b.read(1, 5)
        b.device.run()
        assert seen.data == filled(42)
        for layer in (0, 2, 3):
            offer.layer_ready(layer, stream=a.stream)
        a.device.run()
        while not fetch.done():
            await asyncio.sleep(0.01)
            b.device.run()
        await fetch.wait()
        await offer.wait()
        assert hazards(a, b) == []


@virtual_time
async def test_what_others_enqueue_on_the_stream_does_not_wait_for_a_fetch() -> None:
    async with ranks(steps=False) as (a, b):
        fetch, offer = (
            b.engine.fetch("t", [5], sources=[a.engine.address], stream=b.stream),
            a.engine.offer("t", [3]),
        )
        fetch.start()
        offer.start()
        b.device.run()
        for layer in range(LAYERS):
            offer.layer_ready(layer, stream=a.stream)
        a.device.run()
        await settle(a.engine, b.engine)
        assert b.engine.statistics().in_flight
        assert not b.stream.queued
        await fetch.layer_ordered(2)
        assert b.stream.queued
        while not fetch.done():
            b.device.run()
            await asyncio.sleep(0.01)
        await fetch.layer(2)
        assert not b.stream.queued
        await offer.wait()
        assert hazards(a, b) == []


@virtual_time
async def test_without_waiting_for_the_order_a_reader_is_found() -> None:
    async with ranks(steps=False) as (a, b):
        fetch, offer = (
            b.engine.fetch("t", [5], sources=[a.engine.address], stream=b.stream),
            a.engine.offer("t", [3]),
        )
        fetch.start()
        offer.start()
        for layer in range(LAYERS):
            offer.layer_ready(layer, stream=a.stream)
        a.device.run()
        await fetch.layer_ordered(3)
        b.read(3, 5, stream=b.device.stream())  # a stream that was told of nothing
        assert [hazard.kind for hazard in b.device.hazards] == ["read before ready"]
        while not fetch.done():
            b.device.run()
            await asyncio.sleep(0.01)


@virtual_time
async def test_a_landed_layer_is_seen_by_all_that_the_host_enqueues() -> None:
    async with ranks() as (a, b):
        async with (
            b.engine.fetch("t", [5], sources=[a.engine.address]) as fetch,
            a.engine.offer("t", [3]) as t,
        ):
            a.write(2, 3, 8)
            t.layer_ready(2, stream=a.stream)
            await fetch.layer(2)
            read = b.read(2, 5, stream=b.device.stream())
            await asyncio.sleep(1)
            assert read.data == filled(8)
        assert hazards(a, b) == []


@virtual_time
async def test_blocks_that_a_kernel_still_reads_are_not_written_before_it_is_through() -> None:
    async with ranks(steps=False) as (a, b):
        b.write(0, 5, 1)
        b.device.run()
        last = b.read(0, 5)  # attention of the request that had the block before
        b.write(1, 5, 2)
        fetch, offer = (
            b.engine.fetch("t", [5], sources=[a.engine.address], stream=b.stream),
            a.engine.offer("t", [3]),
        )
        fetch.start()
        offer.start()
        for layer in range(LAYERS):
            a.write(layer, 3, 77)
            offer.layer_ready(layer, stream=a.stream)
        a.device.run()
        await fetch.layer_ordered(0)
        b.device.run()
        assert last.data == filled(1)
        while not fetch.done():
            b.device.run()
            await asyncio.sleep(0.01)
        await fetch.wait()
        await offer.wait()
        assert b.holds(1, 5) == filled(77)
        assert hazards(a, b) == []


@virtual_time
async def test_a_kernel_on_a_stream_that_the_fetch_was_not_told_of_is_found() -> None:
    async with ranks() as (a, b):
        b.device.autostep(asyncio.get_running_loop(), random.Random(1), 1e9)  # the kernel takes its time
        b.read(0, 5, stream=b.device.stream())
        fetch, offer = (
            b.engine.fetch("t", [5], sources=[a.engine.address], stream=b.stream),
            a.engine.offer("t", [3]),
        )
        fetch.start()
        offer.start()
        for layer in range(LAYERS):
            offer.layer_ready(layer, stream=a.stream)
        await fetch.layer_ordered(0)
        assert "write under a reader" in {hazard.kind for hazard in b.device.hazards}
        while not fetch.done():
            b.device.run()
            await asyncio.sleep(0.01)


# -- the end ----------------------------------------------------------------------------------------


@virtual_time
async def test_blocks_can_be_used_again_as_soon_as_a_transfer_is_over() -> None:
    async with ranks() as (a, b):
        for number in range(10):
            # On streams that nothing was ordered with but by the transfers.
            writes, reads = a.device.stream(), b.device.stream()
            async with (
                b.engine.fetch(f"t{number}", [5], sources=[a.engine.address], stream=reads),
                a.engine.offer(f"t{number}", [3]) as offer,
            ):
                for layer in range(LAYERS):
                    a.write(layer, 3, number, stream=writes)
                    offer.layer_ready(layer, stream=writes)
        assert hazards(a, b) == []


@virtual_time
@pytest.mark.parametrize("side", ["producer", "consumer"])
async def test_who_is_cancelled_in_the_middle_of_copies_has_the_blocks_when_they_are_quiet(side: str) -> None:
    async with ranks(steps=False) as (a, b):

        async def produce() -> None:
            async with a.engine.offer("t", [3]):
                pass

        async def consume() -> None:
            async with b.engine.fetch("t", [5], sources=[a.engine.address]):
                pass

        tasks = {"consumer": asyncio.ensure_future(consume()), "producer": asyncio.ensure_future(produce())}
        while b.engine.statistics().in_flight == 0:
            await settle(a.engine, b.engine)
            a.device.run()
        tasks[side].cancel()
        await asyncio.sleep(0.1)
        assert not tasks[side].done()
        b.device.run()
        await asyncio.wait([tasks[side]])
        assert tasks[side].cancelled()
        (a if side == "producer" else b).write(0, 3 if side == "producer" else 5, 1)
        with pytest.raises(TransferAborted, match="cancelled"):
            await tasks["producer" if side == "consumer" else "consumer"]
        assert hazards(a, b) == []


@virtual_time
async def test_a_copy_that_fails_costs_its_own_transfer_and_no_later_one() -> None:
    async with ranks(steps=False) as (a, b):
        fetch, offer = (
            b.engine.fetch("t", [5], sources=[a.engine.address], stream=b.device.stream()),
            a.engine.offer("t", [3]),
        )
        fetch.start()
        offer.start()
        for layer in range(LAYERS):
            offer.layer_ready(layer, stream=a.stream)
        a.device.run()
        await fetch.layer_ordered(LAYERS - 1)
        for stream in list(b.device._busy):
            b.device.fail(stream, "uncorrectable")
        b.device.run()
        with pytest.raises(DeviceError, match="uncorrectable"):
            await fetch.wait()
        with pytest.raises(TransferAborted, match="uncorrectable"):
            await offer.wait()
        for rank in (a, b):
            rank.device.autostep(asyncio.get_running_loop(), random.Random(3), 1e-4)
        # More than there are streams, so that each is used again.
        for number in range(8):
            async with (
                b.engine.fetch(f"t{number}", [5], sources=[a.engine.address], stream=b.device.stream()),
                a.engine.offer(f"t{number}", [3]),
            ):
                pass
