"""Tiers that share a pool, in one process: what each finds of the others, and what is left when one ends."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from aiokv.errors import CapacityError, ClosedError, LayoutMismatch
from aiokv.offload.events import BlocksRemoved, BlocksStored
from aiokv.offload.sharing import guest
from aiokv.offload.sharing.owner import HostPool
from aiokv.offload.tier import HostTier
from aiokv.proto.layout import CacheLayout
from aiokv.ranks import RankGroup
from aiokv.testing.cancelling import MANNERS, Cancelling
from aiokv.testing.ranks import MemoryRanks
from aiokv.testing.tiers import BLOCK, GROUPS, LAYOUT, Kit, names, tier_on
from aiokv.testing.tierusers import Users

both = pytest.mark.parametrize("kind", ["host", "mocked"])


@asynccontextmanager
async def pool_at(folder: Path, blocks: int = 32, **more: Any) -> AsyncIterator[HostPool]:
    """A pool with room for so many blocks; on leaving nothing of it is held."""
    async with HostPool(folder / "pool", blocks * BLOCK, segment_bytes=16 * BLOCK, **more) as pool:
        yield pool
        found = pool.statistics()
        assert (found.guests, found.guests_lost) == (0, 0)
        assert (found.places_pinned, found.places_pending, found.waiting) == (0, 0, 0)
    assert list(folder.iterdir()) == []


@asynccontextmanager
async def sharing(
    folder: Path, seed: int, *, kind: str = "host", size: int = 2, blocks: int = 32, **more: Any
) -> AsyncIterator[tuple[HostPool, list[Kit]]]:
    """A pool, and tiers that share it."""
    async with pool_at(folder, blocks) as pool, AsyncExitStack() as stack:
        kits = [
            await stack.enter_async_context(tier_on(kind, seed + rank, pool=pool.path, **more))
            for rank in range(size)
        ]
        for rank, kit in enumerate(kits):
            kit.fill(seed + rank)
        yield pool, kits


async def until(what: Callable[[], bool]) -> None:
    """Let others go on until something holds."""
    async with asyncio.timeout(20):
        while not what():  # noqa: ASYNC110 - what is waited for is another's, and says nothing
            await asyncio.sleep(0)


# -- what one stored the other finds


@both
@pytest.mark.asyncio
async def test_each_finds_what_the_other_stored(tmp_path: Path, kind: str, seed: int) -> None:
    async with sharing(tmp_path, seed, kind=kind) as (pool, (one, other)):
        before = one.content(range(3, 23))
        assert await one.tier.store(names("a", 20), list(range(3, 23))) == 20
        assert await other.tier.exists(names("a", 25)) == 20
        async with other.tier.lookup(names("a", 25)) as hit:
            assert len(hit) == 20
            assert pool.statistics().places_pinned == 20
            assert await other.tier.load(hit, list(range(40, 60))) == 20
        assert other.holds(range(40, 60), before)
        # What is there is not copied again.
        assert await other.tier.store(names("a", 20), list(range(20))) == 20
        assert (other.tier.statistics().stored_blocks, pool.statistics().places_used) == (0, 20)
        assert await one.get(names("a", 20), range(30, 50)) == 20
        assert one.holds(range(30, 50), before)


@pytest.mark.one_loop
@pytest.mark.asyncio
async def test_groups_whose_block_sizes_differ(tmp_path: Path, seed: int) -> None:
    async with sharing(tmp_path, seed, layout=GROUPS) as (_, (one, other)):
        before = [plane.clone() for plane in one.planes()]
        assert await one.tier.store(names("a", 10), [list(range(10)), list(range(40, 60))]) == 10
        async with other.tier.lookup(names("a", 10)) as hit:
            assert await other.tier.load(hit, [list(range(10)), list(range(40, 60))]) == 10
        for layer, plane in zip((0, 1, 2), other.planes(), strict=True):
            axis = GROUPS.groups[layer % 2].axes.index("b")
            ids = torch.arange(40, 60) if layer % 2 else torch.arange(10)
            assert torch.equal(plane.index_select(axis, ids), before[layer].index_select(axis, ids))


@pytest.mark.one_loop
@pytest.mark.asyncio
async def test_caches_that_lie_otherwise_in_memory_share_blocks(tmp_path: Path, seed: int) -> None:
    """K and V apart, heads before tokens, more blocks: the same KV all the same."""
    group = LAYOUT.groups[0]
    others = [
        msgspec.structs.replace(group, axes="bhtd", split=True),
        msgspec.structs.replace(group, axes="bshtd", blocks=group.blocks * 2),
    ]
    async with pool_at(tmp_path) as pool, tier_on("host", seed, pool=pool.path) as one:
        await one.tier.store(names("a", 8), list(range(8)))
        for other in others:
            layout = CacheLayout(groups=(other,), model=LAYOUT.model)
            async with tier_on("host", seed, layout=layout, pool=pool.path) as kit:
                assert await kit.get(names("a", 8), range(20, 28)) == 8
                for layer in range(3):
                    here = one.cache.tensor(layer)
                    there = kit.cache.tensor(layer)
                    if isinstance(there, tuple):
                        there = torch.stack([each.transpose(1, 2) for each in there])
                    else:
                        there = there.transpose(0, 1).transpose(2, 3)
                    assert torch.equal(there[:, 20:28], here[:, :8])


@pytest.mark.one_loop
@pytest.mark.asyncio
async def test_what_differs_in_content_is_never_mixed(tmp_path: Path, seed: int) -> None:
    """Of the same size: other heads, another model, other types."""
    group = LAYOUT.groups[0]
    layouts = [
        LAYOUT,
        CacheLayout(groups=LAYOUT.groups, model=b"another"),
        CacheLayout((msgspec.structs.replace(group, heads=(2, 4), total_heads=4),), model=LAYOUT.model),
        CacheLayout((msgspec.structs.replace(group, dtype="float16", head_size=16),), model=LAYOUT.model),
    ]
    async with pool_at(tmp_path, 64) as pool, AsyncExitStack() as stack:
        kits = [
            await stack.enter_async_context(tier_on("host", seed, layout=layout, pool=pool.path))
            for layout in layouts
        ]
        for at, kit in enumerate(kits):
            assert await kit.found(names("a", 4)) == 0
            kit.fill(at)
            assert await kit.tier.store(names("a", 4), list(range(4))) == 4
        assert pool.statistics().places_used == 16
        for kit in kits:
            before = kit.content(range(4))
            assert await kit.get(names("a", 4), range(10, 14)) == 4
            assert kit.holds(range(10, 14), before)


@pytest.mark.one_loop
@pytest.mark.asyncio
async def test_blocks_of_another_size_are_refused(tmp_path: Path, seed: int) -> None:
    group = LAYOUT.groups[0]
    async with pool_at(tmp_path) as pool, tier_on("host", seed, pool=pool.path) as kit:
        for other, says in (
            (msgspec.structs.replace(group, head_size=16), "1024 bytes a block against 3 layers of 512"),
            (msgspec.structs.replace(group, layers=(0, 1)), "2 layers"),
            (msgspec.structs.replace(group, layers=(0, 1), head_size=12), "2 layers"),
        ):
            with pytest.raises(LayoutMismatch, match=says):
                async with tier_on("host", seed, layout=CacheLayout((other,), b"test"), pool=pool.path):
                    pass
        with pytest.raises(LayoutMismatch, match="groups"):
            async with tier_on("host", seed, layout=GROUPS, pool=pool.path):
                pass
        assert await kit.tier.store(names("a", 4), list(range(4))) == 4


@pytest.mark.one_loop
@pytest.mark.asyncio
async def test_a_pool_without_room_for_a_block_says_so(tmp_path: Path, seed: int) -> None:
    async with HostPool(tmp_path / "pool", BLOCK - 1) as pool:
        with pytest.raises(CapacityError, match="no room for one block"):
            async with tier_on("host", seed, pool=pool.path):
                pass


@pytest.mark.one_loop
@pytest.mark.asyncio
async def test_names_that_mean_nothing_to_others_are_refused(tmp_path: Path, seed: int) -> None:
    async with sharing(tmp_path, seed) as (_, (one, other)):
        keys = [b"1", "1", 1, 2**100, -(2**100), ("1", (b"1", 2)), ("1", b"1"), ()]
        assert await one.tier.store(keys, list(range(8))) == 8
        assert await other.tier.exists(keys) == 8
        for bad in (1.5, frozenset(), ("a", None), "\ud800"):
            with pytest.raises(TypeError, match="in a shared pool a hash"):
                await other.found([bad])  # type: ignore[list-item]
            with pytest.raises(TypeError, match="in a shared pool a hash"):
                await other.tier.store([bad], [0])
        with pytest.raises(CapacityError, match="at most 1024"):
            await other.found(["x" * 1100])
        for call in (other.tier.lookup(["a", "a"]).__aenter__(), other.tier.delete(["a", "a"])):
            with pytest.raises(ValueError, match="twice"):
                await call
        with pytest.raises(ValueError, match="twice"):
            other.tier.store(["a", "a"], [0, 1])


# -- two store the same


@pytest.mark.one_loop
@pytest.mark.asyncio
async def test_the_same_stored_by_two_at_once_is_there_once(tmp_path: Path, seed: int) -> None:
    async with sharing(tmp_path, seed, kind="mocked", stepping=False) as (pool, (one, other)):
        before = one.content(range(8))
        first = asyncio.ensure_future(one.tier.store(names("a", 8), list(range(8))))
        await until(lambda: pool.statistics().places_pending == 8)
        second = asyncio.ensure_future(other.tier.store(names("a", 10), list(range(10))))
        await until(lambda: pool.statistics().waiting == 1)
        # Half of a block is never seen by others.
        assert await other.found(names("a", 8)) == 0
        async with one.tier.lookup(names("a", 8)) as hit:
            assert len(hit) == 8
        assert await _driven(one, first) == 8
        assert await _driven(other, second) == 10
        assert other.tier.statistics().stored_blocks == 2
        loading = asyncio.ensure_future(other.get(names("a", 8), range(20, 28)))
        await _driven(other, loading)
        assert other.holds(range(20, 28), before)


async def _driven(kit: Kit, what: asyncio.Future[int]) -> int:
    while not what.done():
        kit.device.step()
        await asyncio.sleep(0)
    return await what


@pytest.mark.one_loop
@pytest.mark.asyncio
async def test_a_store_that_fails_leaves_it_to_the_one_that_waited(tmp_path: Path, seed: int) -> None:
    async with sharing(tmp_path, seed, kind="mocked", stepping=False) as (pool, (one, other)):
        first = asyncio.ensure_future(one.tier.store(names("a", 4), list(range(4))))
        await until(lambda: pool.statistics().places_pending == 4)
        second = asyncio.ensure_future(other.tier.store(names("a", 4), list(range(4))))
        await until(lambda: pool.statistics().waiting == 1)
        (batch,) = one.tier._opened().copies.batches
        one.device.fail(batch.stream)  # type: ignore[arg-type]
        while not one.tier.statistics().failed_copies:
            one.device.step()
            await asyncio.sleep(0)
        assert await _driven(other, second) == 4
        assert other.tier.statistics().stored_blocks == 4
        assert await first == 4, "tried again, it found that it was there"
        assert one.tier.statistics().stored_blocks == 0


@pytest.mark.one_loop
@pytest.mark.asyncio
async def test_who_waits_for_another_may_give_up(tmp_path: Path, seed: int) -> None:
    async with sharing(tmp_path, seed, kind="mocked", stepping=False) as (pool, (one, other)):
        first = asyncio.ensure_future(one.tier.store(names("a", 4), list(range(4))))
        await until(lambda: pool.statistics().places_pending == 4)
        second = asyncio.ensure_future(other.tier.store([*names("a", 4), "b"], list(range(5))))
        await until(lambda: pool.statistics().waiting == 1)
        assert other.tier.statistics().blocks_leased == 5, "they are read later"
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        assert other.tier.statistics().blocks_leased == 0
        assert await other.tier.store(names("a", 4), list(range(4)), deadline=0.001) == 0
        assert await _driven(one, first) == 4
        await until(lambda: pool.statistics().places_pinned == 0)
        assert pool.statistics().places_used == 4


# -- cancelling, dropping, resetting


@pytest.mark.parametrize("manner", MANNERS)
@pytest.mark.parametrize("what", ["load", "store", "lookup", "delete"])
@pytest.mark.one_loop
@pytest.mark.asyncio
async def test_cancelled_at_each_await_nothing_is_left(
    tmp_path: Path, manner: str, what: str, seed: int
) -> None:
    async with sharing(tmp_path, seed, blocks=64) as (pool, (one, other)):
        await other.tier.store(names("a", 12), list(range(12)))

        async def go(at: int) -> None:
            if what == "store":
                await one.tier.store(names(f"s{at}-", 12), list(range(20, 32)))
            elif what == "delete":
                await one.tier.delete(names("none", 3))
            else:
                async with one.tier.lookup(names("a", 12)) as hit:
                    if what == "load":
                        await one.tier.load(hit, list(range(40, 52)))

        for at in itertools.count(1):
            cancelling = Cancelling(at, manner)  # type: ignore[arg-type]
            task = asyncio.create_task(cancelling(go(at)))
            await asyncio.wait([task])
            found = one.tier.statistics()
            assert (found.blocks_leased, found.copies) == (0, 0)
            assert await other.tier.exists(names("a", 12)) == 12  # and with that the owner has heard all
            await one.tier.exists(["x"])
            left = pool.statistics()
            assert (left.places_pinned, left.places_pending) == (0, 0)
            if not cancelling.hit:
                break


@both
@pytest.mark.one_loop
@pytest.mark.asyncio
async def test_a_reset_by_one_while_another_loads_and_stores(tmp_path: Path, kind: str, seed: int) -> None:
    async with sharing(tmp_path, seed, kind=kind) as (_, (one, other)):
        await other.tier.store(names("a", 12), list(range(12)))
        async with other.tier.lookup(names("a", 12)) as hit:
            loading = asyncio.ensure_future(other.tier.load(hit, list(range(40, 52))))
            storing = asyncio.ensure_future(other.tier.store(names("b", 12), list(range(12, 24))))
            dropped = await one.tier.reset()
            assert dropped.blocks >= 12
            await until(lambda: other.tier._generation == 1)
            assert await other.tier.load(hit, [*range(52, 60), 0, 1, 2, 3]) == 0, "worth nothing"
            await loading
            assert await storing in (0, 12)
        assert await other.found(names("a", 12)) == 0
        assert await one.tier.exists(names("b", 12)) == await other.tier.exists(names("b", 12))
        assert await other.tier.store(names("a", 12), list(range(12))) == 12
        assert await one.get(names("a", 12), range(12)) == 12


@pytest.mark.one_loop
@pytest.mark.asyncio
async def test_what_one_deletes_another_may_be_using(tmp_path: Path, seed: int) -> None:
    async with sharing(tmp_path, seed) as (pool, (one, other)):
        before = one.content(range(6))
        await one.tier.store(names("a", 6), list(range(6)))
        async with other.tier.lookup(names("a", 6)) as hit:
            assert await one.tier.delete(["a3", "a9"]) == 1
            assert await other.tier.exists(names("a", 6)) == 3
            assert await other.tier.load(hit, list(range(20, 26))) == 3
            assert other.holds(range(20, 23), [each[:, :3] for each in before])
            assert pool.statistics().places_used == 6
        await until(lambda: pool.statistics().places_used == 5)


@pytest.mark.one_loop
@pytest.mark.asyncio
async def test_what_is_used_by_one_is_not_evicted_by_another(tmp_path: Path, seed: int) -> None:
    async with sharing(tmp_path, seed, blocks=16) as (_, (one, other)):
        before = one.content(range(8))
        await one.tier.store(names("a", 8), list(range(8)))
        async with one.tier.lookup(names("a", 8)) as hit:
            assert await other.tier.store(names("b", 12), list(range(12))) == 8
            assert await one.tier.load(hit, list(range(20, 28))) == 8
            assert one.holds(range(20, 28), before)
        assert await other.tier.store(names("b", 12), list(range(12))) == 12
        assert await one.tier.exists(names("a", 8)) == 4
        assert other.tier.statistics().evicted_blocks == 4


@pytest.mark.one_loop
@pytest.mark.asyncio
async def test_events_tell_of_ones_own_stores_and_of_all_that_goes(tmp_path: Path, seed: int) -> None:
    async with sharing(tmp_path, seed) as (_, (one, other)):
        ones, others = one.tier.events(), other.tier.events()
        await one.tier.store(names("a", 3), [0, 1, 2])
        await other.tier.delete(["a1"])
        await one.tier.exists([])
        await one.tier.reset()
        await other.tier.exists([])
        assert [await anext(ones) for _ in range(3)] == [
            BlocksStored(("a0", "a1", "a2"), None, 4, None),
            BlocksRemoved(("a1",), "deleted"),
            BlocksRemoved((), "reset"),
        ]
        assert await anext(others) == BlocksRemoved(("a1",), "deleted")
        assert await anext(others) == BlocksRemoved((), "reset")


@pytest.mark.one_loop
@pytest.mark.asyncio
async def test_a_changed_block_is_dropped_for_all(tmp_path: Path, seed: int) -> None:
    async with sharing(tmp_path, seed, checksums=1.0) as (_, (one, other)):
        await one.tier.store(names("a", 8), list(range(8)))
        await until(lambda: len(one.tier._opened().checksums) == 8)
        async with one.tier.lookup(names("a", 8)) as hit:
            assert hit.places is not None
            next(iter(one.tier._pool.views(hit.places[5])))[0] ^= 1
        assert await one.get(names("a", 8), range(20, 28)) < 6
        assert (one.tier.statistics().checksum_failures, one.tier.statistics().canary) == (1, False)
        assert await other.tier.exists(names("a", 8)) == 5
        # Of the same name, and by another: another's bytes are not taken for changed ones.
        assert await other.tier.store(names("a", 8), list(range(8, 16))) == 8
        assert await one.get(names("a", 8), range(20, 28)) == 8
        await other.tier.reset()
        other.fill(77)
        assert await other.tier.store(names("a", 8), list(range(8, 16))) == 8
        assert await one.get(names("a", 8), range(20, 28)) == 8
        assert one.tier.statistics().checksum_failures == 1


# -- an end


@both
@pytest.mark.asyncio
async def test_a_pool_that_is_lost_means_misses(tmp_path: Path, kind: str, seed: int) -> None:
    async with AsyncExitStack() as stack:
        pool = HostPool(tmp_path / "pool", 32 * BLOCK, segment_bytes=16 * BLOCK)
        await stack.enter_async_context(pool)
        one = await stack.enter_async_context(tier_on(kind, seed, pool=pool.path))
        before = one.content(range(12))
        await one.tier.store(names("a", 12), list(range(12)))
        async with one.tier.lookup(names("a", 12)) as hit:
            loading = one.tier.load(hit, list(range(40, 52)))
            storing = one.tier.store(names("b", 12), list(range(12, 24)))
            finding = asyncio.ensure_future(one.found(names("a", 12)))
            await asyncio.sleep(0)
            await pool.aclose()
            loaded = await loading
            assert one.holds(range(40, 40 + loaded), [each[:, :loaded] for each in before])
            assert await storing in (0, 12)
            assert await finding in (0, 12)
            await until(lambda: one.tier._generation == 1)
            assert not one.tier.statistics().attached
            assert await one.tier.load(hit, list(range(40, 52))) == 0
        assert await one.found(names("a", 12)) == 0
        assert await one.tier.store(names("c", 4), list(range(4))) == 0
        assert (await one.tier.exists(names("a", 1)), await one.tier.delete(["a0"])) == (0, 0)
        assert (await one.tier.reset()).blocks == 0


@both
@pytest.mark.asyncio
async def test_another_owner_is_used_when_there_is_one(
    tmp_path: Path, kind: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guest, "_FIRST_S", 0.001)
    path = tmp_path / "pool"
    pool = await HostPool(path, 30 * BLOCK, segment_bytes=16 * BLOCK).__aenter__()
    async with tier_on(kind, seed, pool=str(path)) as kit:
        await kit.tier.store(names("a", 12), list(range(12)))
        async with kit.tier.lookup(names("a", 12)) as hit:
            for more in range(1, 3):
                await pool.aclose()
                await until(lambda: not kit.tier.statistics().attached)
                assert await kit.tier.store(names("b", 4), list(range(4))) == 0
                # In between its blocks are others'.
                if more == 1:
                    retry = kit.tier._guest._retry  # type: ignore[union-attr]
                    retry.cancel()  # type: ignore[union-attr]
                    async with HostPool(path, 100 * BLOCK):
                        layout = CacheLayout(groups=GROUPS.groups, model=b"another")
                        async with tier_on("host", seed, layout=layout, pool=str(path)):
                            kit.tier._guest._try_again()  # type: ignore[union-attr]
                            await asyncio.sleep(0.01)
                            assert not kit.tier.statistics().attached
                pool = await HostPool(path, 20 * BLOCK, segment_bytes=7 * BLOCK).__aenter__()
                await until(lambda: kit.tier.statistics().attached)
                await kit.tier.grown()
                assert kit.tier.statistics().places == 20
                assert await kit.found(names("a", 12)) == 0
                before = kit.content(range(20))
                assert await kit.tier.store(names("c", 20), list(range(20))) == 20
                kit.fill(seed + more)
                assert await kit.get(names("c", 20), range(30, 50)) == 20
                assert kit.holds(range(30, 50), before)
                assert kit.tier._pool._old, "what was found before is held on"  # type: ignore[union-attr]
                assert await kit.tier.load(hit, list(range(12))) == 0
        assert not kit.tier._pool._old, "its memory was given back"  # type: ignore[union-attr]
        assert await kit.get(names("c", 20), range(20)) == 20
        await until(lambda: pool.statistics().places_pinned == 0)
        await pool.aclose()


@both
@pytest.mark.one_loop
@pytest.mark.asyncio
async def test_the_same_owner_after_a_connection_that_broke(
    tmp_path: Path, kind: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was held comes back once it is not in use, and a reset meanwhile is made up for."""
    monkeypatch.setattr(guest, "_FIRST_S", 0.001)

    async def cut(pool: HostPool, kit: Kit) -> None:
        desk = next(desk for desk in pool._desks if not desk._line.closed)
        desk._line._end("cut by the test")
        await until(lambda: not kit.tier.statistics().attached)

    async with pool_at(tmp_path) as pool, tier_on(kind, seed, pool=pool.path) as kit:
        await kit.tier.store(names("a", 12), list(range(12)))
        async with kit.tier.lookup(names("a", 12)) as hit:
            await cut(pool, kit)
            await until(lambda: kit.tier.statistics().attached)
            await kit.tier.grown()
            assert pool.statistics().guests_lost == 1
            assert pool.statistics().places_pinned == 12
            assert await kit.tier.load(hit, list(range(40, 52))) == 0
            assert await kit.get(names("a", 12), range(40, 52)) == 12, "it is the same pool"
        await until(lambda: pool.statistics().guests_lost == 0)
        await until(lambda: pool.statistics().places_pinned == 0)
        await cut(pool, kit)
        assert await kit.tier.delete(["a7", "a9"]) == 0, "as far as anybody knows"
        await until(lambda: kit.tier.statistics().attached)
        await kit.tier.grown()
        assert await kit.found(names("a", 12)) == 7
        assert pool.statistics().places_used == 10
        await cut(pool, kit)
        assert (await kit.tier.reset()).blocks == 0
        await until(lambda: kit.tier.statistics().attached)
        await kit.tier.grown()
        assert await kit.found(names("a", 12)) == 0
        assert pool.statistics().places_used == 0
        assert await kit.tier.store(names("a", 12), list(range(12))) == 12


