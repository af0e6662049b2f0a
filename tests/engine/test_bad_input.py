"""Bad input: refused at the call, or told to both sides; never a lasting effect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aiokv.device.cache import KVCache
from aiokv.engine.engine import TransferEngine
from aiokv.errors import (
    BusyError,
    CapacityError,
    DeadlineExceeded,
    InvalidBlocks,
    PeerLostError,
    Refused,
    TransferAborted,
)
from aiokv.proto.layout import CacheLayout, GroupLayout
from aiokv.proto.settings import SECOND, Settings
from aiokv.testing.pairs import LAYOUT, Engines, check_idle, settle, transfer, unharmed, virtual_time

#: Two groups: full attention in layers 0 and 2, a sliding window in layer 1.
MIXED = CacheLayout(
    groups=(
        GroupLayout(
            layers=(0, 2), blocks=8, block_size=4, heads=(0, 2), total_heads=2, head_size=8, dtype="uint8"
        ),
        GroupLayout(
            layers=(1,),
            blocks=8,
            block_size=4,
            heads=(0, 2),
            total_heads=2,
            head_size=8,
            dtype="uint8",
            kind="window",
            window=16,
        ),
    )
)

#: Begins a transfer of some blocks, of either kind.
Begin = Callable[[TransferEngine, Any], None]


def begin_offer(engine: TransferEngine, blocks: Any) -> None:
    engine.offer("t", blocks).start()


def begin_fetch(engine: TransferEngine, blocks: Any) -> None:
    engine.fetch("t", blocks, sources=["memory://elsewhere"]).start()


both = pytest.mark.parametrize("begin", [begin_offer, begin_fetch])


# -- block ids ------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize(
    ("blocks", "text"),
    [
        ([1, 16], r"group 0: there is no block 16, the cache has 0\.\.15"),
        ([1, -1], "group 0: there is no block -1"),
        ([2**63], "there is no block"),
        ([1, 3, 2, 3], "group 0: block 3 stands twice"),
        ([1, 2.5], "block ids are integers, not float64"),
        (["1"], "block ids are integers"),
        ([[1], [2]], "blocks has lists for 2 groups, the cache has 1"),
        ([[1, [2]]], "list for each group"),
    ],
    ids=str,
)
@pytest.mark.asyncio
async def test_ids_that_cannot_be_meant_are_refused(begin: Begin, blocks: Any, text: str) -> None:
    async with unharmed() as (producer, _):
        with pytest.raises(InvalidBlocks, match=text):
            begin(producer, blocks)


@both
@pytest.mark.parametrize(
    ("blocks", "text"),
    [
        ([1, 2], "list for each group"),
        ([[1]], "blocks has lists for 1 groups, the cache has 2"),
        ([[1], [8]], r"group 1: there is no block 8, the cache has 0\.\.7"),
        ([[1, 2], [3, 3]], "group 1: block 3 stands twice"),
    ],
    ids=str,
)
@pytest.mark.asyncio
async def test_each_group_has_its_own_list(begin: Begin, blocks: Any, text: str) -> None:
    async with Engines() as engines:
        engine = await engines.add("mixed", MIXED)
        with pytest.raises(InvalidBlocks, match=text):
            begin(engine, blocks)
        check_idle(engine)


@both
@pytest.mark.asyncio
async def test_more_blocks_than_a_message_can_list_are_refused(begin: Begin) -> None:
    async with unharmed() as (producer, _):
        with pytest.raises(CapacityError, match="at most 200000 blocks"):
            begin(producer, range(200_001))


@pytest.mark.asyncio
async def test_blocks_in_use_are_not_written_and_those_being_written_not_read() -> None:
    async with unharmed() as (producer, consumer):
        offered = consumer.offer("own", [1, 2])
        offered.start()
        fetched = consumer.fetch("t", [3, 4], sources=[producer.address])
        fetched.start()
        with pytest.raises(BusyError, match="block 2 is being read by another transfer"):
            consumer.fetch("u", [2, 5], sources=[producer.address]).start()
        with pytest.raises(BusyError, match="block 4 is being written by another transfer"):
            consumer.fetch("u", [5, 4], sources=[producer.address]).start()
        with pytest.raises(BusyError, match="block 3 is being written by another transfer"):
            consumer.offer("u", [3]).start()
        # Nothing of what was refused is held: neither the blocks that were free nor the id.
        again = consumer.fetch("u", [5, 6], sources=[producer.address])
        again.start()
        for handle in (offered, fetched, again):
            handle.cancel()
            with pytest.raises(TransferAborted):
                await handle.wait()


@pytest.mark.asyncio
async def test_blocks_may_be_read_by_many_transfers() -> None:
    async with unharmed() as (producer, consumer):
        first = producer.offer("first", [1, 2])
        first.start()
        await transfer(producer, consumer, "second", source=[2, 1], target=[5, 6])
        assert producer.statistics().blocks_held == 2
        with pytest.raises(BusyError, match="being read"):
            producer.fetch("in", [1], sources=[consumer.address]).start()
        first.cancel()
        with pytest.raises(TransferAborted):
            await first.wait()


# -- other arguments ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"tid": None}, "tid, .* not None"),
        ({"tid": ""}, "1 to 256 characters"),
        ({"tid": "\ud800"}, "1 to 256 characters"),
        ({"deadline": 0}, "deadline"),
        ({"deadline": float("nan")}, "deadline"),
        ({"attempt": -1}, "attempt"),
        ({"attempt": 1.5}, "attempt is an integer, not 1.5"),
        ({"attempt": None}, "attempt is an integer, not None"),
        ({"deadline": None}, "deadline is a number of seconds, not None"),
        ({"deadline": "3"}, "deadline is a number of seconds, not '3'"),
        ({"blocks": None}, "blocks is a list .* not None"),
        ({"blocks": {1, 2}}, "blocks is a list .* not {1, 2}"),
        ({"blocks": []}, "blocks is empty"),
        ({"tokens": 9}, "tokens=9, but the blocks have room for 8"),
        ({"tokens": 1.5}, "tokens is an integer, not 1.5"),
        ({"trace": "x" * 65}, "trace"),
    ],
    ids=str,
)
@pytest.mark.asyncio
async def test_arguments_that_cannot_be_meant_are_refused(given: dict[str, Any], text: str) -> None:
    arguments = {"tid": "t", "blocks": [1, 2], **given}
    async with unharmed() as (producer, consumer):
        with pytest.raises((TypeError, ValueError), match=text):
            producer.offer(**arguments)
        with pytest.raises((TypeError, ValueError), match=text):
            consumer.fetch(**arguments, sources=[producer.address])


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"tokens": 0}, "tokens is an integer of at least 1 .* not 0"),
        ({"readers": 0}, "readers is an integer of at least 1 .* not 0"),
        ({"readers": 1.5}, "readers is an integer, not 1.5"),
        ({"readers": 1, "to": ["memory://x", "memory://y"]}, "readers=1, but to names 2 engines"),
        ({"to": [None]}, "to lists control addresses, .* not None"),
        ({"to": None}, "to is a list of addresses, not None"),
        ({"to": ["memory://x", "memory://x"]}, "once"),
        ({"to": "memory://x"}, "list of addresses"),
    ],
    ids=str,
)
@pytest.mark.asyncio
async def test_arguments_of_offers(given: dict[str, Any], text: str) -> None:
    async with unharmed() as (producer, _):
        with pytest.raises((TypeError, ValueError), match=text):
            producer.offer(**{"tid": "t", "blocks": [1, 2], **given})


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"first_token": 9}, "first_token=9 lies beyond the 8 tokens that the blocks have room for"),
        ({"first_token": 5, "tokens": 4}, "first_token=5 lies beyond tokens=4"),
        ({"first_token": -1}, "first_token"),
        ({"first_token": None}, "first_token is an integer, not None"),
        ({"priority": None}, "priority is an integer, not None"),
        ({"priority": 1.5}, "priority is an integer, not 1.5"),
        ({"priority": "hi"}, "priority is an integer, not 'hi'"),
        ({"priority": float("nan")}, "priority is an integer, not nan"),
        ({"stream": object()}, "stream is what has __cuda_stream__"),
        ({"sources": [None]}, "sources lists control addresses, .* not None"),
        ({"sources": ["memory://x"], "parts": 2}, "parts=2, but sources names 1 engines"),
        ({"sources": 5}, "sources is a list of addresses, not 5"),
        ({"sources": []}, "no engine"),
        ({"sources": ["memory://x", "memory://x"]}, "once"),
        ({"sources": "memory://x"}, "list of addresses"),
        ({"parts": 0}, "parts is an integer of at least 1"),
        ({"parts": 1.0}, "parts is an integer, not 1.0"),
    ],
    ids=lambda each: each if isinstance(each, str) else type(each).__name__,
)
@pytest.mark.asyncio
async def test_arguments_of_fetches(given: dict[str, Any], text: str) -> None:
    async with unharmed() as (_, consumer):
        with pytest.raises((TypeError, ValueError), match=text):
            consumer.fetch(**{"tid": "t", "blocks": [1, 2], **given})


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ({"cache": None}, TypeError, "cache is a KVCache, not None"),
        ({"cache": LAYOUT}, TypeError, "cache is a KVCache, not CacheLayout"),
        ({"bind": None}, TypeError, "bind is an address"),
        ({"bind": "localhost"}, ValueError, "'localhost' is not tcp://host:port"),
        ({"advertise": 7}, TypeError, "advertise is an address"),
        ({"transports": "tcp"}, TypeError, "transports is a list of names, not the one name 'tcp'"),
        ({"transports": [None]}, TypeError, "transports has None"),
        ({"transports": ["tcp", "tcp"]}, ValueError, "transports must name each once"),
        ({"settings": {"peers": 5}}, TypeError, "settings is a Settings, not {'peers': 5}"),
        ({"channel": "tcp://127.0.0.1:0"}, TypeError, "channel is a control channel"),
        ({"clock": 5}, TypeError, "clock is a function that gives nanoseconds, not 5"),
    ],
    ids=str,
)
def test_arguments_of_engines(given: dict[str, Any], kind: type[Exception], text: str) -> None:
    cache = KVCache.allocate(LAYOUT)
    with pytest.raises(kind, match=f"^{text}"):
        TransferEngine(**{"cache": cache, **given})
    cache.close()


@pytest.mark.asyncio
async def test_layers_that_cannot_be_meant_are_refused_and_may_be_said_again() -> None:
    async with unharmed() as (producer, consumer):
        offer = producer.offer("t", [1])
        fetch = consumer.fetch("t", [2], sources=[producer.address])
        async with offer, fetch:
            for layer in (1.0, "0", None):
                with pytest.raises(TypeError, match="^layer is an integer, not "):
                    offer.layer_ready(layer)
                for wait in (fetch.layer, fetch.layer_ordered):
                    with pytest.raises(TypeError, match="^layer is an integer, not "):
                        await wait(layer)
            for layer in (-1, LAYOUT.layers):
                with pytest.raises(IndexError, match=f"^layer {layer} is not one of"):
                    offer.layer_ready(layer)
            with pytest.raises(TypeError, match="^stream is what has __cuda_stream__"):
                offer.layer_ready(0, stream=object())
            for layer in range(LAYOUT.layers):
                offer.layer_ready(np.int64(layer))
            await fetch.layer(np.int32(0))


@pytest.mark.parametrize("address", ["", "nonsense", "memory://", "tcp://127.0.0.1:1", "memory://x/"])
@pytest.mark.asyncio
async def test_addresses_that_the_channel_does_not_know(address: str) -> None:
    async with unharmed() as (producer, consumer):
        with pytest.raises(ValueError, match="is not memory://name"):
            producer.offer("t", [1], to=[address]).start()
        with pytest.raises(ValueError, match="is not memory://name"):
            consumer.fetch("t", [1], sources=[address]).start()


@pytest.mark.asyncio
async def test_an_engine_has_nothing_to_fetch_from_itself() -> None:
    async with unharmed() as (producer, _):
        with pytest.raises(ValueError, match="memory://a is this engine itself"):
            producer.fetch("t", [1], sources=[producer.address]).start()
        with pytest.raises(ValueError, match="memory://a is this engine itself"):
            producer.offer("t", [1], to=[producer.address]).start()


# -- ids ------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_an_id_is_offered_once_and_fetched_once() -> None:
    async with unharmed() as (producer, consumer):
        offer = producer.offer("t", [1, 2])
        fetch = consumer.fetch("t", [1, 2], sources=[producer.address])
        offer.start()
        fetch.start()
        with pytest.raises(BusyError, match="transfer 't' is being offered already"):
            producer.offer("t", [3]).start()
        with pytest.raises(BusyError, match="transfer 't' is being fetched already"):
            consumer.fetch("t", [3], sources=[producer.address]).start()
        for layer in range(4):
            offer.layer_ready(layer)
        await offer.wait()
        await fetch.wait()
        with pytest.raises(BusyError, match="was offered before and landed; use a new attempt number"):
            producer.offer("t", [3]).start()
        with pytest.raises(BusyError, match="was fetched before and landed; use a new attempt number"):
            consumer.fetch("t", [3], sources=[producer.address]).start()


@pytest.mark.asyncio
async def test_an_attempt_is_a_transfer_of_its_own() -> None:
    async with unharmed() as (producer, consumer):
        first = producer.offer("t", [1, 2])
        first.start()
        second = consumer.fetch("t", [5, 6], sources=[producer.address], attempt=1)
        async with producer.offer("t", [3, 4], attempt=1):
            second.start()
        await second.wait()
        assert not first.done()
        first.cancel()
        with pytest.raises(TransferAborted, match="transfer 't': cancelled"):
            await first.wait()


@pytest.mark.asyncio
async def test_readers_beyond_those_expected_are_refused() -> None:
    async with Engines() as engines:
        producer, consumer, late, later = [await engines.add(name) for name in "pclm"]
        offer = producer.offer("t", [1, 2])
        offer.start()
        fetch = consumer.fetch("t", [1, 2], sources=[producer.address])
        fetch.start()
        await settle(producer, consumer)
        with pytest.raises(Refused, match=r"memory://p refused \(readers\): the offer has no reader left"):
            async with late.fetch("t", [1, 2], sources=[producer.address]):
                pass
        for layer in range(4):
            offer.layer_ready(layer)
        await offer.wait()
        await fetch.wait()
        with pytest.raises(Refused, match=r"memory://p refused \(ended\): the offer landed"):
            async with later.fetch("t", [1, 2], sources=[producer.address]):
                pass
        await settle(producer, consumer, late, later)
        check_idle(producer, consumer, late, later)
        await transfer(producer, late, "afterwards")


@pytest.mark.asyncio
async def test_what_has_ended_is_refused_at_once_and_told_how_it_ended() -> None:
    async with Engines() as engines:
        producer, consumer, late = [await engines.add(name) for name in "pcl"]
        await transfer(producer, consumer, "well")
        with pytest.raises(ZeroDivisionError):
            async with producer.offer("badly", [1]):
                _ = 1 / 0
        with pytest.raises(Refused, match=r"refused \(ended\): the offer landed"):
            async with late.fetch("well", [1], sources=[producer.address], deadline=1000):
                pass
        with pytest.raises(TransferAborted, match="the offer ended: ZeroDivisionError"):
            async with late.fetch("badly", [1], sources=[producer.address], deadline=1000):
                pass
        # The same the other way round: pushed to somebody who is through with it.
        with pytest.raises(Refused, match=r"refused \(ended\): the fetch landed"):
            async with late.offer("well", [1], to=[consumer.address], deadline=1000):
                pass
        await settle(producer, consumer, late)
        check_idle(producer, consumer, late)
        await transfer(late, producer, "afterwards")


@virtual_time
async def test_what_is_never_offered_ends_by_its_deadline_and_says_what_it_waited_for() -> None:
    async with unharmed() as (producer, consumer):
        # Both sides have it end at the same time, so either may be the first to say so.
        waiting = r"waiting for ACCEPT from memory://a \(memory\), where it is not offered yet"
        told = r"memory://a refused \(unknown\): it was not offered here before its deadline"
        with pytest.raises(DeadlineExceeded, match=f"{waiting}|{told}"):
            async with consumer.fetch("t", [1], sources=[producer.address], deadline=30):
                await settle(producer, consumer)
                assert producer.statistics().parked == 1
        with pytest.raises(DeadlineExceeded, match="at the consumer, waiting for OFFER from anybody"):
            async with consumer.fetch("pushed", [1], deadline=30):
                pass
        with pytest.raises(DeadlineExceeded, match="at the producer, waiting for GRANT from anybody"):
            async with producer.offer("alone", [1], deadline=30):
                pass
        waiting = "waiting for GRANT from memory://b"
        told = r"memory://b refused \(unknown\): it was not fetched here before its deadline"
        with pytest.raises(DeadlineExceeded, match=f"{waiting}|{told}"):
            async with producer.offer("unwanted", [1], to=[consumer.address], deadline=30):
                pass


# -- tokens ---------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_more_tokens_than_are_offered_are_refused() -> None:
    async with unharmed() as (producer, consumer):
        offer = producer.offer("t", [1, 2], tokens=7)
        offer.start()
        with pytest.raises(Refused, match=r"refused \(tokens\): 8 tokens asked for, 7 are offered"):
            async with consumer.fetch("t", [3, 4], sources=[producer.address], tokens=8):
                pass
        assert not offer.done()  # another reader may ask for less
        offer.cancel()
        with pytest.raises(TransferAborted):
            await offer.wait()


@pytest.mark.asyncio
async def test_more_tokens_than_there_is_room_for_end_both_sides() -> None:
    async with unharmed() as (producer, consumer):
        offer = producer.offer("t", [1, 2, 3], tokens=9)
        offer.start()
        too_many = "9 tokens are offered, the blocks have room for 8"
        with pytest.raises(InvalidBlocks, match=too_many):
            async with consumer.fetch("t", [3, 4], sources=[producer.address]):
                pass
        with pytest.raises(TransferAborted, match=f"given up by the consumer at memory://b.*{too_many}"):
            await offer.wait()


# -- peers that aren't there ----------------------------------------------------------------------


@virtual_time
async def test_a_dead_address_is_lost_within_the_contact_time() -> None:
    async with unharmed(settings=Settings(contact_ns=5 * SECOND)) as (producer, consumer):
        with pytest.raises(PeerLostError, match="no answer from memory://nobody within 5 s"):
            async with consumer.fetch("t", [1], sources=["memory://nobody"], deadline=1000):
                pass
        with pytest.raises(PeerLostError, match="no answer from memory://nobody within 5 s"):
            async with producer.offer("t", [1], to=["memory://nobody"], deadline=1000):
                pass
        with pytest.raises(PeerLostError, match="no answer from memory://nobody within 5 s"):
            async with consumer.fetch("u", [1], sources=[producer.address, "memory://nobody"], deadline=1000):
                pass
