"""Layer by layer: what is announced lands while the rest is still being written, and who is told when."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aiokv.engine.engine import TransferEngine
from aiokv.engine.transfer import Fetch, Offer
from aiokv.errors import LocalProtocolError, TransferAborted
from aiokv.testing.pairs import LAYOUT, check_idle, kv_of, settle, unharmed

#: Bytes of two blocks in one layer.
TWO_BLOCKS = 2 * LAYOUT.groups[0].block_bytes


def begun(producer: TransferEngine, consumer: TransferEngine) -> tuple[Offer, Fetch]:
    """Both sides of a transfer of blocks 1 and 2 into 3 and 4."""
    offer, fetch = producer.offer("t", [1, 2]), consumer.fetch("t", [3, 4], sources=[producer.address])
    offer.start()
    fetch.start()
    return offer, fetch


async def collect(fetch: Fetch, into: list[int]) -> None:
    async for layer in fetch.layers():
        into.append(layer)  # noqa: PERF401 - looked at meanwhile


def announce(offer: Offer, *layers: int) -> None:
    for layer in layers:
        offer.layer_ready(layer)


class Crash(Exception):
    """What a model raises."""


# -- order ----------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_each_layer_lands_once_it_is_announced_and_no_other() -> None:
    async with unharmed() as (producer, consumer):
        theirs, before = kv_of(producer.cache, [1, 2]), kv_of(consumer.cache, [3, 4])
        landed: list[int] = []
        announced: list[int] = []
        async with asyncio.TaskGroup() as group:
            offer, fetch = begun(producer, consumer)
            group.create_task(collect(fetch, landed))
            await settle(producer, consumer)
            for layer in (2, 0, 3, 1):
                assert landed == announced
                offer.layer_ready(layer)
                announced.append(layer)
                await settle(producer, consumer)
                now = kv_of(consumer.cache, [3, 4])
                for each in range(4):
                    assert np.array_equal(now[each], (theirs if each in announced else before)[each])
        assert landed == [2, 0, 3, 1]
        await offer.wait()
        await fetch.wait()


@pytest.mark.asyncio
async def test_layers_that_are_ready_before_the_fetch_comes() -> None:
    async with unharmed() as (producer, consumer):
        offer = producer.offer("t", [1, 2])
        offer.layer_ready(3)  # even before it has begun
        offer.start()
        offer.layer_ready(1)
        await settle(producer)
        fetch = consumer.fetch("t", [3, 4], sources=[producer.address])
        fetch.start()
        await fetch.layer(1)
        await fetch.layer(3)
        assert fetch.progress.layers == 2
        offer.layer_ready(0)
        offer.layer_ready(2)
        await offer.wait()
        await fetch.wait()


@pytest.mark.asyncio
async def test_layers_are_yielded_once_also_to_who_comes_late_and_to_several() -> None:
    async with unharmed() as (producer, consumer):
        early: list[int] = []
        late: list[int] = []
        async with producer.offer("t", [1, 2]) as offer:
            fetch = consumer.fetch("t", [3, 4], sources=[producer.address])
            async with fetch:
                async with asyncio.TaskGroup() as group:
                    group.create_task(collect(fetch, early))
                    for layer in range(4):
                        offer.layer_ready(layer)
                await collect(fetch, late)
            await fetch.layer(2)  # at once, also when it is over
        assert early == late == [0, 1, 2, 3]


@pytest.mark.asyncio
async def test_leaving_the_body_announces_what_was_not() -> None:
    async with unharmed() as (producer, consumer):
        landed: list[int] = []
        async with asyncio.TaskGroup() as group, producer.offer("t", [1, 2]) as offer:
            fetch = consumer.fetch("t", [3, 4], sources=[producer.address])
            fetch.start()
            group.create_task(collect(fetch, landed))
            offer.layer_ready(2)
            await fetch.layer(2)
        assert landed == [2, 0, 1, 3]
        await fetch.wait()
        assert np.array_equal(kv_of(producer.cache, [1, 2]), kv_of(consumer.cache, [3, 4]))


# -- wake-ups -------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_what_a_thread_announces_in_one_turn_wakes_the_loop_once_and_is_told_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with unharmed() as (producer, consumer):
        loop = asyncio.get_running_loop()
        wakes: list[Callable[..., Any]] = []
        really = loop.call_soon_threadsafe

        def counted(callback: Callable[..., Any], *args: Any, **options: Any) -> asyncio.Handle:
            wakes.append(callback)
            return really(callback, *args, **options)

        offer, fetch = begun(producer, consumer)
        await settle(producer, consumer)
        heard, turns = consumer.statistics().frames_received, producer.statistics().turns
        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        # The loop stands still meanwhile, so that all of it falls between two of its turns.
        for layers in ((0, 1), (2, 3)):
            model = threading.Thread(target=announce, args=(offer, *layers))
            model.start()
            model.join()
            await fetch.layer(layers[-1])
        monkeypatch.undo()
        assert len(wakes) == 2
        assert consumer.statistics().frames_received == heard + 2
        await offer.wait()
        await fetch.wait()
        assert producer.statistics().turns <= turns + 8


@pytest.mark.asyncio
async def test_a_model_in_a_thread_announces_while_the_loop_runs() -> None:
    async with unharmed() as (producer, consumer):
        async with producer.offer("t", [1, 2]) as offer:
            fetch = consumer.fetch("t", [3, 4], sources=[producer.address])
            fetch.start()
            await asyncio.to_thread(announce, offer, 0, 1, 2, 3)
        await fetch.wait()


# -- mistakes -------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_layer_is_announced_once_and_exists() -> None:
    async with unharmed() as (producer, consumer):
        offer, fetch = begun(producer, consumer)
        offer.layer_ready(1)
        with pytest.raises(LocalProtocolError, match="layer 1 of transfer 't' was announced before"):
            offer.layer_ready(1)
        for layer in (-1, 4):
            with pytest.raises(IndexError, match=rf"layer {layer} is not one of 0\.\.3"):
                offer.layer_ready(layer)
            for wait in (fetch.layer, fetch.layer_ordered):
                with pytest.raises(IndexError, match=rf"layer {layer} is not one of 0\.\.3"):
                    await wait(layer)
        for layer in (0, 2, 3):
            offer.layer_ready(layer)
        await offer.wait()
        await fetch.wait()


@pytest.mark.asyncio
async def test_once_it_is_over_announcing_does_nothing() -> None:
    async with unharmed() as (producer, consumer):
        offer, fetch = begun(producer, consumer)
        offer.layer_ready(0)
        await fetch.layer(0)
        offer.cancel()
        with pytest.raises(TransferAborted):
            await offer.wait()
        with pytest.raises(TransferAborted):
            await fetch.wait()
        before = kv_of(consumer.cache, [3, 4])
        for layer in (0, 1, 1):
            offer.layer_ready(layer)
        thread = threading.Thread(target=offer.layer_ready, args=(2,))
        thread.start()
        thread.join()
        await settle(producer, consumer)
        assert np.array_equal(kv_of(consumer.cache, [3, 4]), before)


@pytest.mark.asyncio
async def test_what_has_not_begun_has_no_layers_and_can_not_be_waited_for() -> None:
    async with unharmed() as (producer, consumer):
        fetch = consumer.fetch("t", [3, 4], sources=[producer.address])
        with pytest.raises(LocalProtocolError, match="was not begun"):
            await fetch.layer(0)
        with pytest.raises(LocalProtocolError, match="was not begun"):
            await fetch.layer_ordered(0)
        with pytest.raises(LocalProtocolError, match="was not begun"):
            await collect(fetch, [])
        assert fetch.progress.layers == 0
        assert not fetch.done()


# -- failures half-way ----------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_model_that_fails_half_way_ends_both_sides_with_its_error() -> None:
    async with unharmed() as (producer, consumer):
        landed: list[int] = []
        fetch = consumer.fetch("t", [3, 4], sources=[producer.address])
        with pytest.raises(Crash, match="out of memory in layer 2"):
            async with producer.offer("t", [1, 2]) as offer:
                fetch.start()
                offer.layer_ready(0)
                offer.layer_ready(1)
                await fetch.layer(1)
                raise Crash("out of memory in layer 2")
        assert offer.done()
        check_idle(producer)
        told = "given up by the producer at memory://a: Crash: out of memory in layer 2"
        with pytest.raises(TransferAborted, match=told):
            await collect(fetch, landed)
        assert landed == [0, 1]
        for wait in (fetch.wait(), fetch.layer(0), fetch.layer_ordered(3)):
            with pytest.raises(TransferAborted, match=told):
                await wait
        assert np.array_equal(kv_of(producer.cache, [1, 2])[:2], kv_of(consumer.cache, [3, 4])[:2])


@pytest.mark.asyncio
async def test_a_consumer_that_fails_half_way_ends_both_sides_with_its_error() -> None:
    async with unharmed() as (producer, consumer):
        with pytest.raises(TransferAborted, match=r"by the consumer at memory://b: Crash: no use"):
            async with producer.offer("t", [1, 2]) as offer:
                with pytest.raises(Crash, match="no use"):
                    async with consumer.fetch("t", [3, 4], sources=[producer.address]) as fetch:
                        offer.layer_ready(0)
                        await fetch.layer(0)
                        raise Crash("no use")
                assert fetch.done()
                check_idle(consumer)


@pytest.mark.asyncio
async def test_an_error_whose_text_has_no_utf8_is_told_all_the_same() -> None:
    async with unharmed() as (producer, consumer):
        fetch = consumer.fetch("t", [3, 4], sources=[producer.address])
        with pytest.raises(Crash):
            async with producer.offer("t", [1, 2]):
                fetch.start()
                await settle(producer, consumer)
                raise Crash("no file \udcff" + "x" * 5000)
        with pytest.raises(TransferAborted, match="Crash: no file"):
            await fetch.wait()


# -- progress -------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_progress_tells_bytes_layers_and_parts() -> None:
    async with unharmed() as (producer, consumer):
        received = consumer.statistics().bytes_received
        offer, fetch = begun(producer, consumer)
        assert fetch.progress == fetch.progress
        assert (fetch.progress.bytes_total, fetch.progress.parts) == (0, {"offered": 1})
        await settle(producer, consumer)
        assert (offer.tokens, fetch.tokens) == (8, 8)
        assert (fetch.progress.bytes_total, fetch.progress.bytes_moved) == (4 * TWO_BLOCKS, 0)
        assert offer.progress.parts == fetch.progress.parts == {"granted": 1}
        for number, layer in enumerate((3, 1, 2), 1):
            offer.layer_ready(layer)
            await fetch.layer(layer)
            assert offer.progress.layers == fetch.progress.layers == number
            assert fetch.progress.bytes_moved == number * TWO_BLOCKS
            assert offer.progress.parts == fetch.progress.parts == {"moving": 1}
        offer.layer_ready(0)
        await offer.wait()
        await fetch.wait()
        assert (fetch.progress.bytes_moved, fetch.progress.layers) == (4 * TWO_BLOCKS, 4)
        assert offer.progress.parts == fetch.progress.parts == {"landed": 1}
        assert consumer.statistics().bytes_received == received + 4 * TWO_BLOCKS
