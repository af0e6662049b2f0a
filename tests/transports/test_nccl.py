from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from aiokv.device.cache import KVCache
from aiokv.device.gate import Gate, gated
from aiokv.device.offloop import off_loop
from aiokv.errors import CapacityError, DeviceError, PeerLostError
from aiokv.proto.layout import CacheLayout
from aiokv.testing.conformance.transportkit import Part, Path, TransportKit, bytes_of, done
from aiokv.testing.conformance.transports import CASES, Case
from aiokv.testing.fakenccl import FakeNccl, StagingMockedDevice
from aiokv.transports import nccl, nccl_calls, nccl_end, nccl_home, nccl_making, nccl_receiver, nccl_sender
from aiokv.transports.base import Transport
from aiokv.transports.nccl import NcclTransport
from aiokv.transports.nccl_calls import Calls
from aiokv.transports.nccl_line import Announced, Credit, Nudge, Rest, Wake, Yield
from aiokv.transports.nccl_receiver import NcclReceiver
from aiokv.transports.nccl_sender import NcclSender

PLAIN = CacheLayout.attention(layers=3, blocks=12, block_size=4, heads=4, head_size=16, dtype="float16")
#: Blocks of 256 KiB for K and V each, and more for several in a row.
LARGE = CacheLayout.attention(layers=2, blocks=16, block_size=64, heads=16, head_size=128, dtype="float16")


class NcclKit(TransportKit):
    """A mocked device that steps by itself, as a GPU does, and NCCL on it."""

    def __init__(self, seed: int, *, staging: int = 8 << 20, idle_s: float = 60, tells: bool = True) -> None:
        super().__init__(seed)
        self.device = StagingMockedDevice(seed)
        self.fake = FakeNccl(self.device, tells=tells)
        self.steps = self.device.autostep(asyncio.get_running_loop(), random.Random(seed), 1e-6)
        #: Kinds of hazards that a test brings about.
        self.meant: set[str] = set()
        self.options = {"staging": staging, "idle_s": idle_s}

    def make_transport(self) -> Transport:
        return NcclTransport(calls=Calls(self.fake, kind="mocked"), **self.options)

    def make_cache(self, layout: CacheLayout) -> KVCache:
        return KVCache.allocate(layout, device=self.device)

    async def path(self, layout: CacheLayout = PLAIN) -> Path:
        return await (await self.engine(layout)).read_from(await self.engine(layout))

    async def __aexit__(self, *error) -> None:
        try:
            await super().__aexit__(*error)
        finally:
            self.fake.close()
            for _ in range(200 if error == (None, None, None) else 0):  # threads that were abandoned
                if self.fake.alive():
                    await asyncio.sleep(0.01)
            self.steps.close()
        assert not [each for each in self.device.hazards if each.kind not in self.meant]
        assert not self.fake.faults
        assert not self.fake.alive()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.005)


def send_all(part: Part, limit: int = 4096) -> list:
    path = part.path
    stream = path.producer.cache.device.stream()
    send = partial(path.producer_end.send, part.id, part.plan, src=path.producer.cache.buffers, stream=stream)
    return [send(chunk) for chunk in part.chunks(limit)]


async def arrives(kit: NcclKit, path: Path, number: int, **options) -> Part:
    """A part that moves, and comes out right."""
    part = path.part(kit, number, **options)
    expected = path.consumer.copy_of_memory()
    part.apply(path.producer.copy_of_memory(), expected)
    part.expect()
    for event in send_all(part):
        await done(kit, event, part)
    await part.until(part.plan.total)
    for found, wanted in zip(path.consumer.copy_of_memory(), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)
    return part


async def in_flight(kit: NcclKit, path: Path, number: int = 1) -> tuple[Part, list]:
    """A part of which both ends have posted something that doesn't move."""
    kit.fake.stalled = True
    part = path.part(kit, number)
    part.expect()
    events = send_all(part)
    await until(lambda: bool(path.end._flights) and bool(path.producer_end._flights))
    return part, events