@pytest.mark.asyncio
async def test_closing_while_the_owner_is_asked(tmp_path: Path, seed: int) -> None:
    async with sharing(tmp_path, seed, kind="mocked", stepping=False) as (pool, (one, other)):
        first = asyncio.ensure_future(one.tier.store(names("a", 4), list(range(4))))
        await until(lambda: pool.statistics().places_pending == 4)
        waiting = asyncio.ensure_future(other.tier.store(names("a", 4), list(range(4))))
        await until(lambda: pool.statistics().waiting == 1)
        finding = asyncio.ensure_future(other.found(names("a", 4)))
        await asyncio.sleep(0)
        await other.tier.aclose()
        assert await waiting == 0
        with pytest.raises(ClosedError):
            await finding
        assert await _driven(one, first) == 4


@both
@pytest.mark.one_loop
@pytest.mark.asyncio
async def test_never_a_wrong_byte(tmp_path: Path, kind: str, seed: int) -> None:
    """Requests of several at random, with cancellations and resets, in a pool that is too small for all."""
    draw = random.Random(seed)
    async with sharing(tmp_path, seed, kind=kind, size=3, blocks=24) as (_, kits):
        users = [Users(kit, seed + at) for at, kit in enumerate(kits)]
        tasks: set[asyncio.Task[None]] = set()
        for number in range(120):
            tasks.add(asyncio.ensure_future(draw.choice(users).request()))
            for _ in range(draw.randint(0, 6)):
                await asyncio.sleep(0)
            if draw.random() < 0.15:
                draw.choice(list(tasks)).cancel()
            if kind == "mocked" and draw.random() < 0.05:
                kit = draw.choice(kits)
                for batch in list(kit.tier._opened().copies.batches)[:1]:
                    kit.device.fail(batch.stream)  # type: ignore[arg-type]
            if number % 40 == 39:
                await draw.choice(kits).tier.reset()
            if len(tasks) > 8:
                over, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in over:
                    assert task.cancelled() or task.exception() is None
        for done in await asyncio.gather(*tasks, return_exceptions=True):
            assert not isinstance(done, Exception), done
        assert sum(user.loaded for user in users) > 0


