"""What every transport must do, as one suite of async functions.

Describe a transport by a ``TransportKit`` and run each of ``CASES`` with it, under any test framework and
on any event loop::

    @pytest.mark.asyncio
    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
    async def test_my_transport(case):
        async with MyKit(seed=1) as kit:
            await case(kit)
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from aiokv.errors import ClosedError, DeviceError, LocalProtocolError, PeerLostError
from aiokv.proto.layout import CacheLayout
from aiokv.proto.placement import Placement
from aiokv.testing.conformance.transportkit import PATIENCE_S, Engine, Part, TransportKit, done
from aiokv.transports.base import Link, PeerInfo

__all__ = ["CASES", "Case"]

_PLAIN = CacheLayout.attention(layers=3, blocks=12, block_size=4, heads=4, head_size=16, dtype="float16")
_COARSE = CacheLayout.attention(layers=3, blocks=6, block_size=16, heads=4, head_size=16, dtype="float16")
_JOINED = CacheLayout.attention(
    layers=3, blocks=9, block_size=8, heads=4, head_size=16, dtype="float16", axes="bhtsd"
)
_HALF = CacheLayout.attention(
    layers=3, blocks=12, block_size=4, heads=4, head_size=16, dtype="float16", rank_heads=(2, 4), split=True,
    axes="bthd",
)  # fmt: skip
_LARGE = CacheLayout.attention(layers=2, blocks=64, block_size=16, heads=8, head_size=128, dtype="float16")


Case = Callable[[TransportKit], Awaitable[None]]


async def _lost(*ends: Link) -> None:
    """Wait until all of them are lost, by their callbacks, each of which comes once."""
    async with asyncio.timeout(PATIENCE_S):
        for end in ends:
            bell = asyncio.Event()
            end.on_lost(bell.set)
            await bell.wait()
            assert end.lost


async def _moved(kit: TransportKit, *parts: Part, limit: int = 4096, shuffled: bool = True) -> None:
    """Move all of several parts, chunks of all in a drawn order, and check all memory of both sides."""
    engines = {engine for part in parts for engine in (part.path.producer, part.path.consumer)}
    expected = {engine: engine.copy_of_memory() for engine in engines}
    for part in parts:
        part.expect()
        part.apply(part.path.producer.copy_of_memory(), expected[part.path.consumer])
    todo = [(part, chunk) for part in parts for chunk in part.chunks(limit)]
    if shuffled:
        kit.random.shuffle(todo)
    for part, chunk in todo:
        await part.move(kit, chunk)
    for part in parts:
        await part.until(part.plan.total)
        assert part.landed == {layer: part.plan.nbytes(layer) for layer in part.plan.layers}
    for engine in engines:
        for found, wanted in zip(engine.copy_of_memory(), expected[engine], strict=True):
            np.testing.assert_array_equal(found, wanted)


@contextlib.contextmanager
def _raises(*kinds: type[BaseException]) -> Iterator[None]:
    try:
        yield
    except kinds:
        return
    raise AssertionError(f"{' or '.join(kind.__name__ for kind in kinds)} was not raised")


def _unchanged(engine: Engine, before: list[NDArray[np.uint8]]) -> None:
    for found, wanted in zip(engine.copy_of_memory(), before, strict=True):
        np.testing.assert_array_equal(found, wanted)


def _descriptors() -> int:
    """How many are open, of the first thousands: looked at one by one, since listing would block."""
    count = 0
    for fd in range(4096):
        with contextlib.suppress(OSError):
            os.fstat(fd)
            count += 1
    return count


async def _eventually(condition: Callable[[], bool]) -> None:
    """Wait for what nobody announces."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def _settled(kit: TransportKit) -> None:
    """Let everything happen that is going to."""
    await kit.drive()
    await asyncio.sleep(0.05)


# -- the cases ------------------------------------------------------------------------------------


async def moves_between_equal_layouts(kit: TransportKit) -> None:
    """The granted blocks arrive, and no other byte changes."""
    path = await (await kit.engine(_PLAIN)).read_from(await kit.engine(_PLAIN))
    await _moved(kit, path.part(kit, 1))


async def moves_between_block_sizes(kit: TransportKit) -> None:
    """Blocks of 4 tokens into blocks of 16, without the prefix that the consumer has."""
    path = await (await kit.engine(_COARSE)).read_from(await kit.engine(_PLAIN))
    await _moved(kit, path.part(kit, 1, first_token=5))


