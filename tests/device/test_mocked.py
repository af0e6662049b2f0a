"""The mocked device: each hazard is found on a faulty sequence, and none on the right one."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from aiokv.device.host import HostDevice
from aiokv.device.mocked import MockedBuffer, MockedDevice, MockedStream
from aiokv.errors import DeviceError
from aiokv.proto.layout import CacheLayout
from aiokv.proto.placement import Placement
from aiokv.proto.plan import CopyPlan, GroupBlocks, Side, plan_copy

BLOCK = 64  # bytes: 4 tokens of one head of 4 float16, K and V


def block_plan(src: list[int], dst: list[int]) -> CopyPlan:
    """A plan that moves whole blocks of one small layer."""
    layout = CacheLayout.attention(
        layers=1, blocks=8, block_size=4, heads=1, head_size=4, dtype="float16", axes="bsthd"
    )
    place = Placement.dense(layout)

    def side(ids: list[int]) -> Side:
        return Side(layout, place, (GroupBlocks(0, np.array(ids, dtype=np.int64)),))

    return plan_copy(side(src), side(dst), first_token=0, tokens=4 * len(src), heads=(0, 1))


def copy(
    device: MockedDevice,
    stream: MockedStream,
    source: MockedBuffer,
    target: MockedBuffer,
    src: list[int],
    dst: list[int],
) -> None:
    plan = block_plan(src, dst)
    for chunk in plan.chunks((0,), 1 << 20):
        device.copy(plan, chunk, [source], [target], stream=stream)


def kinds(device: MockedDevice) -> list[str]:
    return [hazard.kind for hazard in device.hazards]


@pytest.fixture
def device(seed: int) -> MockedDevice:
    return MockedDevice(seed)


@pytest.fixture
def buffer(device: MockedDevice) -> MockedBuffer:
    return device.allocate(8 * BLOCK)


@pytest.fixture
def other(device: MockedDevice) -> MockedBuffer:
    return device.allocate(8 * BLOCK)


# -- streams and events ---------------------------------------------------------------------------


def test_nothing_happens_until_it_is_stepped(device: MockedDevice, buffer: MockedBuffer) -> None:
    stream = device.stream()
    stream.write(buffer, 0, b"kv")
    event = stream.record()
    assert not event.done()
    assert bytes(buffer.view[:2]) == b"\0\0"
    assert device.step(stream)
    assert bytes(buffer.view[:2]) == b"kv"
    assert not event.done()
    assert device.step(stream)
    assert event.done()
    assert not device.step(stream)
    assert device.idle


def test_a_stream_waits_for_an_event_of_another(device: MockedDevice, buffer: MockedBuffer) -> None:
    writer, reader = device.stream(), device.stream()
    writer.write(buffer, 0, b"kv")
    reader.wait(writer.record())
    seen = reader.read(buffer, 0, 2)
    assert not device.step(reader)
    device.run()
    assert seen.data == b"kv"
    assert device.hazards == []


def test_the_seed_decides_the_order() -> None:
    def order(seed: int) -> list[int]:
        device = MockedDevice(seed)
        buffer = device.allocate(4)
        streams = [device.stream() for _ in range(4)]
        reads = [stream.read(buffer, 0, 1) for stream in streams for _ in range(3)]
        found = []
        while device.step():
            found.append(sum(read.data is not None for read in reads[:6]))
        return found

    assert order(1) == order(1)
    assert len({tuple(order(seed)) for seed in range(8)}) > 1


def test_a_device_without_a_seed_tells_the_one_it_drew() -> None:
    device = MockedDevice()
    assert str(device.seed) in repr(device)


def test_a_copy_is_in_flight_between_its_two_steps(
    device: MockedDevice, buffer: MockedBuffer, other: MockedBuffer
) -> None:
    stream = device.stream()
    buffer.write(0, bytes(range(1, BLOCK + 1)))
    copy(device, stream, buffer, other, [0], [3])
    event = stream.record()
    device.step(stream)
    half = 3 * BLOCK + BLOCK // 2
    assert other.view[half - 1] == BLOCK // 2
    assert other.view[half] == 0
    assert not event.done()
    device.run()
    assert event.done()
    assert other.read(3 * BLOCK, BLOCK) == bytes(range(1, BLOCK + 1))
    assert device.hazards == []


def test_a_wait_for_an_event_of_another_kind(device: MockedDevice) -> None:
    stream = device.stream()
    stream.wait(HostDevice().stream().record())
    event = stream.record()
    device.run()
    assert event.done()


# -- adopting -------------------------------------------------------------------------------------


def test_adopts_what_names_a_stream(device: MockedDevice) -> None:
    stream = device.stream()

    class Foreign:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, stream.handle

    class Unknown:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, 7

    assert device.adopt(stream) is stream
    assert device.adopt(Foreign()) is stream
    assert device.adopt(None) is device.adopt(None)
    assert device.adopt(None) is not stream
    with pytest.raises(TypeError, match="__cuda_stream__"):
        device.adopt(object())
    with pytest.raises(DeviceError, match="no stream 0x7"):
        device.adopt(Unknown())


def test_streams_take_work_from_other_threads(device: MockedDevice, buffer: MockedBuffer) -> None:
    stream = device.stream()

    def submit() -> None:
        for _ in range(50):
            stream.write(buffer, 0, b"x")
            events.append(stream.record())

    events: list[object] = []
    threads = [threading.Thread(target=submit) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stream.queued == 200
    device.run()
    assert device.hazards == []


# -- failing --------------------------------------------------------------------------------------


def test_a_failure_is_sticky_and_spares_what_came_before(device: MockedDevice, buffer: MockedBuffer) -> None:
    stream, bystander = device.stream(), device.stream()
    before = stream.record()
    stream.write(buffer, 0, b"x")
    after = stream.record()
    device.fail(stream, "ECC")
    fine = bystander.record()
    device.run()
    assert before.done()
    assert fine.done()
    assert buffer.view[0] == 0
    with pytest.raises(DeviceError, match="ECC"):
        after.done()
    stream.write(buffer, 0, b"y")
    later = stream.record()
    assert not later.done()
    device.run()
    with pytest.raises(DeviceError, match="ECC"):
        later.done()
    assert buffer.view[0] == 0


def test_a_copy_that_fails_half_way(device: MockedDevice, buffer: MockedBuffer, other: MockedBuffer) -> None:
    stream = device.stream()
    buffer.write(0, b"\1" * BLOCK)
    copy(device, stream, buffer, other, [0], [0])
    event = stream.record()
    device.step(stream)
    device.fail(stream)
    device.run()
    with pytest.raises(DeviceError):
        event.done()
    assert other.read(0, BLOCK) == b"\1" * (BLOCK // 2) + b"\0" * (BLOCK // 2)
    assert device.hazards == []


def test_who_waits_for_a_failed_event_fails(device: MockedDevice, buffer: MockedBuffer) -> None:
    stream, dependent = device.stream(), device.stream()
    device.fail(stream)
    stream.write(buffer, 0, b"x")
    dependent.wait(stream.record())
    dependent.write(buffer, 0, b"y")
    event = dependent.record()
    device.run()
    with pytest.raises(DeviceError):
        event.done()
    assert buffer.view[0] == 0


@pytest.mark.parametrize("offset", [-1, 8 * BLOCK, 8 * BLOCK - 1])
def test_refuses_what_lies_outside(device: MockedDevice, buffer: MockedBuffer, offset: int) -> None:
    with pytest.raises(DeviceError, match="beyond"):
        device.stream().write(buffer, offset, b"xx")
    with pytest.raises(DeviceError, match="beyond"):
        buffer.read(offset, 2)
    assert device.idle


def test_a_copy_that_can_not_be_submitted_enqueues_nothing(
    device: MockedDevice, buffer: MockedBuffer
) -> None:
    plan = block_plan([0], [0])
    chunk = next(plan.chunks((0,), 1 << 20))
    small, stream = device.allocate(8), device.stream()
    with pytest.raises(DeviceError, match="beyond"):
        device.copy(plan, chunk, [buffer], [small], stream=stream)
    with pytest.raises(DeviceError, match="no such chunk"):
        device.copy(plan, chunk._replace(layer=5), [buffer], [buffer], stream=stream)
    with pytest.raises(DeviceError, match="no mocked stream"):
        device.copy(plan, chunk, [buffer], [buffer], stream=HostDevice().stream())
    assert device.idle


# -- hazards --------------------------------------------------------------------------------------


def test_read_before_ready(device: MockedDevice, buffer: MockedBuffer) -> None:
    model, side = device.stream(), device.stream()
    model.write(buffer, 0, b"layer")
    side.read(buffer, 4, 10)
    assert kinds(device) == ["read before ready"]
    hazard = device.hazards[0]
    assert (hazard.lo, hazard.hi) == (4, 5)
    assert "write on stream" in str(hazard)


def test_an_event_recorded_before_the_write_orders_nothing(
    device: MockedDevice, buffer: MockedBuffer, other: MockedBuffer
) -> None:
    model, side = device.stream(), device.stream()
    event = model.record()
    model.write(buffer, 0, b"layer")
    side.wait(event)
    copy(device, side, buffer, other, [0], [0])
    assert kinds(device) == ["read before ready"]


def test_a_right_order_by_luck_is_found_too(device: MockedDevice, buffer: MockedBuffer) -> None:
    model, side = device.stream(), device.stream()
    model.write(buffer, 0, b"layer")
    event = model.record()
    device.run()
    assert event.reached
    side.read(buffer, 0, 5)
    assert kinds(device) == ["read before ready"]


def test_what_the_host_saw_done_comes_before_what_it_submits(
    device: MockedDevice, buffer: MockedBuffer
) -> None:
    model, side, third = device.stream(), device.stream(), device.stream()
    model.write(buffer, 0, b"layer")
    side.wait(model.record())
    event = side.record()
    device.run()
    assert event.done()
    third.read(buffer, 0, 5)
    assert device.hazards == []


def test_order_passes_through_a_chain_of_events(
    device: MockedDevice, buffer: MockedBuffer, other: MockedBuffer
) -> None:
    model, side, third = device.stream(), device.stream(), device.stream()
    model.write(buffer, 0, b"layer")
    side.wait(model.record())
    copy(device, side, buffer, other, [0], [1])
    third.wait(side.record())
    third.read(other, BLOCK, BLOCK)
    third.write(buffer, 0, b"next")
    assert device.hazards == []
    device.run()


def test_write_under_a_reader(device: MockedDevice, buffer: MockedBuffer, other: MockedBuffer) -> None:
    model, side = device.stream(), device.stream()
    copy(device, side, buffer, other, [0, 2], [0, 1])
    model.write(buffer, BLOCK, b"x" * BLOCK)
    assert device.hazards == []
    model.write(buffer, 2 * BLOCK, b"x")
    assert kinds(device) == ["write under a reader"]


def test_write_under_a_writer(device: MockedDevice, buffer: MockedBuffer, other: MockedBuffer) -> None:
    model, side = device.stream(), device.stream()
    copy(device, side, buffer, other, [0], [5])
    model.write(other, 5 * BLOCK + 3, b"x")
    assert kinds(device) == ["write under a writer"]


def test_readers_may_overlap(device: MockedDevice, buffer: MockedBuffer) -> None:
    for _ in range(3):
        device.stream().read(buffer, 0, 8)
    assert device.hazards == []


def test_the_host_reads_and_writes_under_the_same_rules(device: MockedDevice, buffer: MockedBuffer) -> None:
    stream = device.stream()
    stream.write(buffer, 0, b"x")
    event = stream.record()
    device.run()
    buffer.read(0, 1)
    buffer.write(0, b"y")
    assert kinds(device) == ["read before ready", "write under a writer"]
    assert event.done()
    buffer.read(0, 1)
    buffer.write(0, b"y")
    assert len(device.hazards) == 2


def test_free_under_a_copy_in_flight(device: MockedDevice, buffer: MockedBuffer, other: MockedBuffer) -> None:
    stream = device.stream()
    copy(device, stream, buffer, other, [0], [0])
    event = stream.record()
    device.step(stream)
    other.free()
    assert kinds(device) == ["use after free"]
    device.run()
    assert event.done()
    buffer.free()
    buffer.free()
    assert len(device.hazards) == 1


def test_use_after_free(device: MockedDevice, buffer: MockedBuffer) -> None:
    buffer.close()
    device.stream().read(buffer, 0, 1)
    assert kinds(device) == ["use after free"]


def test_a_hazard_can_be_raised_and_then_nothing_is_enqueued() -> None:
    device = MockedDevice(0, raises=True)
    buffer = device.allocate(8)
    model, side = device.stream(), device.stream()
    model.write(buffer, 0, b"x")
    with pytest.raises(DeviceError, match="read before ready"):
        side.read(buffer, 0, 1)
    assert not side.queued


def test_clocks_forget_what_the_host_knows(device: MockedDevice) -> None:
    main = device.stream()
    for _ in range(100):
        side = device.stream()
        main.wait(side.record())
        event = main.record()
        device.run()
        assert event.done()
    assert len(event.point.clock) < 5


def test_a_copy_between_two_devices(seed: int) -> None:
    prefill, decode = MockedDevice(seed, name="prefill"), MockedDevice(seed, name="decode")
    source, target = prefill.allocate(8 * BLOCK), decode.allocate(8 * BLOCK)
    model, side, reader = prefill.stream(), decode.stream(), decode.stream()
    model.write(source, 0, b"k" * BLOCK)
    ready = model.record()
    prefill.run()
    assert ready.done()
    copy(decode, side, source, target, [0], [1])
    model.write(source, 0, b"n" * BLOCK)
    assert kinds(prefill) == ["write under a reader"]
    landed = side.record()
    decode.run()
    assert landed.done()
    model.write(source, 0, b"n" * BLOCK)
    seen = reader.read(target, BLOCK, BLOCK)
    decode.run()
    assert seen.data == b"k" * BLOCK
    assert len(prefill.hazards) == 1
    assert decode.hazards == []


def test_a_stream_of_one_device_waits_for_another(seed: int) -> None:
    prefill, decode = MockedDevice(seed), MockedDevice(seed)
    source, target = prefill.allocate(8 * BLOCK), decode.allocate(8 * BLOCK)
    model, side = prefill.stream(), decode.stream()
    model.write(source, 0, b"k" * BLOCK)
    side.wait(model.record())
    copy(decode, side, source, target, [0], [1])
    decode.run()
    assert side.queued
    prefill.run()
    decode.run()
    assert bytes(target.view[BLOCK : 2 * BLOCK]) == b"k" * BLOCK
    assert prefill.hazards == decode.hazards == []
