"""The tier at work on the host: fifty requests for one prefix, and when blocks are the caller's again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiokv
from aiokv.bench.offload.played import PlayedDevice
from aiokv.device.cache import Allocator, KVCache
from aiokv.offload.policies import Key, Lru
from aiokv.offload.tier import HostTier

__all__ = ["alone", "at_once", "lags", "layout_of", "opened"]


def layout_of(blocks: int, *, layers: int = 16) -> aiokv.CacheLayout:
    """Blocks of 16 tokens with 8 heads of 128 in bfloat16, as Llama-3-8B has them: 64 KiB a layer."""
    return aiokv.CacheLayout.attention(
        layers=layers, blocks=blocks, block_size=16, heads=8, head_size=128, dtype="bfloat16"
    )


@asynccontextmanager
async def opened(
    layout: aiokv.CacheLayout,
    device: Allocator | None,
    places: int,
    **more: Any,  # noqa: ANN401
) -> AsyncIterator[HostTier]:
    """A tier with room for so many blocks, on a cache of its own."""
    cache = await asyncio.to_thread(KVCache.allocate, layout, device=device)
    size = sum(group.block_bytes * len(group.layers) for group in layout.groups)
    try:
        async with HostTier(cache, places * size, **more) as tier:
            await tier.grown()
            yield tier
    finally:
        await asyncio.to_thread(cache.close)


async def _get(tier: HostTier, hashes: Sequence[Key], blocks: Sequence[int], began: int) -> float:
    async with tier.lookup(hashes) as hit:
        count = await tier.load(hit, blocks)
    if count != len(hashes):
        raise RuntimeError(f"{count} of {len(hashes)} blocks came")
    return (time.monotonic_ns() - began) / 1e9


async def alone(tier: HostTier, hashes: Sequence[Key], blocks: Sequence[int]) -> float:
    """Seconds of one request."""
    return await _get(tier, hashes, blocks, time.monotonic_ns())


async def at_once(tier: HostTier, hashes: Sequence[Key], blocks: Sequence[Sequence[int]]) -> float:
    """Seconds until the last of some requests has the prefix, each in the blocks that it names."""
    began = time.monotonic_ns()
    return max(await asyncio.gather(*(_get(tier, hashes, own, began) for own in blocks)))


class _Noting(Lru):
    """Notes when blocks that were stored can go: that is when those of the cache are free again."""

    def __init__(self) -> None:
        super().__init__()
        self.at = 0

    def idle(self, blocks: Sequence[int]) -> None:
        self.at = time.monotonic_ns()
        super().idle(blocks)


async def lags(count: int, step_s: float) -> tuple[list[float], list[float]]:
    """How long after the copy's event blocks were free, for some stores one after another.

    Args:
        count: Of stores.
        step_s: Of the design beside, which looks at the end of each step.

    Returns:
        Seconds; and those of a design that looks at its next step.
    """
    layout = layout_of(64, layers=4)
    device, policy = PlayedDevice(50.0), _Noting()
    ours, theirs = [], []
    async with opened(layout, device, 64, policy=policy) as tier:
        for number in range(count):
            blocks = list(range(16 + number % 17))
            await tier.store([(number, index) for index in blocks], blocks)
            ours.append(max(0, policy.at - device.over_at) / 1e9)
            theirs.append(step_s - device.over_at / 1e9 % step_s)
    return ours, theirs