async def moves_between_axis_orders(kit: TransportKit) -> None:
    """Small fragments: every token's head is a run of its own."""
    path = await (await kit.engine(_JOINED)).read_from(await kit.engine(_PLAIN))
    await _moved(kit, path.part(kit, 1), limit=700)


async def moves_some_heads(kit: TransportKit) -> None:
    """A producer that has half of the heads, with K and V apart."""
    path = await (await kit.engine(_PLAIN)).read_from(await kit.engine(_HALF))
    await _moved(kit, path.part(kit, 1))


async def moves_parts_interleaved(kit: TransportKit) -> None:
    """Chunks of several parts over one link, in any order."""
    path = await (await kit.engine(_PLAIN)).read_from(await kit.engine(_PLAIN))
    await _moved(kit, *(path.part(kit, number, tokens=11 + number) for number in range(3)), limit=600)


async def moves_large_chunks(kit: TransportKit) -> None:
    """Chunks that no socket buffer holds."""
    path = await (await kit.engine(_LARGE)).read_from(await kit.engine(_LARGE))
    await _moved(kit, path.part(kit, 1, tokens=900), path.part(kit, 2, tokens=100), limit=16 << 20)


async def moves_both_ways(kit: TransportKit) -> None:
    """Two engines that read from each other, at once."""
    a, b = await kit.engine(_PLAIN), await kit.engine(_COARSE)
    there, back = await a.read_from(b), await b.read_from(a)
    assert there.end.id != back.end.id
    await _moved(kit, there.part(kit, 1), back.part(kit, 2), limit=600)


async def moves_to_several_consumers(kit: TransportKit) -> None:
    """Links of one producer don't disturb each other, and neither does the end of one."""
    producer = await kit.engine(_PLAIN)
    first, second = [await (await kit.engine(_PLAIN)).read_from(producer) for _ in range(2)]
    await _moved(kit, first.part(kit, 1, tokens=8), second.part(kit, 2, tokens=8))
    first.end.close()
    await _lost(first.producer_end)
    assert not second.producer_end.lost
    await _moved(kit, second.part(kit, 3, tokens=8))


async def closed_by_the_consumer(kit: TransportKit) -> None:
    """The producer learns of it, forgets the link, and can be read through a new one."""
    producer, consumer = await kit.engine(_PLAIN), await kit.engine(_PLAIN)
    path = await consumer.read_from(producer)
    assert not path.end.lost
    assert not path.producer_end.lost
    path.end.close()
    path.end.close()
    await _lost(path.producer_end, path.end)
    assert producer.transport.accepted(path.end.id) is None
    again = await consumer.read_from(producer)
    assert again.end.id != path.end.id
    await _moved(kit, again.part(kit, 1))


async def closed_by_the_producer(kit: TransportKit) -> None:
    """The consumer learns of it; the producer's end is lost when the consumer has answered."""
    path = await (await kit.engine(_PLAIN)).read_from(await kit.engine(_PLAIN))
    path.producer_end.close()
    path.producer_end.close()
    await _lost(path.end)
    path.end.close()
    await _lost(path.producer_end)
    part = path.part(kit, 1)
    with contextlib.suppress(PeerLostError):  # what may be expected needs no answer
        part.expect()
    before = path.consumer.copy_of_memory()
    with _raises(PeerLostError):
        await part.move(kit, part.chunks(4096)[0])
    _unchanged(path.consumer, before)


async def closed_transport(kit: TransportKit) -> None:
    """All links of a transport that is closed are lost at the other end, and it can't be used."""
    a, b = await kit.engine(_PLAIN), await kit.engine(_PLAIN)
    there, back = await a.read_from(b), await b.read_from(a)
    description = b.transport.describe()
    await b.transport.aclose()
    await b.transport.aclose()
    await _lost(there.end, back.producer_end)
    assert b.transport.accepted(there.end.id) is None
    with _raises(ClosedError):
        b.transport.describe()
    with _raises(ClosedError):
        await b.transport.connect(a.transport.describe(), a.info)
    with _raises(PeerLostError):
        await a.transport.connect(description, b.info)
    assert kit.make_transport().accepted(b"no such link") is None


