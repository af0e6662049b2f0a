"""A GPU's memory over shm and tcp between two processes, through pinned memory."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio
from remote import Other, TwoProcessesKit, a_victim, lost

from aiokv.errors import DeviceError, PeerLostError
from aiokv.proto.layout import CacheLayout
from aiokv.testing.conformance.transportkit import done
from aiokv.testing.conformance.transports import CASES, Case

pytestmark = [pytest.mark.gpu, pytest.mark.may_block("it asks the other process, and waits")]

PATHS = {"shm": "aiokv.transports.staging_shm:StagedShmTransport", "tcp": "aiokv.transports.tcp:TcpTransport"}
#: Larger than a ring.
LAYOUT = CacheLayout.attention(layers=8, blocks=128, block_size=16, heads=8, head_size=128, dtype="bfloat16")
TOKENS = 2048


@pytest.mark.asyncio
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("kind", PATHS)
async def test_conformance_in_two_processes(kind: str, case: Case, other: Other, device, seed: int) -> None:
    # Little, since some make hundreds of links, and it is pinned for each.
    async with TwoProcessesKit(seed, other, PATHS[kind], device, {"staging": 4 << 20}) as kit:
        await case(kit)


@pytest_asyncio.fixture(params=PATHS)
async def victim(request, seed: int, device) -> AsyncIterator[TwoProcessesKit]:
    async with a_victim(seed, PATHS[request.param], device, {"staging": 16 << 20}) as kit:
        yield kit


async def receiving(kit):
    """The other process sends to this one: the path, and a part of all that there is."""
    consumer, producer = await kit.engine(LAYOUT), await kit.engine(LAYOUT)
    path = await consumer.read_from(producer)
    part = path.part(kit, 1, tokens=TOKENS)
    expected = consumer.copy_of_memory()
    part.apply(producer.copy_of_memory(), expected)
    part.expect()
    return path, part, expected


def push(kit, path, part) -> asyncio.Future:
    """The other process sends all of a part."""
    end = path.producer_end
    return asyncio.ensure_future(
        kit.other.ask_later("push", 0, end, part.id, part.plan, path.producer.cache, 8 << 20)
    )


def same(engine, expected) -> None:
    for found, wanted in zip(engine.copy_of_memory(), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.asyncio
async def test_all_of_it_arrives_and_comes_again(victim) -> None:
    path, part, expected = await receiving(victim)
    await push(victim, path, part)
    await part.until(part.plan.total)
    same(path.consumer, expected)


@pytest.mark.asyncio
async def test_copies_that_are_held_up_hold_the_producer_up(victim, holder) -> None:
    """The consumer's copies wait on the GPU: a ring is full, and the rest waits for slots."""
    path, part, expected = await receiving(victim)
    gate = victim.device.stream()
    number = holder.hold(gate)
    for stream in path.end._scatterer._streams:
        stream.wait(gate.record())
    pushing = push(victim, path, part)
    await asyncio.sleep(0.3)
    assert part.arrived == 0
    assert not pushing.done()  # it waits for slots
    holder.release(number)
    await pushing
    await part.until(part.plan.total)
    same(path.consumer, expected)


@pytest.mark.asyncio
async def test_what_is_forgotten_in_the_middle_is_quiet_when_the_gpu_is(victim, holder) -> None:
    path, part, _ = await receiving(victim)
    gate = victim.device.stream()
    number = holder.hold(gate)
    for stream in path.end._scatterer._streams:
        stream.wait(gate.record())
    pushing = push(victim, path, part)
    async with asyncio.timeout(20):
        while not path.end._scatterer._flying:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    writing = path.end.forget(part.id)
    assert writing is not None
    assert not writing.done()
    holder.release(number)
    await done(victim, writing, path.end)
    before = path.consumer.copy_of_memory()
    await pushing  # the rest goes nowhere
    await asyncio.sleep(0.1)
    same(path.consumer, before)
    assert part.arrived == 0
    assert not path.end.lost


