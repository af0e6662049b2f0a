"""Tiers of several ranks: what each call gives is the same on all of them, and nothing stays held."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Any

import pytest

from aiokv.errors import (
    AiokvError,
    ClosedError,
    DeadlineExceeded,
    InvalidBlocks,
    LocalProtocolError,
    PeerLostError,
)
from aiokv.offload.agreement import at_once
from aiokv.offload.begun import Begun
from aiokv.ranks import RankGroup
from aiokv.testing.ranks import MemoryRanks
from aiokv.testing.tiers import Kit, names, tier_on


@asynccontextmanager
async def several(seed: int, size: int = 2, **more: Any) -> AsyncIterator[list[Kit]]:
    ranks = MemoryRanks(size, seed=seed)
    async with AsyncExitStack() as stack:
        groups = [stack.enter_context(RankGroup(ranks.collective(rank), deadline=5)) for rank in range(size)]
        kits = [
            await stack.enter_async_context(tier_on("host", seed, ranks=group, **more)) for group in groups
        ]
        yield kits
        assert len({ranks.entered(rank) for rank in range(size)}) == 1
        for kit in kits:
            found = kit.tier.statistics()
            assert (found.places_pinned, found.blocks_leased) == (0, 0)


async def on_all(kits: list[Kit], call: Callable[[Kit], Awaitable[Any]]) -> list[Any]:
    async def one(kit: Kit) -> Any:
        return await call(kit)  # what is refused at once, too

    return await asyncio.gather(*map(one, kits), return_exceptions=True)


async def uneven(kits: list[Kit]) -> None:
    """The first has 6 blocks, the others 2."""

    async def store(kit: Kit) -> int:
        return await kit.tier.store(names("a", 6), list(range(6)))

    assert await on_all(kits, store) == [6] * len(kits)
    for kit in kits[1:]:
        table = kit.tier._opened().table
        places = table.lookup(names("a", 6))
        table.drop(places[2:])
        table.release(places)


@pytest.mark.asyncio
async def test_each_call_gives_the_least_of_all(seed: int) -> None:
    async with several(seed, 3) as kits:
        await uneven(kits)
        assert await on_all(kits, lambda kit: kit.tier.exists(names("a", 6))) == [2] * 3
        assert await on_all(kits, lambda kit: kit.get(names("a", 6), list(range(20, 26)))) == [2] * 3
        assert await on_all(kits, lambda kit: kit.tier.delete(names("a", 6)[1:])) == [1] * 3
        assert await on_all(kits, lambda kit: kit.found(names("a", 6))) == [1] * 3
        dropped = await on_all(kits, lambda kit: kit.tier.reset())
        assert [each.drained for each in dropped] == [True] * 3
        assert await on_all(kits, lambda kit: kit.tier.exists(names("a", 6))) == [0] * 3


@pytest.mark.asyncio
async def test_a_load_that_one_rank_has_less_of_is_less_on_all(seed: int) -> None:
    async with several(seed) as kits:
        await on_all(kits, lambda kit: kit.tier.store(names("a", 6), list(range(6))))

        async def load(kit: Kit) -> int:
            async with kit.tier.lookup(names("a", 6)) as hit:
                if kit is kits[1]:  # it turns out that a block is bad
                    kit.tier._opened().table.drop(hit.places[4:5])
                return await kit.tier.load(hit, list(range(20, 26)))

        assert await on_all(kits, load) == [4, 4]

        async def steps(kit: Kit) -> list[int]:
            async with kit.tier.lookup(names("a", 6)) as hit:
                return [count async for count in kit.tier.loading(hit, list(range(20, 20 + len(hit))))]

        assert await on_all(kits, steps) == [[4], [4]]


@pytest.mark.asyncio
async def test_a_rank_that_is_refused_enters_all_the_same(seed: int) -> None:
    async with several(seed) as kits:
        await on_all(kits, lambda kit: kit.tier.store(names("a", 6), list(range(6))))

        async def load(kit: Kit) -> int:
            async with kit.tier.lookup(names("a", 6)) as hit:
                return await kit.tier.load(hit, [20, 20] if kit is kits[1] else [20, 21])

        first, second = await on_all(kits, load)
        assert isinstance(first, AiokvError) and "INVALID" in str(first)
        assert isinstance(second, InvalidBlocks)
        twice = names("a", 2) * 2
        found = await on_all(kits, lambda kit: kit.found(twice))
        assert [type(each) for each in found] == [ValueError, ValueError]
        kept = await on_all(kits, lambda kit: kit.tier.store(names("b", 2), [0, 99 if kit is kits[0] else 1]))
        assert isinstance(kept[0], InvalidBlocks) and isinstance(kept[1], AiokvError)
        assert await on_all(kits, lambda kit: kit.found(names("a", 6))) == [6, 6]


@pytest.mark.asyncio
async def test_who_is_cancelled_at_any_time_enters_all_the_same(seed: int) -> None:
    async with several(seed) as kits:
        await on_all(kits, lambda kit: kit.tier.store(names("a", 6), list(range(6))))
        draw = random.Random(seed)
        for number in range(20):
            turns, name = draw.randrange(6), f"b{number}"

            async def call(kit: Kit) -> None:
                what = kit.found(names("a", 6)) if number % 2 else kit.tier.store(names(name, 2), [7, 8])  # noqa: B023
                going = asyncio.ensure_future(what)
                await asyncio.sleep(0)
                if kit is kits[0]:
                    for _ in range(turns):  # noqa: B023
                        await asyncio.sleep(0)
                    going.cancel()
                await asyncio.wait([going])
                if not going.cancelled():
                    going.exception()

            await on_all(kits, call)
            assert await on_all(kits, lambda kit: kit.found(names("a", 6))) == [6, 6]


@pytest.mark.parametrize("what", ["store", "load", "loading", "exists", "delete", "reset"])
@pytest.mark.asyncio
async def test_a_call_that_is_cancelled_before_its_task_ran_is_entered(seed: int, what: str) -> None:
    async with several(seed) as kits:
        await on_all(kits, lambda kit: kit.tier.store(names("a", 6), list(range(6))))

        async def call(kit: Kit) -> Any:
            async with kit.tier.lookup(names("a", 6)) as hit:
                if what == "loading":
                    async with aclosing(kit.tier.loading(hit, list(range(20, 26)))) as steps:
                        if kit is kits[1]:
                            return [count async for count in steps]
                    found = kit.tier.statistics()
                    assert (found.blocks_leased, found.copies) == (0, 0)
                    return None
                made = {
                    "store": lambda: kit.tier.store(names("b", 6), list(range(6))),
                    "load": lambda: kit.tier.load(hit, list(range(20, 26))),
                    "exists": lambda: kit.tier.exists(names("a", 6)),
                    "delete": lambda: kit.tier.delete(names("c", 6)),
                    "reset": kit.tier.reset,
                }[what]()
                if kit is kits[1]:
                    return await made
                task = asyncio.ensure_future(made)
                task.cancel()
                await asyncio.wait([task])
                assert task.cancelled()
                found = kit.tier.statistics()
                assert (found.blocks_leased, found.copies) == (0, 0)
                return None

        _, other = await on_all(kits, call)
        # It has what both did, or is told of the other; it doesn't wait until the group is given up.
        assert not isinstance(other, DeadlineExceeded | PeerLostError)
        kept = await on_all(kits, lambda kit: kit.tier.store(names("d", 6), list(range(6))))
        assert kept == [6, 6]


@pytest.mark.asyncio
async def test_steps_that_are_left_are_left_once_they_are_quiet() -> None:
    """However often whoever leaves them is cancelled meanwhile."""
    waiter, seen = asyncio.get_running_loop().create_future(), []

    async def going() -> int:
        try:
            return await waiter
        except asyncio.CancelledError:
            for _ in range(5):
                await asyncio.sleep(0)
            seen.append("quiet")
            raise

    steps = at_once(Begun(going()))

    async def leave() -> None:
        try:
            await steps.aclose()
        finally:
            seen.append("left")

    task = asyncio.ensure_future(leave())
    for _ in range(3):
        await asyncio.sleep(0)
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == ["quiet", "left"]


@pytest.mark.asyncio
async def test_calls_at_once_are_agreed_on_in_their_order(seed: int) -> None:
    async with several(seed, 3) as kits:

        async def many(kit: Kit) -> list[int]:
            return await asyncio.gather(
                *(kit.tier.store(names(each, 4), range(at, at + 4)) for at, each in ((0, "a"), (8, "b"))),
                kit.found(names("a", 3)),
                kit.tier.exists(names("b", 9)),
                kit.get(names("a", 4), list(range(20, 24))),
                kit.tier.delete(names("b", 2)),
            )

        first, *others = await on_all(kits, many)
        assert isinstance(first, list), first
        assert others == [first] * 2


@pytest.mark.asyncio
async def test_other_calls_are_noticed(seed: int) -> None:
    async with several(seed) as kits:
        found = await asyncio.gather(
            kits[0].tier.exists(names("a", 2)), kits[1].tier.delete(names("a", 2)), return_exceptions=True
        )
        assert all(isinstance(each, LocalProtocolError) for each in found)


@pytest.mark.asyncio
async def test_a_tier_that_is_closed_on_one_rank_is_told_to_the_others(seed: int) -> None:
    async with several(seed) as kits:
        await kits[0].tier.aclose()
        first, second = await on_all(kits, lambda kit: kit.found(names("a", 2)))
        assert isinstance(first, ClosedError)
        assert isinstance(second, AiokvError) and "FAULT" in str(second)
