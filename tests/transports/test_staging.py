"""A GPU's memory over the host's transports, on a CUDA that is played by host memory."""

from __future__ import annotations

import asyncio
import gc
import os
import struct
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from aiokv.device.cache import KVCache
from aiokv.device.cuda import CudaDevice
from aiokv.device.cudacosts import TYPICAL
from aiokv.device.host import HostDevice
from aiokv.device.offloop import off_loop
from aiokv.errors import CapacityError, DeviceError, PeerLostError
from aiokv.proto.layout import CacheLayout
from aiokv.proto.placement import Placement
from aiokv.proto.plan import Chunk, GroupBlocks, Side, plan_copy
from aiokv.testing.conformance.transportkit import TransportKit, done
from aiokv.testing.conformance.transports import CASES, Case, lost_in_the_middle, moves_both_ways
from aiokv.testing.fakecuda import FakeCuda
from aiokv.transports.base import Transport
from aiokv.transports.frames import pack
from aiokv.transports.shm import ShmTransport
from aiokv.transports.staging import STAGING_BYTES, Pending, Staging, split
from aiokv.transports.staging_shared import map_shared, shared
from aiokv.transports.staging_shm import StagedShmTransport
from aiokv.transports.staging_shm_ends import ProducerEnd
from aiokv.transports.tcp import TcpTransport

LAYOUT = CacheLayout.attention(layers=3, blocks=32, block_size=16, heads=4, head_size=64, dtype="float16")


class Gpu:
    """A device on a CUDA of fakes."""

    def __init__(self) -> None:
        self.fake = FakeCuda()
        self.device = CudaDevice(0, cuda=self.fake.libraries())
        self.before = self.fake.allocated


@pytest.fixture(scope="module")
def gpu() -> Iterator[Gpu]:
    import torch

    assert torch.float16
    made = Gpu()
    yield made
    made.device.close()


class StagedKit(TransportKit):
    """Both ends on a GPU, and rings so small that most things wait for slots."""

    staging = 1 << 20

    def __init__(self, seed: int, gpu: Gpu) -> None:
        super().__init__(seed)
        self.gpu, self.device = gpu, gpu.device

    def make_transport(self) -> Transport:
        return TcpTransport(streams=self.random.randint(1, 4), staging=self.staging)

    def make_cache(self, layout: CacheLayout) -> KVCache:
        return KVCache.allocate(layout, device=self.device)

    async def __aexit__(self, *error: object) -> None:
        await super().__aexit__(*error)
        if error[0] is None:
            # Memory goes with the last that refers to it, which may be a thread that is about to end.
            for _ in range(500):
                gc.collect()
                if self.gpu.fake.allocated == self.gpu.before:
                    break
                await asyncio.sleep(0.01)
            assert self.gpu.fake.allocated == self.gpu.before


class MixedKit(StagedKit):
    """GPU and host, in turn."""

    staging = 32 << 20
    made = 0

    def make_cache(self, layout: CacheLayout) -> KVCache:
        self.made += 1
        return KVCache.allocate(layout, device=self.device if self.made % 2 else HostDevice())


class TwoKit(StagedKit):
    """Two GPUs, in turn; what is done with the wrong one current is refused."""

    made = 0

    def __init__(self, seed: int, gpu: Gpu) -> None:
        fake = FakeCuda(devices=2)
        libraries = fake.libraries()
        self.devices = [CudaDevice(number, cuda=libraries, costs=TYPICAL) for number in range(2)]
        super().__init__(seed, SimpleNamespace(fake=fake, device=self.devices[0], before=fake.allocated))

    def make_cache(self, layout: CacheLayout) -> KVCache:
        self.made += 1
        return KVCache.allocate(layout, device=self.devices[self.made % 2])


class ShmKit(StagedKit):
    def make_transport(self) -> Transport:
        return StagedShmTransport(self.staging)


class TwoShmKit(TwoKit):
    def make_transport(self) -> Transport:
        return StagedShmTransport(self.staging)


KITS = {"tcp": StagedKit, "mixed": MixedKit, "shm": ShmKit}


@pytest.mark.one_loop
@pytest.mark.asyncio
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("kind", KITS)
async def test_conformance(kind: str, case: Case, gpu: Gpu, seed: int) -> None:
    async with KITS[kind](seed, gpu) as kit:
        await case(kit)


