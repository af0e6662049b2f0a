"""Plans of scattered copies, made as engines make theirs: from layouts and block lists."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from aiokv.proto.layout import CacheLayout
from aiokv.proto.placement import Placement
from aiokv.proto.plan import CopyPlan, GroupBlocks, Side, plan_copy

__all__ = ["fragments_layout", "plan_of", "side_of"]

_BLOCK = 16  # tokens


def fragments_layout(blocks: int, nbytes: int) -> CacheLayout:
    """A cache of one layer whose blocks are contiguous and of so many bytes, a multiple of 32."""
    return CacheLayout.latent(
        layers=1, blocks=blocks, block_size=_BLOCK, latent_size=nbytes // (2 * _BLOCK), dtype="bfloat16"
    )


def side_of(blocks: int, nbytes: int, ids: NDArray[np.int64]) -> Side:
    """One end of a copy: blocks of such a cache."""
    layout = fragments_layout(blocks, nbytes)
    return Side(layout=layout, placement=Placement.dense(layout), blocks=(GroupBlocks(0, ids),))


def plan_of(src: Side, dst: Side) -> CopyPlan:
    """The copy of all blocks of one to those of the other."""
    return plan_copy(src, dst, first_token=0, tokens=len(src.blocks[0].ids) * _BLOCK, heads=(0, 1))