# -- ranks, memory, arguments


@pytest.mark.one_loop
@pytest.mark.asyncio
async def test_ranks_that_keep_the_same_keep_it_once(tmp_path: Path, seed: int) -> None:
    """Of a latent vector every rank has all; of heads each has its own."""
    latent = CacheLayout.latent(
        layers=3, blocks=64, block_size=4, latent_size=128, dtype="float32", model=b"mla"
    )
    heads = [
        CacheLayout.attention(
            layers=3, blocks=64, block_size=4, heads=2, head_size=32, dtype="float32",
            rank_heads=(rank, rank + 1), model=b"heads",
        )
        for rank in range(2)
    ]  # fmt: skip
    for layouts, places in (([latent, latent], 6), (heads, 12)):
        ranks = MemoryRanks(2, seed=seed)
        async with HostPool(tmp_path / "pool", "1MiB") as pool, AsyncExitStack() as stack:
            kits = []
            for rank, layout in enumerate(layouts):
                group = stack.enter_context(RankGroup(ranks.collective(rank), deadline=5))
                kit = tier_on("host", seed, layout=layout, pool=pool.path, ranks=group)
                kits.append(await stack.enter_async_context(kit))
                kits[-1].fill(1)

            async def turn(kit: Kit) -> tuple[int, int]:
                before = kit.content(range(6))
                stored = await kit.tier.store(names("a", 6), list(range(6)))
                loaded = await kit.get(names("a", 9), list(range(20, 29)))
                assert kit.holds(range(20, 26), before)
                return stored, loaded

            assert await asyncio.gather(*map(turn, kits)) == [(6, 6)] * 2
            assert pool.statistics().places_used == places
            assert sum(kit.tier.statistics().stored_blocks for kit in kits) == places
            dropped = await asyncio.gather(*(kit.tier.reset() for kit in kits))
            assert [each.drained for each in dropped] == [True] * 2


