"""A small tier on memory of the host, or of a mocked device that steps itself."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import torch

from aiokv.device.autostep import Autostep
from aiokv.device.cache import Allocator, KVCache
from aiokv.device.mocked import MockedDevice
from aiokv.offload.settings import TierSettings
from aiokv.offload.tier import HostTier
from aiokv.proto.layout import CacheLayout, GroupLayout

__all__ = ["BLOCK", "BLOCKS", "GROUPS", "LAYOUT", "SMALL", "Kit", "names", "tier_on"]

BLOCKS = 64
LAYOUT = CacheLayout.attention(
    layers=3, blocks=BLOCKS, block_size=4, heads=2, head_size=8, dtype="float32", model=b"test"
)
#: Bytes of one block of all layers.
BLOCK = 3 * 2 * 4 * 2 * 8 * 4
#: Two groups whose block sizes differ.
GROUPS = CacheLayout(
    groups=(
        GroupLayout(layers=(0, 2), blocks=BLOCKS, block_size=8, heads=(0, 2), total_heads=2, head_size=8,
                    dtype="float16"),
        GroupLayout(layers=(1,), blocks=2 * BLOCKS, block_size=4, heads=(0, 1), total_heads=1, head_size=16,
                    dtype="float16", axes="btd", kind="mla"),
    ),
    model=b"test",
)  # fmt: skip
SMALL = TierSettings(segment_bytes=16 * BLOCK, part_bytes=4 * BLOCK, chunk_bytes=2 * BLOCK, drain_s=5)


class Kit:
    """A cache, a tier, and what its blocks hold."""

    def __init__(self, cache: KVCache, tier: HostTier, stepping: Autostep | None) -> None:
        self.cache = cache
        self.tier = tier
        self.stepping = stepping

    @property
    def device(self) -> MockedDevice:
        """The mocked device."""
        assert isinstance(self.cache.device, MockedDevice)
        return self.cache.device

    def planes(self) -> list[torch.Tensor]:
        """All tensors of the cache."""
        found = []
        for layer in range(self.cache.layout.layers):
            made = self.cache.tensor(layer)
            found += [*made] if isinstance(made, tuple) else [made]
        return found

    def content(self, blocks: Sequence[int]) -> list[torch.Tensor]:
        """A copy of what blocks hold."""
        axis = self.cache.layout.groups[0].axes.index("b")
        return [
            plane.index_select(axis, torch.tensor(list(blocks), device=plane.device)).cpu()
            for plane in self.planes()
        ]

    def fill(self, seed: int = 0) -> None:
        """Other content in every block."""
        made = torch.Generator().manual_seed(seed)
        for plane in self.planes():
            plane.copy_(torch.randn(plane.shape, generator=made))

    def holds(self, blocks: Sequence[int], content: list[torch.Tensor]) -> bool:
        """Whether blocks hold what ``content`` gave."""
        return all(torch.equal(one, other) for one, other in zip(self.content(blocks), content, strict=True))

    async def get(self, hashes: Sequence[str], blocks: Sequence[int], **more: Any) -> int:  # noqa: ANN401
        """Look up and load what is found."""
        async with self.tier.lookup(hashes) as hit:
            return await self.tier.load(hit, list(blocks)[: len(hit)], **more)

    async def found(self, hashes: Sequence[str]) -> int:
        """How long the prefix is that is there."""
        async with self.tier.lookup(hashes) as hit:
            return len(hit)


@asynccontextmanager
async def tier_on(
    kind: str | Allocator,
    seed: int,
    *,
    blocks: int = 32,
    layout: CacheLayout = LAYOUT,
    settings: TierSettings = SMALL,
    stepping: bool = True,
    pool: str | None = None,
    **more: Any,  # noqa: ANN401
) -> AsyncIterator[Kit]:
    """An entered tier with room for so many blocks; on leaving nothing is held, and no hazard was met.

    Args:
        kind: ``"host"``, ``"mocked"``, or a device.
        seed: Of the mocked device, and of its steps.
        blocks: Of the tier.
        layout: Of the cache.
        settings: Of the tier; parts and chunks are small by default.
        stepping: The mocked device steps by itself.
        pool: Where a pool is that it shares; ``blocks`` means nothing then.
        more: For the tier.
    """
    device = MockedDevice(seed) if kind == "mocked" else None if isinstance(kind, str) else kind
    cache = await asyncio.to_thread(KVCache.allocate, layout, device=device)
    steps = None
    if isinstance(device, MockedDevice) and stepping:
        steps = device.autostep(asyncio.get_running_loop(), random.Random(seed), 20e-6)  # noqa: S311
    if pool is not None:
        more["pool"] = pool
    else:
        more["capacity"] = blocks * HostTier(cache, 1 << 40)._pool.place_bytes
    try:
        async with HostTier(cache, settings=settings, **more) as tier:
            await tier.grown()
            kit = Kit(cache, tier, steps)
            kit.fill()
            yield kit
        found = tier.statistics()
        assert (found.blocks_leased, found.copies, found.places_pending, found.places_pinned) == (0, 0, 0, 0)
        if isinstance(device, MockedDevice):
            assert device.hazards == []
    finally:
        if steps is not None:
            steps.close()
        if isinstance(device, MockedDevice):
            device.run()
        await asyncio.to_thread(cache.close)


def names(name: str, count: int, start: int = 0) -> list[str]:
    """Hashes to use."""
    return [f"{name}{index}" for index in range(start, start + count)]
