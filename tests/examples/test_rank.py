"""Ranks that prefill or decode together, in one process: what they do when one of them can't."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager

import pytest

import aiokv

pytest.importorskip("transformers", reason="the examples need the extra: pip install 'aiokv[examples]'")

from rank import Rank
from transformers import DynamicCache

from aiokv.testing.ranks import MemoryRanks
from serving.channel import Message, RequestFailed
from serving.model import Model
from serving.paged import BlockPool
from serving.split import split

OPTIONS = argparse.Namespace(blocks=8, block_size=16, deadline=20.0)
PROMPT = [(7 * position + 3) % 251 for position in range(40)]


@pytest.fixture
def caches(model: Model) -> Iterator[list[aiokv.KVCache]]:
    """Memory of each rank; made outside any loop, since making it blocks."""
    with ExitStack() as stack:
        layout = model.layout(OPTIONS.blocks, OPTIONS.block_size)
        yield [stack.enter_context(aiokv.KVCache.allocate(layout)) for _ in range(3)]


@asynccontextmanager
async def one_and_two(
    model: Model, caches: list[aiokv.KVCache]
) -> AsyncIterator[tuple[Rank, list[Rank], str]]:
    """A rank that prefills alone, and two that decode, each with the whole model; and where to fetch."""
    async with AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(aiokv.TransferEngine(cache, transports=["shm"]))
            for cache in caches
        ]
        alone, pair = MemoryRanks(1), MemoryRanks(2)
        collectives = [alone.collective(0), pair.collective(0), pair.collective(1)]
        ranks = [stack.enter_context(aiokv.RankGroup(collective)) for collective in collectives]
        prefill, *decode = [
            Rank(model, engine, group, OPTIONS) for engine, group in zip(engines, ranks, strict=True)
        ]
        yield prefill, decode, engines[0].address
    await asyncio.get_running_loop().shutdown_default_executor()


async def asked(rank: Rank, message: Message) -> Message:
    """The first reply."""
    replies: asyncio.Queue[Message] = asyncio.Queue()
    await rank.answer(message, replies.put)
    return replies.get_nowait()


@pytest.mark.asyncio
async def test_both_ranks_answer_as_one_process_does(model: Model, caches: list[aiokv.KVCache]) -> None:
    kv = DynamicCache()
    expected = [model.next_token(PROMPT, kv)]  # type: ignore[arg-type]
    while len(expected) < 4:
        expected.append(model.next_token(expected[-1:], kv))  # type: ignore[arg-type]
    wanted = {"id": "a", "tokens": PROMPT, "token": expected[0], "limit": 4}
    async with one_and_two(model, caches) as (prefill, decode, address):
        told, *answers = await asyncio.gather(
            asked(prefill, {**wanted, "do": "prefill", "readers": 2}),
            *(asked(rank, {**wanted, "do": "decode", "sources": [address]}) for rank in decode),
        )
    assert told == {"token": expected[0]}
    assert answers == [{"answer": expected}] * 2


@pytest.mark.asyncio
async def test_a_rank_that_fails_alone_leaves_nobody_waiting(
    model: Model, caches: list[aiokv.KVCache]
) -> None:
    wanted = {"id": "a", "tokens": PROMPT, "token": 1, "limit": 4}
    async with one_and_two(model, caches) as (prefill, decode, address):
        asking = asyncio.ensure_future(asked(prefill, {**wanted, "do": "prefill", "readers": 2}))
        nowhere = {**wanted, "do": "decode", "sources": ["tcp://127.0.0.1:9"]}
        good, bad = await asyncio.gather(
            asked(decode[0], {**wanted, "do": "decode", "sources": [address]}),
            asked(decode[1], nowhere),
            return_exceptions=True,
        )
        assert isinstance(good, RequestFailed)
        assert "rank 0 could go on, and another can't" in str(good)
        assert isinstance(bad, aiokv.AiokvError)
        asking.cancel()
        await asyncio.wait([asking])


@pytest.mark.asyncio
async def test_a_rank_without_room_leaves_nobody_waiting(model: Model, caches: list[aiokv.KVCache]) -> None:
    wanted = {"id": "a", "tokens": PROMPT, "token": 1, "limit": 4}
    async with one_and_two(model, caches) as (prefill, decode, address):
        decode[1]._pool = BlockPool(1)
        asking = asyncio.ensure_future(asked(prefill, {**wanted, "do": "prefill", "readers": 2}))
        good, bad = await asyncio.gather(
            *(asked(rank, {**wanted, "do": "decode", "sources": [address]}) for rank in decode),
            return_exceptions=True,
        )
        assert isinstance(good, RequestFailed)
        assert "INVALID" in str(good)
        assert isinstance(bad, ValueError)
        asking.cancel()
        await asyncio.wait([asking])


def test_heads_are_shared_out_evenly_or_not_at_all(model: Model) -> None:
    with pytest.raises(ValueError, match="4 KV heads can't be split evenly over 3 ranks"):
        split(model, 0, 3)
    whole = split(model, 0, 1)
    assert whole.layout(8, 16) == model.layout(8, 16)
    half = type(whole)(model.name, model.network, model.tokenizer, rank=1, size=2)
    assert half.layout(8, 16).groups[0].heads == (2, 4)