async def lost_in_the_middle(kit: TransportKit) -> None:
    """After a link is lost nothing is written, and all that was submitted has ended."""
    path = await (await kit.engine(_LARGE)).read_from(await kit.engine(_LARGE))
    part = path.part(kit, 1, tokens=1000)
    part.expect()
    chunks = part.chunks(1 << 20)
    await part.move(kit, chunks[0])
    await part.until(chunks[0].nbytes)
    if not part.one_sided:  # some of it is in sockets, some not even there
        stream = path.producer.cache.device.stream()
        events = [
            path.producer_end.send(part.id, part.plan, chunk, path.producer.cache.buffers, stream=stream)
            for chunk in chunks[1:]
        ]
        path.producer_end.close()
        for event in events:  # what a device has begun it ends, and then it is over
            with contextlib.suppress(DeviceError):
                await done(kit, event, path.producer_end)
    else:
        path.producer_end.close()
    await _lost(path.end)
    writing = None if part.one_sided else path.end.forget(part.id)
    if writing is not None:  # what a device has begun it ends, here too
        with contextlib.suppress(DeviceError):
            await done(kit, writing, path.end)
    before = path.consumer.copy_of_memory()
    told = part.arrived
    with _raises(PeerLostError):
        await part.move(kit, chunks[1])
    await _settled(kit)
    _unchanged(path.consumer, before)
    assert part.arrived == told < part.plan.total or part.one_sided


async def forgotten_in_the_middle(kit: TransportKit) -> None:
    """What is under way to a part that was forgotten goes nowhere, and harms no other part."""
    path = await (await kit.engine(_LARGE)).read_from(await kit.engine(_LARGE))
    if path.consumer.transport.one_sided:
        return  # nobody else writes
    part, other = path.part(kit, 1, tokens=500), path.part(kit, 2, tokens=100)
    part.expect()
    other.expect()
    chunks = part.chunks(1 << 20)
    stream, buffers = path.producer.cache.device.stream(), path.producer.cache.buffers
    send = path.producer_end.send
    events = [send(part.id, part.plan, chunk, buffers, stream=stream) for chunk in chunks]
    await part.until(1)
    for _ in range(2):
        writing = path.end.forget(part.id)
        if writing is not None:  # what a device has begun it ends
            await done(kit, writing, path.end)
    told, before = part.arrived, path.consumer.copy_of_memory()
    for event in events:
        await done(kit, event, stream)
    other.apply(path.producer.copy_of_memory(), before)
    for chunk in other.chunks(1 << 20):
        await other.move(kit, chunk)
    await other.until(other.plan.total)
    _unchanged(path.consumer, before)
    assert part.arrived == told
    assert not path.end.lost


async def uninvited_data(kit: TransportKit) -> None:
    """Data of a part that was never expected cuts the link, and writes nothing."""
    path = await (await kit.engine(_PLAIN)).read_from(await kit.engine(_PLAIN))
    if path.consumer.transport.one_sided:
        return
    part, before = path.part(kit, 1), path.consumer.copy_of_memory()
    with contextlib.suppress(DeviceError, PeerLostError):
        await part.move(kit, part.chunks(4096)[0])
    await _lost(path.end, path.producer_end)
    _unchanged(path.consumer, before)


async def the_same_twice(kit: TransportKit) -> None:
    """A chunk that comes twice is not counted twice: the link is cut."""
    path = await (await kit.engine(_PLAIN)).read_from(await kit.engine(_PLAIN))
    if path.consumer.transport.one_sided:
        return
    part = path.part(kit, 1)
    part.expect()
    with _raises(LocalProtocolError):
        part.expect()
    chunk = part.chunks(600)[0]
    await part.move(kit, chunk)
    await part.until(chunk.nbytes)
    with contextlib.suppress(DeviceError, PeerLostError):
        await part.move(kit, chunk)
    await _lost(path.end, path.producer_end)
    assert part.arrived == chunk.nbytes


async def wrong_token(kit: TransportKit) -> None:
    """Who doesn't know the token is refused, and nobody else is disturbed."""
    producer, consumer = await kit.engine(_PLAIN), await kit.engine(_PLAIN)
    path = await consumer.read_from(producer)
    for _ in range(3):
        with _raises(PeerLostError):
            await consumer.transport.connect(kit.forged(producer.transport.describe()), producer.info)
    await _moved(kit, path.part(kit, 1))


