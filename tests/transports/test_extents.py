from __future__ import annotations

import numpy as np

from aiokv.proto.layout import CacheLayout
from aiokv.proto.placement import Placement
from aiokv.proto.plan import GroupBlocks, Side, plan_copy
from aiokv.transports import extents
from aiokv.transports.extents import Extents

LAYOUT = CacheLayout.attention(layers=3, blocks=64, block_size=4, heads=2, head_size=8, dtype="float16")


def test_what_is_remembered_is_what_a_copy_gives(seed: int) -> None:
    rng = np.random.default_rng(seed)
    known = Extents()
    for _ in range(5):  # plans that come and go, whose sections may get each other's identity
        sides = [
            Side(LAYOUT, Placement.dense(LAYOUT), (GroupBlocks(0, rng.permutation(64)[:40]),))
            for _ in range(2)
        ]
        plan = plan_copy(*sides, first_token=3, tokens=150, heads=(0, 2))
        for layer in plan.layers:
            for number, copy in enumerate(plan.copies(layer)):
                for chunk in plan.chunks(layer, 700):
                    if chunk.copy == number:
                        for found, wanted in zip(
                            known.of(copy, chunk.lo, chunk.hi), copy.extents(chunk.lo, chunk.hi), strict=True
                        ):
                            np.testing.assert_array_equal(found, wanted)
        assert len(known._known) <= extents._REMEMBERED
