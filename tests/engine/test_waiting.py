"""Waiting: several waiters, failures that nobody awaits, what a handle tells and what an engine counts."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import logging
import re

import msgspec
import pytest

from aiokv.device.mocked import MockedDevice
from aiokv.engine.engine import TransferEngine
from aiokv.engine.transfer import Fetch, Offer
from aiokv.errors import (
    AiokvError,
    ClosedError,
    InvalidBlocks,
    LayoutMismatch,
    LocalProtocolError,
    Refused,
    TransferAborted,
)
from aiokv.proto.settings import Settings
from aiokv.testing.pairs import LAYOUT, Engines, check_idle, settle, transfer, unharmed, virtual_time


def begun(producer: TransferEngine, consumer: TransferEngine) -> tuple[Offer, Fetch]:
    """Both sides of a transfer of blocks 1 and 2 into 3 and 4, before any layer is written."""
    offer, fetch = producer.offer("t", [1, 2]), consumer.fetch("t", [3, 4], sources=[producer.address])
    offer.start()
    fetch.start()
    return offer, fetch


def write(offer: Offer) -> None:
    for layer in range(4):
        offer.layer_ready(layer)


async def outcome(handle: Offer | Fetch) -> str:
    """How it ended, in a word."""
    try:
        await handle.wait()
    except AiokvError as error:
        return type(error).__name__
    return "well"


# -- several who wait -----------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_any_number_may_wait_and_some_of_them_go() -> None:
    async with unharmed() as (producer, consumer):
        offer, fetch = begun(producer, consumer)
        waiting = [asyncio.ensure_future(handle.wait()) for handle in [offer, fetch] * 3]
        layers = [asyncio.ensure_future(fetch.layer(layer)) for layer in (0, 0, 3, 3)]
        await settle(producer, consumer)
        for task in (waiting[0], waiting[1], layers[0], layers[2]):
            task.cancel()
        await settle(producer, consumer)
        assert [task.cancelled() for task in waiting] == [True, True, False, False, False, False]
        assert not offer.done()
        assert not fetch.done()
        offer.layer_ready(0)
        await layers[1]
        assert not layers[3].done()
        for layer in (1, 2, 3):
            offer.layer_ready(layer)
        await asyncio.gather(*waiting[2:], layers[3])
        assert layers[0].cancelled()
        assert layers[2].cancelled()
        assert offer.done()
        assert fetch.done()
        await offer.wait()  # at once, and as often as anybody likes
        await fetch.wait()


@pytest.mark.asyncio
async def test_all_who_wait_are_told_of_a_failure_each_with_an_error_of_its_own() -> None:
    async with unharmed() as (producer, consumer):
        offer, fetch = begun(producer, consumer)
        waiting = [asyncio.ensure_future(fetch.wait()) for _ in range(3)]
        layers = [asyncio.ensure_future(fetch.layer(layer)) for layer in range(4)]
        ordered = asyncio.ensure_future(fetch.layer_ordered(1))
        offer.cancel("preempted")
        found = await asyncio.gather(*waiting, *layers, ordered, return_exceptions=True)
        assert {type(error) for error in found} == {TransferAborted}
        assert {str(error) for error in found} == {str(fetch.error)}
        assert len({id(error) for error in found}) == len(found)
        assert await outcome(offer) == "TransferAborted"


@pytest.mark.asyncio
async def test_a_timeout_on_waiting_is_the_waiters_own() -> None:
    async with unharmed() as (producer, consumer):
        offer, fetch = begun(producer, consumer)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await fetch.wait()
        write(offer)
        assert await outcome(fetch) == await outcome(offer) == "well"


# -- without async with ---------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_what_is_started_by_hand_is_waited_for_or_cancelled() -> None:
    async with unharmed() as (producer, consumer):
        offer, fetch = producer.offer("t", [1, 2]), consumer.fetch("t", [3, 4], sources=[producer.address])
        for handle in (offer, fetch):
            assert not handle.done()
            assert handle.explain() == "not begun"
            with pytest.raises(LocalProtocolError, match="transfer 't' was not begun"):
                await handle.wait()
            with pytest.raises(LocalProtocolError, match="transfer 't' was not begun"):
                handle.cancel()
            handle.start()
            with pytest.raises(LocalProtocolError, match="transfer 't' was begun before"):
                handle.start()
            with pytest.raises(LocalProtocolError, match="transfer 't' was begun before"):
                await handle.__aenter__()
        write(offer)
        assert await outcome(offer) == await outcome(fetch) == "well"
        for handle in (offer, fetch):
            handle.cancel()  # which comes too late, and changes nothing
        await settle(producer, consumer)
        assert await outcome(offer) == await outcome(fetch) == "well"


@pytest.mark.asyncio
async def test_what_could_not_begin_can_begin_later() -> None:
    async with unharmed() as (producer, consumer):
        busy = producer.offer("busy", [1])
        busy.start()
        fetch = producer.fetch("t", [1], sources=[consumer.address])
        for _ in range(2):
            with pytest.raises(RuntimeError, match="block 1 is being read"):
                fetch.start()
        busy.cancel()
        assert await outcome(busy) == "TransferAborted"
        async with consumer.offer("t", [7]):
            fetch.start()
        assert await outcome(fetch) == "well"
        with pytest.raises(InvalidBlocks):
            consumer.offer("bad", [99]).start()


@pytest.mark.parametrize("who", ["offer", "fetch"])
@pytest.mark.asyncio
async def test_cancelling_ends_both_sides_and_says_why(who: str) -> None:
    async with unharmed() as (producer, consumer):
        offer, fetch = begun(producer, consumer)
        await settle(producer, consumer)
        one, other, role = (offer, fetch, "producer") if who == "offer" else (fetch, offer, "consumer")
        address = producer.address if who == "offer" else consumer.address
        one.cancel("the user left")
        one.cancel("and again")
        with pytest.raises(TransferAborted, match="^transfer 't': the user left$"):
            await one.wait()
        with pytest.raises(TransferAborted, match=f"given up by the {role} at {address}: the user left$"):
            await other.wait()


@pytest.mark.asyncio
async def test_what_a_handle_is_called() -> None:
    async with unharmed() as (producer, consumer):
        offer = producer.offer("t", [1], attempt=3)
        assert (offer.transfer_id, offer.attempt, offer.error) == ("t", 3, None)
        assert repr(offer) == "<Offer 't' attempt 3 not begun>"
        fetch = consumer.fetch("t", [1], attempt=3, sources=[producer.address])
        assert (fetch.transfer_id, fetch.attempt, fetch.tokens) == ("t", 3, -1)
        async with offer:
            fetch.start()
        await fetch.wait()
        assert repr(fetch) == "<Fetch 't' attempt 3 landed, memory://a (memory) at the other end>"


# -- failures that nobody sees --------------------------------------------------------------------


def collected(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """What was logged since the last call, also by what nobody refers to any more."""
    gc.collect()
    found = [record for record in caplog.records if record.name == "aiokv"]
    caplog.clear()
    return found


@pytest.mark.asyncio
async def test_a_failure_that_nobody_awaited_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    collected(caplog)  # what other tests left
    async with unharmed() as (producer, consumer):
        offer, fetch = begun(producer, consumer)
        fetch.cancel("no longer wanted")
        await settle(producer, consumer)
        assert offer.done()
        assert fetch.done()
        assert await outcome(fetch) == "TransferAborted"
        assert not collected(caplog)
        del offer, fetch
        (record,) = collected(caplog)
        assert record.levelno == logging.ERROR
        told = "given up by the consumer at memory://b: no longer wanted"
        assert record.getMessage() == f"Offer of 't' failed and nobody saw: transfer 't': {told}"


@pytest.mark.asyncio
async def test_what_somebody_saw_or_went_well_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    collected(caplog)
    async with unharmed() as (producer, consumer):
        await transfer(producer, consumer, "well")
        producer.offer("never begun", [1])
        with pytest.raises(LookupError):
            async with producer.offer("left", [1]):
                raise LookupError
        offer, fetch = begun(producer, consumer)
        offer.cancel()
        with pytest.raises(TransferAborted):
            await fetch.layer(0)  # whoever saw it here need not wait
        assert await outcome(offer) == "TransferAborted"
        await settle(producer, consumer)
        del offer, fetch
        assert not collected(caplog)


# -- what it waits for ----------------------------------------------------------------------------


@virtual_time
async def test_explain_says_what_each_part_waits_for() -> None:
    async with unharmed() as (producer, consumer):
        pushed = consumer.fetch("pushed", [5])
        pushed.start()
        assert pushed.explain() == "waiting for OFFER from anybody, 30.0 s left"
        await asyncio.sleep(1.26)
        assert pushed.explain() == "waiting for OFFER from anybody, 28.7 s left"
        unmet = consumer.fetch("unmet", [6], sources=["memory://x", producer.address], deadline=60)
        unmet.start()
        await settle(producer, consumer)
        to_x = "waiting for a connection to memory://x, 60.0 s left"
        assert unmet.explain() == f"{to_x}; waiting for the other sources, 60.0 s left"
        for handle in (pushed, unmet):
            handle.cancel()
            assert await outcome(handle) == "TransferAborted"

        fetch = consumer.fetch("t", [3, 4], sources=[producer.address], deadline=10)
        fetch.start()
        await settle(producer, consumer)
        told = "waiting for ACCEPT from memory://a (memory), where it is not offered yet, 10.0 s left"
        assert fetch.explain() == told
        offer = producer.offer("t", [1, 2], readers=2)
        offer.start()
        assert offer.explain().endswith("; waiting for GRANT from anybody, 30.0 s left")
        await settle(producer, consumer)
        # The earlier of both sides' deadlines holds for what they share.
        first, _, second = offer.explain().partition("; ")
        assert first == "waiting for the first layer, memory://b (memory) at the other end, 10.0 s left"
        assert second == "waiting for GRANT from anybody, 30.0 s left"
        assert (
            fetch.explain()
            == "waiting for the first layer, memory://a (memory) at the other end, 10.0 s left"
        )
        offer.layer_ready(0)
        offer.layer_ready(2)
        await settle(producer, consumer)
        assert fetch.explain() == "2 of 4 layers landed, memory://a (memory) at the other end, 10.0 s left"
        assert offer.explain().startswith(
            "2 of 4 layers announced, memory://b (memory) at the other end, 10.0 s left"
        )
        for layer in (1, 3):
            offer.layer_ready(layer)
        await fetch.wait()
        assert fetch.explain() == "landed, memory://a (memory) at the other end"
        await settle(producer, consumer)
        offer.cancel()
        assert await outcome(offer) == "TransferAborted"
        assert (
            offer.explain()
            == "landed, memory://b (memory) at the other end; aborted, nobody at the other end"
        )


@pytest.mark.asyncio
async def test_explain_says_what_is_not_quiet_yet() -> None:
    device = MockedDevice(seed=1)
    async with Engines() as engines:
        producer, consumer = await engines.add("a"), await engines.add("b", device=device)
        offer, fetch = begun(producer, consumer)
        offer.layer_ready(0)
        while not consumer.statistics().in_flight:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0)
        fetch.cancel()
        await settle(producer, consumer)
        told = "settled as aborted, waiting until it is quiet"
        assert fetch.explain() == f"{told}, memory://a (memory) at the other end"
        assert offer.explain() == f"{told}, memory://b (memory) at the other end"
        assert not fetch.done()
        assert not offer.done()
        assert consumer.statistics().blocks_held == producer.statistics().blocks_held == 2
        with pytest.raises(TransferAborted):  # at once: what fails needs no waiting for the blocks
            await fetch.layer(0)
        device.run()
        assert await outcome(fetch) == await outcome(offer) == "TransferAborted"
        check_idle(producer, consumer)


@pytest.mark.asyncio
async def test_an_offer_tells_whom_it_refused_last_and_why() -> None:
    async with Engines(settings=Settings(tombstone_ns=0)) as engines:
        producer, fits = await engines.add("a"), await engines.add("b")
        other = msgspec.structs.replace(LAYOUT, model=b"other")
        stranger, greedy = await engines.add("x", other), await engines.add("y")
        offer = producer.offer("t", [1])
        offer.start()
        assert "refused" not in offer.explain()
        for engine, arguments, kind, text in (
            (
                stranger,
                {},
                LayoutMismatch,
                "refused memory://x itself: this cache and that of memory://a differ: model",
            ),
            (
                greedy,
                {"tokens": 8, "blocks": [1, 2]},
                Refused,
                "refused memory://y: 8 tokens asked for, 4 are offered",
            ),
        ):
            fetch = engine.fetch(**{"tid": "t", "blocks": [1], "sources": [producer.address], **arguments})
            with pytest.raises(kind):
                async with fetch:
                    pass
            await settle(producer, engine)
            assert re.search(
                rf"waiting for GRANT from anybody \({text}.*\), \d+\.\d s left$", offer.explain()
            )
        write(offer)
        async with fits.fetch("t", [1], sources=[producer.address]):
            pass
        await offer.wait()
        assert offer.explain() == "landed, memory://b (memory) at the other end"


# -- statistics -----------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_statistics_count_what_goes_on_and_what_went_on() -> None:
    async with Engines() as engines:
        producer, consumer = await engines.add("p"), await engines.add("c")
        fresh = dataclasses.asdict(producer.statistics())
        assert fresh.pop("parts_ended") == {"landed": 0, "failed": 0, "aborted": 0}
        assert fresh.pop("window_bytes") == Settings().window_bytes
        assert fresh.pop("received_by_transport") == fresh.pop("sent_by_transport") == {}
        assert not any(value for value in fresh.values() if isinstance(value, int))
        offer, fetch = begun(producer, consumer)
        late = consumer.fetch("late", [5], sources=[producer.address])
        late.start()
        await settle(producer, consumer)
        p, c = producer.statistics(), consumer.statistics()
        assert (p.offers, p.fetches, p.parts, p.parked, p.leases, p.blocks_held) == (1, 0, 1, 1, 1, 2)
        assert (c.offers, c.fetches, c.parts, c.parked, c.leases, c.blocks_held) == (0, 2, 2, 0, 2, 3)
        assert p.sessions == c.sessions == 1
        assert p.turns > 0 < c.turns
        write(offer)
        await offer.wait()
        await fetch.wait()
        late.cancel()
        assert await outcome(late) == "TransferAborted"
        await settle(producer, consumer)
        p, c = producer.statistics(), consumer.statistics()
        assert p.parts_ended == {"landed": 1, "failed": 0, "aborted": 0}
        assert c.parts_ended == {"landed": 1, "failed": 0, "aborted": 1}
        moved = 4 * 2 * LAYOUT.groups[0].block_bytes
        assert (p.bytes_sent, p.bytes_received) == (moved, 0)
        assert (c.bytes_sent, c.bytes_received) == (0, moved)
        assert (p.sent_by_transport, p.received_by_transport) == ({"memory": moved}, {})
        assert (c.sent_by_transport, c.received_by_transport) == ({}, {"memory": moved})
        for handle in (offer, fetch):
            progress = handle.progress
            assert (progress.bytes_moved, progress.bytes_total) == (moved, moved)
            assert progress.transports == ("memory",)
        assert late.progress.transports == ("memory",)
        assert p.frames_sent == c.frames_received > 0
        assert c.frames_sent == p.frames_received > 0
        assert p.frames_stray == c.frames_stray == p.sessions_lost == c.sessions_lost == 0
        check_idle(producer, consumer)
        with pytest.raises(dataclasses.FrozenInstanceError):
            p.turns = 0  # type: ignore[misc]


@pytest.mark.asyncio
async def test_statistics_count_lost_sessions_and_can_be_read_until_the_end() -> None:
    async with Engines() as engines:
        producer, consumer = await engines.add("p"), await engines.add("c")
        unopened = engines.make("x", await engines.cache())
        with pytest.raises(ClosedError, match="not entered"):
            unopened.statistics()
        _, fetch = begun(producer, consumer)
        await settle(producer, consumer)
        await engines.close(producer)
        with pytest.raises(TransferAborted, match="by the producer at memory://p: .*engine was closed"):
            await fetch.wait()
        counts = consumer.statistics()
        assert counts.sessions == 0
        assert sum(counts.parts_ended.values()) == 1
        assert producer.statistics().parts_ended["aborted"] == 1