def unharmed(path: Path, before: list) -> None:
    for found, wanted in zip(path.consumer.copy_of_memory(), before, strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.one_loop
@pytest.mark.asyncio
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
async def test_conformance(case: Case, seed: int) -> None:
    async with NcclKit(seed) as kit:
        await case(kit)


# -- a broken communicator --------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("end", ["producer", "consumer"])
@pytest.mark.parametrize("tells", [True, False])
async def test_an_error_of_either_end_ends_both_and_lands_nothing(end: str, tells: bool, seed: int) -> None:
    async with NcclKit(seed, tells=tells) as kit:
        path = await kit.path()
        part, events = await in_flight(kit, path)
        broken = path.producer_end if end == "producer" else path.end
        broken._comm._made.failure = "NCCL_ERROR_REMOTE_ERROR: made up"
        await until(lambda: path.end.lost and path.producer_end.lost)
        before = path.consumer.copy_of_memory()
        kit.fake.stalled = False
        await asyncio.sleep(0.02)
        assert part.arrived == 0
        unharmed(path, before)
        for event in events:
            with pytest.raises(DeviceError) as caught:
                event.done()
            assert isinstance(caught.value.__cause__, PeerLostError)
        with pytest.raises(PeerLostError, match="over"):
            path.producer_end.send(
                part.id, part.plan, part.chunks(4096)[0], path.producer.cache.buffers,
                stream=path.producer.cache.device.stream(),
            )  # fmt: skip
        with pytest.raises(PeerLostError, match="over"):
            path.end.expect(("other", 1), part.plan, path.consumer.cache.buffers, print)
        again = await path.consumer.read_from(path.producer)
        await arrives(kit, again, 2)


@pytest.mark.asyncio
async def test_nothing_is_over_before_the_abort_is(seed: int) -> None:
    async with NcclKit(seed) as kit:
        path = await kit.path()
        part, events = await in_flight(kit, path)
        kit.fake.hang_in_abort = True
        path.producer_end.close()
        quiet = path.end.forget(part.id)
        await asyncio.sleep(0.05)
        assert not path.producer_end.lost and not path.end.lost
        assert not quiet.done()
        assert not events[0].done()  # it was committed
        with pytest.raises(DeviceError):
            events[-1].done()  # it was not
        kit.fake.hang_in_abort = False
        await until(lambda: path.end.lost and path.producer_end.lost)
        assert quiet.done()
        assert path.end.forget(part.id) is None
        with pytest.raises(DeviceError):
            events[0].done()


@pytest.mark.asyncio
async def test_memory_is_kept_for_an_abort_that_never_returns(seed: int, monkeypatch) -> None:
    monkeypatch.setattr(nccl, "_CLOSE_S", 0.05)
    async with NcclKit(seed) as kit:
        path = await kit.path()
        await in_flight(kit, path)
        kit.fake.hang_in_abort = True
        kit.meant.add("use after free")  # the engine would keep these caches
        unused = path.producer.transport._memory.bytes[-1024:]  # it receives nothing
        unused[:] = 1
        await path.producer.transport.aclose()
        assert (unused == 1).all()  # freed memory is overwritten
        assert not path.producer_end.lost


@pytest.mark.asyncio
@pytest.mark.parametrize("refuses", ["send", "recv"])
async def test_what_nccl_refuses_ends_the_link(refuses: str, seed: int) -> None:
    async with NcclKit(seed) as kit:
        path = await kit.path()
        part = path.part(kit, 1)
        if refuses == "send":
            part.expect()
            kit.fake.refuse_groups = True
        events = send_all(part)
        await until(lambda: refuses == "send" or bool(path.end._early))
        kit.fake.refuse_groups = True
        with contextlib.suppress(PeerLostError):
            if refuses == "recv":
                part.expect()
        await until(lambda: path.end.lost and path.producer_end.lost)
        kit.fake.refuse_groups = False
        for event in events:
            with pytest.raises(DeviceError):
                event.done()
        assert part.arrived == 0


@pytest.mark.asyncio
async def test_an_error_that_shows_only_when_all_seems_done_lands_nothing(seed: int) -> None:
    async with NcclKit(seed) as kit:
        path = await kit.path()
        part, _ = await in_flight(kit, path)
        if path.end._look_at is not None:
            path.end._look_at.cancel()  # so that nobody asks before the event is done
        path.end._comm._made.failure = "NCCL_ERROR_REMOTE_ERROR: made up"
        kit.fake.stalled = False
        await until(lambda: path.end.lost and path.producer_end.lost)
        assert part.arrived == 0


# -- what was forgotten -----------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_what_is_under_way_to_a_forgotten_part_may_end(seed: int) -> None:
    async with NcclKit(seed) as kit:
        path = await kit.path()
        part, _ = await in_flight(kit, path)
        quiet = path.end.forget(part.id)
        assert not quiet.done()
        kit.fake.stalled = False
        await until(quiet.done)
        assert part.arrived == 0
        await arrives(kit, path, 2)


@pytest.mark.asyncio
async def test_what_is_under_way_to_a_forgotten_part_is_ended_if_it_does_not(seed: int, monkeypatch) -> None:
    monkeypatch.setattr(nccl_receiver, "_DRAIN_S", 0.05)
    async with NcclKit(seed, tells=False) as kit:
        path = await kit.path()
        part, _ = await in_flight(kit, path)
        quiet = path.end.forget(part.id)
        await until(quiet.done)
        assert path.end.lost
        await until(lambda: path.producer_end.lost)


# -- the making -------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_communicator_that_is_not_made_in_time_ends_the_link(seed: int, monkeypatch) -> None:
    monkeypatch.setattr(nccl_end, "_MAKE_S", 0.1)
    async with NcclKit(seed) as kit:
        producer, consumer = await kit.engine(PLAIN), await kit.engine(PLAIN)
        kit.fake.hang_in_init = True
        with pytest.raises(PeerLostError, match=r"within 0.1 s|broken"):
            await consumer.transport.connect(producer.transport.describe(), producer.info)
        await until(lambda: not producer.transport._accepted)
        kit.fake.hang_in_init = False
        monkeypatch.setattr(nccl_end, "_MAKE_S", 10)
        await arrives(kit, await consumer.read_from(producer), 1)


@pytest.mark.asyncio
async def test_a_communicator_through_which_nothing_comes_is_not_used(seed: int) -> None:
    async with NcclKit(seed) as kit:
        producer, consumer = await kit.engine(PLAIN), await kit.engine(PLAIN)
        kit.fake.stalled = True
        connecting = asyncio.ensure_future(
            consumer.transport.connect(producer.transport.describe(), producer.info)
        )
        await until(lambda: len(kit.fake.communicators) == 2)
        kit.fake.communicators[0].failure = "made up"
        with pytest.raises(PeerLostError):
            await connecting
        for engine in (producer, consumer):
            await until(lambda home=engine.transport._home: not home.lingering)
            assert (
                len(engine.transport._home.incoming._free) == len(engine.transport._home.outgoing._free) == 4
            )


@pytest.mark.asyncio
async def test_who_waits_for_a_producer_that_never_comes_is_not_left_waiting(seed: int, monkeypatch) -> None:
    monkeypatch.setattr(nccl_making, "_LAST_S", 0.02)
    monkeypatch.setattr(NcclSender, "_make", lambda *_: None)
    async with NcclKit(seed) as kit:
        producer, consumer = await kit.engine(PLAIN), await kit.engine(PLAIN)
        connecting = asyncio.ensure_future(
            consumer.transport.connect(producer.transport.describe(), producer.info)
        )

        def making() -> bool:
            return any(thread.name == "aiokv-nccl-make" for thread in threading.enumerate())

        await until(making)
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting
        await until(lambda: not making())
        await until(lambda: not kit.fake.alive())


@pytest.mark.asyncio
async def test_a_name_that_nobody_met_under_is_used_for_the_next(seed: int, monkeypatch) -> None:
    named, may = [], threading.Event()
    unique_id = Calls.unique_id

    def slow(calls: Calls, ordinal: int) -> bytes:
        may.wait(20)
        named.append(unique_id(calls, ordinal))
        return named[-1]

    monkeypatch.setattr(Calls, "unique_id", slow)
    async with NcclKit(seed) as kit:
        may.set()
        producer, consumer = await kit.engine(PLAIN), await kit.engine(PLAIN)
        may.clear()
        named.clear()
        connecting = asyncio.ensure_future(
            consumer.transport.connect(producer.transport.describe(), producer.info)
        )
        home = consumer.transport._home
        await until(lambda: any(end._slots for end in home.ends))
        connecting.cancel()
        await asyncio.gather(connecting, return_exceptions=True)
        may.set()
        await until(lambda: home.names == named != [])
        await arrives(kit, await consumer.read_from(producer), 1)
        assert len(named) == 1 and not home.names


@pytest.mark.asyncio
async def test_other_bytes_than_were_agreed_on_prove_nothing(seed: int, monkeypatch) -> None:
    async with NcclKit(seed) as kit:
        producer, consumer = await kit.engine(PLAIN), await kit.engine(PLAIN)
        monkeypatch.setattr(Calls, "get", lambda *_: np.zeros(16, np.uint8))
        with pytest.raises(PeerLostError, match=r"not what was sent|broken"):  # whichever end is first
            await consumer.transport.connect(producer.transport.describe(), producer.info)


@pytest.mark.asyncio
@pytest.mark.parametrize("end", [NcclReceiver, NcclSender])
async def test_a_device_without_streams_left_is_told_on_connecting(end: type, seed: int, monkeypatch) -> None:
    def refuse() -> None:
        raise DeviceError("no more streams")

    async with NcclKit(seed) as kit:
        producer, consumer = await kit.engine(PLAIN), await kit.engine(PLAIN)
        refusing, init = [], end.__init__

        def made(self, link, sock, home) -> None:
            with monkeypatch.context() as patch:
                patch.setattr(kit.device, "stream", refuse)
                refusing.append(sock)
                init(self, link, sock, home)

        with monkeypatch.context() as patch:
            patch.setattr(end, "__init__", made)
            with pytest.raises(PeerLostError, match="no more streams" if end is NcclReceiver else None):
                await consumer.transport.connect(producer.transport.describe(), producer.info)
        assert [sock.fileno() for sock in refusing] == [-1]
        await until(lambda: not producer.transport._accepted)
        await arrives(kit, await consumer.read_from(producer), 1)


def test_an_abort_that_raises_frees_no_slot_before_the_stream_is_idle() -> None:
    asked: list[None] = []

    class Stream:
        def record(self) -> Stream:
            return self

        def done(self) -> bool:
            asked.append(None)
            return len(asked) == 3

    class Broken:
        def communicator(self, *args, **named) -> Broken:
            return self

        def use(self, ordinal: int) -> None:
            pass

        def put(self, *args) -> None:
            raise DeviceError("made to fail")

        def abort(self) -> None:
            raise DeviceError("can't be aborted")

    slot = type("Slot", (), {"address": 0})()
    args = (
        Broken(),
        Gate(),
        0,
        contextlib.nullcontext,
        Stream(),
        0,
        [slot],
        nccl_making.PRODUCER,
        b"name",
        b"nonce",
    )
    with pytest.raises(DeviceError, match="aborted"):
        nccl_making.Making(*args)._run()
    assert len(asked) == 3


# -- rest, and memory -------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_an_idle_link_lets_its_communicator_go_and_makes_another_when_needed(seed: int) -> None:
    async with NcclKit(seed, idle_s=0.05) as kit:
        path = await kit.path()
        for number in range(3):
            await arrives(kit, path, number, tokens=9)
            await until(lambda: not kit.fake.alive())
            assert not path.end.lost and not path.producer_end.lost
            assert path.end._epoch == path.producer_end._epoch == number + 1
            assert not path.end._slots and not path.producer_end._slots


@pytest.mark.asyncio
async def test_links_share_memory_that_is_not_enough_for_all(seed: int) -> None:
    async with NcclKit(seed, staging=1) as kit:  # one slot each way
        producer = await kit.engine(PLAIN)
        paths = [await (await kit.engine(PLAIN)).read_from(producer) for _ in range(3)]
        for number in range(2):
            for path in paths:
                await arrives(kit, path, number, tokens=4)
        back = await producer.read_from(paths[0].consumer)
        forth = await producer.read_from(paths[1].consumer)
        await arrives(kit, back, 7, tokens=4)
        await arrives(kit, forth, 8, tokens=4)


@contextlib.asynccontextmanager
async def busy(path: Path, part: Part) -> AsyncIterator[None]:
    """Send one part, over and over, so that there is always something left to send."""
    stream = path.producer.cache.device.stream()
    part.expect()
    chunk = part.chunks(1 << 20)[0]
    # The same bytes again and again, which nothing but a test may do.
    path.end._parts.expected[nccl_receiver.tag_of(part.id)]._seen = SimpleNamespace(add=lambda chunk: None)

    async def feed() -> None:
        while True:
            while path.producer_end.writable:
                path.producer_end.send(part.id, part.plan, chunk, path.producer.cache.buffers, stream=stream)
            await asyncio.sleep(0.001)

    feeding = asyncio.ensure_future(feed())
    try:
        yield
    finally:
        feeding.cancel()
        await asyncio.gather(feeding, return_exceptions=True)
        await until(lambda: not path.producer_end._ready and not path.producer_end._waiting)
        await until(lambda: not path.producer_end._flights and not path.end._flights)


@pytest.mark.asyncio
@pytest.mark.parametrize("short", ["outgoing", "incoming"])
async def test_who_is_always_busy_gives_way_when_its_turn_is_over(short: str, seed: int, monkeypatch) -> None:
    monkeypatch.setattr(nccl_home, "_TURN_S", 0.02)
    async with NcclKit(seed, staging=1) as kit:  # one slot each way
        one = await kit.engine(PLAIN)
        others = [await kit.engine(PLAIN) for _ in range(4)]
        if short == "outgoing":
            paths = [await other.read_from(one) for other in others]
        else:
            paths = [await one.read_from(other) for other in others]
        async with contextlib.AsyncExitStack() as stack:
            parts = [path.part(kit, number, tokens=4) for number, path in enumerate(paths)]
            for path, part in zip(paths, parts, strict=True):
                await stack.enter_async_context(busy(path, part))
            for _ in range(3):  # all get on, again and again
                before = [part.arrived for part in parts]
                await until(lambda before=before: all(
                    part.arrived > there for part, there in zip(parts, before, strict=True)
                ))  # fmt: skip
        assert one.transport._home.turn is None or not one.transport._home.outgoing.short


@pytest.mark.asyncio
async def test_who_has_most_memory_makes_room_for_more_links(seed: int, monkeypatch) -> None:
    monkeypatch.setattr(nccl_home, "_TURN_S", 0.02)
    async with NcclKit(seed) as kit:
        producer = await kit.engine(PLAIN)
        slots = len(producer.transport._home.outgoing._free)
        paths = [await (await kit.engine(PLAIN)).read_from(producer) for _ in range(slots)]
        async with contextlib.AsyncExitStack() as stack:
            for number, path in enumerate(paths):
                part = path.part(kit, 1 + number, tokens=4)
                await stack.enter_async_context(busy(path, part))
            # In the end each has one, and nobody has to give way any more.
            await until(lambda: all(len(path.producer_end._slots) == 1 for path in paths))
            await until(lambda: all(path.producer_end._granted for path in paths))
            assert producer.transport._home.turn is None


@pytest.mark.asyncio
async def test_nothing_is_posted_while_a_call_waits_for_the_gpu_but_what_is_received(seed: int) -> None:
    async with NcclKit(seed) as kit:
        path = await kit.path()
        gate = kit.device.gate
        part, events = await in_flight(kit, path)
        assert gate.flying
        made, may_end = threading.Event(), threading.Event()

        def call() -> None:
            made.set()
            may_end.wait(20)

        calling = off_loop(gated(kit.device, call), "call")
        await asyncio.sleep(0.01)
        assert not made.is_set()
        kit.fake.stalled = False  # what is in flight ends, since it is received all the same
        await until(made.is_set)
        assert not gate.flying
        other = path.part(kit, 2, tokens=4)
        other.expect()
        more = send_all(other)
        await asyncio.sleep(0.02)
        assert other.arrived == 0 and not path.producer_end._flights
        may_end.set()
        await calling
        await other.until(other.plan.total)
        await part.until(part.plan.total)
        for event in events + more:
            await until(event.done)


@pytest.mark.asyncio
async def test_a_making_that_is_given_up_before_its_turn_is_not_begun(seed: int) -> None:
    async with NcclKit(seed) as kit:
        producer, consumer = await kit.engine(PLAIN), await kit.engine(PLAIN)
        gate, made = kit.device.gate, len(kit.fake.communicators)
        assert gate.enter(print)
        connecting = asyncio.ensure_future(
            consumer.transport.connect(producer.transport.describe(), producer.info)
        )
        await until(lambda: any(end._making for end in consumer.transport._home.ends))
        connecting.cancel()
        await asyncio.gather(connecting, return_exceptions=True)
        gate.leave()
        for engine in (producer, consumer):
            await until(lambda home=engine.transport._home: not home.ends and not home.lingering)
        assert len(kit.fake.communicators) == made


@pytest.mark.asyncio
async def test_more_is_not_committed_than_the_consumer_has_memory_for(seed: int) -> None:
    async with NcclKit(seed, staging=1) as kit:
        path = await kit.path()
        part, events = await in_flight(kit, path)
        await asyncio.sleep(0.02)
        assert sum(len(units) for units in path.producer_end._flights) == 1
        assert len(path.producer_end._ready) >= len(events) - 1
        assert not path.producer_end.writable
        bell = asyncio.Event()
        path.producer_end.on_writable(bell.set)
        kit.fake.stalled = False
        await part.until(part.plan.total)
        await bell.wait()


@pytest.mark.asyncio
async def test_nothing_more_is_posted_of_a_chunk_that_failed(seed: int) -> None:
    async with NcclKit(seed, staging=1) as kit:
        path = await kit.path()
        await until(lambda: path.producer_end._credits)
        kit.fake.stalled = True
        part = path.part(kit, 1, tokens=32)
        part.expect()
        chunk = part.chunks(1 << 20)[0]
        piece = part.plan.copies(chunk.layer)[chunk.copy].section.piece_bytes
        longest, path.producer_end._longest = path.producer_end._longest, piece
        assert chunk.nbytes >= 4 * piece
        gathered, where = [], path.producer_end._where

        def failing(unit):
            gathered.append(unit.chunk)
            if len(gathered) == 2:
                raise DeviceError("made to fail")
            return where(unit)

        path.producer_end._where = failing
        stream = path.producer.cache.device.stream()
        send = partial(path.producer_end.send, part.id, part.plan, src=path.producer.cache.buffers)
        event = send(chunk, stream=stream)
        await until(lambda: gathered)
        assert len(gathered) == 1 and not event.done()
        assert not path.producer_end.writable
        bell = asyncio.Event()
        path.producer_end.on_writable(bell.set)
        kit.fake.stalled = False
        await bell.wait()
        await until(lambda: path.producer_end._credits == path.producer_end._granted)
        await until(lambda: not path.producer_end._flights)  # a credit may be there before that is seen
        assert len(gathered) == 2 and not path.producer_end._ready
        with pytest.raises(DeviceError) as caught:
            event.done()
        assert "made to fail" in str(caught.value.__cause__)
        await part.until(gathered[0].nbytes)
        path.end.forget(part.id)
        path.producer_end._longest = longest
        await arrives(kit, path, 2, tokens=4)


@pytest.mark.asyncio
async def test_what_a_failed_gather_may_still_read_is_in_flight(seed: int) -> None:
    async with NcclKit(seed) as kit:
        path = await kit.path()
        await until(lambda: path.producer_end._credits)
        part, gather = path.part(kit, 1, tokens=32), kit.device.gather
        part.expect()
        released = [False]

        def failing(*arguments, stream) -> None:
            kit.device.gather = gather
            stream.wait(type("Held", (), {"done": lambda self: released[0]})())
            gather(*arguments, stream=stream)
            raise DeviceError("made to fail")

        free = len(path.producer_end._free)
        kit.device.gather = failing
        event = send_all(part, 1 << 20)[0]
        await until(lambda: kit.device.gather is gather)
        await asyncio.sleep(0.02)
        assert not event.done()
        assert len(path.producer_end._free) < free
        released[0] = True
        await until(lambda: not path.producer_end._flights)
        with pytest.raises(DeviceError) as caught:
            event.done()
        assert "made to fail" in str(caught.value.__cause__)
        assert len(path.producer_end._free) == free and part.arrived == 0
        path.end.forget(part.id)
        await arrives(kit, path, 2, tokens=4)


@pytest.mark.asyncio
async def test_a_stream_that_failed_blocks_nobody(seed: int) -> None:
    async with NcclKit(seed) as kit:
        path = await kit.path()
        part = path.part(kit, 1)
        gate = [False]

        class Failing:
            def record(self) -> Failing:
                return self

            def done(self) -> bool:
                if gate[0]:
                    raise DeviceError("made to fail")
                return False

        stream = Failing()
        send = partial(path.producer_end.send, part.id, part.plan, src=path.producer.cache.buffers)
        events = [send(chunk, stream=stream) for chunk in part.chunks(1024)]
        assert not path.producer_end.writable
        bell = asyncio.Event()
        path.producer_end.on_writable(bell.set)
        gate[0] = True
        async with asyncio.timeout(20):
            await bell.wait()
        await until(lambda: not path.producer_end._unready)
        for event in events:
            with pytest.raises(DeviceError):
                event.done()


@pytest.mark.asyncio
async def test_bytes_that_are_not_there_yet_hold_up_nobody(seed: int) -> None:
    async with NcclKit(seed) as kit:
        path = await kit.path()
        late, early = path.part(kit, 1, tokens=8), path.part(kit, 2, tokens=8)
        late.expect()
        early.expect()
        device = path.producer.cache.device
        gate, stream = device.stream(), device.stream()
        held = kit.device.stream().record()
        never = type("Never", (), {"done": lambda self: opened[0]})()
        opened = [False]
        gate.wait(never)
        stream.wait(gate.record())
        send = partial(path.producer_end.send, late.id, late.plan, src=path.producer.cache.buffers)
        events = [send(chunk, stream=stream) for chunk in late.chunks(4096)]
        for event in send_all(early):
            await done(kit, event, early)
        await early.until(early.plan.total)
        assert late.arrived == 0
        assert not path.end._inbox
        opened[0] = True
        await late.until(late.plan.total)
        for event in events:
            await until(event.done)
        assert held.done()


@pytest.mark.asyncio
async def test_long_runs_go_as_they_lie(seed: int, monkeypatch) -> None:
    copied: list[str] = []
    monkeypatch.setattr(nccl_sender, "_LONG_RUN", 256 << 10)
    for name in ("gather", "scatter"):
        monkeypatch.setattr(StagingMockedDevice, name, lambda *args, name=name, **named: copied.append(name))
    async with NcclKit(seed) as kit:
        path = await kit.path(LARGE)
        await arrives(kit, path, 1, tokens=192)  # whole blocks
        assert not copied


@pytest.mark.asyncio
async def test_pieces_longer_than_what_the_consumer_takes_are_refused(seed: int) -> None:
    async with NcclKit(seed) as kit:
        path = await kit.path()
        path.producer_end._longest = 8
        with pytest.raises(DeviceError, match="raise `staging`"):
            send_all(path.part(kit, 1))


# -- what a peer must not say -----------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("said", [Wake(1), Wake(3), Rest(7), Credit(1, 1), Nudge(), Yield(1)], ids=repr)
async def test_a_producer_that_says_what_it_must_not_is_cut_off(said, seed: int) -> None:
    async with NcclKit(seed) as kit:
        path = await kit.path()
        path.producer_end._line.say(said)
        await until(lambda: path.end.lost and path.producer_end.lost)


@pytest.mark.asyncio
@pytest.mark.parametrize("said", [Wake(1), Rest(1), Credit(9, 1), Yield(2)], ids=repr)
async def test_a_consumer_that_says_what_it_must_not_is_cut_off(said, seed: int) -> None:
    async with NcclKit(seed) as kit:
        path = await kit.path()
        path.end._line.say(said)
        await until(lambda: path.end.lost and path.producer_end.lost)


@pytest.mark.asyncio
@pytest.mark.parametrize("lengths", [(8, 8), (1 << 31,), (0,), (16, 0)], ids=repr)
@pytest.mark.parametrize("known", [True, False])
async def test_messages_that_do_not_fit_the_chunk_cut_the_link(lengths, known: bool, seed: int) -> None:
    async with NcclKit(seed) as kit:
        path = await kit.path()
        part, before = path.part(kit, 1), path.consumer.copy_of_memory()
        if known:
            part.expect()
        tag = nccl_receiver.tag_of(part.id)
        path.producer_end._line.say(Announced(tag, part.chunks(4096)[0], lengths))
        await until(lambda: path.end.lost and path.producer_end.lost)
        unharmed(path, before)


@pytest.mark.asyncio
async def test_what_waits_to_be_expected_is_no_more_than_was_granted(seed: int) -> None:
    async with NcclKit(seed) as kit:
        path = await kit.path()
        part = path.part(kit, 1)
        chunk = part.chunks(4096)[0]
        said = Announced(nccl_receiver.tag_of(part.id), chunk, (chunk.nbytes,))
        for _ in range(path.end._credits + 4):
            path.producer_end._line.say(said)
        await until(lambda: path.end.lost and path.producer_end.lost)
        assert "more than there is memory for" in path.end._reason


# -- what is missing --------------------------------------------------------------------------------


def test_without_cupy_it_is_said_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(DeviceError, match=r"pip install 'aiokv\[cuda13\]'"):
        nccl_calls.load()


@pytest.mark.asyncio
async def test_what_can_not_be_served_is_refused(seed: int) -> None:
    async with NcclKit(seed) as kit:
        cache = await kit.cache(PLAIN)
        with pytest.raises(DeviceError, match="mocked memory, and only a GPU's"):
            await NcclTransport().start(cache, "127.0.0.1")
        kit.fake.version = 21803
        with pytest.raises(DeviceError, match="NCCL 21803 is older than"):
            Calls(kit.fake).check()
        transport = kit.make_transport()
        with pytest.raises(DeviceError, match="can't listen at 192.0.2.1, port 1"):
            await NcclTransport((1,), calls=Calls(kit.fake, kind="mocked")).start(cache, "192.0.2.1")
        kit.fake.refuse_groups = True
        with pytest.raises(DeviceError, match="doesn't work here"):
            await transport.start(cache, "127.0.0.1")

        def full(nbytes: int) -> None:
            raise CapacityError(f"no room for {nbytes} bytes")

        kit.device.allocate = full
        with pytest.raises(DeviceError, match="nccl: no room for"):
            await transport.start(cache, "127.0.0.1")
        with pytest.raises(ValueError, match="staging"):
            NcclTransport(staging=0)


@pytest.mark.asyncio
async def test_ends_are_what_they_say(seed: int) -> None:
    async with NcclKit(seed) as kit:
        path = await kit.path()
        assert isinstance(path.end, NcclReceiver) and isinstance(path.producer_end, NcclSender)
        assert path.end.pace == path.producer_end.pace > 1
        assert len(bytes_of(path.producer.transport._memory)) == 16 << 20
