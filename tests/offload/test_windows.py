"""Loads for groups with a sliding window, which leave out what comes before it."""

from __future__ import annotations

import asyncio
import random

import msgspec
import pytest
import torch

from aiokv.engine.arguments import Window
from aiokv.errors import BusyError, CapacityError, InvalidBlocks
from aiokv.offload.calls import NONE
from aiokv.proto.layout import CacheLayout, GroupLayout
from aiokv.testing.tiers import BLOCKS, Kit, names, tier_on

#: Blocks of a window of half the size of the others', which come behind; and a window alone.
MIXED = CacheLayout(
    groups=(
        GroupLayout(layers=(0, 2), blocks=2 * BLOCKS, block_size=4, heads=(0, 2), total_heads=2, head_size=8,
                    dtype="float16", kind="window", window=9),
        GroupLayout(layers=(1,), blocks=BLOCKS, block_size=8, heads=(0, 2), total_heads=2, head_size=8,
                    dtype="float16"),
    ),
    model=b"test",
)  # fmt: skip
ALONE = CacheLayout(groups=(msgspec.structs.replace(MIXED.groups[0], layers=(0, 1)),), model=b"test")

both = pytest.mark.parametrize("kind", ["host", "mocked"])


def blocks_of(kit: Kit, tokens: int, first: int = 0) -> list[list[int]]:
    """Blocks of all groups for so many tokens, from token ``first`` on."""
    return [
        list(range(first // group.block_size, (first + tokens) // group.block_size))
        for group in kit.cache.layout.groups
    ]


def planes(kit: Kit) -> list[torch.Tensor]:
    """What each layer holds, block by block."""
    found = [torch.Tensor()] * kit.cache.layout.layers
    for group in kit.cache.layout.groups:
        for layer in group.layers:
            made = kit.cache.tensor(layer)
            axis = group.axes.index("b")
            halves = made if isinstance(made, tuple) else (made,)
            found[layer] = torch.stack([half.movedim(axis, 0) for half in halves], 1).clone()
    return found


@both
@pytest.mark.asyncio
@pytest.mark.parametrize("layout", [MIXED, ALONE], ids=["mixed", "alone"])
async def test_what_is_left_out_stays_as_it_is(kind: str, seed: int, layout: CacheLayout) -> None:
    drawn = random.Random(seed)
    async with tier_on(kind, seed, layout=layout) as kit:
        size, count = kit.tier.block_size, 9
        stored = blocks_of(kit, count * size)
        before = planes(kit)
        assert await kit.tier.store(names("a", count), stored) == count
        for turn in range(20):
            kit.fill(turn + 1)
            wanted = drawn.randint(1, count)
            to = blocks_of(kit, wanted * size, 10 * size)
            starts = [
                drawn.randint(0, len(ids)) if group.window else 0
                for ids, group in zip(to, layout.groups, strict=True)
            ]
            given = [
                Window(start * group.block_size, ids[start:]) if group.window else ids
                for start, ids, group in zip(starts, to, layout.groups, strict=True)
            ]
            expected = planes(kit)
            for group, start, ids, source in zip(layout.groups, starts, to, stored, strict=True):
                for layer in group.layers:
                    expected[layer][ids[start:]] = before[layer][source[start : len(ids)]]
            loaded = kit.tier.statistics().bytes_loaded
            async with kit.tier.lookup(names("a", wanted)) as hit:
                assert await kit.tier.load(hit, given) == wanted
            for here, there in zip(planes(kit), expected, strict=True):
                assert torch.equal(here, there)
            assert kit.tier.statistics().bytes_loaded - loaded == sum(
                (len(ids) - start) * group.block_bytes * len(group.layers)
                for ids, start, group in zip(to, starts, layout.groups, strict=True)
            )


@pytest.mark.asyncio
async def test_the_same_is_joined_and_something_else_refused(seed: int) -> None:
    async with tier_on("mocked", seed, layout=MIXED, stepping=False) as kit:
        size = kit.tier.block_size
        storing = asyncio.ensure_future(kit.tier.store(names("a", 6), blocks_of(kit, 6 * size)))
        await _until(kit, storing)
        window, full = blocks_of(kit, 6 * size, 10 * size)
        for start in (4, 5, 12):
            given = [Window(4 * start, window[start:]), full]
            async with kit.tier.lookup(names("a", 6)) as hit:
                joined = kit.tier.statistics().joined_blocks
                loads = [asyncio.ensure_future(kit.tier.load(hit, given)) for _ in range(3)]
                await asyncio.sleep(0)
                assert kit.tier.statistics().joined_blocks - joined == 12
                other = [Window(4 * (start - 3), window[start - 3 :]), full]
                with pytest.raises(BusyError):
                    await kit.tier.load(hit, other)
                for load in loads:
                    await _until(kit, load)
                    assert load.result() == 6


async def _until(kit: Kit, task: asyncio.Future[int]) -> None:
    while not task.done():
        kit.device.step()
        await asyncio.sleep(0)


@pytest.mark.asyncio
async def test_what_can_not_be_meant(seed: int) -> None:
    async with tier_on("host", seed, layout=MIXED) as kit:
        size = kit.tier.block_size
        await kit.tier.store(names("a", 2), blocks_of(kit, 2 * size))
        async with kit.tier.lookup(names("a", 2)) as hit:
            for blocks, message in [
                ([[0, 1, 2, 3], Window(8, [1])], "list them all"),
                ([[NONE, NONE, 2, 3], [0, 1]], "leave out"),
                ([Window(8, [NONE, 3]), [0, 1]], "leave out"),
                ([Window(8, [2, 3, 4, 5]), [0, 1]], "as many each"),
                ([Window(4, [2, 3]), [0, 1]], "2 go together"),
                ([Window(2, [2, 3]), [0, 1]], "multiple"),
            ]:
                with pytest.raises(InvalidBlocks, match=message):
                    kit.tier.load(hit, blocks)
            with pytest.raises(CapacityError):
                kit.tier.load(hit, [Window(1 << 40, []), [0, 1]])
        with pytest.raises(InvalidBlocks, match="list them all"):
            kit.tier.store(names("b", 2), [Window(8, [2, 3]), [0, 1]])
