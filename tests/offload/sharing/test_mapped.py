"""Memory of a pool as a tier maps it, on a GPU that is played."""

from __future__ import annotations

import asyncio
import ctypes
import gc
from pathlib import Path

import numpy as np
import pytest

from aiokv.device.cache import KVCache
from aiokv.device.cuda import CudaDevice, PinnedBuffer
from aiokv.device.cudacosts import PATHS, TYPICAL
from aiokv.offload.sharing.owner import HostPool
from aiokv.offload.tier import HostTier
from aiokv.testing.fakecuda import FakeCuda
from aiokv.testing.tiers import BLOCK, LAYOUT, SMALL, names


def blocks_of(cache: KVCache, ids: range) -> list[bytes]:
    """What blocks hold, layer by layer."""
    (group,), (where,) = cache.layout.groups, cache.placement.groups
    half, found = group.block_bytes // 2, []
    for planes in where.layers:
        for s in range(2):
            base = cache.buffers[0].address + planes[0][1] + s * where.strides[1]
            found += [ctypes.string_at(base + block * where.strides[0], half) for block in ids]
    return found


@pytest.mark.one_loop
@pytest.mark.asyncio
async def test_a_gpu_pins_what_it_maps_and_copies_there(tmp_path: Path, seed: int) -> None:
    fake = FakeCuda()
    device = await asyncio.to_thread(
        lambda: CudaDevice(
            0, cuda=fake.libraries(), costs=TYPICAL, staging_bytes=1 << 16, offsets_bytes=1 << 16
        )
    )
    caches = [await asyncio.to_thread(KVCache.allocate, LAYOUT, device=device) for _ in range(2)]
    for at, cache in enumerate(caches):
        size = cache.buffers[0].nbytes
        ctypes.memmove(cache.buffers[0].address, np.random.default_rng(seed + at).bytes(size), size)
    before = blocks_of(caches[0], range(20))
    async with HostPool(tmp_path / "pool", 32 * BLOCK, segment_bytes=16 * BLOCK) as pool:
        async with (
            HostTier(caches[0], pool=pool.path, settings=SMALL) as one,
            HostTier(caches[1], pool=pool.path, settings=SMALL) as other,
        ):
            await one.grown()
            await other.grown()
            assert await one.store(names("a", 20), list(range(20))) == 20
            async with other.lookup(names("a", 20)) as hit:
                assert await other.load(hit, list(range(40, 60))) == 20
            assert blocks_of(caches[1], range(40, 60)) == before
            buffers = [segment.buffer for segment in other._pool.segments]
            assert all(isinstance(buffer, PinnedBuffer) for buffer in buffers)
            assert sum(device.moved.values()) == 40 * BLOCK
            found = other.statistics()
            assert sum(getattr(found, f"bytes_by_{path}") for path in PATHS) == 40 * BLOCK
        assert all(buffer.closed for buffer in buffers if isinstance(buffer, PinnedBuffer))
    for cache in caches:
        cache.close()
    gc.collect()
    await asyncio.to_thread(device.close)