@pytest.mark.asyncio
@pytest.mark.parametrize("case", [moves_both_ways, lost_in_the_middle], ids=lambda case: case.__name__)
@pytest.mark.parametrize("kit", [TwoKit, TwoShmKit])
async def test_between_two_gpus(kit: type, case: Case, gpu: Gpu, seed: int) -> None:
    async with kit(seed, gpu) as made:
        await case(made)
        assert not made.gpu.fake.status


async def lost(link) -> None:
    bell = asyncio.Event()
    link.on_lost(bell.set)
    async with asyncio.timeout(20):
        await bell.wait()


async def writable(end) -> None:
    bell = asyncio.Event()
    end.on_writable(bell.set)
    end.on_lost(bell.set)
    async with asyncio.timeout(20):
        while not end.writable and not end.lost:
            bell.clear()
            await bell.wait()


async def until(condition) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def joined(kit):
    path = await (await kit.engine(LAYOUT)).read_from(await kit.engine(LAYOUT))
    await writable(path.producer_end)
    return path, path.part(kit, 1, tokens=400)


def send(path, part, chunk, stream):
    return path.producer_end.send(part.id, part.plan, chunk, path.producer.cache.buffers, stream=stream)


TWO_SIDED = {"tcp": StagedKit, "shm": ShmKit}


# -- what waits for the GPU


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", TWO_SIDED)
async def test_nothing_leaves_before_the_gpu_has_gathered_it(kind: str, gpu: Gpu, seed: int) -> None:
    async with TWO_SIDED[kind](seed, gpu) as kit:
        path, part = await joined(kit)
        part.expect()
        stream = gpu.device.stream()
        chunk = part.chunks(1 << 16)[0]
        with gpu.fake.held(stream.handle):
            event = send(path, part, chunk, stream)
            await asyncio.sleep(0.02)
            assert not event.done()
            assert part.arrived == 0
        await done(kit, event, stream)
        await part.until(chunk.nbytes)


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", TWO_SIDED)
async def test_nobody_is_told_before_the_gpu_has_scattered_it(kind: str, gpu: Gpu, seed: int) -> None:
    async with TWO_SIDED[kind](seed, gpu) as kit:
        path, part = await joined(kit)
        part.expect()
        scatterer = path.end._scatterer
        with gpu.fake.held(*(stream.handle for stream in scatterer._streams)):
            send(path, part, part.chunks(1 << 16)[0], gpu.device.stream())
            await until(lambda: scatterer._flying)
            assert part.arrived == 0
            writing = path.end.forget(part.id)
            assert writing is not None
            assert not writing.done()
            again = path.end.forget(part.id)
            assert not again.done()
        await done(kit, writing, path.end)
        await done(kit, again, path.end)
        assert path.end.forget(part.id) is None
        assert part.arrived == 0
        await _free(path)


