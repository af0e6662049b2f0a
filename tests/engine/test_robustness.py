"""What nobody foresaw in one transfer, or with one peer, costs that transfer or that peer, and is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import pytest_asyncio

from aiokv.control.memory import MemoryNetwork, MemoryPort
from aiokv.device.cache import KVCache
from aiokv.device.host import HostStream
from aiokv.engine.core import Core
from aiokv.engine.engine import TransferEngine
from aiokv.engine.transfer import Offer
from aiokv.errors import AiokvError, CapacityError, ClosedError, DeviceError, PeerLostError
from aiokv.proto.consumer import Consumer
from aiokv.proto.layout import CacheLayout
from aiokv.proto.messages import Accept, Landed
from aiokv.proto.session import Session
from aiokv.proto.settings import Settings
from aiokv.proto.transfers import Part
from aiokv.transports.base import Link, PeerInfo
from aiokv.transports.memory import MemoryHub, MemoryTransport

LAYOUT = CacheLayout.attention(layers=2, blocks=256, block_size=4, heads=2, head_size=8, dtype="float32")

Make = Callable[..., Any]


@pytest.fixture
def caches() -> Iterator[list[KVCache]]:
    """Allocated before the loop runs, which that would block."""
    made = [KVCache.allocate(LAYOUT) for _ in range(3)]
    yield list(made)
    for cache in made:
        cache.close()


@pytest_asyncio.fixture
async def engines(caches: list[KVCache]) -> AsyncIterator[list[TransferEngine]]:
    """Three engines of one process, open."""
    network, hub = MemoryNetwork(), MemoryHub()
    made = [
        TransferEngine(cache, channel=network.channel(f"memory://{name}"), transports=[MemoryTransport(hub)])
        for cache, name in zip(caches, "abc", strict=True)
    ]
    async with made[0], made[1], made[2], asyncio.timeout(20):
        yield made


@contextmanager
def told() -> Iterator[list[str]]:
    """What is told to the loop's exception handler meanwhile."""
    loop = asyncio.get_running_loop()
    before, found = loop.get_exception_handler(), []  # type: ignore[var-annotated]
    loop.set_exception_handler(lambda _, context: found.append(repr(context.get("exception"))))
    yield found
    loop.set_exception_handler(before)


def core_of(engine: TransferEngine) -> Core:
    assert engine._core is not None
    return engine._core


async def moved(producer: TransferEngine, consumer: TransferEngine, tid: str, block: int = 0) -> None:
    """Move one block."""
    offer = producer.offer(tid, [block])
    offer.start()
    for layer in range(LAYOUT.layers):
        offer.layer_ready(layer)
    async with consumer.fetch(tid, [block], sources=[producer.address]):
        pass
    await offer.wait()


async def failed(handle: Any, kind: type[AiokvError]) -> None:
    with pytest.raises(kind):
        await handle.wait()


# -- peers


