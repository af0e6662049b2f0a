"""A GPU as a device, played by host memory: what is ordered how, what is refused, what is given back."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from aiokv.device.cuda import CudaBuffer, CudaDevice, CudaStream, PinnedBuffer
from aiokv.device.cudacosts import PATHS, TYPICAL
from aiokv.device.host import HostBuffer, HostDevice
from aiokv.errors import CapacityError, ClosedError, DeviceError
from aiokv.proto.layout import CacheLayout
from aiokv.proto.placement import GroupPlacement, Placement
from aiokv.proto.plan import CopyPlan, GroupBlocks, Side, plan_copy
from aiokv.testing.conformance.devices import CASES, Case
from aiokv.testing.cudakit import CudaKit
from aiokv.testing.fakecuda import FakeCuda, FakeError

LAYOUT = CacheLayout.attention(layers=1, blocks=64, block_size=4, heads=2, head_size=8, dtype="float16")
BLOCK = 256  # bytes, at one layer


@pytest.fixture
def fake() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def device(fake: FakeCuda) -> Iterator[CudaDevice]:
    made = make(fake)
    yield made
    gc.collect()
    made.close()


def make(fake: FakeCuda, *, ordinal: int = 0, path: str | None = None, staging: int = 1 << 20) -> CudaDevice:
    return CudaDevice(
        ordinal,
        cuda=fake.libraries(),
        costs=TYPICAL,
        path=path,
        staging_bytes=staging,
        offsets_bytes=1 << 16,
    )


def plan_of(blocks: list[int], targets: list[int] | None = None) -> CopyPlan:
    sides = [
        Side(LAYOUT, Placement.dense(LAYOUT), (GroupBlocks(0, np.array(ids)),))
        for ids in (blocks, blocks if targets is None else targets)
    ]
    return plan_copy(*sides, first_token=0, tokens=4 * len(blocks), heads=(0, 2))


def cache_of(device: CudaDevice, seed: int) -> CudaBuffer:
    nbytes = Placement.dense(LAYOUT).buffers[0]
    buffer = device.allocate(nbytes)
    ctypes.memmove(buffer.address, np.random.default_rng(seed).bytes(nbytes), nbytes)
    return buffer


def host_of(device: CudaDevice, nbytes: int) -> PinnedBuffer:
    host = HostBuffer.allocate(nbytes)
    try:
        return device.pin_now(host)
    except BaseException:
        host.close()
        raise


def block(buffer: CudaBuffer | PinnedBuffer, number: int) -> bytes:
    """One block's K and V, in the layout's order."""
    half = 64 * BLOCK // 2
    return b"".join(
        ctypes.string_at(buffer.address + s * half + number * BLOCK // 2, BLOCK // 2) for s in range(2)
    )


# -- the contract ---------------------------------------------------------------------------------


@pytest.mark.may_block("a test looks into memory as it likes")
@pytest.mark.one_loop
@pytest.mark.asyncio
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("path", [None, *PATHS])
async def test_conformance(fake: FakeCuda, case: Case, path: str | None, seed: int) -> None:
    # So little staging memory that it is used many times over.
    device = make(fake, path=path, staging=1 << 10)
    async with CudaKit(seed, device) as kit:
        await case(kit)
    assert not fake.status
    gc.collect()
    device.close()
    assert not fake.allocated


def test_torch_is_ready_before_the_first_fetch(fake: FakeCuda) -> None:
    libraries, asked = fake.libraries(), []
    current = libraries.torch.cuda.current_stream

    def noted(ordinal: int) -> object:
        asked.append(ordinal)
        return current(ordinal)

    libraries.torch.cuda.current_stream = noted
    device = CudaDevice(0, cuda=libraries, costs=TYPICAL, staging_bytes=4096, offsets_bytes=4096)
    assert asked == [0]
    device.close()

    def too_old(ordinal: int) -> object:
        raise RuntimeError("the driver is too old")

    libraries.torch.cuda.current_stream = too_old
    with pytest.raises(DeviceError, match="torch can't use CUDA device 0: the driver is too old"):
        CudaDevice(0, cuda=libraries, costs=TYPICAL, staging_bytes=4096, offsets_bytes=4096)


def test_making_one_measures_what_ways_cost(fake: FakeCuda) -> None:
    device = CudaDevice(0, cuda=fake.libraries(), staging_bytes=24 << 20, offsets_bytes=1 << 16)
    assert set(device.costs.to_host) == set(device.costs.to_device) == set(PATHS)
    assert "to_host staged" in str(device.costs)
    device.close()
    assert not fake.allocated


def test_every_kernel_ran_before_it_is_needed(fake: FakeCuda, device: CudaDevice) -> None:
    assert {unit for unit, _, _ in fake.launches} == {16, 4, 1}


# -- copies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [None, *PATHS])
@pytest.mark.parametrize("where", ["gpu", "host"])
def test_gathers_in_plan_order_and_scatters_back(fake: FakeCuda, path: str | None, where: str) -> None:
    device = make(fake, path=path, staging=1 << 10)
    source, target = cache_of(device, 1), cache_of(device, 2)
    ids, others = [5, 9, 10, 2, 63], [1, 40, 41, 7, 0]
    plan = plan_of(ids, others)
    staging = device.allocate(4096) if where == "gpu" else host_of(device, 4096)
    stream, at = device.stream(), 48
    for chunk in plan.chunks((0,), 1 << 20):
        device.gather(plan, chunk, [source], staging, at, stream=stream)
        device.scatter(plan, chunk, staging, at, [target], stream=stream)
        packed = ctypes.string_at(staging.address + at, chunk.nbytes)
        wanted = b"".join(
            ctypes.string_at(source.address + start, size)
            for _, src, _, _, lengths in plan.copy(chunk).extents(chunk.lo, chunk.hi)
            for start, size in zip(src.tolist(), lengths.tolist(), strict=True)
        )
        assert packed == wanted
        at += chunk.nbytes + 16
    assert stream.record().done()
    for mine, theirs in zip(ids, others, strict=True):
        assert block(source, mine) == block(target, theirs)
    source.close()
    target.close()
    staging.close()
    device.close()


@pytest.mark.parametrize("path", [None, *PATHS])
def test_blocks_in_a_row_on_the_host_and_scattered_on_the_gpu(fake: FakeCuda, path: str | None) -> None:
    device = make(fake, path=path, staging=3 << 10)
    gpu, back = cache_of(device, 1), device.allocate(Placement.dense(LAYOUT).buffers[0])
    host = host_of(device, gpu.nbytes)
    ids, row = [5, 9, 60, 2, 33, 17, 40, 8], list(range(10, 18))
    stream = device.stream()
    for plan, source, target in ((plan_of(ids, row), gpu, host), (plan_of(row, ids), host, back)):
        for chunk in plan.chunks(plan.layers, 1 << 20):
            device.copy(plan, chunk, [source], [target], stream=stream)
    assert stream.record().done()
    for mine, theirs in zip(ids, row, strict=True):
        assert block(gpu, mine) == block(host, theirs) == block(back, mine)
    host.close()
    for buffer in (gpu, back):
        buffer.close()
    device.close()


@pytest.mark.parametrize("path", [None, *PATHS])
@pytest.mark.parametrize("split", [False, True], ids=["one buffer", "a buffer for each tensor"])
def test_many_layers_move_at_once(fake: FakeCuda, path: str | None, split: bool, seed: int) -> None:
    device, count = make(fake, path=path, staging=1 << 12), 75
    layout = CacheLayout.attention(
        layers=count, blocks=8, block_size=4, heads=2, head_size=24, dtype="uint8", axes="bthd", split=True
    )
    place, stream, rng = Placement.dense(layout), device.stream(), np.random.default_rng(seed)
    if split:
        each = place.buffers[0] // (2 * count)
        planes = tuple(((2 * n, 0), (2 * n + 1, 0)) for n in range(count))
        group = GroupPlacement(place.groups[0].strides, planes)
        place = Placement(buffers=(each,) * (2 * count), groups=(group,))
    sides = [Side(layout, place, (GroupBlocks(0, rng.permutation(8)[:3]),)) for _ in range(2)]
    plan = plan_copy(*sides, first_token=0, tokens=12, heads=(0, 2))
    (chunk,) = plan.chunks(plan.layers, 1 << 30)
    caches = [[device.allocate(nbytes) for nbytes in place.buffers] for _ in range(3)]
    source, target, back = caches
    host = host_of(device, plan.total)
    for buffer in source:
        ctypes.memmove(buffer.address, rng.bytes(buffer.nbytes), buffer.nbytes)
    before = len(fake.launches)
    device.copy(plan, chunk, source, target, stream=stream)
    # No launch takes more than 128 tensors.
    assert len(fake.launches) == before + (0 if path == "plain" else 2)
    device.gather(plan, chunk, source, host, 0, stream=stream)
    device.scatter(plan, chunk, host, 0, back, stream=stream)
    assert stream.record().done()
    for copy in (target, back):
        for here, at, there, to, lengths in plan.copy(chunk).extents(chunk.lo, chunk.hi):
            for start, end, size in zip(at.tolist(), to.tolist(), lengths.tolist(), strict=True):
                found = ctypes.string_at(copy[there].address + end, size)
                assert found == ctypes.string_at(source[here].address + start, size)
    host.close()
    for buffer in (*source, *target, *back):
        buffer.close()
    device.close()


def test_offsets_are_uploaded_once_a_plan_and_kept_as_long(fake: FakeCuda, device: CudaDevice) -> None:
    source, target = cache_of(device, 1), cache_of(device, 2)
    plan, stream = plan_of([5, 9, 30, 2]), device.stream()
    free = device._engine._offsets.free
    before = len(fake.copies)
    chunks = list(plan.chunks((0,), BLOCK))
    assert len(chunks) > 2
    with fake.held(stream.ptr):
        for chunk in chunks:
            device.copy(plan, chunk, [source], [target], stream=stream)
        assert len(fake.copies) == before + len({id(copy.section) for copy in plan.copies(0)})
        del plan
        gc.collect()
        other = plan_of([1, 20])
        device.copy(
            other, next(iter(other.chunks((0,), 1 << 20))), [source], [target], stream=device.stream()
        )
        kept = device._engine._offsets.free
        assert kept < free - 128  # what is in flight reads them
    del other
    gc.collect()
    device._engine._offsets._sweep()
    assert device._engine._offsets.free == free
    assert block(source, 30) == block(target, 30)
    source.close()
    target.close()


def test_no_room_for_offsets_is_no_failure(fake: FakeCuda) -> None:
    device = make(fake)
    while device._engine._offsets._ranges.take(128) is not None:
        pass
    source, target, staging = cache_of(device, 1), cache_of(device, 2), host_of(device, 4096)
    plan, stream = plan_of([5, 9, 30, 2]), device.stream()
    for chunk in plan.chunks((0,), 1 << 20):
        device.copy(plan, chunk, [source], [target], stream=stream)
        device.gather(plan, chunk, [source], staging, 0, stream=stream)
    assert block(source, 30) == block(target, 30)
    for buffer in (source, target, staging):
        buffer.close()
    device.close()


def test_a_copy_within_the_host_is_refused_where_the_loop_would_wait_for_it(fake: FakeCuda) -> None:
    device = make(fake)
    nbytes = Placement.dense(LAYOUT).buffers[0]
    source, target = host_of(device, nbytes), host_of(device, nbytes)
    plan, stream = plan_of([5, 9, 30, 2]), device.stream()
    (chunk, *_) = plan.chunks((0,), 1 << 20)
    while device._engine._offsets._ranges.take(128) is not None:
        pass
    before = len(fake.copies)
    with pytest.raises(DeviceError, match="no room for the offsets"):
        device.copy(plan, chunk, [source], [target], stream=stream)
    assert len(fake.copies) == before
    for buffer in (source, target):
        buffer.close()
    device.close()


def test_dma_keeps_within_what_was_pinned_at_a_time(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiokv.device.cudamemory.PIECE", 512)
    for path in ("plain", "batch", "staged"):
        device = make(fake, path=path)
        source, staging = cache_of(device, 1), host_of(device, 4096)
        plan, stream = plan_of(list(range(8))), device.stream()
        for chunk in plan.chunks((0,), 1 << 20):
            # FakeCuda checks each access against one range.
            device.gather(plan, chunk, [source], staging, 100, stream=stream)
            device.scatter(plan, chunk, staging, 100, [source], stream=stream)
        assert not fake.status, path
        source.close()
        staging.close()
        device.close()


# -- order ----------------------------------------------------------------------------------------


def test_the_companion_follows_what_was_enqueued_before(fake: FakeCuda) -> None:
    """What is staged to the host is gathered on another stream, after what wrote it all the same."""
    device = make(fake, path="staged")
    first, second = cache_of(device, 1), cache_of(device, 2)
    staging = host_of(device, 4096)
    plan, stream = plan_of([5, 9]), device.stream()
    (chunk, *_) = plan.chunks((0,), 1 << 20)
    device.gather(plan, chunk, [first], staging, 0, stream=stream)  # the companion is made
    with fake.held(stream.ptr):
        device.copy(plan, chunk, [first], [second], stream=stream)
        device.gather(plan, chunk, [second], staging, 2048, stream=stream)
    assert ctypes.string_at(staging.address, chunk.nbytes) == ctypes.string_at(
        staging.address + 2048, chunk.nbytes
    )
    for buffer in (first, second, staging):
        buffer.close()
    device.close()


def test_gathers_run_ahead_of_sends(fake: FakeCuda) -> None:
    device = make(fake, path="staged", staging=3 * 1024)
    source, staging = cache_of(device, 1), host_of(device, 1 << 14)
    plan, stream = plan_of(list(range(0, 64, 2))), device.stream()
    chunks = list(plan.chunks((0,), 1 << 20))
    before = len(fake.launches)
    device.gather(plan, chunks[0], [source], staging, 0, stream=stream)
    companion = stream.companion
    assert companion is not None
    assert {at for _, _, at in fake.launches[before:]} == {companion.ptr}
    with fake.held(stream.ptr):
        device.gather(plan, chunks[0], [source], staging, 8192, stream=stream)
        # As much as staging memory holds was gathered; the rest waits for what it is sent from.
        assert not stream.record().done()
        assert fake._queues[companion.ptr]
    assert stream.record().done()
    assert ctypes.string_at(staging.address, chunks[0].nbytes) == ctypes.string_at(
        staging.address + 8192, chunks[0].nbytes
    )
    source.close()
    staging.close()
    device.close()


def test_a_stream_that_is_held_up_takes_no_staging(fake: FakeCuda) -> None:
    device = make(fake, path="staged")
    source, staging = cache_of(device, 1), host_of(device, 4096)
    plan, caller, stuck, free = plan_of([5, 9]), device.stream(), device.stream(), device.stream()
    (chunk, *_) = plan.chunks((0,), 1 << 20)
    with fake.held(caller.ptr):
        stuck.wait(caller.record())
        device.gather(plan, chunk, [source], staging, 0, stream=stuck)
        assert stuck.companion is None
        device.gather(plan, chunk, [source], staging, 2048, stream=free)
        assert free.companion is not None
        assert free.record().done()
    assert stuck.record().done()
    device.gather(plan, chunk, [source], staging, 0, stream=stuck)
    assert stuck.companion is not None
    # A stream whose handle was given away may be held up by what nobody told of.
    assert free.handle
    device.gather(plan, chunk, [source], staging, 0, stream=free)
    assert free.gate is None
    source.close()
    staging.close()
    device.close()


def test_waiting_is_remembered_only_until_it_is_over(fake: FakeCuda, device: CudaDevice) -> None:
    stream, other = device.stream(), device.stream()
    for _ in range(100):
        with fake.held(other.ptr):
            stream.wait(other.record())
    assert len(stream._waits) <= 16
    assert not stream.held


# -- streams and events ---------------------------------------------------------------------------


def test_events_come_from_a_pool(device: CudaDevice) -> None:
    stream = device.stream()
    for _ in range(1000):
        assert stream.record().done()
    assert device.context.events_made == 64


def test_streams_come_from_a_pool_once_nothing_is_on_them(fake: FakeCuda, device: CudaDevice) -> None:
    first = device.stream()
    handle = first.ptr
    with fake.held(handle):
        first.record()
        del first
        assert device.stream().ptr != handle
    made = device.context.streams_made
    kept = [device.stream() for _ in range(2)]
    assert handle in {stream.ptr for stream in kept}
    assert device.context.streams_made <= made + 1


def test_what_is_dropped_while_pending_breaks_nothing(fake: FakeCuda, device: CudaDevice) -> None:
    stream, other = device.stream(), device.stream()
    with fake.held(stream.ptr):
        for _ in range(70):
            stream.record()
        event = other.record()
        assert event.done()


def test_adopting(device: CudaDevice) -> None:
    current = device.adopt(None)
    assert current.ptr == 0
    assert current.record().done()
    mine = device.stream()
    assert device.adopt(mine) is mine
    theirs = device.adopt(SimpleNamespace(__cuda_stream__=lambda: (0, mine.ptr)))
    assert theirs == mine
    assert hash(theirs) == hash(mine)
    with pytest.raises(TypeError, match="no __cuda_stream__"):
        device.adopt(object())


def test_a_stream_of_another_device_is_refused() -> None:
    fake = FakeCuda(devices=2)
    libraries = fake.libraries()
    devices = [
        CudaDevice(n, cuda=libraries, costs=TYPICAL, staging_bytes=4096, offsets_bytes=4096) for n in (0, 1)
    ]
    other, mine = devices[1].stream(), cache_of(devices[0], 1)
    with pytest.raises(DeviceError, match="not of device 0"):
        devices[0].adopt(other)
    with pytest.raises(DeviceError, match="another device than 0"):
        devices[0].adopt(SimpleNamespace(__cuda_stream__=lambda: (0, other.ptr)))
    with pytest.raises(DeviceError, match="stream of device 1"):
        devices[0].adopt(SimpleNamespace(__cuda_stream__=lambda: (0, 0), device_index=1))
    plan = plan_of([1])
    with pytest.raises(DeviceError, match="no stream of CUDA device 0"):
        devices[0].copy(plan, next(iter(plan.chunks((0,), 1 << 20))), [mine], [mine], stream=other)
    mine.close()
    devices[0].stream().wait(other.record())  # but it can be waited for
    for each in devices:
        each.close()


@pytest.mark.parametrize("current", ["none", "other"])
def test_each_call_is_made_on_its_own_device(current: str, seed: int) -> None:
    """Of two GPUs, in threads that have none, or the other one: ``FakeCuda`` refuses what goes astray."""
    fake = FakeCuda(devices=2)
    libraries, found = fake.libraries(), []

    def work(ordinal: int) -> None:
        if current == "other":
            libraries.runtime.setDevice(1 - ordinal)
        before = libraries.driver.ctxGetCurrent()
        device = CudaDevice(ordinal, cuda=libraries, staging_bytes=4096, offsets_bytes=4096)
        src, dst, host = cache_of(device, seed), device.allocate(1 << 16), host_of(device, 1 << 16)
        assert {fake.ordinal_of(each.address) for each in (src, dst)} == {ordinal}
        plan, stream = plan_of([3, 1, 4]), device.stream()
        late = device.stream()
        for path in (None, *PATHS):
            device._engine.path = path
            for chunk in plan.chunks((0,), 1 << 20):
                device.gather(plan, chunk, [src], host, 0, stream=stream)
                late.wait(stream.record())
                device.scatter(plan, chunk, host, 0, [src], stream=late)
                device.copy(plan, chunk, [src], [src], stream=late)
        assert late.record().done()
        fresh = [device.context.event() for _ in range(100)]
        for each in fresh:
            device.context.give_event(each)
        host.close()
        for each in (src, dst):
            each.close()
        device.close()
        assert libraries.driver.ctxGetCurrent() == before
        found.append(ordinal)

    for ordinal in (0, 1):
        thread = threading.Thread(target=work, args=(ordinal,))
        thread.start()
        thread.join()
    gc.collect()
    assert found == [0, 1]
    assert not fake.status and not fake.allocated


def test_the_per_thread_default_stream_is_refused(device: CudaDevice) -> None:
    with pytest.raises(DeviceError, match="another one in each thread"):
        device.adopt(SimpleNamespace(__cuda_stream__=lambda: (0, 2)))


def test_events_of_the_host_must_be_done(device: CudaDevice) -> None:
    stream = device.stream()
    stream.wait(HostDevice().stream().record())
    with pytest.raises(DeviceError, match="await it first"):
        stream.wait(SimpleNamespace(done=lambda: False))


def test_the_threads_current_device_is_put_back(fake: FakeCuda) -> None:
    fake._current = 0x1234
    device = make(fake)
    plan, stream = plan_of([1]), device.stream()
    source, target = cache_of(device, 1), cache_of(device, 2)
    device.copy(plan, next(iter(plan.chunks((0,), 1 << 20))), [source], [target], stream=stream)
    assert fake._current == 0x1234
    source.close()
    target.close()
    device.close()
    assert fake._current == 0x1234


# -- what is refused ------------------------------------------------------------------------------


def test_memory_that_a_gpu_cannot_reach(device: CudaDevice) -> None:
    plan, stream, source = plan_of([1]), device.stream(), cache_of(device, 1)
    (chunk, *_) = plan.chunks((0,), 1 << 20)
    host = HostBuffer.allocate(1 << 16)
    with pytest.raises(DeviceError, match="has to be pinned"):
        device.copy(plan, chunk, [source], [host], stream=stream)
    host.close()
    with pytest.raises(DeviceError, match="no buffer 0"):
        device.copy(plan, chunk, [source], [], stream=stream)
    pinned = host_of(device, 100)
    with pytest.raises(DeviceError, match="beyond"):
        device.gather(plan, chunk, [source], pinned, 0, stream=stream)
    with pytest.raises(DeviceError, match="offset -1"):
        device.gather(plan, chunk, [source], pinned, -1, stream=stream)
    with pytest.raises(DeviceError, match="no such chunk"):
        device.copy(plan, chunk._replace(hi=7), [source], [source], stream=stream)
    pinned.close()
    with pytest.raises(DeviceError, match="can't be copied"):
        device.scatter(plan, chunk, pinned, 0, [source], stream=stream)
    source.close()
    with pytest.raises(ClosedError, match="was closed"):
        source.tensor()


def test_memory_pinned_to_be_read_is_not_written(device: CudaDevice) -> None:
    plan, stream, source = plan_of([1]), device.stream(), cache_of(device, 1)
    (chunk, *_) = plan.chunks((0,), 1 << 20)
    pinned = device.pin_now(HostBuffer.allocate(4096), readonly=True)
    device.scatter(plan, chunk, pinned, 0, [source], stream=stream)
    with pytest.raises(DeviceError, match="only be read"):
        device.gather(plan, chunk, [source], pinned, 0, stream=stream)
    pinned.close()
    source.close()


def test_a_way_that_there_is_not(fake: FakeCuda) -> None:
    with pytest.raises(ValueError, match="path is one of plain, batch"):
        make(fake, path="fast")


# -- what fails -----------------------------------------------------------------------------------


def test_memory_that_is_not_there() -> None:
    fake = FakeCuda(memory=1 << 22)
    with pytest.raises(CapacityError, match="only 4\\d+ are free"):
        make(fake, staging=1 << 23)
    device = make(fake)
    with pytest.raises(CapacityError, match="8388608 bytes of CUDA device 0"):
        device.allocate(1 << 23)
    with pytest.raises(ValueError, match="at least one byte"):
        device.allocate(0)
    device.close()
    gc.collect()
    assert not fake.allocated


def test_what_cannot_be_pinned_is_given_back(fake: FakeCuda, device: CudaDevice) -> None:
    fake.failing["hostRegister"] = 2
    with pytest.raises(CapacityError, match="can't be pinned"):
        host_of(device, 4096)
    fake.failing["hostRegister"] = 712
    host = HostBuffer.allocate(4096)
    with pytest.raises(DeviceError, match="can't be pinned"):
        device.pin_now(host)
    host.close()


@pytest.mark.may_block("it makes a buffer to be pinned itself")
@pytest.mark.asyncio
async def test_pinned_memory_is_made_off_the_loop(device: CudaDevice) -> None:
    pinned = await device.pinned(4096)
    assert (pinned.nbytes, pinned.fd is None, len(pinned.view)) == (4096, False, 4096)
    pinned.close()
    assert pinned.closed
    pinned.close()
    again = await device.pin(HostBuffer.allocate(100))
    again.close()


def test_a_device_that_is_lost_says_so_from_then_on(fake: FakeCuda) -> None:
    device = make(fake)
    source, target = cache_of(device, 1), cache_of(device, 2)
    plan, stream = plan_of([1]), device.stream()
    (chunk, *_) = plan.chunks((0,), 1 << 20)
    fine = stream.record()
    assert fine.done()
    event = device.stream().record()
    assert device.lost is None
    fake.status = 700
    with pytest.raises(DeviceError, match="failed: cudaError700"):
        event.done()
    assert fine.done()
    assert "lost" in repr(device)
    for call in (
        stream.record,
        device.stream,
        lambda: device.copy(plan, chunk, [source], [target], stream=stream),
    ):
        with pytest.raises(DeviceError, match="device 0 is lost"):
            call()
    # Giving everything back goes without errors all the same.
    source.close()
    target.close()
    gc.collect()
    device.close()


def test_an_error_that_passes_is_told_once(fake: FakeCuda, device: CudaDevice) -> None:
    source, target = cache_of(device, 1), cache_of(device, 2)
    plan, stream = plan_of([1, 9]), device.stream()
    (chunk, *_) = plan.chunks((0,), 1 << 20)
    fake.failing["launch"] = 701
    with pytest.raises(DeviceError, match="can't be launched"):
        device.copy(plan, chunk, [source], [target], stream=stream)
    device.copy(plan, chunk, [source], [target], stream=stream)
    fake.failing["eventRecord"] = 4
    with pytest.raises(DeviceError, match="can't be recorded"):
        stream.record()
    assert stream.record().done()
    assert device.lost is None
    source.close()
    target.close()


@pytest.mark.parametrize("where", ["gather", "scatter"])
@pytest.mark.parametrize("path", ["staged", "plain"])
def test_what_was_enqueued_before_an_error_is_over_when_the_stream_is(
    fake: FakeCuda, path: str, where: str
) -> None:
    device = make(fake, path=path, staging=3 * 1024)
    source, staging = cache_of(device, 1), host_of(device, 1 << 14)
    plan, stream = plan_of(list(range(0, 64, 2))), device.stream()
    (chunk, *_) = plan.chunks((0,), 1 << 20)
    device.gather(plan, chunk, [source], staging, 0, stream=stream)
    copies, calls = fake._runtime_memcpyAsync, []

    def second_fails(*args: int) -> None:
        calls.append(args)
        if len(calls) == 2:
            raise FakeError(701)
        copies(*args)

    device.context.cuda.runtime.memcpyAsync = second_fails
    busy = stream.companion.ptr if stream.companion is not None else stream.ptr
    with fake.held(busy):
        with pytest.raises(DeviceError, match="a DMA can't be enqueued"):
            if where == "gather":
                device.gather(plan, chunk, [source], staging, 0, stream=stream)
            else:
                device.scatter(plan, chunk, staging, 0, [source], stream=stream)
        rest = stream.record()
        assert not rest.done()
    assert rest.done()
    source.close()
    staging.close()
    device.close()


def test_what_was_gathered_ahead_is_over_when_the_stream_is_though_it_could_not_follow(
    fake: FakeCuda,
) -> None:
    device = make(fake, path="staged", staging=3 * 1024)
    source, staging = cache_of(device, 1), host_of(device, 1 << 14)
    plan, stream = plan_of(list(range(0, 64, 2))), device.stream()
    (chunk, *_) = plan.chunks((0,), 1 << 20)
    device.gather(plan, chunk, [source], staging, 0, stream=stream)
    ahead = stream.companion
    assert ahead is not None
    with fake.held(ahead.ptr):
        fake.failing["eventRecord"] = 4
        with pytest.raises(DeviceError, match="can't be recorded"):
            device.gather(plan, chunk, [source], staging, 0, stream=stream)
        rest = stream.record()
        assert not rest.done()
    assert rest.done()
    source.close()
    staging.close()
    device.close()


def test_a_stream_of_its_own_is_never_the_default_one(device: CudaDevice) -> None:
    stream = device.stream()
    assert isinstance(stream, CudaStream)
    assert stream.ptr > 2


def test_no_such_device(fake: FakeCuda) -> None:
    with pytest.raises(DeviceError, match="device 7 can't be used"):
        make(fake, ordinal=7)
