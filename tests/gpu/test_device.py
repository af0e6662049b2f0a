"""A real GPU as a device: what is ordered, what overlaps, what is left behind."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from aiokv.device.cache import KVCache
from aiokv.device.cuda import CudaBuffer, CudaDevice, PinnedBuffer
from aiokv.device.cudacosts import PATHS, TYPICAL
from aiokv.device.host import HostBuffer
from aiokv.proto.layout import CacheLayout
from aiokv.proto.plan import CopyPlan, GroupBlocks, Side, plan_copy
from aiokv.testing.conformance.devices import CASES, Case
from aiokv.testing.cudakit import CudaKit
from aiokv.testing.held import Holder
from aiokv.testing.pairs import Engines

pytestmark = [pytest.mark.gpu, pytest.mark.may_block("it looks into the GPU's memory, and waits")]

LAYOUT = CacheLayout.attention(layers=2, blocks=256, block_size=16, heads=4, head_size=64, dtype="bfloat16")


@pytest.fixture(scope="session")
def devices(device: CudaDevice) -> Iterator[dict[str | None, CudaDevice]]:
    """One device for each way of copying, with little staging memory."""
    made = {
        path: CudaDevice(0, costs=TYPICAL, path=path, staging_bytes=48 << 10, offsets_bytes=1 << 20)
        for path in PATHS
    }
    yield {None: device, **made}
    for each in made.values():
        each.close()


def cache_of(device: CudaDevice, seed: int, layout: CacheLayout = LAYOUT) -> KVCache:
    cache = KVCache.allocate(layout, device=device)
    (buffer,) = cache.buffers
    assert isinstance(buffer, CudaBuffer)
    noise = np.random.default_rng(seed).integers(0, 256, buffer.nbytes, dtype=np.uint8)
    buffer.tensor().copy_(torch.from_numpy(noise))
    torch.cuda.synchronize()
    return cache


def plan_of(cache: KVCache, seed: int, blocks: int = 32, tokens: int = 0) -> CopyPlan:
    group = cache.layout.groups[0]
    random = np.random.default_rng(seed)
    sides = [
        Side(cache.layout, cache.placement, (GroupBlocks(0, random.permutation(group.blocks)[:blocks]),))
        for _ in range(2)
    ]
    tokens = tokens or blocks * group.block_size
    return plan_copy(*sides, first_token=0, tokens=tokens, heads=group.heads)


def contents(cache: KVCache) -> np.ndarray:
    torch.cuda.synchronize()
    (buffer,) = cache.buffers
    assert isinstance(buffer, CudaBuffer)
    return buffer.tensor().cpu().numpy()


def carried_out(plan: CopyPlan, source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """What the target must hold afterwards, worked out from the extents on the host."""
    wanted = target.copy()
    for layer in plan.layers:
        for copy in plan.copies(layer):
            for _, src, _, dst, lengths in copy.extents(0, len(copy.section.src)):
                for a, b, size in zip(src.tolist(), dst.tolist(), lengths.tolist(), strict=True):
                    wanted[b : b + size] = source[a : a + size]
    return wanted


def until(event: object, seconds: float = 15.0) -> None:
    end = time.monotonic() + seconds
    while not event.done():  # type: ignore[attr-defined]
        assert time.monotonic() < end, "the GPU did not get there"
        time.sleep(0.0005)


@pytest.mark.asyncio
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("path", [None, *PATHS])
async def test_conformance(
    devices: dict[str | None, CudaDevice], case: Case, path: str | None, seed: int
) -> None:
    async with CudaKit(seed, devices[path]) as kit:
        await case(kit)


# -- what waits, and what doesn't -------------------------------------------------------------------


def test_side_streams_run_beside_the_default_stream_and_each_other(
    device: CudaDevice, holder: Holder
) -> None:
    cache = cache_of(device, 1)
    plan = plan_of(cache, 2)
    stuck, free = device.stream(), device.stream()
    number = holder.hold(torch.cuda.current_stream())
    other = holder.hold(stuck)
    default = device.adopt(None).record()
    behind = stuck.record()
    for chunk in plan.chunks((0,), 1 << 20):
        device.copy(plan, chunk, cache.buffers, cache.buffers, stream=free)
    until(free.record())
    assert not default.done()
    assert not behind.done()
    holder.release(number)
    until(default)
    assert not behind.done()
    holder.release(other)
    until(behind)
    cache.close()


def test_what_waits_for_an_event_comes_after_it(device: CudaDevice, holder: Holder) -> None:
    source, target = cache_of(device, 1), cache_of(device, 2)
    plan = plan_of(source, 3)
    staging = device.pin_now(HostBuffer.allocate(plan.total))
    writer, reader = device.stream(), device.stream()
    number = holder.hold(writer)
    before = contents_async(target)
    for chunk in plan.chunks((0,), 1 << 20):
        device.copy(plan, chunk, source.buffers, target.buffers, stream=writer)
    reader.wait(writer.record())
    assert reader.held
    (chunk,) = plan.chunks((1,), 1 << 30)
    device.gather(plan, chunk, source.buffers, staging, 0, stream=reader)
    event = reader.record()
    time.sleep(0.05)
    assert not event.done()
    assert before.tobytes() == contents_async(target).tobytes()
    holder.release(number)
    until(event)
    assert not reader.held
    staging.close()
    source.close()
    target.close()


def contents_async(cache: KVCache) -> np.ndarray:
    """Contents, without waiting for other streams than one of its own."""
    (buffer,) = cache.buffers
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        found = buffer.tensor().to("cpu")  # type: ignore[attr-defined]
    stream.synchronize()
    return found.numpy()


def test_nothing_waits_for_a_kernel_that_spins(device: CudaDevice, holder: Holder) -> None:
    """No kernel is loaded and no memory is made once a device is there, or this would hang."""
    odd = CacheLayout.attention(layers=1, blocks=64, block_size=4, heads=3, head_size=5, dtype="int8")
    caches = [cache_of(device, 1), cache_of(device, 2, odd)]
    staging = [device.pin_now(HostBuffer.allocate(8 << 20)), device.allocate(8 << 20)]
    stuck, busy = device.stream(), device.stream()
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info(0)[0]
    holder.hold(stuck)
    for number, cache in enumerate(caches):
        for at in (0, 4, 7):
            plan = plan_of(cache, number)
            for chunk in plan.chunks((0,), 1 << 20):
                for memory in staging:
                    device.gather(plan, chunk, cache.buffers, memory, at, stream=busy)
                    device.scatter(plan, chunk, memory, at, cache.buffers, stream=busy)
    until(busy.record())
    assert torch.cuda.mem_get_info(0)[0] == free
    holder.release()
    for memory in staging:
        memory.close()
    for cache in caches:
        cache.close()


def test_records_what_a_model_thread_enqueued(device: CudaDevice, holder: Holder) -> None:
    found = []
    stream = torch.cuda.Stream()

    def model() -> None:
        with torch.cuda.stream(stream):
            number = holder.hold(torch.cuda.current_stream())
            adopted = device.adopt(None)
            found.append((number, adopted, adopted.record()))

    thread = threading.Thread(target=model)
    thread.start()
    thread.join()
    ((number, adopted, event),) = found
    assert adopted.ptr == stream.cuda_stream
    assert not event.done()
    holder.release(number)
    until(event)


def test_streams_of_cupy(device: CudaDevice) -> None:
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)

    class Cupys:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, stream.ptr

    until(device.adopt(stream if hasattr(stream, "__cuda_stream__") else Cupys()).record())


# -- bytes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [None, *PATHS])
@pytest.mark.parametrize(
    ("dtype", "head_size", "heads"), [("bfloat16", 128, 8), ("float16", 10, 3), ("int8", 5, 3)]
)
def test_bytes_arrive_by_every_way(
    devices: dict[str | None, CudaDevice], path: str | None, dtype: str, head_size: int, heads: int, seed: int
) -> None:
    device = devices[path]
    layout = CacheLayout.attention(
        layers=150, blocks=100, block_size=4, heads=heads, head_size=head_size, dtype=dtype
    )
    source, target = cache_of(device, 1, layout), cache_of(device, 2, layout)
    wanted = contents(source), contents(target)
    plan = plan_of(source, seed, blocks=60, tokens=237)
    staging = device.pin_now(HostBuffer.allocate(plan.total + 64))
    stream, at = device.stream(), 0
    few, many = plan.layers[:8], plan.layers[8:]
    for chunk in (*plan.chunks(few, 30_000), *plan.chunks(many, 1 << 30)):
        device.gather(plan, chunk, source.buffers, staging, at, stream=stream)
        device.scatter(plan, chunk, staging, at, target.buffers, stream=stream)
        at += chunk.nbytes
    until(stream.record())
    assert (contents(target) == carried_out(plan, *wanted)).all()
    staging.close()
    source.close()
    target.close()


def test_pinned_memory_of_many_pieces(device: CudaDevice) -> None:
    layout = CacheLayout.attention(
        layers=1, blocks=1024, block_size=16, heads=8, head_size=128, dtype="bfloat16"
    )
    cache = cache_of(device, 1, layout)
    ids = GroupBlocks(0, np.arange(1024))
    side = Side(layout, cache.placement, (ids,))
    plan = plan_copy(side, side, first_token=0, tokens=16 * 1024, heads=(0, 8))
    staging = device.pin_now(HostBuffer.allocate(plan.total + 100))
    assert staging.nbytes > staging.piece
    stream, at = device.stream(), 33
    before = contents(cache)
    for chunk in plan.chunks((0,), 1 << 30):
        device.gather(plan, chunk, cache.buffers, staging, at, stream=stream)
        at += chunk.nbytes
    until(stream.record())
    assert (np.frombuffer(staging.view, np.uint8)[33 : 33 + plan.total] == before[: plan.total]).all()
    staging.close()
    cache.close()


@pytest.mark.asyncio
async def test_pinning_does_not_hold_the_loop(device: CudaDevice) -> None:
    future = asyncio.ensure_future(device.pinned(256 << 20))
    turns = 0
    while not future.done():
        turns += 1
        await asyncio.sleep(0.001)
    buffer = await future
    assert turns > 3
    assert isinstance(buffer, PinnedBuffer)
    assert buffer.fd is not None
    await asyncio.to_thread(buffer.close)


# -- engines ----------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_pair_of_engines_on_one_gpu(device: CudaDevice) -> None:
    source, target = cache_of(device, 1), cache_of(device, 2)
    async with Engines() as engines:
        producer = await engines.add("a", cache=source)
        consumer = await engines.add("b", cache=target)
        for number in range(5):
            blocks, others = list(range(number, number + 40, 2)), list(range(100 + number, 120 + number))
            async with (
                producer.offer(f"t{number}", blocks) as offer,
                consumer.fetch(f"t{number}", others, sources=[producer.address]) as fetch,
            ):
                for layer in range(LAYOUT.layers):
                    offer.layer_ready(layer)
                await fetch.wait()
            mine, theirs = source.tensor(1), target.tensor(1)
            assert isinstance(mine, torch.Tensor)
            assert isinstance(theirs, torch.Tensor)
            axis = LAYOUT.groups[0].axes.index("b")
            assert torch.equal(
                mine.index_select(axis, torch.tensor(blocks, device="cuda")).view(torch.uint8),
                theirs.index_select(axis, torch.tensor(others, device="cuda")).view(torch.uint8),
            )
    source.close()
    target.close()


def test_nothing_is_left_after_ten_thousand_copies(device: CudaDevice) -> None:
    cache = cache_of(device, 1)
    staging = device.pin_now(HostBuffer.allocate(1 << 20))
    torch.cuda.synchronize()
    for number in range(200):
        self_copy(device, cache, staging, number)
    gc.collect()
    until(device.stream().record())
    free, events, streams = (
        torch.cuda.mem_get_info(0)[0],
        device.context.events_made,
        device.context.streams_made,
    )
    for number in range(10_000):
        self_copy(device, cache, staging, number)
    torch.cuda.synchronize()
    gc.collect()
    assert torch.cuda.mem_get_info(0)[0] == free
    assert device.context.events_made <= events + 8
    assert device.context.streams_made <= streams + 1
    staging.close()
    cache.close()


def self_copy(device: CudaDevice, cache: KVCache, staging: PinnedBuffer, number: int) -> None:
    stream = device.stream()
    plan = plan_of(cache, number % 7, blocks=4)
    (chunk, *_) = plan.chunks((0,), 1 << 20)
    device.gather(plan, chunk, cache.buffers, staging, 0, stream=stream)
    device.scatter(plan, chunk, staging, 0, cache.buffers, stream=stream)
    if number % 64 == 0:
        until(stream.record())