@pytest.mark.asyncio
async def test_a_producer_that_is_killed_in_the_middle(victim) -> None:
    path, part, expected = await receiving(victim)
    pushing = push(victim, path, part)
    await part.until(1)
    victim.other.signal(signal.SIGKILL)
    await lost(path.end)
    pushing.cancel()
    await asyncio.gather(pushing, return_exceptions=True)
    writing = path.end.forget(part.id)
    if writing is not None:
        await done(victim, writing, path.end)
    before = path.consumer.copy_of_memory()
    told = part.arrived
    await asyncio.sleep(0.1)
    same(path.consumer, before)
    assert part.arrived == told
    with pytest.raises(PeerLostError):
        part.expect()
    assert victim.device.lost is None
    assert len(expected) == len(before)


async def writable(end) -> None:
    bell = asyncio.Event()
    end.on_writable(bell.set)
    async with asyncio.timeout(20):
        while not end.writable:
            bell.clear()
            await bell.wait()


async def sending(kit):
    """This process sends to the other."""
    producer, consumer = await kit.engine(LAYOUT), await kit.engine(LAYOUT)
    path = await consumer.read_from(producer)
    part = path.part(kit, 1, tokens=TOKENS)
    part.expect()
    return path, part


@pytest.mark.asyncio
async def test_a_consumer_that_is_stopped_takes_a_ring_and_no_more(victim) -> None:
    path, part = await sending(victim)
    expected = path.consumer.copy_of_memory()
    part.apply(path.producer.copy_of_memory(), expected)
    end, stream = path.producer_end, victim.device.stream()
    bell = asyncio.Event()
    end.on_writable(bell.set)
    while not end.writable:
        bell.clear()
        await bell.wait()
    victim.other.signal(signal.SIGSTOP)
    events, chunks = [], part.chunks(1 << 20)
    async with asyncio.timeout(20):
        while chunks and len(events) < 64:
            if end.writable:
                events.append(
                    end.send(part.id, part.plan, chunks.pop(0), path.producer.cache.buffers, stream=stream)
                )
            else:
                bell.clear()
                try:
                    async with asyncio.timeout(0.5):
                        await bell.wait()
                except TimeoutError:
                    break
    assert chunks  # not all of it went
    for event in events:
        await done(victim, event, stream)  # this side's memory is read no more all the same
    victim.other.signal(signal.SIGCONT)
    while chunks:
        while not end.writable:
            bell.clear()
            await bell.wait()
        end.send(part.id, part.plan, chunks.pop(0), path.producer.cache.buffers, stream=stream)
    await part.until(part.plan.total)
    same(path.consumer, expected)


@pytest.mark.asyncio
async def test_a_consumer_that_is_killed_in_the_middle(victim, holder) -> None:
    path, part = await sending(victim)
    end = path.producer_end
    before = path.producer.copy_of_memory()
    gate, stream = victim.device.stream(), victim.device.stream()
    number = holder.hold(gate)
    stream.wait(gate.record())
    await writable(end)
    chunks = part.chunks(4 << 20)
    events = [
        end.send(part.id, part.plan, chunk, path.producer.cache.buffers, stream=stream) for chunk in chunks
    ]
    victim.other.signal(signal.SIGKILL)
    await lost(end)
    with pytest.raises(PeerLostError):
        end.send(part.id, part.plan, chunks[0], path.producer.cache.buffers, stream=stream)
    # What the GPU reads is in flight until it doesn't.
    assert not all(event.done() for event in events[:1])
    holder.release(number)
    failures = []
    for event in events:
        try:
            await done(victim, event, stream)
        except DeviceError as error:
            failures.append(error.__cause__)
    assert failures
    assert all(isinstance(cause, PeerLostError) for cause in failures)
    same(path.producer, before)
    assert victim.device.lost is None


@pytest.mark.asyncio
async def test_links_that_come_and_go_leave_nothing_pinned(other: Other, device, seed: int) -> None:
    import torch

    async with TwoProcessesKit(seed, other, PATHS["shm"], device) as kit:
        consumer, producer = await kit.engine(LAYOUT), await kit.engine(LAYOUT)
        free = []
        for number in range(20):
            path = await consumer.read_from(producer)
            path.end.close()
            await lost(path.producer_end)
            if number in (5, 19):
                free.append(torch.cuda.mem_get_info()[0])
        assert free[0] == free[1]
