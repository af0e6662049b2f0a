from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from aiokv.proto.layout import CacheLayout
from aiokv.proto.placement import Placement
from aiokv.proto.plan import GroupBlocks, Side, plan_copy
from aiokv.transports import extents
from aiokv.transports.extents import Extents, addresses

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
        buffers = [SimpleNamespace(address=1 << 40)]
        for limit in (700, 100_000):
            for chunk in plan.chunks(plan.layers, limit):
                copy, lo, hi = plan.copy(chunk), chunk.lo, chunk.hi
                src, lengths = known.sources(copy, lo, hi, addresses(copy.src, buffers))
                dst, again = known.targets(copy, lo, hi, addresses(copy.dst, buffers))
                wanted = [
                    np.concatenate(each) for each in list(zip(*copy.extents(lo, hi), strict=True))[1::2]
                ]
                sizes = np.concatenate([sizes for *_, sizes in copy.extents(lo, hi)])
                np.testing.assert_array_equal(src - (1 << 40), wanted[0])
                np.testing.assert_array_equal(dst - (1 << 40), wanted[1])
                np.testing.assert_array_equal(lengths, sizes)
                np.testing.assert_array_equal(again, sizes)
        assert len(known._known) <= extents._REMEMBERED
