"""What is asked for before it is offered, and what is offered in several pieces."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from aiokv.errors import ClosedError
from aiokv.testing.pairs import LAYOUT, Engines, check_idle, kv_of, settle

HERE, THERE = [3, 4, 5], [9, 7, 8]
SIZE = LAYOUT.groups[0].block_size


@pytest.mark.asyncio
async def test_in_pieces_as_they_are_asked_for() -> None:
    """Who fetches finds out how far each goes; who offers hears when it is worth it."""
    async with Engines() as engines:
        producer, consumer = await engines.add("p"), await engines.add("c")
        theirs = kv_of(producer.cache, THERE)
        end = len(THERE) * SIZE

        async def fetched() -> list[int]:
            found, first = [], 0
            while first < end:
                async with consumer.fetch(
                    f"t{len(found)}", HERE, sources=[producer.address], first_token=first
                ) as fetch:
                    pass
                assert fetch.more is (fetch.tokens < end)
                first = fetch.tokens
                found.append(first)
            return found

        fetching = asyncio.ensure_future(fetched())
        for number, tokens in enumerate((SIZE, 2 * SIZE + 1, end)):
            first = await producer.wanted(f"t{number}")
            assert first == (0, SIZE, 2 * SIZE + 1)[number]
            async with producer.offer(f"t{number}", THERE, tokens=tokens, more=tokens < end):
                pass
        assert await fetching == [SIZE, 2 * SIZE + 1, end]
        assert np.array_equal(kv_of(consumer.cache, HERE), theirs)
        await settle(producer, consumer)
        check_idle(producer, consumer)


@pytest.mark.asyncio
async def test_all_readers_have_to_ask_for_what_there_is() -> None:
    async with Engines() as engines:
        producer, first, second = [await engines.add(name) for name in "pcd"]
        fetches = []

        async def ask(engine, tid, block, **more) -> None:
            fetches.append(engine.fetch(tid, [block, block + 1], sources=[producer.address], **more))
            parked = producer.statistics().parked
            fetches[-1].start()
            while producer.statistics().parked == parked:  # noqa: ASYNC110 - nothing tells, but what is tested
                await asyncio.sleep(0)

        both = asyncio.ensure_future(producer.wanted("both", readers=2))
        again = asyncio.ensure_future(producer.wanted("both", readers=2))
        nothing = asyncio.ensure_future(producer.wanted("nothing"))
        certain = asyncio.ensure_future(producer.wanted("certain"))
        await ask(first, "both", 0, first_token=SIZE)
        await ask(second, "both", 0, first_token=1)
        assert [await both, await again] == [1, 1]
        assert await producer.wanted("both") == 1
        await ask(first, "certain", 2, tokens=SIZE)
        await ask(first, "nothing", 4, first_token=SIZE, tokens=SIZE)
        assert not certain.done()
        assert not nothing.done()
        certain.cancel()
        await producer.aclose()
        with pytest.raises(ClosedError):
            await nothing
        assert not producer._core._watching
        for fetch in fetches:
            fetch._course.observed = True


@pytest.mark.parametrize("wrong", [{"readers": 0}, {"readers": 1.5}, {"attempt": -1}])
@pytest.mark.asyncio
async def test_what_cannot_be_meant(wrong) -> None:
    async with Engines() as engines:
        producer = await engines.add("p")
        with pytest.raises((TypeError, ValueError)):
            await producer.wanted("t", **wrong)
        with pytest.raises(TypeError, match="tid"):
            await producer.wanted(7)
