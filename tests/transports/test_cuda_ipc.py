"""CUDA IPC on a GPU that isn't there: who maps what, for how long, and what a copy counts for."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from aiokv.device.cache import KVCache
from aiokv.errors import DeviceError, PeerLostError
from aiokv.proto.layout import CacheLayout
from aiokv.testing.conformance.transports import CASES, Case
from aiokv.transports import local
from aiokv.transports.base import PeerInfo
from aiokv.transports.cuda_ipc import CudaIpcTransport
from aiokv.transports.cuda_ipc_driver import CudaIpcDriver
from aiokv.transports.local import Offer

spec = importlib.util.spec_from_file_location("fakecuda", Path(__file__).with_name("fakecuda.py"))
fakecuda = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = fakecuda
spec.loader.exec_module(fakecuda)
Apart, IpcKit = fakecuda.Apart, fakecuda.IpcKit

LAYOUT = CacheLayout.attention(layers=2, blocks=8, block_size=4, heads=2, head_size=8, dtype="float16")


@pytest.mark.asyncio
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("kit", [IpcKit, fakecuda.OwnIpcKit], ids=["apart", "own"])
async def test_conformance(kit: type, case: Case, seed: int) -> None:
    async with kit(seed) as made:
        await case(made)


async def started(kit, path, tokens: int = 13):
    """A read that is in flight, of one chunk."""
    part = path.part(kit, 1, tokens=tokens)
    stream = kit.device.stream()
    chunk = part.chunks(1 << 20)[0]
    return path.end.read(part.plan, chunk, path.consumer.cache.buffers, stream=stream), stream


async def lost(link) -> None:
    bell = asyncio.Event()
    link.on_lost(bell.set)
    async with asyncio.timeout(20):
        await bell.wait()


# -- what is mapped


@pytest.mark.asyncio
async def test_memory_is_mapped_once_for_each_incarnation_and_allocation(seed: int) -> None:
    async with IpcKit(seed) as kit:
        producer, consumer = await kit.engine(LAYOUT), await kit.engine(LAYOUT)
        paths = [await consumer.read_from(producer) for _ in range(3)]
        assert len(kit.driver.opened) == 2  # the nonce's and the cache's
        another = PeerInfo("suite", b"j" * 16, producer.cache.placement)
        link = await consumer.transport.connect(producer.transport.describe(), another)
        assert len(kit.driver.opened) == 4
        for end in (paths[0].end, paths[1].end, link):
            end.close()
        await lost(paths[1].producer_end)
        paths[2].end.close()
        await consumer.transport.aclose()
        assert sorted(kit.driver.closed) == sorted(kit.driver.opened)


@pytest.mark.asyncio
async def test_memory_of_this_process_is_used_as_it_is(seed: int) -> None:
    async with fakecuda.OwnIpcKit(seed) as kit:
        path = await (await kit.engine(LAYOUT)).read_from(await kit.engine(LAYOUT))
        read, _ = await started(kit, path)
        kit.device.run()
        assert read.done()
        assert not kit.driver.opened
        assert len(kit.driver.reached) == 2  # which another GPU's may need


@pytest.mark.asyncio
async def test_another_gpus_memory_of_this_process_that_is_out_of_reach_is_told(seed: int) -> None:
    async with fakecuda.OwnIpcKit(seed) as kit:
        producer, consumer = await kit.engine(LAYOUT), await kit.engine(LAYOUT)
        kit.driver.fails = "reach"
        with pytest.raises(PeerLostError, match="memory of GPU 1 can't be reached"):
            await consumer.transport.connect(producer.transport.describe(), producer.info)


@pytest.mark.asyncio
async def test_two_that_connect_at_once_map_once(seed: int) -> None:
    async with IpcKit(seed) as kit:
        producer, consumer = await kit.engine(LAYOUT), await kit.engine(LAYOUT)
        first, second = await asyncio.gather(*(consumer.read_from(producer) for _ in range(2)))
        assert len(kit.driver.opened) == 2
        assert first.end.id != second.end.id


@pytest.mark.asyncio
@pytest.mark.parametrize("turns", range(1, 30))
async def test_a_connect_that_is_cancelled_keeps_nothing_mapped(turns: int, seed: int) -> None:
    async with IpcKit(seed) as kit:
        producer, consumer = await kit.engine(LAYOUT), await kit.engine(LAYOUT)
        connecting = asyncio.ensure_future(consumer.read_from(producer))
        for _ in range(turns):
            await asyncio.sleep(0)
        connecting.cancel()
        await asyncio.gather(connecting, return_exceptions=True)
        await consumer.transport.aclose()
        assert sorted(kit.driver.closed) == sorted(kit.driver.opened)


@pytest.mark.asyncio
async def test_nothing_is_unmapped_while_a_cancelled_connect_reads_it(seed: int) -> None:
    reads, may, unmapped = threading.Event(), threading.Event(), []
    async with IpcKit(seed) as kit:
        read = kit.driver.read

        def slow(address: int, nbytes: int) -> bytes:
            reads.set()
            may.wait(20)
            unmapped.append(address in kit.driver.closed)
            return read(address, nbytes)

        kit.driver.read = slow
        producer, consumer = await kit.engine(LAYOUT), await kit.engine(LAYOUT)
        connecting = asyncio.ensure_future(
            consumer.transport.connect(producer.transport.describe(), producer.info)
        )
        await asyncio.to_thread(reads.wait, 20)
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting
        closing = asyncio.ensure_future(consumer.transport.aclose())
        await asyncio.sleep(0.02)
        assert not closing.done()
        may.set()
        await closing
        assert unmapped == [False]
        assert sorted(kit.driver.closed) == sorted(kit.driver.opened)


@pytest.mark.asyncio
async def test_buffers_that_share_an_allocation_are_one_mapping(seed: int) -> None:
    """As tensors of torch's allocator do, which lie anywhere in its segments."""
    async with IpcKit(seed) as kit:
        segment = kit.device.allocate(1 << 14)
        placed = await kit.cache(LAYOUT)
        half = placed.buffers[0].nbytes // 2

        class Split:
            def __init__(self, offset: int) -> None:
                self.address, self.nbytes = segment.address + offset, half
                self.view = segment.view[offset : offset + half]

        shared = fakecuda.KVCache(LAYOUT, placed.placement, kit.device, placed.buffers)
        assert 2 * half + 96 <= segment.nbytes
        shared.buffers = (Split(32), Split(half + 96))
        transport = Apart(lambda ordinal: kit.driver)
        await transport.start(shared, "")
        nonce, allocations, buffers = msgspec.msgpack.decode(transport._offered.extra)
        assert len(allocations) == 2
        assert buffers == [[1, 32, half], [1, half + 96, half]]
        assert len(nonce) == 32
        await transport.aclose()