@pytest.mark.one_loop
@pytest.mark.asyncio
async def test_who_comes_late_uses_what_it_has_mapped(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pool_at(tmp_path, 48) as pool, tier_on("host", seed, pool=pool.path) as one:
        await one.tier.store(names("a", 40), list(range(40)))
        other = HostTier(one.cache, pool=pool.path)
        grow, go_on = other._pool.grow, asyncio.Event()

        async def slowly():  # type: ignore[no-untyped-def]
            if len(other._pool) >= 16:
                await go_on.wait()
            return await grow()

        monkeypatch.setattr(other._pool, "grow", slowly)
        async with other:
            async with other.lookup(names("a", 40)) as hit:
                assert len(hit) < 40
                assert max(hit.places or (), default=0) < 16
            assert await other.store(names("a", 40), list(range(40))) == 40, "it is there already"
            assert await other.store(names("b", 4), list(range(40, 44))) == 0, "no room where it can write"
            go_on.set()
            await other.grown()
            await until(lambda: all(guest.limit == 48 for guest in pool.shares.guests))
            async with other.lookup(names("a", 40)) as hit:
                assert len(hit) == 40
            assert await other.store(names("b", 4), list(range(40, 44))) == 4
            assert other.statistics().places == 48


@pytest.mark.one_loop
@pytest.mark.asyncio
async def test_arguments_that_can_not_be_meant(tmp_path: Path, seed: int) -> None:
    async with tier_on("host", seed) as kit:
        path = tmp_path / "pool"
        for more in ({}, {"capacity": "1MiB", "pool": path}):
            with pytest.raises(ValueError, match="give the capacity"):
                HostTier(kit.cache, **more)
        for more in ({"policy": "lru"}, {"policy": "arc"}):
            with pytest.raises(ValueError, match="give it to HostPool"):
                HostTier(kit.cache, pool=path, **more)
        nameless = CacheLayout(groups=LAYOUT.groups)
        async with tier_on("host", seed, layout=nameless) as other:
            with pytest.raises(ValueError, match="fingerprint"):
                HostTier(other.cache, pool=path)
        with pytest.raises(ValueError, match="1 to 107"):
            HostTier(kit.cache, pool="x" * 108)
        for bad in (5, b"pool"):
            with pytest.raises(TypeError):
                HostTier(kit.cache, pool=bad)  # type: ignore[arg-type]


@pytest.mark.one_loop
@pytest.mark.asyncio
async def test_an_idle_tier_has_nothing_on_the_loop(tmp_path: Path, seed: int) -> None:
    async with sharing(tmp_path, seed) as (_, (one, other)):
        await one.tier.store(names("a", 4), list(range(4)))
        await other.get(names("a", 4), range(4))
        for _ in range(5):
            await asyncio.sleep(0.01)
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        assert tasks == []