async def _free(path) -> None:
    """All slots come back."""
    ring = path.end._scatterer.ring
    if isinstance(path.consumer.transport, TcpTransport):
        await until(lambda: ring.free == ring.slots)
    gathering = path.producer_end._gatherer.ring
    await until(lambda: gathering.free == gathering.slots)


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", TWO_SIDED)
async def test_a_full_ring_takes_no_more_until_a_slot_is_free(kind: str, gpu: Gpu, seed: int) -> None:
    async with TWO_SIDED[kind](seed, gpu) as kit:
        path, part = await joined(kit)
        part.expect()
        stream, chunks = gpu.device.stream(), part.chunks(1 << 18)
        with gpu.fake.held(stream.handle):
            events = []
            while path.producer_end.writable:
                events.append(send(path, part, chunks.pop(0), stream))
            events += [send(path, part, chunk, stream) for chunk in chunks]  # these wait
            await asyncio.sleep(0.02)
            assert not any(event.done() for event in events)
        for event in events:
            await done(kit, event, stream)
        await part.until(part.plan.total)
        await writable(path.producer_end)
        await _free(path)


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", TWO_SIDED)
async def test_what_a_lost_link_had_begun_is_in_flight_until_the_gpu_is_done(
    kind: str, gpu: Gpu, seed: int
) -> None:
    async with TWO_SIDED[kind](seed, gpu) as kit:
        path, part = await joined(kit)
        part.expect()
        stream = gpu.device.stream()
        pinned = gpu.fake.allocated
        with gpu.fake.held(stream.handle):
            events = [send(path, part, chunk, stream) for chunk in part.chunks(1 << 18)]
            path.end.close()
            await lost(path.producer_end)
            await asyncio.sleep(0.02)
            assert not events[0].done()
            assert gpu.fake.allocated < pinned  # the consumer's, but
            held = gpu.fake.allocated
        failures = []
        for event in events:
            try:
                await done(kit, event, stream)
            except DeviceError as error:
                failures.append(error.__cause__)
        assert failures
        assert all(isinstance(cause, PeerLostError) for cause in failures)
        await until(lambda: gpu.fake.allocated < held)  # not the producer's before
        with pytest.raises(PeerLostError):
            send(path, part, part.chunks(1 << 18)[0], stream)


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", TWO_SIDED)
async def test_closing_waits_for_what_the_gpu_writes(kind: str, gpu: Gpu, seed: int) -> None:
    async with TWO_SIDED[kind](seed, gpu) as kit:
        path, part = await joined(kit)
        part.expect()
        scatterer = path.end._scatterer
        with gpu.fake.held(*(stream.handle for stream in scatterer._streams)):
            send(path, part, part.chunks(1 << 16)[0], gpu.device.stream())
            await until(lambda: scatterer._flying)
            closing = asyncio.ensure_future(path.consumer.transport.aclose())
            await lost(path.end)
            await asyncio.sleep(0.02)
            assert not closing.done()
        await closing
        assert part.arrived == 0


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", TWO_SIDED)
async def test_data_may_overtake_its_announcement(kind: str, gpu: Gpu, seed: int) -> None:
    async with TWO_SIDED[kind](seed, gpu) as kit:
        path, part = await joined(kit)
        stream = gpu.device.stream()
        for chunk in part.chunks(1 << 16)[:3]:
            await done(kit, send(path, part, chunk, stream), stream)
        await asyncio.sleep(0.02)
        part.expect()
        await part.until(3 * (1 << 16) - 2)


# -- memory