async def garbage_for_a_description(kit: TransportKit) -> None:
    """What a peer may send in place of a description is refused, and nothing worse happens."""
    producer, consumer = await kit.engine(_PLAIN), await kit.engine(_PLAIN)
    true = producer.transport.describe()
    garbage = [b"", b"\0", true[:-1], true[: len(true) // 2], b"\xc1" + true, kit.bytes.bytes(100)]
    for description in garbage:
        with _raises(PeerLostError):
            await consumer.transport.connect(description, producer.info)


async def another_placement(kit: TransportKit) -> None:
    """A one-sided consumer that was told of other buffers is not let near the real ones."""
    producer, consumer = await kit.engine(_PLAIN), await kit.engine(_PLAIN)
    if not consumer.transport.one_sided:
        return
    there = producer.cache.placement
    for buffers in ((*there.buffers, 4096), (there.buffers[0] + 4096, *there.buffers[1:])):
        info = PeerInfo("suite", b"i" * 16, Placement(buffers, there.groups))
        with _raises(PeerLostError):
            await consumer.transport.connect(producer.transport.describe(), info)


async def cancelled_connect(kit: TransportKit) -> None:
    """A connect that is cancelled, wherever it waits, leaves nothing at either end."""
    producer, consumer = await kit.engine(_PLAIN), await kit.engine(_PLAIN)
    first = await consumer.read_from(producer)  # whatever is made once is made now
    first.end.close()
    await _lost(first.end, first.producer_end)
    await _settled(kit)
    before = _descriptors()
    turns = 0
    while True:
        turns += 1
        connecting = asyncio.ensure_future(
            consumer.transport.connect(producer.transport.describe(), producer.info)
        )
        for _ in range(turns):
            await asyncio.sleep(0)
        connecting.cancel()
        (result,) = await asyncio.gather(connecting, return_exceptions=True)
        if not isinstance(result, BaseException):
            break
        assert isinstance(result, asyncio.CancelledError), result
        if turns > 300:  # a thread or another process is what it waits for
            break
    if not isinstance(result, BaseException):
        result.close()
    # Fewer, where the very first took longer to be given back than it was lost.
    await _eventually(lambda: _descriptors() <= before)


async def misused(kit: TransportKit) -> None:
    """Each end refuses what is not its business, and a transport what it is not ready for."""
    path = await (await kit.engine(_PLAIN)).read_from(await kit.engine(_PLAIN))
    part, stream = path.part(kit, 1), path.producer.cache.device.stream()
    chunk, buffers = part.chunks(4096)[0], path.consumer.cache.buffers
    with _raises(LocalProtocolError):
        path.producer_end.read(part.plan, chunk, buffers, stream=stream)
    with _raises(LocalProtocolError):
        path.end.send(part.id, part.plan, chunk, buffers, stream=stream)
    with _raises(LocalProtocolError):
        path.producer_end.expect(part.id, part.plan, buffers, lambda chunk: None)
    with _raises(LocalProtocolError):
        path.producer_end.forget(part.id)
    assert not path.end.writable
    with _raises(LocalProtocolError):
        await path.producer.transport.start(path.producer.cache, "127.0.0.1")
    fresh = kit.make_transport()
    with _raises(ClosedError):
        fresh.describe()
    with _raises(ClosedError):
        await fresh.connect(path.producer.transport.describe(), path.producer.info)
    await fresh.aclose()


async def many_lives(kit: TransportKit) -> None:
    """Fifty engines come, are read from, and go; nothing of them is left."""
    consumer = await kit.engine(_PLAIN)
    cache = await kit.cache(_PLAIN)
    before = _descriptors()
    for _ in range(50):
        transport = kit.make_transport()
        await transport.start(cache, "127.0.0.1")
        path = await consumer.read_from(Engine(transport, cache))
        await transport.aclose()
        path.end.close()
    await _eventually(lambda: _descriptors() == before)


CASES: tuple[Case, ...] = (
    moves_between_equal_layouts,
    moves_between_block_sizes,
    moves_between_axis_orders,
    moves_some_heads,
    moves_parts_interleaved,
    moves_large_chunks,
    moves_both_ways,
    moves_to_several_consumers,
    closed_by_the_consumer,
    closed_by_the_producer,
    closed_transport,
    lost_in_the_middle,
    forgotten_in_the_middle,
    uninvited_data,
    the_same_twice,
    wrong_token,
    garbage_for_a_description,
    another_placement,
    cancelled_connect,
    misused,
    many_lives,
)
