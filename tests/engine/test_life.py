"""Life of an engine: entering, leaving with transfers in each state, starting again, and idling."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from aiokv.device.mocked import MockedDevice
from aiokv.engine.engine import TransferEngine
from aiokv.engine.transfer import Fetch, Offer
from aiokv.errors import (
    BusyError,
    ClosedError,
    DeviceError,
    LayoutMismatch,
    PeerLostError,
    TransferAborted,
)
from aiokv.proto.settings import SECOND, Settings
from aiokv.testing.pairs import LAYOUT, Engines, check_idle, kv_of, settle, transfer, unharmed, virtual_time
from aiokv.testing.virtual import VirtualLoop
from aiokv.transports.memory import MemoryHub, MemoryTransport


async def until(reached: Callable[[], bool]) -> None:
    while not reached():  # noqa: ASYNC110 - nothing tells of what statistics count
        await asyncio.sleep(0)


def refuses(engine: TransferEngine, state: str) -> None:
    for call in (engine.offer, engine.fetch):
        with pytest.raises(ClosedError, match=f"the engine is {state}"):
            call("t", [1])


# -- entering -------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_an_engine_is_used_while_it_is_open() -> None:
    async with Engines() as engines:
        engine, peer = engines.make("x", await engines.cache()), await engines.add("peer")
        refuses(engine, "new")
        await engine.aclose()  # which closes nothing that isn't open
        await engines.enter(engine)
        early = [engine.offer("early", [1]), engine.fetch("early", [2], sources=[peer.address])]
        await transfer(engine, peer, "well")
        with pytest.raises(ClosedError, match="entered once; this one is open"):
            await engine.__aenter__()
        await engine.aclose()
        await engine.aclose()
        refuses(engine, "closed")
        for handle in early:
            with pytest.raises(ClosedError, match="the engine is closed"):
                handle.start()
        with pytest.raises(ClosedError, match="entered once; this one is closed"):
            await engine.__aenter__()
        assert engine.statistics().parts_ended["landed"] == 1  # what it did can still be read
        check_idle(engine, peer)


@pytest.mark.asyncio
async def test_what_is_wrong_with_an_engine_is_said_when_it_is_made_or_entered() -> None:
    async with Engines() as engines:
        cache = await engines.cache()
        with pytest.raises(ValueError, match="at least one transport"):
            TransferEngine(cache, transports=[])
        with pytest.raises(ValueError, match="there is no transport 'rdma'; there are shm, cma, tcp"):
            TransferEngine(cache, transports=["shm", "rdma"])
        for bind in ("nonsense", "tcp://127.0.0.1", "tcp://0.0.0.0:0"):
            with pytest.raises(ValueError, match="tcp://|has no port|pass advertise="):
                TransferEngine(cache, bind=bind)
        # This cache's memory is private to the process, so the one transport that is allowed can't serve it.
        engine = TransferEngine(cache, transports=["shm"], bind="tcp://127.0.0.1:0")
        with pytest.raises(DeviceError, match="no transport can serve this cache: shm: "):
            await engine.__aenter__()
        with pytest.raises(ClosedError, match="this one is closed"):
            await engine.__aenter__()
        cache.close()


@pytest.mark.asyncio
async def test_a_cache_cannot_be_closed_under_its_engine() -> None:
    async with Engines() as engines:
        first = await engines.add("a")
        cache = first.cache
        second = engines.make("b", cache)
        await engines.enter(second)
        with pytest.raises(BusyError, match="is in use; close the engine first"):
            cache.close()
        await second.aclose()
        with pytest.raises(BusyError, match="is in use"):
            cache.close()
        await first.aclose()
        cache.close()
        with pytest.raises(ClosedError, match="this KV cache was closed"):
            await engines.make("c", cache).__aenter__()


@pytest.mark.asyncio
async def test_an_engine_that_failed_to_open_lets_go_of_its_cache() -> None:
    async with Engines() as engines:
        cache = await engines.cache()
        with pytest.raises(DeviceError, match="no transport"):
            await TransferEngine(cache, transports=["shm"]).__aenter__()
        cache.close()


@pytest.mark.asyncio
async def test_an_engine_says_what_it_is_and_does() -> None:
    async with Engines() as engines:
        producer, consumer = await engines.add("p"), engines.make("c", await engines.cache())
        assert repr(consumer) == "<TransferEngine new>"
        await engines.enter(consumer)
        assert repr(consumer) == "<TransferEngine at memory://c open, 0 peers, 0 offers, 0 fetches>"
        async with consumer.fetch("t", [1], sources=[producer.address]):
            assert repr(consumer) == "<TransferEngine at memory://c open, 1 peers, 0 offers, 1 fetches>"
            async with producer.offer("t", [2]):
                assert " 1 offers, 0 fetches>" in repr(producer)
        await consumer.aclose()
        assert repr(consumer) == "<TransferEngine closed>"


@pytest.mark.asyncio
async def test_an_address_in_use_is_told_and_its_holder_is_not_disturbed() -> None:
    async with unharmed() as (a, _):
        network = a._channel._network  # type: ignore[attr-defined]
        async with Engines(network=network) as others:
            second = others.make("a", await others.cache())
            with pytest.raises(OSError, match="memory://a: address already in use"):
                await second.__aenter__()
            assert not others.hub._transports
            second.cache.close()


@pytest.mark.asyncio
async def test_leaving_by_an_exception_gives_up_what_goes_on() -> None:
    async with Engines() as engines:
        producer, cache = await engines.add("p"), await engines.cache()
        consumer = engines.make("c", cache)
        offer = producer.offer("t", [1])
        with pytest.raises(LookupError):
            async with consumer:
                fetch = consumer.fetch("t", [1], sources=[producer.address])
                fetch.start()
                offer.start()
                await settle(producer, consumer)
                raise LookupError
        with pytest.raises(ClosedError, match="transfer 't': its engine was closed"):
            await fetch.wait()
        with pytest.raises(TransferAborted, match="by the consumer at memory://c: .*its engine was closed"):
            await offer.wait()
        cache.close()
        check_idle(producer)


@pytest.mark.asyncio
async def test_engines_that_share_no_memory_do_not_take_each_other_s_for_their_own() -> None:
    async with Engines() as engines:
        producer, cache = await engines.add("p"), await engines.cache()
        # As in another process: a hub of its own, whose count begins anew.
        transport = MemoryTransport(MemoryHub())
        consumer = TransferEngine(
            cache, channel=engines.network.channel("memory://c"), transports=[transport]
        )
        async with consumer:
            fetch = consumer.fetch("t", [1], sources=[producer.address])
            with pytest.raises(TransferAborted, match="at memory://c: no data path to memory://p: memory: "):
                async with producer.offer("t", [1]):
                    fetch.start()
            with pytest.raises(PeerLostError, match="no data path to memory://p: .*not in this process"):
                await fetch.wait()
            await settle(producer, consumer)
            check_idle(producer, consumer)
        cache.close()


# -- closing --------------------------------------------------------------------------------------

STATES = ["offered", "granted", "moving", "copying"]


@pytest.mark.parametrize("push", [False, True], ids=["pull", "push"])
@pytest.mark.parametrize("who", ["producer", "consumer"])
@pytest.mark.parametrize("state", STATES)
@pytest.mark.asyncio
async def test_closing_ends_what_goes_on_at_both_sides(state: str, who: str, push: bool) -> None:
    device = MockedDevice(seed=1)
    async with Engines() as engines:
        producer, other = await engines.add("p"), await engines.add("o")
        consumer = await engines.add("c", device=device)
        await settle(producer, consumer, other)
        offer = producer.offer("t", [1, 2], to=[consumer.address] if push else [])
        fetch = consumer.fetch("t", [1, 2], sources=None if push else [producer.address])
        handles: list[Offer | Fetch] = [offer, fetch]
        if state == "offered":  # the other side isn't there yet
            handles = [offer] if who == "producer" else [fetch]
        for handle in handles:
            handle.start()
        if state in ("moving", "copying"):
            offer.layer_ready(0)
            await until(lambda: consumer.statistics().in_flight > 0)
            if state == "moving":
                device.run()
                await until(lambda: consumer.statistics().in_flight == 0)
        await settle(producer, consumer)
        closing = producer if who == "producer" else consumer
        task = asyncio.ensure_future(engines.close(closing))
        if state == "copying":
            await settle(producer, consumer)
            assert not task.done()
            assert not any(handle.done() for handle in handles)
            device.run()
        await task
        for handle in handles:
            mine = (who == "producer") is isinstance(handle, Offer)
            kinds = ClosedError if mine else (TransferAborted, PeerLostError)
            with pytest.raises(kinds, match=r"its engine was closed|closed$"):
                await handle.wait()
        left = consumer if who == "producer" else producer
        await settle(left, other)
        check_idle(left, other)
        assert left.statistics().sessions == 0
        if left is producer:
            await transfer(left, other, "afterwards")


@pytest.mark.asyncio
async def test_cancelling_who_closes_does_not_stop_it_and_comes_out_at_the_end() -> None:
    device = MockedDevice(seed=1)
    async with Engines() as engines:
        producer, consumer = await engines.add("p"), await engines.add("c", device=device)
        offer, fetch = producer.offer("t", [1]), consumer.fetch("t", [1], sources=[producer.address])
        offer.start()
        fetch.start()
        offer.layer_ready(0)
        await until(lambda: consumer.statistics().in_flight > 0)
        closing = [asyncio.ensure_future(consumer.aclose()) for _ in range(2)]
        for _ in range(3):
            await settle(producer, consumer)
            closing[0].cancel()
        await settle(producer, consumer)
        assert not any(task.done() for task in closing)
        device.run()
        await closing[1]
        with pytest.raises(asyncio.CancelledError):
            await closing[0]
        with pytest.raises(ClosedError):
            await fetch.wait()
        with pytest.raises(TransferAborted):
            await offer.wait()
        check_idle(producer, consumer)
        again = await engines.add("c")  # the address is free
        await transfer(producer, again, "afterwards")


@virtual_time
@pytest.mark.parametrize("role", ["offer", "fetch"])
async def test_who_closes_before_it_was_answered_says_goodbye_all_the_same(role: str) -> None:
    async with Engines() as engines:
        closing, left = await engines.add("closing"), await engines.add("left")
        if role == "offer":
            handle: Offer | Fetch = closing.offer("t", [1], to=[left.address])
        else:
            handle = closing.fetch("t", [1], sources=[left.address])
        handle.start()
        handle.cancel()
        loop = asyncio.get_running_loop()
        begun = loop.time()
        await engines.close(closing)
        await settle(left)
        assert left.statistics().sessions == 0
        await left.aclose()
        assert loop.time() == begun  # it waits for nobody to read what it said
        with pytest.raises(TransferAborted):
            await handle.wait()


@virtual_time
async def test_closing_waits_for_a_peer_that_is_gone_no_longer_than_it_must() -> None:
    async with Engines(settings=Settings(close_ns=7 * SECOND)) as engines:
        producer, consumer = await engines.add("p"), await engines.add("c")
        unmet = producer.offer("t", [1], to=["memory://nobody"])
        unmet.start()
        await settle(producer, consumer)
        loop = asyncio.get_running_loop()
        begun = loop.time()
        await engines.close(producer)
        assert loop.time() == begun  # whom it never met need not acknowledge anything
        with pytest.raises(ClosedError):
            await unmet.wait()


@pytest.mark.asyncio
async def test_an_address_is_used_again_by_the_same_and_by_another_layout() -> None:
    other = msgspec.structs.replace(LAYOUT, model=b"another")
    async with Engines() as engines:
        consumer = await engines.add("c")
        for number, layout in enumerate((LAYOUT, LAYOUT, other, LAYOUT)):
            producer = await engines.add("p", layout)
            if layout is LAYOUT:
                await transfer(producer, consumer, f"t{number}")
                await transfer(consumer, producer, f"u{number}", push=True)
            else:
                with pytest.raises(LayoutMismatch, match="model fingerprint"):
                    async with consumer.fetch("t", [1], sources=[producer.address]):
                        pass
            await settle(producer, consumer)
            check_idle(producer, consumer)
            await engines.close(producer)


# -- both ways, and at rest -----------------------------------------------------------------------


@pytest.mark.asyncio
async def test_two_engines_move_to_each_other_at_once(seed: int) -> None:
    rng = random.Random(seed)

    async def one(producer: TransferEngine, consumer: TransferEngine, block: int) -> None:
        # The lower half of the blocks is written, the upper half is read.
        fetch = consumer.fetch(f"to {consumer.address} {block}", [block], sources=[producer.address])
        fetch.start()
        async with producer.offer(fetch.transfer_id, [15 - block]) as offer:
            for layer in rng.sample(range(4), 4):
                for _ in range(rng.randrange(4)):
                    await asyncio.sleep(0)
                offer.layer_ready(layer)
        await fetch.wait()
        theirs, ours = kv_of(producer.cache, [15 - block]), kv_of(consumer.cache, [block])
        assert np.array_equal(theirs, ours)

    async with unharmed() as (a, b):
        async with asyncio.TaskGroup() as group:
            for block in range(8):
                group.create_task(one(a, b, block))
                group.create_task(one(b, a, block))
        assert a.statistics().sessions == b.statistics().sessions == 1


@virtual_time
async def test_nothing_is_scheduled_once_nothing_goes_on() -> None:
    async with unharmed() as (producer, consumer):
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        for push in (False, True):
            await transfer(producer, consumer, f"t{push}", push=push)
            await settle(producer, consumer)
            assert loop.scheduled() == []
        fetch = consumer.fetch("t", [1], sources=[producer.address])
        fetch.start()
        await settle(producer, consumer)
        assert loop.scheduled()  # deadlines and heartbeats
        fetch.cancel()
        with pytest.raises(TransferAborted):
            await fetch.wait()
        await settle(producer, consumer)
        assert loop.scheduled() == []


@pytest.mark.asyncio
async def test_an_idle_engine_has_no_turns() -> None:
    async with unharmed() as (producer, consumer):
        before = producer.statistics(), consumer.statistics()
        for _ in range(500):
            await asyncio.sleep(0)
        await asyncio.sleep(0.02)
        assert (producer.statistics(), consumer.statistics()) == before
