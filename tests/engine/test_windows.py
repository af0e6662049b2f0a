"""Sliding-window groups list the blocks that they still have."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from aiokv.engine.arguments import Window
from aiokv.errors import InvalidBlocks
from aiokv.proto.layout import CacheLayout, GroupLayout
from aiokv.testing.pairs import Engines, check_idle, kv_of, virtual_time

#: Full attention in layers 0 and 2, a window of 8 tokens in layer 1.
MIXED = CacheLayout(
    groups=(
        GroupLayout(
            layers=(0, 2), blocks=16, block_size=4, heads=(0, 2), total_heads=2, head_size=8, dtype="uint8"
        ),
        GroupLayout(
            layers=(1,),
            blocks=16,
            block_size=4,
            heads=(0, 2),
            total_heads=2,
            head_size=8,
            dtype="uint8",
            kind="window",
            window=8,
        ),
    )
)


@virtual_time
@pytest.mark.parametrize("start", [0, 8, 12])
async def test_a_window_is_all_that_is_moved_of_its_group(start: int) -> None:
    async with Engines() as engines:
        a, b = await engines.add("a", MIXED), await engines.add("b", MIXED)
        full, tail = [1, 2, 3, 4, 5], [7, 9]  # 20 tokens, the window holds 12..19
        before = kv_of(b.cache, [0, 4, 6], group=1)
        target = Window(start, list(range(8, 8 + (20 - start) // 4)))

        async def produce() -> None:
            async with a.offer("t", [full, Window(12, tail)], tokens=20):
                pass

        async def consume() -> None:
            async with b.fetch("t", [full, target], sources=[a.address]) as fetch:
                await fetch.wait()

        await asyncio.gather(produce(), consume())
        assert np.array_equal(kv_of(b.cache, full), kv_of(a.cache, full))
        last = target.ids[-2:]
        assert np.array_equal(kv_of(b.cache, last, group=1), kv_of(a.cache, tail, group=1))
        assert np.array_equal(kv_of(b.cache, [0, 4, 6], group=1), before)
        check_idle(a, b)


@virtual_time
async def test_a_window_that_lacks_a_token_is_refused() -> None:
    async with Engines() as engines:
        a, b = await engines.add("a", MIXED), await engines.add("b", MIXED)
        full = [1, 2, 3, 4, 5]
        offer = a.offer("t", [full, Window(16, [7])], tokens=20)
        fetch = b.fetch("t", [full, full], sources=[a.address])
        offer.start()
        fetch.start()
        outcomes = await asyncio.gather(offer.wait(), fetch.wait(), return_exceptions=True)
        assert any(isinstance(each, InvalidBlocks) and "token 12 is needed" in str(each) for each in outcomes)
        check_idle(a, b)


@virtual_time
async def test_a_window_begins_with_a_block() -> None:
    async with Engines() as engines:
        a = await engines.add("a", MIXED)
        with pytest.raises(InvalidBlocks, match="Window.start=10 is no multiple of the block size 4"):
            a.offer("t", [[1, 2, 3], Window(10, [7])])
        with pytest.raises(TypeError, match=r"Window\.start"):
            a.offer("t", [[1, 2, 3], Window(1.5, [7])])  # type: ignore[list-item,arg-type]
        check_idle(a)
