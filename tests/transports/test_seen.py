from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiokv.proto.layout import CacheLayout
from aiokv.proto.placement import Placement
from aiokv.proto.plan import Chunk, GroupBlocks, Side, plan_copy
from aiokv.transports.seen import Ranges, Seen


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 8)), max_size=40))
def test_ranges_take_every_number_once(ranges: list[tuple[int, int]]) -> None:
    mine, seen = Ranges(), set()
    for lo, count in ranges:
        numbers = set(range(lo, lo + count))
        assert mine.add(lo, lo + count) == (not numbers & seen)
        if not numbers & seen:
            seen |= numbers


def test_ranges_in_order_stay_one() -> None:
    ranges = Ranges()
    assert all(ranges.add(lo, lo + 3) for lo in range(0, 3000, 3))
    assert ranges._los == [0]
    assert ranges._his == [3000]


def test_what_came_in_any_chunk_does_not_come_again() -> None:
    layout = CacheLayout.attention(
        layers=3, blocks=8, block_size=4, heads=2, head_size=8, dtype="float16", axes="bthd", split=True
    )
    side = Side(layout, Placement.dense(layout), (GroupBlocks(0, np.array([5, 2, 7])),))
    plan = plan_copy(side, side, first_token=0, tokens=12, heads=(0, 2))
    (whole,) = plan.chunks((0, 1), 1 << 20)
    keys, values, *_ = plan.chunks((1,), plan.nbytes(1) // 2)
    (last,) = plan.chunks((2,), 1 << 20)
    seen = Seen(plan)
    seen.add(values)
    with pytest.raises(ValueError, match="came before"):
        seen.add(whole)
    seen = Seen(plan)
    seen.add(whole)
    seen.add(last)
    for again in (keys, values, whole, last, last._replace(layer=1), last._replace(layer=1, layers=2)):
        with pytest.raises(ValueError, match="Chunk"):
            seen.add(again)
    with pytest.raises(ValueError, match="no layer 3"):
        seen.add(Chunk(3, 1, 0, 0, 1, 1))