@pytest.mark.asyncio
async def test_memory_that_cannot_be_pinned_is_told_on_connecting(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    def refuse(host, *, readonly: bool = False) -> None:
        raise CapacityError("so much can't be pinned")

    monkeypatch.setattr(gpu.device, "pin_now", refuse)
    for kit_type in TWO_SIDED.values():
        async with kit_type(seed, gpu) as kit:
            producer, consumer = await kit.engine(LAYOUT), await kit.engine(LAYOUT)
            with pytest.raises(PeerLostError):
                await consumer.transport.connect(producer.transport.describe(), producer.info)
            await until(lambda producer=producer: not producer.transport._accepted)


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", TWO_SIDED)
async def test_a_link_for_which_no_more_may_be_pinned_is_refused(
    kind: str, gpu: Gpu, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with TWO_SIDED[kind](seed, gpu) as kit:
        producer, consumer = await kit.engine(LAYOUT), await kit.engine(LAYOUT)
        first = await consumer.read_from(producer)
        await writable(first.producer_end)
        for full in (consumer, producer):
            staging = full.transport._staging
            staging._budget, budget = 2 * staging.nbytes - 1, staging._budget
            reason = "bytes that all links may have" if full is consumer else None
            with pytest.raises(PeerLostError, match=reason):
                end = await consumer.transport.connect(producer.transport.describe(), producer.info)
                await lost(end)
                raise end.lost_error()
            await until(lambda: len(producer.transport._accepted) == 1)
            staging._budget = budget
        assert "a link is refused: staging memory" in caplog.text
        first.end.close()
        await until(lambda: not (consumer.transport._staging._pinned or producer.transport._staging._pinned))
        second = await consumer.read_from(producer)
        await writable(second.producer_end)
        assert second.producer_end.writable


@pytest.mark.asyncio
async def test_slots_are_as_large_as_a_block_at_least(gpu: Gpu) -> None:
    cache = await off_loop(lambda: KVCache.allocate(LAYOUT, device=gpu.device), "cache")
    small = Staging(cache, 1)
    assert small.slot_bytes >= LAYOUT.groups[0].block_bytes
    assert small.slots == 4
    assert small.nbytes == 4 * small.slot_bytes
    await small.aclose()
    assert small.most == STAGING_BYTES
    with pytest.raises(CapacityError, match="staging memory: 0 of the"):
        small.check(1 << 40)
    usual = Staging(cache)
    assert usual.most == 4 * usual.nbytes
    assert (usual.slot_bytes, usual.slots) == (16 << 20, 8)
    asking = asyncio.ensure_future(usual.ring())
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await usual.aclose()
    await usual.aclose()
    cache.close()


def test_shared_memory_is_written_by_both_and_cut_short_by_none() -> None:
    ours = shared(8192)
    theirs = map_shared(ours.fd, 8192)
    theirs.view[:3] = b"abc"
    assert bytes(ours.view[:3]) == b"abc"
    with pytest.raises(PermissionError):
        os.truncate(ours.fd, 4096)
    with pytest.raises(DeviceError, match="less than"):
        map_shared(ours.fd, 16384)
    theirs.close()
    ours.close()
    fd = os.memfd_create("unsealed")
    os.truncate(fd, 8192)
    with pytest.raises(DeviceError, match="cut short"):
        map_shared(fd, 8192)
    os.close(fd)
    with pytest.raises(DeviceError):
        map_shared(fd, 8192)
    with pytest.raises(CapacityError):
        shared(1 << 60)


def test_a_chunk_is_split_at_its_pieces(gpu: Gpu, seed: int) -> None:
    layout = CacheLayout.attention(layers=2, blocks=9, block_size=1, heads=1, head_size=50, dtype="uint8")
    side = Side(layout, Placement.dense(layout), (GroupBlocks(0, np.array([7, 1, 5])),))
    plan = plan_copy(side, side, first_token=0, tokens=3, heads=(0, 1))
    (chunk,) = plan.chunks((0, 1), 1 << 20)
    assert list(split(plan, chunk, 300)) == [Chunk(0, 1, 0, 0, 3, 300), Chunk(1, 1, 0, 0, 3, 300)]
    assert list(split(plan, chunk, 250))[:2] == [Chunk(0, 1, 0, 0, 2, 200), Chunk(0, 1, 0, 2, 3, 100)]
    with pytest.raises(DeviceError, match="pieces of 100 bytes"):
        list(split(plan, chunk, 99))


class Flag:
    def __init__(self) -> None:
        self.over = False
        self.error: DeviceError | None = None

    def done(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.over


def test_several_copies_are_over_when_all_are() -> None:
    pending, flags = Pending(2), [Flag(), Flag()]
    assert not pending.done()
    for flag in flags:
        pending.add(flag)
    flags[0].over = True
    assert not pending.done()
    flags[1].over = True
    assert pending.done()
    pending = Pending(3)
    pending.add(flag := Flag())
    pending.fail(DeviceError("the link is lost"))
    assert not pending.done()  # one is in flight
    flag.over = True
    with pytest.raises(DeviceError, match="lost"):
        pending.done()
    pending = Pending(1)
    pending.add(flag := Flag())
    flag.error = DeviceError("the GPU failed")
    with pytest.raises(DeviceError, match="GPU"):
        pending.done()
    assert pending.failed


# -- peers that say what they must not


SAYS = {
    "a slot that there isn't": lambda path: path.producer_end._say(
        pack(b"t" * 16, CHUNK) + struct.pack("!I", 99)
    ),
    "a slot twice": lambda path: [
        path.producer_end._say(pack(b"t" * 16, CHUNK) + struct.pack("!I", 0)) for _ in range(2)
    ],
    "more than a slot": lambda path: path.producer_end._say(
        pack(b"t" * 16, CHUNK._replace(nbytes=1 << 40)) + struct.pack("!I", 0)
    ),
    "a slot that it didn't have": lambda path: path.end._say(struct.pack("!I", 0)),
}
CHUNK = Chunk(0, 1, 0, 0, 1, 8)


@pytest.mark.asyncio
@pytest.mark.parametrize("what", SAYS)
async def test_who_says_what_it_must_not_is_cut_off(what: str, gpu: Gpu, seed: int) -> None:
    async with ShmKit(seed, gpu) as kit:
        path, _ = await joined(kit)
        SAYS[what](path)
        await lost(path.end)
        await lost(path.producer_end)


@pytest.mark.asyncio
@pytest.mark.parametrize("lie", ["nonce", "size", "slots", "much", "no memory"])
async def test_the_ring_that_a_producer_passes_is_looked_at(
    lie: str, gpu: Gpu, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    true = ProducerEnd.begin

    def begin(end, ring, message, fd) -> None:
        nonce, nbytes, slot_bytes = struct.unpack("!32sQQ", message)
        if lie == "nonce":
            nonce = bytes(32)
        if lie == "size":
            nbytes, slot_bytes = 2 * nbytes, 2 * slot_bytes
        if lie == "much":
            nbytes = 1 << 28
        if lie == "slots":
            slot_bytes = nbytes - 1
        if lie == "no memory":
            end._say(struct.pack("!32sQQ", nonce, nbytes, slot_bytes))
            fd = None
        true(end, ring, struct.pack("!32sQQ", nonce, nbytes, slot_bytes), fd)

    monkeypatch.setattr(ProducerEnd, "begin", begin)
    async with ShmKit(seed, gpu) as kit:
        producer, consumer = await kit.engine(LAYOUT), await kit.engine(LAYOUT)
        with pytest.raises(PeerLostError):
            await consumer.transport.connect(producer.transport.describe(), producer.info)


@pytest.mark.asyncio
async def test_the_two_kinds_of_shm_are_told_apart(gpu: Gpu, seed: int) -> None:
    async with ShmKit(seed, gpu) as kit:
        on_gpu = await kit.engine(LAYOUT)
        kit.make_transport, kit.make_cache = ShmTransport, KVCache.allocate
        on_host = await kit.engine(LAYOUT)
        for consumer, producer in ((on_gpu, on_host), (on_host, on_gpu)):
            with pytest.raises(PeerLostError):
                await consumer.transport.connect(producer.transport.describe(), producer.info)
        transport = StagedShmTransport()
        with pytest.raises(DeviceError, match="needs no staging"):
            await transport.start(on_host.cache, "")
        await transport.aclose()


async def large_frame(kit: MixedKit):
    """A frame of a producer in host memory, which sends what its settings say, larger than the ring."""
    kit.staging = 1 << 20
    consumer, producer = await kit.engine(LAYOUT), await kit.engine(LAYOUT)
    path = await consumer.read_from(producer)
    part = path.part(kit, 1, tokens=480)
    (chunk,) = part.chunks(8 << 20)
    assert chunk.nbytes > path.end._scatterer.ring.memory.nbytes
    return path, part, chunk


@pytest.mark.asyncio
async def test_a_frame_that_no_ring_holds_is_taken_in_several_goes(gpu: Gpu, seed: int) -> None:
    async with MixedKit(seed, gpu) as kit:
        path, part, chunk = await large_frame(kit)
        expected = path.consumer.copy_of_memory()
        part.apply(path.producer.copy_of_memory(), expected)
        part.expect()
        send(path, part, chunk, path.producer.cache.device.stream())
        await part.until(part.plan.total)
        for found, wanted in zip(path.consumer.copy_of_memory(), expected, strict=True):
            np.testing.assert_array_equal(found, wanted)
        ring = path.end._scatterer.ring
        await until(lambda: ring.free == ring.slots)


@pytest.mark.asyncio
async def test_the_rest_of_a_frame_that_waits_for_a_slot_is_drained_if_nobody_wants_it(
    gpu: Gpu, seed: int
) -> None:
    async with MixedKit(seed, gpu) as kit:
        path, part, chunk = await large_frame(kit)
        part.expect()
        ring, stream = path.end._scatterer.ring, path.producer.cache.device.stream()
        with gpu.fake.held(*(stream.handle for stream in path.end._scatterer._streams)):
            send(path, part, chunk, stream)
            await until(lambda: any(inlet._full for inlet in path.end._inlets))
            assert not ring.free
            writing = path.end.forget(part.id)
            assert not writing.done()
        await done(kit, writing, path.end)
        await until(lambda: ring.free == ring.slots)
        assert part.arrived == 0
        later = path.part(kit, 2, tokens=16)
        later.expect()
        for each in later.chunks(1 << 16):
            send(path, later, each, stream)
        await later.until(later.plan.total)


@pytest.mark.asyncio
async def test_a_device_that_fails_ends_the_link(gpu: Gpu, seed: int) -> None:
    for kit_type in TWO_SIDED.values():
        async with kit_type(seed, gpu) as kit:
            path, part = await joined(kit)
            part.expect()
            path.end._scatterer._staging = SimpleNamespace(device=Failing())
            send(path, part, part.chunks(1 << 16)[0], gpu.device.stream())
            await lost(path.end)
            assert part.arrived == 0


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", TWO_SIDED)
async def test_a_slot_that_a_failed_gather_may_still_write_to_is_nobodys(
    kind: str, gpu: Gpu, seed: int
) -> None:
    async with TWO_SIDED[kind](seed, gpu) as kit:
        path, part = await joined(kit)
        part.expect()
        gatherer, stream = path.producer_end._gatherer, gpu.device.stream()
        staging, free = gatherer._staging, gatherer.ring.free
        with gpu.fake.held(stream.handle):
            gatherer._staging = SimpleNamespace(device=Failing(gpu.device), slot_bytes=staging.slot_bytes)
            event = send(path, part, part.chunks(1 << 16)[0], stream)
            gatherer._staging = staging
            assert gatherer.ring.free == free - 1
            assert not event.done()  # it reads the cache, too
        with pytest.raises(DeviceError, match="made to fail"):
            await done(kit, event, stream)
        await until(lambda: gatherer.ring.free == free)
        assert part.arrived == 0


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", TWO_SIDED)
async def test_a_scatter_that_failed_half_way_is_in_flight_still(kind: str, gpu: Gpu, seed: int) -> None:
    async with TWO_SIDED[kind](seed, gpu) as kit:
        path, part = await joined(kit)
        part.expect()
        scatterer, ring = path.end._scatterer, path.end._scatterer.ring
        with gpu.fake.held(*(stream.handle for stream in scatterer._streams)):
            scatterer._staging = SimpleNamespace(device=Failing(gpu.device))
            send(path, part, part.chunks(1 << 16)[0], gpu.device.stream())
            await lost(path.end)
            writing = path.end.forget(part.id)
            assert not writing.done()
            await asyncio.sleep(0.02)
            assert not ring.memory.closed
        await done(kit, writing, path.end)
        await until(lambda: ring.memory.closed)
        assert part.arrived == 0


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", TWO_SIDED)
async def test_a_callback_that_raises_costs_no_slot(kind: str, gpu: Gpu, seed: int) -> None:
    async with TWO_SIDED[kind](seed, gpu) as kit:
        path, part = await joined(kit)
        told: list[dict] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))

        def landed(chunk: Chunk) -> None:
            raise ZeroDivisionError

        path.end.expect(part.id, part.plan, path.consumer.cache.buffers, landed)
        stream = gpu.device.stream()
        await done(kit, send(path, part, part.chunks(1 << 16)[0], stream), stream)
        await until(lambda: told)
        assert isinstance(told[0]["exception"], ZeroDivisionError)
        await _free(path)
        assert not path.end.lost


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", TWO_SIDED)
async def test_a_device_without_streams_left_is_told_on_connecting(
    kind: str, gpu: Gpu, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    def refuse(staging: Staging) -> None:
        raise DeviceError("no more streams")

    async with TWO_SIDED[kind](seed, gpu) as kit:
        producer, consumer = await kit.engine(LAYOUT), await kit.engine(LAYOUT)
        with monkeypatch.context() as patch:
            patch.setattr(Staging, "stream", refuse)
            with pytest.raises(PeerLostError, match="no more streams"):
                await consumer.transport.connect(producer.transport.describe(), producer.info)
        assert not consumer.transport._staging._rings
        await until(lambda: not producer.transport._accepted)


class Failing:
    """Fails after a part of a copy was enqueued."""

    def __init__(self, device: CudaDevice | None = None) -> None:
        self._device = device

    def gather(self, *arguments, stream) -> None:
        self._device.gather(*arguments, stream=stream)
        raise DeviceError("made to fail")

    def scatter(self, *arguments, stream) -> None:
        if self._device is not None:
            self._device.scatter(*arguments, stream=stream)
        raise DeviceError("made to fail")


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", TWO_SIDED)
async def test_links_that_come_and_go_use_the_same_streams(kind: str, gpu: Gpu, seed: int) -> None:
    """Whether or not the collector comes by."""
    gc.collect()
    gc.disable()
    try:
        async with TWO_SIDED[kind](seed, gpu) as kit:
            consumer, producer = await kit.engine(LAYOUT), await kit.engine(LAYOUT)
            made = []
            for _ in range(6):
                path = await consumer.read_from(producer)
                path.end.close()
                await lost(path.producer_end)
                made.append(gpu.device.context.streams_made)
            assert made[1:] == [made[1]] * 5
    finally:
        gc.enable()
