"""The host tier on a real GPU: what comes back, in which order, and that nothing is left."""

from __future__ import annotations

import asyncio

import pytest
import torch

from aiokv.device.cuda import CudaDevice, PinnedBuffer
from aiokv.device.cudacosts import PATHS, TYPICAL
from aiokv.testing.tiers import GROUPS, names, tier_on
from aiokv.testing.tierusers import disturbed

pytestmark = [pytest.mark.gpu, pytest.mark.may_block("it looks into the GPU's memory, and waits")]


@pytest.mark.parametrize("path", [None, *PATHS])
@pytest.mark.asyncio
async def test_what_is_stored_comes_back_whatever_the_way(
    device: CudaDevice, path: str | None, seed: int
) -> None:
    chosen = device if path is None else CudaDevice(0, costs=TYPICAL, path=path, staging_bytes=48 << 10)
    async with tier_on(chosen, seed, checksums=1.0) as kit:
        assert all(isinstance(segment.buffer, PinnedBuffer) for segment in kit.tier._pool.segments)
        blocks, to = list(range(3, 23)), list(range(40, 60))
        before = kit.content(blocks)
        assert await kit.tier.store(names("a", 20), blocks) == 20
        kit.fill(1)
        async with kit.tier.lookup(names("a", 25)) as hit:
            seen = [count async for count in kit.tier.loading(hit, to)]
        assert seen[-1] == 20
        assert kit.holds(to, before)
        assert kit.tier.statistics().checksum_failures == 0
    if path is not None:
        chosen.close()


@pytest.mark.asyncio
async def test_groups_whose_block_sizes_differ(device: CudaDevice, seed: int) -> None:
    async with tier_on(device, seed, layout=GROUPS) as kit:
        before = [plane.clone() for plane in kit.planes()]
        assert await kit.tier.store(names("a", 10), [list(range(10)), list(range(40, 60))]) == 10
        to = [list(range(30, 40)), list(range(20))]
        async with kit.tier.lookup(names("a", 10)) as hit:
            assert await kit.tier.load(hit, to) == 10
        assert torch.equal(kit.planes()[1][:20], before[1][40:60])
        assert torch.equal(kit.planes()[0][:, 30:40], before[0][:, :10])


@pytest.mark.asyncio
async def test_a_store_waits_for_the_kernel_that_writes_and_a_load_for_the_one_that_reads(
    device: CudaDevice, seed: int
) -> None:
    async with tier_on(device, seed) as kit:
        stream = torch.cuda.Stream()
        plane = kit.planes()[0]
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            plane[:, 5] = 7.0
        storing = kit.tier.store(["a"], [5], stream=stream)
        assert await storing == 1
        kit.fill(2)
        torch.cuda.synchronize()
        expected = plane[:, 6].clone()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            read = plane[:, 6].clone()
        async with kit.tier.lookup(["a"]) as hit:
            assert await kit.tier.load(hit, [6], stream=stream) == 1
        torch.cuda.synchronize()
        assert torch.equal(read, expected), "it was read before the load wrote it"
        assert bool((plane[:, 6] == 7.0).all())


@pytest.mark.asyncio
async def test_cancelled_at_many_moments_nothing_is_left(device: CudaDevice, seed: int) -> None:
    async with tier_on(device, seed, blocks=2000) as kit:
        await kit.tier.store(names("a", 12), list(range(12)))
        for turns in range(60):
            busy = torch.cuda.Stream()
            with torch.cuda.stream(busy):
                torch.cuda._sleep(1_000_000)
            task = asyncio.ensure_future(kit.get(names("a", 12), range(40, 52), stream=busy))
            other = asyncio.ensure_future(kit.tier.store(names(f"s{turns}-", 8), list(range(20, 28))))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            other.cancel()
            await asyncio.gather(task, other, return_exceptions=True)
            found = kit.tier.statistics()
            assert (found.blocks_leased, found.places_pending, found.places_pinned, found.copies) == (
                0,
                0,
                0,
                0,
            )
        assert await kit.get(names("a", 12), range(40, 52)) == 12


@pytest.mark.asyncio
async def test_never_a_wrong_byte(device: CudaDevice, seed: int) -> None:
    async with tier_on(device, seed, blocks=24, policy="arc", checksums=0.2) as kit:
        users = await disturbed(kit, seed, 120)
        assert users.loaded > 0