@pytest.mark.asyncio
async def test_a_message_that_cannot_be_taken_ends_its_session_and_no_other(
    engines: list[TransferEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer, other = engines
    await moved(producer, other, "before")
    receive = core_of(producer).table.receive

    def fault(session: Session, message: Any, now: int) -> None:
        if isinstance(message, Landed) and message.tid == "t":
            raise ZeroDivisionError
        receive(session, message, now)

    monkeypatch.setattr(core_of(producer).table, "receive", fault)
    offer = producer.offer("t", [0])
    offer.start()
    offer.layer_ready(0)
    offer.layer_ready(1)
    with told() as errors:
        async with consumer.fetch("t", [0], sources=[producer.address]):
            pass
        await failed(offer, PeerLostError)
    assert errors == ["ZeroDivisionError()"]
    await moved(producer, other, "after")
    await moved(producer, consumer, "again")
    assert core_of(producer).peers.sessions_lost == 1


@pytest.mark.asyncio
async def test_a_transport_that_fails_in_an_unforeseen_way_fails_what_waits_for_it_and_is_tried_again(
    engines: list[TransferEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer, _ = engines
    connect = MemoryTransport.connect

    async def fault(self: MemoryTransport, description: bytes, peer: PeerInfo) -> Link:
        raise ZeroDivisionError

    monkeypatch.setattr(MemoryTransport, "connect", fault)
    fetches = [consumer.fetch(f"t{number}", [number], sources=[producer.address]) for number in range(2)]
    for fetch in fetches:
        fetch.start()
    for fetch in fetches:
        await failed(fetch, PeerLostError)
    monkeypatch.setattr(MemoryTransport, "connect", connect)
    await moved(producer, consumer, "again")


# -- transfers


@pytest.mark.asyncio
async def test_what_the_engine_fails_to_do_for_one_transfer_stops_no_other(
    engines: list[TransferEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer, _ = engines
    start = core_of(consumer).mover.start

    def fault(part: Part, *args: Any) -> int:
        if part.transfer.tid == "bad":
            raise ZeroDivisionError
        return start(part, *args)

    monkeypatch.setattr(core_of(consumer).mover, "start", fault)
    offers: list[Offer] = []
    for number, tid in enumerate(["good", "bad", "better"]):
        offers.append(producer.offer(tid, [number]))
        offers[-1].start()
        for layer in range(LAYOUT.layers):
            offers[-1].layer_ready(layer)
    with told() as errors:
        fetches = [
            consumer.fetch(o.transfer_id, [n], sources=[producer.address]) for n, o in enumerate(offers)
        ]
        for fetch in fetches:
            fetch.start()
        await fetches[0].wait()
        await failed(fetches[1], DeviceError)
        await fetches[2].wait()
        await offers[0].wait()
        await failed(offers[1], AiokvError)
        await offers[2].wait()
    assert errors == ["ZeroDivisionError()"]


@pytest.mark.asyncio
async def test_a_stream_that_is_broken_from_the_start_takes_nothing(
    engines: list[TransferEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer, _ = engines

    def broken(self: HostStream) -> None:
        raise DeviceError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(HostStream, "record", broken)
        with pytest.raises(DeviceError):
            consumer.fetch("t", [0], sources=[producer.address]).start()
    assert consumer.statistics().leases == 0
    await moved(producer, consumer, "t")


# -- what many transfers and peers cost


@pytest.mark.asyncio
async def test_a_transfer_costs_the_same_however_many_go_on(
    engines: list[TransferEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer, _ = engines
    await moved(producer, consumer, "first")
    connected, asked = Consumer.connected, []

    def counted(self: Consumer, part: Part, *args: Any, **kwargs: Any) -> None:
        asked.append(part)
        connected(self, part, *args, **kwargs)

    monkeypatch.setattr(Consumer, "connected", counted)
    fetches = [consumer.fetch(f"t{number}", [number], sources=[producer.address]) for number in range(200)]
    for fetch in fetches:
        fetch.start()
        await asyncio.sleep(0)
    for fetch in fetches:
        fetch.cancel()
    for fetch in fetches:
        await failed(fetch, AiokvError)
    assert len(asked) == 200


@pytest.mark.asyncio
async def test_peers_with_which_nothing_goes_on_cost_nothing(
    engines: list[TransferEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer, other = engines
    await moved(producer, consumer, "t")
    await moved(producer, other, "t2")
    next_timer, asked = Session.next_timer, []

    def counted(self: Session) -> int | None:
        asked.append(self)
        return next_timer(self)

    monkeypatch.setattr(Session, "next_timer", counted)
    assert len(core_of(producer).peers.sessions) == 2
    assert core_of(producer).peers.next_timer() is None
    assert asked == []
    await moved(producer, consumer, "t3")
    assert len({session for session in asked if session.me is core_of(producer).peers._me}) == 1


@pytest.mark.asyncio
async def test_a_waiting_task_is_woken_by_layers_and_not_by_chunks(caches: list[KVCache]) -> None:
    network, hub = MemoryNetwork(), MemoryHub()
    producer, consumer = (
        TransferEngine(
            cache,
            channel=network.channel(f"memory://{name}"),
            transports=[MemoryTransport(hub)],
            settings=Settings(chunk_bytes=64),
        )
        for cache, name in zip(caches[:2], "ab", strict=True)
    )
    async with producer, consumer, asyncio.timeout(20):
        offer = producer.offer("t", range(100))
        offer.start()
        offer.layer_ready(0)
        offer.layer_ready(1)
        fetch = consumer.fetch("t", range(100), sources=[producer.address])
        rung, changed = [], fetch._course.changed

        def counted() -> None:
            rung.append(fetch.progress.bytes_moved)
            changed()

        fetch._course.changed = counted  # type: ignore[method-assign]
        fetch.start()
        await fetch.wait()
        await offer.wait()
        assert fetch.progress.bytes_moved > 64 * 100
        assert len(rung) <= 3 * LAYOUT.layers


@pytest.mark.asyncio
async def test_a_lease_that_is_extended_concerns_those_who_wait_for_it(
    engines: list[TransferEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer, _ = engines
    offers = [producer.offer(f"t{number}", [number]) for number in range(20)]
    fetches = [consumer.fetch(f"t{number}", [number], sources=[producer.address]) for number in range(20)]
    for handle in (*offers, *fetches):
        handle.start()
    mover = core_of(consumer).mover
    while mover.movements < 20:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    (session,) = core_of(consumer).peers.sessions
    monkeypatch.setattr(session, "lease_held", 0)  # as after standing still
    offers[0].layer_ready(0)
    while not mover._leasing and not fetches[0].progress.bytes_moved:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert [each.part.transfer.tid for each in mover._leasing.get(session, ())] == ["t0"]
    for offer in offers:
        offer.layer_ready(1)
    for offer in offers[1:]:
        offer.layer_ready(0)
    for fetch in (*fetches, *offers):
        await fetch.wait()
    assert mover._leasing == {}


# -- the peer's mistakes, and a peer that doesn't read


@pytest.mark.asyncio
async def test_who_breaks_the_rules_is_given_up_also_if_that_cannot_be_told(
    engines: list[TransferEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer, _ = engines
    fetch = consumer.fetch("t", [0], sources=[producer.address])
    fetch.start()
    while not core_of(producer).table.waiting:  # noqa: ASYNC110
        await asyncio.sleep(0)

    def full(self: MemoryPort, frame: bytes) -> None:
        raise CapacityError("it doesn't read")

    (session,) = core_of(producer).peers.sessions
    with monkeypatch.context() as patch:
        session.send(Accept("t", 0, tokens=1, blocks=(), ready=b"", lease=0))
        core_of(producer).peers.flush()
        patch.setattr(MemoryPort, "send", full)
        await failed(fetch, PeerLostError)
        assert core_of(consumer).peers.sessions == []
    await moved(producer, consumer, "again")


@pytest.mark.asyncio
async def test_a_session_ends_once_also_if_its_peer_cannot_be_told(
    engines: list[TransferEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer, _ = engines
    fetch = consumer.fetch("t", [0], sources=[producer.address])
    fetch.start()
    while not core_of(producer).table.waiting:  # noqa: ASYNC110
        await asyncio.sleep(0)

    def full(self: MemoryPort, frame: bytes) -> None:
        raise CapacityError("it doesn't read")

    peers = core_of(consumer).peers
    (session,) = peers.sessions
    with monkeypatch.context() as patch:
        patch.setattr(MemoryPort, "send", full)
        peers.end(session, PeerLostError("by the test"), tell=True)
        await failed(fetch, PeerLostError)
    assert peers.sessions_lost == 1


@pytest.mark.asyncio
async def test_the_peer_that_was_not_used_for_longest_gives_way(caches: list[KVCache]) -> None:
    network, hub = MemoryNetwork(), MemoryHub()
    engines = [
        TransferEngine(
            cache,
            channel=network.channel(f"memory://{name}"),
            transports=[MemoryTransport(hub)],
            settings=Settings(peers=2),
        )
        for cache, name in zip(caches, "abc", strict=True)
    ]
    async with engines[0] as a, engines[1] as b, engines[2] as c, asyncio.timeout(20):
        peers = core_of(a).peers
        await moved(b, a, "t0")
        await moved(c, a, "t1")
        await moved(b, a, "t2")
        peers.session("memory://d")
        assert list(peers._peers) == [b.address, "memory://d"]
        await moved(b, a, "t3")


@pytest.mark.asyncio
async def test_a_session_that_ended_before_it_is_used_fails_what_uses_it(
    engines: list[TransferEngine],
) -> None:
    producer, consumer, _ = engines
    await moved(producer, consumer, "before")
    fetch = consumer.fetch("t", [0], sources=[producer.address])
    fetch.start()
    peers = core_of(consumer).peers
    (session,) = peers.sessions
    late = consumer.fetch("late", [1], sources=[producer.address])
    monkey = peers.session
    peers.session = lambda address: session  # type: ignore[method-assign]
    peers.end(session, PeerLostError("by the test"))
    late.start()
    peers.session = monkey  # type: ignore[method-assign]
    await failed(late, PeerLostError)
    await failed(fetch, PeerLostError)


# -- leaving and closing


@pytest.mark.asyncio
async def test_an_offer_whose_layers_cannot_be_announced_is_given_up_on_leaving(
    engines: list[TransferEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer, _ = engines

    def broken(self: HostStream) -> None:
        raise DeviceError("broken")

    offer = producer.offer("t", [0])
    with monkeypatch.context() as patch:
        with pytest.raises(DeviceError, match="broken"):
            async with offer:
                fetch = consumer.fetch("t", [0], sources=[producer.address])
                fetch.start()
                patch.setattr(HostStream, "record", broken)
        assert offer.done()
    assert producer.statistics().leases == 0
    await failed(fetch, AiokvError)


@pytest.mark.asyncio
async def test_a_layer_that_could_not_be_announced_can_be_announced_again(
    engines: list[TransferEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer, _ = engines

    def broken(self: HostStream) -> None:
        raise DeviceError("broken")

    offer = producer.offer("t", [0])
    offer.start()
    with monkeypatch.context() as patch:
        patch.setattr(HostStream, "record", broken)
        with pytest.raises(DeviceError):
            offer.layer_ready(0)
    offer.layer_ready(0)
    offer.layer_ready(1)
    async with consumer.fetch("t", [0], sources=[producer.address]):
        pass
    await offer.wait()


@pytest.mark.asyncio
async def test_who_closes_second_waits_as_the_first_does(engines: list[TransferEngine]) -> None:
    producer, _, _ = engines
    offer = producer.offer("t", [0])
    offer.start()
    states = []

    async def close() -> None:
        await producer.aclose()
        states.append(producer._state)

    await asyncio.gather(close(), close(), close())
    assert states == ["closed"] * 3
    await failed(offer, ClosedError)


@pytest.mark.asyncio
async def test_what_fails_in_closing_leaves_nothing_else_open(
    caches: list[KVCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    network, transport = MemoryNetwork(), MemoryTransport(MemoryHub())
    engine = TransferEngine(caches[0], channel=network.channel("memory://a"), transports=[transport])
    await engine.__aenter__()
    aclose = transport.aclose

    async def fault() -> None:
        await aclose()
        raise DeviceError("broken")

    monkeypatch.setattr(transport, "aclose", fault)
    with pytest.raises(DeviceError, match="broken"):
        await engine.aclose()
    again = network.channel("memory://a")
    await again.start(lambda _: None)
    await again.aclose()
