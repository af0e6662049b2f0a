"""A pool of the host that processes share which have a GPU: its memory is pinned in each of them."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from aiokv.device.cuda import CudaDevice, PinnedBuffer
from aiokv.offload.sharing.owner import HostPool
from aiokv.testing import sharers
from aiokv.testing.sharers import children
from aiokv.testing.tiers import BLOCK, names, tier_on
from aiokv.testing.tierusers import Users, disturbed

pytestmark = [pytest.mark.gpu, pytest.mark.may_block("it looks into the GPU's memory, and waits")]

#: About so many of an H200's cycles make a second.
SECOND = 1_800_000_000


@pytest.fixture(scope="module")
def parent() -> Iterator[subprocess.Popen[bytes]]:
    """Begins the others; it has no GPU, so that they can have it."""
    with sharers.parent() as process:
        yield process


@pytest.mark.timeout(120)
@pytest.mark.asyncio
async def test_processes_find_each_others_blocks(
    device: CudaDevice, parent: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    async with (
        HostPool(tmp_path / "pool", 40 * BLOCK, segment_bytes=16 * BLOCK) as pool,
        children(parent, tmp_path) as begin,
        tier_on(device, 1, pool=pool.path, checksums=1.0) as kit,
    ):
        assert all(isinstance(segment.buffer, PinnedBuffer) for segment in kit.tier._pool.segments)
        child, other = await begin(), await begin()
        await child("enter", path=pool.path, kind="cuda")
        await other("enter", path=pool.path)  # it has no GPU, and may have the same blocks
        assert await child("store", keys=names("a", 20), blocks=list(range(20))) == 20
        assert await kit.get(names("a", 20), range(5, 25)) == 20
        Users(kit, 1).check(names("a", 20), range(5, 25))
        assert await other("load", keys=names("a", 20), blocks=list(range(20))) == 20
        Users(kit, 1).write(names("b", 20), range(20))
        torch.cuda.synchronize()
        assert await kit.tier.store(names("b", 20), list(range(20))) == 20
        assert await child("load", keys=names("b", 20), blocks=list(range(20))) == 20
        assert kit.tier.statistics().checksum_failures == 0
        await child("leave")


@pytest.mark.timeout(180)
@pytest.mark.asyncio
async def test_never_a_wrong_byte(
    device: CudaDevice, parent: subprocess.Popen[bytes], tmp_path: Path, seed: int
) -> None:
    async with (
        HostPool(tmp_path / "pool", 40 * BLOCK, segment_bytes=16 * BLOCK) as pool,
        children(parent, tmp_path) as begin,
        tier_on(device, 1, pool=pool.path, checksums=0.2) as kit,
    ):
        working = [await begin() for _ in range(2)]
        for child in working:
            await child("enter", path=pool.path, kind="cuda")
            child.order("work", requests=60)
        users = await disturbed(kit, seed, 60)
        loaded = [json.loads(await child.reader.readline()) for child in working]
        assert min(users.loaded, *loaded) > 0
        for child in working:
            await child("leave")


@pytest.mark.timeout(120)
@pytest.mark.asyncio
async def test_who_is_killed_in_mid_copy_writes_nothing_after_its_places_are_others(
    device: CudaDevice, parent: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    """A process that is gone has no copy in flight: the driver ends them before the process is over."""
    async with (
        HostPool(tmp_path / "pool", 16 * BLOCK, segment_bytes=16 * BLOCK) as pool,
        children(parent, tmp_path) as begin,
        tier_on(device, 1, pool=pool.path) as kit,
    ):
        users = Users(kit, 1)
        for turn in range(4):
            child = await begin()
            await child("enter", path=pool.path, kind="cuda")
            keys = names(f"b{turn}-", 16)
            await child("begin_store", keys=keys, blocks=list(range(16)), cycles=SECOND // 4)
            async with asyncio.timeout(30):
                while pool.statistics().places_pending < 16:  # noqa: ASYNC110 - another process's doing
                    await asyncio.sleep(0.002)
            assert await kit.found(keys) == 0
            child.signal(signal.SIGKILL)
            mine = names(f"c{turn}-", 16)
            users.write(mine, range(16))
            torch.cuda.synchronize()
            async with asyncio.timeout(30):  # until the process is gone all places are its own
                while await kit.tier.store(mine, list(range(16))) < 16:  # noqa: ASYNC110
                    await asyncio.sleep(0.002)
            await asyncio.sleep(0.5)
            assert await kit.found(keys) == 0
            assert await kit.get(mine, range(20, 36)) == 16
            users.check(mine, range(20, 36))
            assert pool.statistics().places_pending == 0


@pytest.mark.timeout(120)
@pytest.mark.asyncio
async def test_an_owner_that_is_killed_in_mid_copy_means_misses(
    device: CudaDevice, parent: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    """Its memory stays until the copies are over, and is unpinned; the next owner's is pinned."""
    path = str(tmp_path / "pool")
    async with children(parent, tmp_path) as begin:
        owner = await begin()
        await owner("own", path=path, blocks=24)
        async with tier_on(device, 1, pool=path) as kit:
            users = Users(kit, 1)
            users.write(names("a", 12), range(12))
            torch.cuda.synchronize()
            assert await kit.tier.store(names("a", 12), list(range(12))) == 12
            stream = torch.cuda.Stream()
            async with kit.tier.lookup(names("a", 12)) as hit:
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(SECOND // 4)
                loading = asyncio.ensure_future(kit.tier.load(hit, list(range(40, 52)), stream=stream))
                await asyncio.sleep(0.05)
                owner.signal(signal.SIGKILL)
                loaded = await loading
                users.check(names("a", 12)[:loaded], range(40, 40 + loaded))
            assert await kit.found(names("a", 12)) == 0
            later = await begin()
            await later("own", path=path, blocks=24)
            async with asyncio.timeout(60):
                while not await kit.tier.store(names("z", 12), list(range(12))):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            assert await kit.get(names("z", 12), range(20, 32)) == 12
            assert all(
                torch.equal(*pair)
                for pair in zip(kit.content(range(12)), kit.content(range(20, 32)), strict=True)
            )
            assert all(isinstance(segment.buffer, PinnedBuffer) for segment in kit.tier._pool.segments)
