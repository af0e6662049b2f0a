"""CUDA IPC between two processes on one GPU."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio
from remote import Other, TwoProcessesKit, a_victim, lost

from aiokv.device.cache import KVCache
from aiokv.device.offloop import off_loop
from aiokv.errors import DeviceError, PeerLostError
from aiokv.proto.layout import CacheLayout
from aiokv.testing.conformance.transportkit import contents, done
from aiokv.testing.conformance.transports import CASES, Case

pytestmark = [pytest.mark.gpu, pytest.mark.may_block("it asks the other process, and waits")]

PATH = "aiokv.transports.cuda_ipc:CudaIpcTransport"
LAYOUT = CacheLayout.attention(layers=4, blocks=64, block_size=16, heads=8, head_size=128, dtype="bfloat16")


class SameKit(TwoProcessesKit):
    """All engines in this process."""

    async def engine(self, layout):
        self.made = 0
        return await super().engine(layout)


@pytest.mark.asyncio
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
async def test_conformance_in_two_processes(case: Case, other: Other, device, seed: int) -> None:
    async with TwoProcessesKit(seed, other, PATH, device) as kit:
        await case(kit)


@pytest.mark.asyncio
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
async def test_conformance_in_one_process(case: Case, other: Other, device, seed: int) -> None:
    async with SameKit(seed, other, PATH, device) as kit:
        await case(kit)


@pytest_asyncio.fixture
async def victim(seed: int, device) -> AsyncIterator[TwoProcessesKit]:
    async with a_victim(seed, PATH, device) as kit:
        yield kit


async def reading(kit):
    """This process reads from the other: the path, and a part of all that there is."""
    consumer, producer = await kit.engine(LAYOUT), await kit.engine(LAYOUT)
    path = await consumer.read_from(producer)
    part = path.part(kit, 1, tokens=1024)
    expected = consumer.copy_of_memory()
    part.apply(producer.copy_of_memory(), expected)
    return path, part, expected


def held(device, holder):
    """A stream that waits for another, and what to release for that to end."""
    other, stream = device.stream(), device.stream()
    number = holder.hold(other)
    stream.wait(other.record())
    return stream, number


def submit(path, part, stream):
    buffers = path.consumer.cache.buffers
    return [path.end.read(part.plan, chunk, buffers, stream=stream) for chunk in part.chunks(1 << 20)]


@pytest.mark.asyncio
async def test_what_waits_on_the_stream_waits_and_other_streams_do_not(victim, holder) -> None:
    path, part, expected = await reading(victim)
    before = path.consumer.copy_of_memory()
    stream, number = held(victim.device, holder)
    events = submit(path, part, stream)
    free = victim.device.stream()
    chunk = part.chunks(1 << 20)[0]
    await done(victim, path.end.read(part.plan, chunk, path.consumer.cache.buffers, stream=free), free)
    assert not any(event.done() for event in events)
    holder.release(number)
    for event in events:
        await done(victim, event, stream)
    for found, wanted, old in zip(path.consumer.copy_of_memory(), expected, before, strict=True):
        np.testing.assert_array_equal(found, wanted)
        assert not np.array_equal(found, old)


@pytest.mark.asyncio
async def test_reads_go_on_while_the_producers_own_stream_is_held(victim) -> None:
    """Nothing of the producer's is waited for on the GPU."""
    path, part, expected = await reading(victim)
    key = next(victim.other.keys)
    victim.other.ask("hold", key, 5.0)
    stream = victim.device.stream()
    for event in submit(path, part, stream):
        await done(victim, event, stream)
    for found, wanted in zip(path.consumer.copy_of_memory(), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.asyncio
async def test_a_producer_that_is_stopped_is_read_all_the_same(victim) -> None:
    path, part, expected = await reading(victim)
    victim.other.signal(signal.SIGSTOP)
    stream = victim.device.stream()
    for event in submit(path, part, stream):
        await done(victim, event, stream)
    assert not path.end.lost
    victim.other.signal(signal.SIGCONT)
    for found, wanted in zip(path.consumer.copy_of_memory(), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.asyncio
@pytest.mark.parametrize("middle", [False, True], ids=["at once", "in the middle"])
async def test_a_producer_that_is_killed_takes_down_its_copies_and_nothing_else(
    middle: bool, victim, holder
) -> None:
    path, part, _ = await reading(victim)
    # A producer of this process, whose links go on.
    victim.made = 0
    own = await victim.engine(LAYOUT)
    stream, number = held(victim.device, holder) if middle else (victim.device.stream(), None)
    events = submit(path, part, stream)
    events += [event for _ in range(20) for event in submit(path, part, stream)]
    victim.other.signal(signal.SIGKILL)
    await lost(path.end)
    await asyncio.sleep(0.2)  # for the driver to take its memory away, if it does
    if middle:
        assert not any(event.done() for event in events)
        holder.release(number)
    failures = []
    for event in events:
        try:
            await done(victim, event, stream)
        except DeviceError as error:
            failures.append(error.__cause__)
    assert all(isinstance(cause, PeerLostError) for cause in failures)
    assert len(failures) == len(events) or not middle
    with pytest.raises(PeerLostError):
        submit(path, part, stream)
    assert not path.end.reading
    assert victim.device.lost is None
    # The GPU works on.
    victim.made = 0
    again = await (await victim.engine(LAYOUT)).read_from(own)
    another = again.part(victim, 2, tokens=100)
    expected = again.consumer.copy_of_memory()
    another.apply(own.copy_of_memory(), expected)
    for chunk in another.chunks(1 << 20):
        await another.move(victim, chunk)
    for found, wanted in zip(again.consumer.copy_of_memory(), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.asyncio
async def test_a_consumer_that_is_killed_in_the_middle_is_lost(victim) -> None:
    producer, consumer = await victim.engine(LAYOUT), await victim.engine(LAYOUT)
    path = await consumer.read_from(producer)
    part = path.part(victim, 1, tokens=1024)
    before = producer.copy_of_memory()
    key = next(victim.other.keys)
    victim.other.ask("hold", key, 5.0)
    stream = consumer.cache.device.stream()
    for chunk in part.chunks(1 << 20):
        path.end.read(part.plan, chunk, consumer.cache.buffers, stream=stream)
    victim.other.signal(signal.SIGKILL)
    await lost(path.producer_end)
    for found, wanted in zip(producer.copy_of_memory(), before, strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.asyncio
async def test_a_stopped_consumer_keeps_the_producers_end(victim) -> None:
    producer, consumer = await victim.engine(LAYOUT), await victim.engine(LAYOUT)
    path = await consumer.read_from(producer)
    victim.other.signal(signal.SIGSTOP)
    path.producer_end._sock.fileno()
    path.producer_end.close()
    await asyncio.sleep(0.1)
    assert not path.producer_end.lost
    victim.other.signal(signal.SIGCONT)
    await lost(path.producer_end)


@pytest.mark.asyncio
async def test_torchs_tensors_are_shared_wherever_they_lie(other: Other, device, seed: int) -> None:
    """Small tensors of one segment, and large ones, each at its offset."""
    import torch

    layout = CacheLayout.attention(layers=6, blocks=16, block_size=4, heads=2, head_size=64, dtype="float16")
    shape = layout.groups[0].shape
    torch.cuda.init()
    keep = [torch.empty(1000, dtype=torch.uint8, device="cuda") for _ in range(3)]  # odd places
    tensors = [torch.randint(0, 9, shape, device="cuda").to(torch.float16) for _ in range(layout.layers)]
    torch.cuda.synchronize()
    async with TwoProcessesKit(seed, other, PATH, device) as kit:
        own = await off_loop(lambda: KVCache.from_tensors(layout, tensors, device=device), "cache")
        kit._caches.append(own)
        transport = kit.make_transport()
        kit._transports.append(transport)
        await transport.start(own, "")
        kit.made = 1
        consumer = await kit.engine(layout)  # in the other process
        from aiokv.testing.conformance.transportkit import Engine

        path = await consumer.read_from(Engine(transport, own))
        part = path.part(kit, 1, tokens=60)
        expected = consumer.copy_of_memory()
        part.apply([contents(buffer) for buffer in own.buffers], expected)
        for chunk in part.chunks(4096):
            await part.move(kit, chunk)
        for found, wanted in zip(consumer.copy_of_memory(), expected, strict=True):
            np.testing.assert_array_equal(found, wanted)
    assert len(keep) == 3


EXPANDABLE = """
import asyncio, torch
from aiokv.device.cache import KVCache
from aiokv.errors import DeviceError
from aiokv.proto.layout import CacheLayout
from aiokv.transports.cuda_ipc import CudaIpcTransport

layout = CacheLayout.attention(layers=2, blocks=64, block_size=16, heads=8, head_size=128, dtype="float16")
tensors = [torch.zeros(layout.groups[0].shape, dtype=torch.float16, device="cuda") for _ in range(2)]
cache = KVCache.from_tensors(layout, tensors)
async def main():
    try:
        await CudaIpcTransport().start(cache, "")
    except DeviceError as error:
        print("refused:", error)
asyncio.run(main())
"""


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("expandable_segments:True", "expandable_segments:False"),
        ("backend:cudaMallocAsync", "backend:native"),
    ],
)
async def test_memory_without_a_handle_is_refused_by_name(setting: str, said: str) -> None:
    import os

    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        EXPANDABLE,
        stdout=-1,
        stderr=-2,
        env={**os.environ, "PYTORCH_CUDA_ALLOC_CONF": setting, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    told, _ = await process.communicate()
    assert b"refused: cuda_ipc: buffer 0 of the cache lies in" in told, told.decode()
    assert said.encode() in told


@pytest.mark.asyncio
async def test_a_thousand_lives_leave_no_gpu_memory_mapped(other: Other, device, seed: int) -> None:
    import torch

    async with TwoProcessesKit(seed, other, PATH, device) as kit:
        consumer, producer = await kit.engine(LAYOUT), await kit.engine(LAYOUT)
        free = []
        for number in range(60):
            path = await consumer.read_from(producer)
            path.end.close()
            await consumer.transport._mappings.aclose()
            if number in (10, 59):
                free.append(torch.cuda.mem_get_info()[0])
        assert free[0] == free[1]
