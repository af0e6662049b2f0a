"""The host tier as its user sees it, on memory of the host and on a mocked device."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing

import pytest
import torch

from aiokv.bench.offload.played import PlayedDevice
from aiokv.device.cache import KVCache
from aiokv.engine.arguments import Window
from aiokv.engine.engine import TransferEngine
from aiokv.errors import (
    BusyError,
    CapacityError,
    ClosedError,
    InvalidBlocks,
    LocalProtocolError,
    TransferAborted,
)
from aiokv.offload.events import BlocksLost, BlocksRemoved, BlocksStored, TierEvent
from aiokv.offload.policies import SecondSight
from aiokv.offload.settings import TierSettings
from aiokv.offload.tier import HostTier
from aiokv.testing.tiers import BLOCK, GROUPS, LAYOUT, SMALL, Kit, names, tier_on

both = pytest.mark.parametrize("kind", ["host", "mocked"])


@both
@pytest.mark.asyncio
async def test_what_is_stored_comes_back(kind: str, seed: int) -> None:
    async with tier_on(kind, seed) as kit:
        blocks, to = list(range(3, 23)), list(range(40, 60))
        before = kit.content(blocks)
        assert await kit.tier.store(names("a", 20), blocks) == 20
        kit.fill(1)
        async with kit.tier.lookup(names("a", 25)) as hit:
            assert (len(hit), hit.tokens) == (20, 80)
            assert await kit.tier.load(hit, to) == 20
        assert kit.holds(to, before)
        found = kit.tier.statistics()
        assert (found.hit_blocks, found.miss_blocks) == (20, 5)
        assert found.bytes_loaded == found.bytes_stored == 20 * BLOCK
        assert found.load_seconds > 0


@both
@pytest.mark.asyncio
async def test_groups_whose_block_sizes_differ(kind: str, seed: int) -> None:
    async with tier_on(kind, seed, layout=GROUPS) as kit:
        assert kit.tier.block_size == 8
        blocks = [list(range(10)), list(range(40, 60))]
        before = [plane.clone() for plane in kit.planes()]
        assert await kit.tier.store(names("a", 10), blocks) == 10
        kit.fill(1)
        to = [list(range(30, 40)), list(range(20))]
        async with kit.tier.lookup(names("a", 10)) as hit:
            assert await kit.tier.load(hit, to) == 10
        for layer, plane in zip((0, 1, 2), kit.planes(), strict=True):
            group = layer % 2
            axis = GROUPS.groups[group].axes.index("b")
            there, here = torch.tensor(to[group]), torch.tensor(blocks[group])
            assert torch.equal(plane.index_select(axis, there), before[layer].index_select(axis, here))
        with pytest.raises(InvalidBlocks, match="2 go together"):
            kit.tier.store(names("b", 1), [[0], [0]])
        with pytest.raises(InvalidBlocks, match="as many each"):
            kit.tier.store(names("b", 1), [[0], [0, 1, 2, 3]])
        with pytest.raises(InvalidBlocks, match="list them all"):
            kit.tier.store(names("b", 1), [[0], Window(4, [0, 1])])


@both
@pytest.mark.asyncio
async def test_a_prefix_comes_first(kind: str, seed: int) -> None:
    async with tier_on(kind, seed) as kit:
        blocks, to = list(range(20)), list(range(40, 60))
        before = kit.content(blocks)
        await kit.tier.store(names("a", 20), blocks)
        steps = []
        async with kit.tier.lookup(names("a", 20)) as hit:
            async for count in kit.tier.loading(hit, to):
                steps.append(count)
                assert kit.holds(to[:count], [_first(plane, count) for plane in before])
        assert steps == sorted(set(steps))
        assert steps[-1] == 20


@pytest.mark.asyncio
async def test_what_comes_first_is_told_first(seed: int) -> None:
    async with tier_on("mocked", seed, stepping=False) as kit:
        await _run(kit, kit.tier.store(names("a", 20), list(range(20))))
        steps: list[int] = []

        async def go() -> None:
            async with kit.tier.lookup(names("a", 20)) as hit:
                async for count in kit.tier.loading(hit, list(range(40, 60))):
                    steps.append(count)  # noqa: PERF401

        loading = asyncio.ensure_future(go())
        while not loading.done():
            await _step(kit)
        await loading
        assert len(steps) > 2
        assert steps[-1] == 20


async def _step(kit: Kit) -> None:
    """One step of the device, and a look of the poller."""
    poller = kit.tier._opened()._poller
    turns = poller.statistics.turns
    kit.device.step()
    while poller.pending and poller.statistics.turns == turns:  # noqa: ASYNC110
        await asyncio.sleep(0)
    await asyncio.sleep(0)


def _first(plane: torch.Tensor, count: int) -> torch.Tensor:
    return plane.narrow(LAYOUT.groups[0].axes.index("b"), 0, count)


@pytest.mark.asyncio
async def test_what_is_stored_is_visible_part_by_part(seed: int) -> None:
    """Not only when the request ends."""
    async with tier_on("mocked", seed, stepping=False) as kit:
        storing = asyncio.ensure_future(kit.tier.store(names("a", 20), list(range(20))))
        ready = set()
        while not storing.done():
            await _step(kit)
            found = kit.tier.statistics()
            ready.add(found.places_used - found.places_pending)
        assert await storing == 20
        assert len(ready - {0, 20}) >= 2


@pytest.mark.asyncio
async def test_blocks_are_the_callers_with_the_event_of_the_copy(seed: int) -> None:
    """Not with the next step of the model, and not when somebody gets to awaiting."""
    async with tier_on("mocked", seed, stepping=False) as kit:
        kept = kit.tier.store(names("a", 8), list(range(8)))
        with pytest.raises(BusyError, match="being read"):
            kit.tier._opened()._leases.take(_listed([3]), write=True)
        while kit.tier.statistics().blocks_leased:
            kit.device.run()
            await asyncio.sleep(0)
        assert await kept == 8


def _listed(ids: Sequence[int]):  # type: ignore[no-untyped-def]
    from aiokv.engine.arguments import block_lists

    return block_lists(list(ids), LAYOUT)


@pytest.mark.asyncio
async def test_a_store_reads_what_the_stream_has_written_and_a_load_writes_after_its_reads(seed: int) -> None:
    async with tier_on("mocked", seed) as kit:
        compute, buffer = kit.device.stream(), kit.cache.buffers[0]
        where = _where(kit.cache, 5)
        compute.write(buffer, where, b"\x05" * 64)
        storing = asyncio.ensure_future(kit.tier.store(["a"], [5], stream=compute))
        assert await storing == 1
        read = compute.read(buffer, _where(kit.cache, 6), 64)
        async with kit.tier.lookup(["a"]) as hit:
            assert await kit.tier.load(hit, [6], stream=compute) == 1
        after = compute.read(buffer, _where(kit.cache, 6), 64)
        while after.data is None:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert read.data != after.data
        assert after.data == b"\x05" * 64


def _where(cache: KVCache, block: int) -> int:
    """Offset of the first bytes of a block, in its first layer."""
    place = cache.placement.groups[0]
    return place.layers[0][0][1] + block * place.strides[0]


@pytest.mark.asyncio
async def test_what_waits_for_a_stream_holds_up_no_other(seed: int) -> None:
    async with tier_on("mocked", seed) as kit:
        await kit.tier.store(names("a", 4), list(range(4)))
        busy = kit.device.stream()
        gate = kit.device.stream()
        event = gate.record()
        kit.stepping.close()
        busy.wait(event)
        held = kit.tier.store(names("b", 8), list(range(8, 16)), stream=busy)
        free = asyncio.ensure_future(kit.get(names("a", 4), range(20, 24)))
        while not free.done():
            for stream in list(kit.device._busy):
                if stream is not gate:
                    kit.device.step(stream)
            await asyncio.sleep(0)
        assert await free == 4
        assert kit.tier.statistics().places_pending == 8
        held_up = asyncio.ensure_future(held)
        while not held_up.done():
            kit.device.run()
            await asyncio.sleep(0)
        assert await held_up == 8


# -- joining


@both
@pytest.mark.asyncio
async def test_many_loads_of_one_prefix_are_one_copy(kind: str, seed: int) -> None:
    async with tier_on(kind, seed) as kit:
        before = kit.content(range(16))
        await kit.tier.store(names("a", 16), list(range(16)))
        assert await asyncio.gather(*(kit.get(names("a", 16), range(30, 46)) for _ in range(50))) == [16] * 50
        assert kit.holds(range(30, 46), before)
        found = kit.tier.statistics()
        assert found.loaded_blocks == 16
        assert found.joined_blocks == 49 * 16


@both
@pytest.mark.asyncio
async def test_a_longer_load_joins_what_is_on_its_way_and_brings_the_rest(kind: str, seed: int) -> None:
    async with tier_on(kind, seed) as kit:
        before = kit.content(range(16))
        await kit.tier.store(names("a", 16), list(range(16)))
        first = asyncio.ensure_future(kit.get(names("a", 6), range(30, 36)))
        await asyncio.sleep(0)
        assert await kit.get(names("a", 16), range(30, 46)) == 16
        assert await first == 6
        assert kit.holds(range(30, 46), before)
        assert kit.tier.statistics().loaded_blocks == 16


@both
@pytest.mark.asyncio
async def test_the_same_blocks_for_something_else_are_refused(kind: str, seed: int) -> None:
    async with tier_on(kind, seed) as kit:
        await kit.tier.store(["a"], [0])
        await kit.tier.store(["b"], [1])
        async with kit.tier.lookup(["a"]) as one, kit.tier.lookup(["b"]) as other:
            loading = kit.tier.load(one, [9])
            with pytest.raises(BusyError, match="written"):
                kit.tier.load(other, [9])
            with pytest.raises(BusyError, match="written"):
                kit.tier.store(["c"], [9])
            assert await loading == 1
            assert await kit.tier.load(other, [9]) == 1


@both
@pytest.mark.asyncio
async def test_a_load_joins_a_store_in_flight(kind: str, seed: int) -> None:
    async with tier_on(kind, seed) as kit:
        before = kit.content(range(20))
        await kit.tier.store(names("a", 5), list(range(5)))
        storing = kit.tier.store(names("a", 20), list(range(20)))
        async with kit.tier.lookup(names("a", 20)) as hit:
            assert len(hit) == 20
            assert await kit.tier.load(hit, list(range(30, 50))) == 20
        assert await storing == 20
        assert kit.holds(range(30, 50), before)


@both
@pytest.mark.asyncio
async def test_the_same_is_not_stored_twice_at_a_time(kind: str, seed: int) -> None:
    async with tier_on(kind, seed) as kit:
        first = kit.tier.store(names("a", 12), list(range(12)))
        second = kit.tier.store(names("a", 16), list(range(20, 36)))
        assert await asyncio.gather(first, second) == [12, 16]
        found = kit.tier.statistics()
        assert (found.stored_blocks, found.joined_blocks) == (16, 12)


# -- what goes wrong


@pytest.mark.asyncio
async def test_a_failed_load_is_a_miss_and_the_next_one_is_not(seed: int) -> None:
    async with tier_on("mocked", seed, stepping=False) as kit:
        await _run(kit, kit.tier.store(names("a", 12), list(range(12))))
        before = kit.content(range(12))
        loading = asyncio.ensure_future(kit.get(names("a", 12), range(20, 32)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        _fail(kit, store=False)
        assert await _run(kit, loading) < 12
        assert kit.tier.statistics().failed_copies > 0
        assert await _run(kit, kit.get(names("a", 12), range(20, 32))) == 12
        assert kit.holds(range(20, 32), before)


def _fail(kit: Kit, *, store: bool) -> None:
    """Have the next step of what goes on fail."""
    (batch,) = (batch for batch in kit.tier._opened().copies.batches if batch.store is store)
    kit.device.fail(batch.stream)


async def _run(kit: Kit, what) -> int:  # type: ignore[no-untyped-def]
    waiting = asyncio.ensure_future(what)
    while not waiting.done():
        kit.device.run()
        await asyncio.sleep(0)
    return await waiting


@pytest.mark.asyncio
async def test_a_failed_store_is_tried_again(seed: int) -> None:
    async with tier_on("mocked", seed, stepping=False) as kit:
        await _run(kit, kit.tier.store(["x"], [60]))
        storing = asyncio.ensure_future(kit.tier.store(names("a", 12), list(range(12))))
        await asyncio.sleep(0)
        _fail(kit, store=True)
        assert await _run(kit, storing) == 12
        assert kit.tier.statistics().failed_copies > 0
        assert await _run(kit, kit.found(names("a", 12))) == 12


@pytest.mark.asyncio
async def test_a_failed_store_is_dropped_and_who_joined_it_has_a_miss(seed: int) -> None:
    never = TierSettings(segment_bytes=16 * BLOCK, part_bytes=4 * BLOCK, chunk_bytes=2 * BLOCK, retries=0)
    async with tier_on("mocked", seed, stepping=False, settings=never) as kit:
        await _run(kit, kit.tier.store(["x"], [60]))
        storing = asyncio.ensure_future(kit.tier.store(names("a", 8), list(range(8))))
        await asyncio.sleep(0)
        async with kit.tier.lookup(names("a", 8)) as hit:
            loading = asyncio.ensure_future(kit.tier.load(hit, list(range(20, 28))))
            await asyncio.sleep(0)
            _fail(kit, store=True)
            assert await _run(kit, storing) == 0
            assert await _run(kit, loading) == 0
        found = kit.tier.statistics()
        assert found.places_used == 1
        assert await _run(kit, kit.tier.store(names("a", 8), list(range(8)))) == 8


@both
@pytest.mark.asyncio
async def test_a_changed_block_is_found_counted_and_a_miss(kind: str, seed: int) -> None:
    async with tier_on(kind, seed, checksums=1.0) as kit:
        traffic = kit.tier._opened()
        await kit.tier.store(names("a", 10), list(range(10)))
        while len(traffic.checksums) < 10:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert await kit.get(names("a", 10), range(20, 30)) == 10
        place = traffic.table._places["a6"]
        view = list(kit.tier._pool.views(place))[-1]
        view[-1] ^= 1
        assert kit.tier.statistics().canary
        assert await kit.get(names("a", 10), range(20, 30)) in (6, 4)
        found = kit.tier.statistics()
        assert (found.checksum_failures, found.canary) == (1, False)
        assert found.checksums_checked >= 10
        assert await kit.found(names("a", 10)) == 6
        assert await kit.tier.store(names("a", 10), list(range(10))) == 10
        assert await kit.get(names("a", 10), range(20, 30)) == 10


@both
@pytest.mark.asyncio
async def test_a_pin_holds_under_pressure(kind: str, seed: int) -> None:
    async with tier_on(kind, seed, blocks=16) as kit:
        before = kit.content(range(8))
        await kit.tier.store(names("a", 8), list(range(8)))
        async with kit.tier.lookup(names("a", 8)) as hit:
            for round_ in range(6):
                assert await kit.tier.store(names(f"b{round_}-", 16), list(range(16, 32))) == 8
            assert await kit.tier.load(hit, list(range(40, 48))) == 8
        assert kit.holds(range(40, 48), before)
        assert await kit.tier.store(names("c", 16), list(range(16))) == 16
        assert await kit.found(names("a", 8)) == 0


@both
@pytest.mark.asyncio
async def test_a_hit_that_is_left_during_its_load_does_not_lose_it(kind: str, seed: int) -> None:
    async with tier_on(kind, seed, blocks=16) as kit:
        before = kit.content(range(8))
        await kit.tier.store(names("a", 8), list(range(8)))
        async with kit.tier.lookup(names("a", 8)) as hit:
            loading = kit.tier.load(hit, list(range(40, 48)))
        storing = kit.tier.store(names("b", 16), list(range(16, 32)))
        assert await loading == 8
        assert kit.holds(range(40, 48), before)
        await storing


# -- cancelling, deadlines


@both
@pytest.mark.parametrize("what", ["load", "loading", "store"])
@pytest.mark.asyncio
async def test_cancelled_at_each_await_nothing_is_left(kind: str, what: str, seed: int) -> None:
    """However many turns after its beginning; each time all is quiet when it is out."""
    async with tier_on(kind, seed, blocks=5000) as kit:
        await kit.tier.store(names("a", 12), list(range(12)))

        async def go() -> None:
            if what == "store":
                await kit.tier.store(names(f"s{turns}-", 12), list(range(20, 32)))
                return
            async with kit.tier.lookup(names("a", 12)) as hit:
                if what == "load":
                    await kit.tier.load(hit, list(range(40, 52)))
                else:
                    async for _ in kit.tier.loading(hit, list(range(40, 52))):
                        pass

        for turns in range(400):
            task = asyncio.ensure_future(go())
            for _ in range(turns):
                await asyncio.sleep(0)
            if task.done():
                break
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            found = kit.tier.statistics()
            assert (found.blocks_leased, found.places_pending, found.places_pinned) == (0, 0, 0)
            assert found.copies == 0
        assert await kit.get(names("a", 12), range(40, 52)) == 12, "the hit rate is what it was"


@both
@pytest.mark.parametrize("what", ["load", "store", "all is there"])
@pytest.mark.asyncio
async def test_cancelled_before_its_task_ran_nothing_is_left(kind: str, what: str, seed: int) -> None:
    """A call begins with the call: who makes a task of it and cancels that at once has begun."""
    async with tier_on(kind, seed) as kit:
        before = kit.content(range(12))
        await kit.tier.store(names("a", 12), list(range(12)))
        async with kit.tier.lookup(names("a", 12)) as hit:
            if what == "load":
                call = kit.tier.load(hit, list(range(40, 52)))
            else:
                keys = names("a" if what == "all is there" else "b", 12)
                call = kit.tier.store(keys, list(range(20, 32)))
            task = asyncio.ensure_future(call)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            found = kit.tier.statistics()
            assert (found.blocks_leased, found.places_pending, found.copies) == (0, 0, 0)
        assert await kit.get(names("a", 12), range(20, 32)) == 12
        assert kit.holds(range(20, 32), before)


@both
@pytest.mark.asyncio
async def test_steps_that_nobody_took_are_left_once_they_are_quiet(kind: str, seed: int) -> None:
    async with tier_on(kind, seed) as kit:
        await kit.tier.store(names("a", 12), list(range(12)))
        async with kit.tier.lookup(names("a", 12)) as hit:
            with pytest.raises(LookupError, match="the caller's own"):
                async with aclosing(kit.tier.loading(hit, list(range(40, 52)))):
                    raise LookupError("the caller's own")
            found = kit.tier.statistics()
            assert (found.blocks_leased, found.copies) == (0, 0)
            async with aclosing(kit.tier.loading(hit, list(range(40, 52)))) as steps:
                assert await anext(steps) > 0
            assert kit.tier.statistics().blocks_leased == 0


@pytest.mark.asyncio
async def test_cancelled_copies_keep_their_blocks_until_they_are_quiet(seed: int) -> None:
    async with tier_on("mocked", seed, stepping=False) as kit:
        await _run(kit, kit.tier.store(names("a", 12), list(range(12))))
        task = asyncio.ensure_future(kit.get(names("a", 12), range(20, 32)))
        for _ in range(3):
            await asyncio.sleep(0)
        task.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        task.cancel()  # a second one is absorbed
        for _ in range(5):
            await asyncio.sleep(0)
        assert not task.done()
        assert kit.tier.statistics().blocks_leased > 0
        kit.device.run()
        with pytest.raises(asyncio.CancelledError):
            await _run(kit, task)
        assert kit.tier.statistics().blocks_leased == 0


@both
@pytest.mark.asyncio
async def test_one_that_gives_up_takes_nothing_from_those_that_joined(kind: str, seed: int) -> None:
    async with tier_on(kind, seed) as kit:
        before = kit.content(range(12))
        await kit.tier.store(names("a", 12), list(range(12)))
        first = asyncio.ensure_future(kit.get(names("a", 12), range(20, 32)))
        await asyncio.sleep(0)
        second = asyncio.ensure_future(kit.get(names("a", 12), range(20, 32)))
        await asyncio.sleep(0)
        first.cancel()
        assert await second == 12
        assert kit.holds(range(20, 32), before)
        await asyncio.gather(first, return_exceptions=True)


@pytest.mark.asyncio
async def test_what_is_not_there_by_the_deadline_does_not_count(seed: int) -> None:
    async with tier_on("mocked", seed, stepping=False) as kit:
        await _run(kit, kit.tier.store(names("a", 12), list(range(12))))
        gate, held = kit.device.stream(), kit.device.stream()
        held.wait(gate.record())
        async with kit.tier.lookup(names("a", 12)) as hit:
            late = asyncio.ensure_future(kit.tier.load(hit, list(range(20, 32)), stream=held, deadline=0.01))
            await asyncio.sleep(0.03)
            assert not late.done(), "its copies are enqueued"
            assert await _run(kit, late) in (0, 4, 8, 12)
        assert kit.tier.statistics().blocks_leased == 0


# -- reset, closing


@both
@pytest.mark.asyncio
async def test_a_reset_during_loads_and_stores(kind: str, seed: int) -> None:
    async with tier_on(kind, seed) as kit:
        await kit.tier.store(names("a", 8), list(range(8)))
        async with kit.tier.lookup(names("a", 8)) as hit:
            loading = asyncio.ensure_future(kit.tier.load(hit, list(range(40, 48))))
            storing = asyncio.ensure_future(kit.tier.store(names("b", 8), list(range(8, 16))))
            dropped = await kit.tier.reset()
            assert dropped.drained
            assert (dropped.blocks, dropped.loads, dropped.stores) == (16, 1, 1)
            assert dropped.pinned == 8
            assert await loading == 0
            assert await storing == 0
            assert await kit.tier.load(hit, list(range(40, 48))) == 0, "what was found is worth nothing now"
            assert kit.tier.statistics().blocks_leased == 0
        assert await kit.found(["a0"]) == 0
        assert await kit.found(["b0"]) == 0
        assert await kit.tier.store(names("a", 32), list(range(32))) == 32


@both
@pytest.mark.asyncio
async def test_a_reset_waits_for_what_is_in_flight_alone(kind: str, seed: int) -> None:
    async with tier_on(kind, seed) as kit:
        await kit.tier.store(names("a", 4), list(range(4)))
        assert (await kit.tier.reset()).blocks == 4
        assert (await kit.tier.reset()).blocks == 0
        assert await kit.tier.store(names("a", 4), list(range(4))) == 4


@both
@pytest.mark.asyncio
async def test_closing_with_copies_on_their_way(kind: str, seed: int) -> None:
    async with tier_on(kind, seed) as kit:
        await kit.tier.store(names("a", 8), list(range(8)))
        hit = kit.tier.lookup(names("a", 8))
        await hit.__aenter__()
        loading = asyncio.ensure_future(kit.tier.load(hit, list(range(40, 48))))
        storing = asyncio.ensure_future(kit.tier.store(names("b", 8), list(range(8, 16))))
        await asyncio.sleep(0)
        await kit.tier.aclose()
        assert await loading in (0, 8)
        assert await storing in (0, 8)
        await hit.__aexit__(None, None, None)
        with pytest.raises(ClosedError):
            kit.tier.store(["c"], [0])
        with pytest.raises(ClosedError):
            await kit.found(["c"])


@pytest.mark.asyncio
async def test_closing_goes_on_when_it_is_cancelled(seed: int) -> None:
    async with tier_on("mocked", seed, stepping=False) as kit:
        storing = asyncio.ensure_future(kit.tier.store(names("b", 8), list(range(8, 16))))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        closing = asyncio.ensure_future(kit.tier.aclose())
        for _ in range(3):
            await asyncio.sleep(0)
            closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await _run(kit, closing)
        assert await storing in (0, 4, 8)
        kit.cache.close()


# -- bad input


@both
@pytest.mark.asyncio
async def test_calls_that_can_not_be_meant_change_nothing(kind: str, seed: int) -> None:
    async with tier_on(kind, seed) as kit:
        tier = kit.tier
        with pytest.raises(ValueError, match="twice"):
            tier.store(["a", "a"], [0, 1])
        with pytest.raises(ValueError, match="twice"):
            await kit.found(["a", "a"])
        with pytest.raises(InvalidBlocks, match="2"):
            tier.store(["a", "b"], [0])
        with pytest.raises(InvalidBlocks, match="no block 64"):
            tier.store(["a", "b"], [0, 64])
        with pytest.raises(InvalidBlocks, match="no block -1"):
            tier.store(["a", "b"], [0, -1])
        with pytest.raises(InvalidBlocks, match="twice"):
            tier.store(["a", "b"], [3, 3])
        with pytest.raises(TypeError, match="hashes"):
            tier.lookup("abc")
        with pytest.raises(TypeError, match="unhashable"):
            await kit.found([[1]])
        with pytest.raises(TypeError, match="None"):
            tier.lookup([None])
        with pytest.raises(TypeError, match="stream"):
            tier.store(["a"], [0], stream=5)
        with pytest.raises(ValueError, match="tokens"):
            tier.store(["a"], [0], tokens=[1])
        assert tier.statistics().places_used == 0
        await tier.store(names("a", 4), [0, 1, 2, 3])
        async with tier.lookup(names("a", 4)) as hit:
            with pytest.raises(InvalidBlocks, match="at most 4"):
                tier.load(hit, [0, 1, 2, 3, 4])
            with pytest.raises(InvalidBlocks, match="no block"):
                tier.load(hit, [0, 99])
            with pytest.raises(InvalidBlocks, match="twice"):
                tier.load(hit, [5, 5])
            with pytest.raises(ValueError, match="deadline"):
                tier.load(hit, [5], deadline=-1)
            assert await tier.load(hit, []) == 0
            assert tier.statistics().places_pinned == 4
        with pytest.raises(LocalProtocolError, match="not entered"):
            tier.load(hit, [0])
        with pytest.raises(LocalProtocolError, match="once"):
            await hit.__aenter__()
        assert await tier.store([], []) == 0
        assert await kit.found([]) == 0


@pytest.mark.asyncio
async def test_blocks_that_a_transfer_holds_are_refused() -> None:
    cache = await asyncio.to_thread(KVCache.allocate, LAYOUT)
    async with (
        TransferEngine(cache) as engine,
        HostTier(cache, 8 * BLOCK, engine=engine, settings=SMALL) as tier,
    ):
        await tier.store(["a"], [0])
        with pytest.raises(TransferAborted):
            await _beside(engine, tier)
    cache.close()


async def _beside(engine: TransferEngine, tier: HostTier) -> None:
    async with engine.offer("t", [1, 2], deadline=20) as offer:
        async with tier.lookup(["a"]) as hit:
            with pytest.raises(BusyError, match="read"):
                tier.load(hit, [1])
            assert await tier.load(hit, [3]) == 1
        assert await tier.store(["b"], [1]) == 1, "reading goes with reading"
        offer.cancel()


@pytest.mark.asyncio
async def test_capacities_that_can_not_be_had() -> None:
    cache = await asyncio.to_thread(KVCache.allocate, LAYOUT)
    with cache:
        with pytest.raises(CapacityError, match="one block"):
            HostTier(cache, BLOCK - 1)
        with pytest.raises(CapacityError, match="available"):
            async with HostTier(cache, "900TiB"):
                pass
        for wrong in ("much", "-5GiB", 0, "5 XB"):
            with pytest.raises(ValueError, match="capacity"):
                HostTier(cache, wrong)
        with pytest.raises(TypeError, match="capacity"):
            HostTier(cache, 5.5)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="policy"):
            HostTier(cache, "1MiB", "fifo")
        with pytest.raises(TypeError, match="cache"):
            HostTier(LAYOUT, "1MiB")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="checksums"):
            HostTier(cache, "1MiB", checksums=2)
        with pytest.raises(ValueError, match="window_bytes"):
            TierSettings(window_bytes=0)
        tier = HostTier(cache, "1MiB", settings=SMALL)
        async with tier:
            with pytest.raises(ClosedError, match="once"):
                await tier.__aenter__()
            with pytest.raises(BusyError):
                cache.close()
        await tier.aclose()


@pytest.mark.asyncio
async def test_memory_that_runs_out_later_leaves_a_smaller_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    from aiokv.offload import pool

    made = 0

    class Scarce:
        @staticmethod
        def allocate(nbytes: int) -> object:
            nonlocal made
            made += 1
            if made > 2:
                raise CapacityError("no more")
            return allocate(nbytes)

    allocate = pool.HostBuffer.allocate
    monkeypatch.setattr(pool, "HostBuffer", Scarce)
    cache = await asyncio.to_thread(KVCache.allocate, LAYOUT)
    with cache:
        async with HostTier(cache, 64 * BLOCK, settings=SMALL) as tier:
            with pytest.raises(CapacityError, match="no more"):
                await tier.grown()
            assert tier.statistics().places == 32
            assert await tier.store(names("a", 40), list(range(40))) == 32


@pytest.mark.asyncio
async def test_the_pool_is_used_while_it_grows() -> None:
    cache = await asyncio.to_thread(KVCache.allocate, LAYOUT)
    with cache:
        async with HostTier(cache, 64 * BLOCK, settings=SMALL) as tier:
            assert tier.statistics().places >= 16
            assert await tier.store(names("a", 4), list(range(4))) == 4
        async with HostTier(cache, 2000 * BLOCK, settings=SMALL) as tier:
            pass  # closed while it grows


# -- what else there is


@both
@pytest.mark.asyncio
async def test_events_tell_what_is_there(kind: str, seed: int) -> None:
    async with tier_on(kind, seed, blocks=8) as kit:
        events = kit.tier.events()
        tokens = list(range(24))
        await kit.tier.store(names("a", 6), list(range(6)), parent="root", tokens=tokens)
        await kit.tier.store(names("b", 4), list(range(4)))
        await kit.tier.reset()
        await kit.tier.aclose()
        heard = [event async for event in events]
        stored = [event for event in heard if isinstance(event, BlocksStored)]
        assert [hash_ for event in stored for hash_ in event.hashes] == names("a", 6) + names("b", 4)
        assert stored[0].parent == "root"
        assert sum((event.tokens or () for event in stored), ()) == tuple(tokens)
        assert {event.block_size for event in stored} == {4}
        there: set[object] = set()
        for event in heard:
            match event:
                case BlocksStored():
                    there |= set(event.hashes)
                case BlocksRemoved():
                    there -= set(event.hashes)
        assert not there


@pytest.mark.asyncio
async def test_a_reader_that_is_slow_is_told_what_it_lost(seed: int) -> None:
    few = TierSettings(segment_bytes=16 * BLOCK, part_bytes=BLOCK, events=4)
    async with tier_on("host", seed, settings=few) as kit:
        events = kit.tier.events()
        await kit.tier.store(names("a", 20), list(range(20)))
        heard: list[TierEvent] = []
        async for event in events:
            heard.append(event)
            if len(heard) == 5:
                break
        assert heard[0] == BlocksLost(16)
        await events.aclose()  # type: ignore[attr-defined]


@pytest.mark.asyncio
async def test_what_is_denied_is_not_kept(seed: int) -> None:
    async with tier_on("host", seed, admission=SecondSight()) as kit:
        assert await kit.tier.store(names("a", 6), list(range(6))) == 0
        found = kit.tier.statistics()
        assert (found.refused_blocks, found.places_used, found.blocks_leased) == (6, 0, 0)
        assert await kit.tier.store(names("a", 6), list(range(6))) == 6


@pytest.mark.asyncio
async def test_loading_is_worth_it_where_it_is_sooner(seed: int) -> None:
    async with tier_on("host", seed) as kit:
        assert kit.tier.worth_loading(1000, prefill_rate=1.0)
        assert not kit.tier.worth_loading(1000, prefill_rate=1e12)
        await kit.tier.store(names("a", 20), list(range(20)))
        await kit.get(names("a", 20), range(30, 50))
        assert kit.tier.statistics().load_rate > 0
        assert kit.tier.worth_loading(1000, prefill_rate=1.0)
        with pytest.raises(ValueError, match="positive"):
            kit.tier.worth_loading(0, 5)


@pytest.mark.asyncio
async def test_an_idle_tier_has_nothing_on_the_loop(seed: int) -> None:
    async with tier_on("host", seed) as kit:
        await kit.tier.store(names("a", 20), list(range(20)))
        traffic = kit.tier._opened()
        assert traffic._poller.pending == 0
        assert traffic._submissions._turn is None
        assert len(asyncio.all_tasks()) == 1


@pytest.mark.asyncio
async def test_streams_of_those_that_were_held_up_are_used_again(seed: int) -> None:
    async with tier_on("mocked", seed, stepping=False) as kit:
        copies = kit.tier._opened().copies
        made = []
        for number in range(5):
            storing = kit.tier.store(names(f"{number}-", 2), [2 * number, 2 * number + 1])
            made.append(next(iter(copies.batches)).stream)
            assert await _run(kit, storing) == 2
        assert len(set(map(id, made))) == 1
        gate, busy = kit.device.stream(), kit.device.stream()
        busy.wait(gate.record())
        given_up = asyncio.ensure_future(kit.tier.store(["x"], [20], stream=busy))
        await asyncio.sleep(0)
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await _run(kit, given_up)
        assert await _run(kit, kit.tier.store(["y"], [21])) == 1


@pytest.mark.asyncio
async def test_what_was_not_held_up_tells_the_rate() -> None:
    device = PlayedDevice(50.0)
    cache = await asyncio.to_thread(KVCache.allocate, LAYOUT, device=device)
    async with HostTier(cache, 8 * BLOCK) as tier:
        busy = device.stream()
        busy.free_at = time.monotonic_ns() + 20_000_000  # type: ignore[attr-defined]
        device._default = busy  # type: ignore[assignment]
        assert await tier.store(["held"], [0]) == 1
        assert tier.statistics().store_rate == 0
        assert await tier.store(["free"], [1]) == 1
        assert tier.statistics().store_rate > 0
    cache.close()
