"""Which tokens move: one, a whole block, a part of one; what is there already is left alone."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from aiokv.engine.engine import TransferEngine
from aiokv.errors import BusyError, TransferAborted
from aiokv.proto.layout import CacheLayout, GroupLayout
from aiokv.testing.pairs import LAYOUT, Engines, check_idle, kv_of, settle, transfer, unharmed

TOKEN_BYTES = LAYOUT.layers * LAYOUT.groups[0].token_bytes
HERE, THERE = [3, 4, 5], [9, 7, 8]


async def move(
    producer: TransferEngine, consumer: TransferEngine, *, offered: int, wanted: int | None, first: int = 0
) -> None:
    """Fetch some of the tokens that three blocks hold, and look at each byte of both."""
    theirs, before = kv_of(producer.cache, THERE), kv_of(consumer.cache, HERE)
    fetch = consumer.fetch("t", HERE, sources=[producer.address], tokens=wanted, first_token=first)
    async with producer.offer("t", THERE, tokens=offered) as offer:
        fetch.start()
    await fetch.wait()
    last = offered if wanted is None else wanted
    now = kv_of(consumer.cache, HERE)
    assert np.array_equal(now[:, :, :first], before[:, :, :first])
    assert np.array_equal(now[:, :, first:last], theirs[:, :, first:last])
    assert np.array_equal(now[:, :, last:], before[:, :, last:])
    assert np.array_equal(kv_of(producer.cache, THERE), theirs)
    assert offer.tokens == offered
    assert fetch.progress.bytes_moved == fetch.progress.bytes_total == (last - first) * TOKEN_BYTES


# -- how many -------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 8, 11, 12])
@pytest.mark.asyncio
async def test_a_prompt_of_any_length(tokens: int) -> None:
    async with unharmed() as (producer, consumer):
        await move(producer, consumer, offered=tokens, wanted=None)


@pytest.mark.parametrize("wanted", [1, 4, 6, 11])
@pytest.mark.asyncio
async def test_fewer_tokens_than_are_offered(wanted: int) -> None:
    async with unharmed() as (producer, consumer):
        await move(producer, consumer, offered=11, wanted=wanted)


@pytest.mark.parametrize(("size", "blocks"), [(1, 12), (3, 4), (6, 2), (16, 1)])
@pytest.mark.parametrize("tokens", [1, 11])
@pytest.mark.asyncio
async def test_blocks_of_other_sizes(size: int, blocks: int, tokens: int) -> None:
    async with Engines() as engines:
        producer = await engines.add("p")
        group = msgspec.structs.replace(LAYOUT.groups[0], block_size=size, blocks=2 * blocks)
        consumer = await engines.add("c", msgspec.structs.replace(LAYOUT, groups=(group,)))
        ids = list(range(0, 2 * blocks, 2))
        for source, target, at_source, at_target in (
            (producer, consumer, THERE, ids),
            (consumer, producer, ids[::-1], HERE),
        ):
            rest = kv_of(target.cache, at_target)[:, :, tokens:]
            fetch = target.fetch("t", at_target, sources=[source.address])
            async with source.offer("t", at_source, tokens=tokens):
                fetch.start()
            await fetch.wait()
            theirs, ours = kv_of(source.cache, at_source), kv_of(target.cache, at_target)
            assert np.array_equal(theirs[:, :, :tokens], ours[:, :, :tokens])
            assert np.array_equal(ours[:, :, tokens:], rest)
        await settle(producer, consumer)
        check_idle(producer, consumer)


# -- a prefix that is there -----------------------------------------------------------------------


@pytest.mark.parametrize(("first", "wanted"), [(1, 12), (3, 11), (4, 12), (5, 8), (8, 9), (11, 12)])
@pytest.mark.asyncio
async def test_a_prefix_that_is_there_is_not_moved(first: int, wanted: int) -> None:
    async with unharmed() as (producer, consumer):
        await move(producer, consumer, offered=12, wanted=wanted, first=first)


@pytest.mark.asyncio
async def test_blocks_of_a_prefix_may_be_in_use_and_stay_so() -> None:
    async with unharmed() as (producer, consumer):
        shared = consumer.offer("shared", HERE[:1])
        shared.start()
        with pytest.raises(BusyError, match="block 3 is being read"):
            consumer.fetch("busy", HERE, sources=[producer.address], first_token=3).start()
        fetch = consumer.fetch("t", HERE, sources=[producer.address], first_token=4)
        async with producer.offer("t", THERE):
            fetch.start()
            assert consumer.statistics().blocks_held == 3
            # Also of the one that is being written only what is there is anybody's to read.
            with pytest.raises(BusyError, match="block 4 is being written"):
                consumer.offer("u", HERE[1:]).start()
            second = consumer.fetch("u", [3, 10], sources=[producer.address], first_token=4)
            second.start()
            second.cancel()
        await fetch.wait()
        with pytest.raises(TransferAborted):
            await second.wait()
        shared.cancel()
        with pytest.raises(TransferAborted):
            await shared.wait()


@pytest.mark.parametrize("tokens", [12, 9, 0])
@pytest.mark.asyncio
async def test_a_full_hit_is_over_before_anything_is_offered(tokens: int) -> None:
    async with unharmed() as (producer, consumer):
        before = kv_of(consumer.cache, HERE)
        fetch = consumer.fetch("t", HERE, sources=[producer.address], first_token=tokens, tokens=tokens)
        fetch.start()
        await fetch.wait()
        assert [layer async for layer in fetch.layers()] == [0, 1, 2, 3]
        assert (fetch.progress.bytes_moved, fetch.progress.parts) == (0, {"landed": 1})
        assert np.array_equal(kv_of(consumer.cache, HERE), before)
        await settle(producer, consumer)
        assert producer.statistics().parked == 1  # the word that this reader needs nothing
        # The producer hears of it when it offers, and waits for nobody then.
        offer = producer.offer("t", THERE)
        offer.start()
        await offer.wait()
        assert offer.progress.parts == {"landed": 1}


@pytest.mark.asyncio
async def test_a_full_hit_pushed_and_a_full_hit_that_is_only_found_out() -> None:
    async with unharmed() as (producer, consumer):
        before = kv_of(consumer.cache, HERE)
        fetch = consumer.fetch("pushed", HERE, first_token=12, tokens=12)
        fetch.start()
        offer = producer.offer("pushed", THERE, to=[consumer.address])
        offer.start()  # and no layer is ever written
        await fetch.wait()
        await offer.wait()
        # Here it is not known before the answer how many tokens there are to be had.
        fetch = consumer.fetch("found out", HERE, sources=[producer.address], first_token=8)
        fetch.start()
        offer = producer.offer("found out", THERE, tokens=8)
        offer.start()
        await fetch.wait()
        await offer.wait()
        assert np.array_equal(kv_of(consumer.cache, HERE), before)


# -- groups ---------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_groups_have_block_lists_of_their_own() -> None:
    full = GroupLayout(
        layers=(0, 3), blocks=8, block_size=4, heads=(0, 2), total_heads=2, head_size=8, dtype="uint8"
    )
    latent = GroupLayout(
        layers=(1,),
        blocks=4,
        block_size=8,
        heads=(0, 1),
        total_heads=1,
        head_size=16,
        dtype="bfloat16",
        axes="btd",
        kind="mla",
    )
    state = GroupLayout(
        layers=(2,),
        blocks=6,
        block_size=16,  # tokens that one state stands for: it moves as a whole
        heads=(0, 1),
        total_heads=1,
        head_size=4,
        dtype="float32",
        axes="btd",
        kind="state",
    )
    layout = CacheLayout(groups=(full, latent, state))
    async with Engines() as engines:
        producer, consumer = await engines.add("p", layout), await engines.add("c", layout)
        there, here = [[1, 2, 3], [3, 0], [5]], [[7, 6, 5], [1, 2], [0]]
        fetch = consumer.fetch("t", here, sources=[producer.address])
        landed = []
        async with producer.offer("t", there, tokens=11) as offer:
            fetch.start()
            for layer in (2, 1, 0):
                offer.layer_ready(layer)
                await fetch.layer(layer)
                landed.append(layer)
        await fetch.wait()
        assert landed == [2, 1, 0]
        for group, tokens in ((0, 11), (1, 11), (2, 16)):
            theirs = kv_of(producer.cache, there[group], group)[:, :, :tokens]
            ours = kv_of(consumer.cache, here[group], group)[:, :, :tokens]
            assert np.array_equal(theirs, ours)
        await settle(producer, consumer)
        check_idle(producer, consumer)


@pytest.mark.asyncio
async def test_other_blocks_are_never_touched() -> None:
    async with unharmed() as (producer, consumer):
        for number in range(5):
            await transfer(producer, consumer, f"t{number}", source=[number], target=[15 - number])