# -- what is refused


@pytest.mark.asyncio
async def test_host_memory_is_not_served() -> None:
    cache = KVCache.from_tensors(LAYOUT, [torch.zeros(2, 8, 4, 2, 8, dtype=torch.float16) for _ in range(2)])
    transport = CudaIpcTransport()
    with pytest.raises(DeviceError, match="host memory"):
        await transport.start(cache, "")
    await transport.aclose()
    cache.close()


@pytest.mark.asyncio
async def test_memory_that_has_no_handle_is_refused_with_what_mends_it(seed: int) -> None:
    async with IpcKit(seed) as kit:
        kit.driver.refuses = (
            "lies in an expandable segment; set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"
        )
        with pytest.raises(DeviceError, match=r"buffer 0 of the cache lies in .*expandable_segments:False"):
            await kit.engine(LAYOUT)


def test_without_a_driver_that_is_said() -> None:
    if Path("/proc/driver/nvidia").exists():
        pytest.skip("there is a driver")
    with pytest.raises(DeviceError, match="CUDA driver"):
        CudaIpcDriver(0)


@pytest.mark.asyncio
async def test_what_start_took_is_given_back_when_it_fails(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(local, "_address", lambda door: b"/nowhere/at/all")
    async with IpcKit(seed) as kit:
        with pytest.raises(DeviceError, match="can't listen"):
            await kit.engine(LAYOUT)


def sharing() -> bool:
    """Whether a thread still makes what the start was to have, or takes it back."""
    return any(thread.name.startswith("aiokv-cuda-ipc") for thread in threading.enumerate())


@pytest.mark.asyncio
async def test_a_start_that_is_cancelled_leaves_nothing(seed: int) -> None:
    async with IpcKit(seed) as kit:
        cache = await kit.cache(LAYOUT)
        transport = kit.make_transport()
        starting = asyncio.ensure_future(transport.start(cache, ""))
        await asyncio.sleep(0)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        await transport.aclose()
        async with asyncio.timeout(20):
            while kit.driver.made or sharing():  # noqa: ASYNC110
                await asyncio.sleep(0.005)


@pytest.mark.asyncio
@pytest.mark.parametrize("fails", ["open", "read"])
async def test_gpus_that_do_not_reach_each_other_are_told_on_connecting(fails: str, seed: int) -> None:
    async with IpcKit(seed) as kit:
        producer, consumer = await kit.engine(LAYOUT), await kit.engine(LAYOUT)
        kit.driver.fails = fails
        with pytest.raises(PeerLostError, match=r"can't be (mapped|read)"):
            await consumer.transport.connect(producer.transport.describe(), producer.info)


LIES = {
    "garbage": lambda said: None,
    "nonce": lambda said: [bytes(32), *said[1:]],
    "handle": lambda said: [said[0], [[b"short", *each[1:]] for each in said[1]], said[2]],
    "none": lambda said: [said[0], [], said[2]],
    "twice": lambda said: [said[0], [said[1][0], said[1][0]], said[2]],
    "beyond": lambda said: [said[0], said[1], [[1, 64, each[2]] for each in said[2]]],
    "nowhere": lambda said: [said[0], said[1], [[7, 0, each[2]] for each in said[2]]],
    "larger": lambda said: [said[0], [[*each[:2], each[2] + 4096] for each in said[1]], said[2]],
    "fewer": lambda said: [said[0], said[1], []],
}


@pytest.mark.asyncio
@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("own", [False, True], ids=["apart", "own"])
async def test_what_a_producer_says_of_its_memory_is_checked(lie: str, own: bool, seed: int) -> None:
    class Liar(CudaIpcTransport):
        def _offer(self, cache: KVCache) -> Offer:
            said = LIES[lie](msgspec.msgpack.decode(super()._offer(cache).extra))
            return Offer(b"\xc1" if said is None else msgspec.msgpack.encode(said))

    async with (fakecuda.OwnIpcKit if own else IpcKit)(seed) as kit:
        consumer = await kit.engine(LAYOUT)
        kit.make_transport = lambda: Liar(lambda ordinal: kit.driver)
        producer = await kit.engine(LAYOUT)
        with pytest.raises(PeerLostError):
            await consumer.transport.connect(producer.transport.describe(), producer.info)


@pytest.mark.asyncio
async def test_memory_of_this_process_is_made_reachable_before_it_is_looked_for(seed: int) -> None:
    """A driver finds nothing on another GPU before."""
    async with fakecuda.OwnIpcKit(seed) as kit:
        consumer, producer = await kit.engine(LAYOUT), await kit.engine(LAYOUT)
        find = kit.driver.find

        def found(address: int) -> object:
            if address not in kit.driver.reached:
                raise DeviceError("named symbol not found")
            return find(address)

        kit.driver.find = found
        path = await consumer.read_from(producer)
        assert not path.end.lost


@pytest.mark.asyncio
async def test_more_allocations_than_can_be_told_of_are_refused(seed: int) -> None:
    async with IpcKit(seed) as kit:
        cache = await kit.cache(LAYOUT)
        cache.buffers = tuple(kit.device.allocate(8) for _ in range(1000))
        transport = kit.make_transport()
        with pytest.raises(DeviceError, match="too many"):
            await transport.start(cache, "")
        await transport.aclose()


# -- what a copy counts for


@pytest.mark.asyncio
async def test_a_copy_is_over_when_its_event_is_done(seed: int) -> None:
    async with IpcKit(seed) as kit:
        path = await (await kit.engine(LAYOUT)).read_from(await kit.engine(LAYOUT))
        read, _ = await started(kit, path)
        assert not read.done()
        kit.device.run()
        assert read.done()
        assert read.done()
        assert not path.end.reading


@pytest.mark.asyncio
async def test_a_producer_that_closes_is_told_only_when_no_copy_is_in_flight(seed: int) -> None:
    async with IpcKit(seed) as kit:
        path = await (await kit.engine(LAYOUT)).read_from(await kit.engine(LAYOUT))
        read, _ = await started(kit, path)
        path.producer_end.close()
        await lost(path.end)
        for _ in range(10):
            await asyncio.sleep(0.001)
        assert not path.producer_end.lost
        assert not kit.driver.closed
        assert not read.done()
        kit.device.run()
        with pytest.raises(DeviceError) as caught:
            read.done()
        assert isinstance(caught.value.__cause__, PeerLostError)
        await lost(path.producer_end)
        with pytest.raises(DeviceError):
            read.done()


@pytest.mark.asyncio
async def test_a_copy_that_fails_is_over_and_the_link_is_not_lost(seed: int) -> None:
    async with IpcKit(seed) as kit:
        path = await (await kit.engine(LAYOUT)).read_from(await kit.engine(LAYOUT))
        read, stream = await started(kit, path)
        kit.device.fail(stream)
        kit.device.run()
        for _ in range(2):
            with pytest.raises(DeviceError, match="made to fail"):
                read.done()
        assert not path.end.lost
        assert not path.end.reading


@pytest.mark.asyncio
async def test_closing_waits_for_copies_in_flight_before_it_unmaps(seed: int) -> None:
    async with IpcKit(seed) as kit:
        path = await (await kit.engine(LAYOUT)).read_from(await kit.engine(LAYOUT))
        await started(kit, path)
        closing = asyncio.ensure_future(path.consumer.transport.aclose())
        for _ in range(10):
            await asyncio.sleep(0.001)
        assert not kit.driver.closed
        assert not closing.done()
        kit.device.run()
        await closing
        assert len(kit.driver.closed) == 2


@pytest.mark.asyncio
async def test_what_is_still_read_after_the_patience_stays_mapped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    monkeypatch.setattr("aiokv.transports.cuda_ipc._PATIENCE_S", 0.01)
    async with IpcKit(seed) as kit:
        path = await (await kit.engine(LAYOUT)).read_from(await kit.engine(LAYOUT))
        read, _ = await started(kit, path)
        await path.consumer.transport.aclose()
        assert not kit.driver.closed
        assert "stays mapped" in caplog.text
        assert not path.producer_end.lost
        kit.device.run()
        with pytest.raises(DeviceError):
            read.done()
        await lost(path.producer_end)
        await path.consumer.transport.aclose()


@pytest.mark.asyncio
async def test_closing_waits_no_longer_than_a_call_of_the_driver_should_take(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    monkeypatch.setattr("aiokv.transports.cuda_ipc_mappings._PATIENCE_S", 0.01)
    may = threading.Event()
    async with IpcKit(seed) as kit:
        path = await (await kit.engine(LAYOUT)).read_from(await kit.engine(LAYOUT))
        close = kit.driver.close

        def slow(base: int) -> None:
            may.wait(20)
            close(base)

        kit.driver.close = slow
        await path.consumer.transport.aclose()
        assert "don't return" in caplog.text
        assert not kit.driver.closed
        may.set()
        async with asyncio.timeout(20):
            while len(kit.driver.closed) < len(kit.driver.opened):  # noqa: ASYNC110
                await asyncio.sleep(0.005)


@pytest.mark.asyncio
async def test_reads_go_on_the_callers_stream_and_find_hazards(seed: int) -> None:
    """The suite's device tells when a block is read that is still being written."""
    async with IpcKit(seed) as kit:
        path = await (await kit.engine(LAYOUT)).read_from(await kit.engine(LAYOUT))
        writing = kit.device.stream()
        writing.write(path.producer.cache.buffers[0], 0, np.ones(8, np.uint8).tobytes())
        part = path.part(kit, 1, tokens=LAYOUT.groups[0].blocks * 4)
        reading = kit.device.stream()
        read = path.end.read(part.plan, part.chunks(1 << 20)[0], path.consumer.cache.buffers, stream=reading)
        assert kit.device.hazards
        kit.device.hazards.clear()
        kit.device.run()
        assert read.done()


@pytest.mark.asyncio
async def test_what_was_enqueued_of_a_copy_that_failed_keeps_the_memory_mapped(seed: int) -> None:
    async with IpcKit(seed) as kit:
        path = await (await kit.engine(LAYOUT)).read_from(await kit.engine(LAYOUT))
        copy = kit.device.copy

        def failing(*arguments, stream) -> None:
            copy(*arguments, stream=stream)
            raise DeviceError("made to fail")

        kit.device.copy = failing
        read, _ = await started(kit, path)
        path.end.close()
        assert not read.done()
        assert not kit.driver.closed
        kit.device.run()
        with pytest.raises(DeviceError, match="made to fail"):
            read.done()
        await path.consumer.transport.aclose()
        assert sorted(kit.driver.closed) == sorted(kit.driver.opened)


@pytest.mark.asyncio
async def test_memory_is_mapped_and_unmapped_while_nothing_on_the_gpu_waits_for_a_process(seed: int) -> None:
    """Where such a call waits for the GPU, what is on it must end by itself."""
    async with IpcKit(seed) as kit:
        producer, consumer = await kit.engine(LAYOUT), await kit.engine(LAYOUT)
        gate, opened = kit.device.gate, len(kit.driver.opened)
        assert gate.enter(print)
        connecting = asyncio.ensure_future(
            consumer.transport.connect(producer.transport.describe(), producer.info)
        )
        async with asyncio.timeout(20):
            while gate.enter(print):
                gate.leave()
                await asyncio.sleep(0.002)
        assert len(kit.driver.opened) == opened
        gate.leave()
        end = await connecting
        assert len(kit.driver.opened) > opened
        assert gate.enter(print)
        end.close()
        await asyncio.sleep(0.02)
        assert not kit.driver.closed
        gate.leave()
        await consumer.transport.aclose()
        assert kit.driver.closed
