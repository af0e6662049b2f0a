"""A pool shared by real processes, that are stopped and killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest

import aiokv
from aiokv.errors import PeerLostError
from aiokv.offload.sharing import guest
from aiokv.offload.sharing.owner import HostPool
from aiokv.testing import sharers
from aiokv.testing.sharers import PATIENCE_S, Child, children
from aiokv.testing.tiers import BLOCK, names, tier_on
from aiokv.testing.tierusers import Users

#: What the children do is the same under both.
pytestmark = pytest.mark.one_loop


@pytest.fixture(scope="module")
def parent() -> Iterator[subprocess.Popen[bytes]]:
    """Begins the others; all end with it."""
    with sharers.parent() as process:
        yield process


async def until(what: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not what():  # noqa: ASYNC110 - another process's doing
            await asyncio.sleep(0.002)


@pytest.mark.asyncio
async def test_processes_find_each_others_blocks(parent: subprocess.Popen[bytes], tmp_path: Path) -> None:
    async with (
        HostPool(tmp_path / "pool", 40 * BLOCK, segment_bytes=16 * BLOCK) as pool,
        children(parent, tmp_path) as begin,
        tier_on("host", 1, pool=pool.path) as kit,
    ):
        one, other = await begin(), await begin()
        for child in (one, other):
            await child("enter", path=pool.path)
        assert await one("store", keys=names("a", 20), blocks=list(range(20))) == 20
        assert await other("load", keys=names("a", 20), blocks=list(range(30, 50))) == 20
        assert await kit.get(names("a", 20), range(5, 25)) == 20
        Users(kit, 1).check(names("a", 20), range(5, 25))
        # Both the same at a time: it is there once, and both are told that it is kept.
        for child in (one, other):
            child.order("store", keys=names("b", 20), blocks=list(range(20)))
        for child in (one, other):
            assert json.loads(await child.reader.readline()) == 20
        assert pool.statistics().places_used == 40
        # All at once, in a pool that is too small for all of it.
        for child in (one, other):
            child.order("work", requests=80)
        loaded = [json.loads(await child.reader.readline()) for child in (one, other)]
        assert min(loaded) > 0
        for child in (one, other):
            await child("leave")
        await until(lambda: pool.statistics().guests == 1)
        assert pool.statistics().places_pinned == 0


@pytest.mark.asyncio
async def test_who_is_killed_gives_back_what_it_held_and_nobody_saw_half_of_it(
    parent: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    async with (
        HostPool(tmp_path / "pool", 24 * BLOCK, segment_bytes=16 * BLOCK) as pool,
        children(parent, tmp_path) as begin,
        tier_on("host", 1, pool=pool.path) as kit,
    ):
        users = Users(kit, 1)
        users.write(names("a", 8), range(8))
        await kit.tier.store(names("a", 8), list(range(8)))
        child = await begin()
        await child("enter", path=pool.path, kind="mocked", stepping=False)
        await child("begin_store", keys=names("b", 10), blocks=list(range(10)))
        assert await child("hold", keys=names("a", 8)) == 8
        await until(lambda: pool.statistics().places_pending == 10)
        assert await kit.found(names("b", 10)) == 0
        # Stopped, it may have copies in flight: what it holds is its own.
        child.signal(signal.SIGSTOP)
        users.write(names("c", 16), range(16))
        assert await kit.tier.store(names("c", 16), list(range(16))) == 6
        waiting = asyncio.ensure_future(kit.tier.store(names("b", 4), list(range(4))))
        await until(lambda: pool.statistics().waiting == 1)
        assert await kit.found(names("b", 10)) == 0
        child.signal(signal.SIGKILL)
        assert await waiting == 4, "it is this one's to store by then"
        await until(lambda: (found := pool.statistics()).guests == 1 and not found.guests_lost)
        found = pool.statistics()
        assert (found.places_pinned, found.places_pending) == (0, 0)
        assert await kit.found(names("b", 10)) == 4
        assert await kit.tier.store(names("c", 24), list(range(24))) == 24, "all of it can be had again"


@pytest.mark.asyncio
async def test_a_connection_that_ends_gives_back_nothing_while_its_process_is_there(
    parent: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    async with (
        HostPool(tmp_path / "pool", 24 * BLOCK, segment_bytes=16 * BLOCK) as pool,
        children(parent, tmp_path) as begin,
    ):
        child = await begin()
        await child("enter", path=pool.path, kind="mocked", stepping=False)
        await child("begin_store", keys=names("b", 10), blocks=list(range(10)))
        await until(lambda: pool.statistics().places_pending == 10)
        (desk,) = pool._desks
        desk._line._end("cut by the test")
        found = pool.statistics()
        assert (found.guests, found.guests_lost, found.places_pending) == (0, 1, 10)
        async with asyncio.timeout(PATIENCE_S):
            while await child("attached"):
                pass
        assert pool.statistics().places_pending == 10
        child.signal(signal.SIGKILL)
        await until(lambda: pool.statistics().guests_lost == 0)
        assert pool.statistics().places_used == 0


@pytest.mark.asyncio
async def test_an_owner_that_is_killed_means_misses(parent: subprocess.Popen[bytes], tmp_path: Path) -> None:
    path = str(tmp_path / "pool")
    async with children(parent, tmp_path) as begin:
        owner, worker = await begin(), await begin()
        await owner("own", path=path, blocks=24)
        async with tier_on("host", 1, pool=path) as kit:
            users = Users(kit, 1)
            await worker("enter", path=path)
            await worker("store", keys=names("a", 12), blocks=list(range(12)))
            async with kit.tier.lookup(names("a", 12)) as hit:
                assert len(hit) == 12
                worker.order("work", requests=60)
                working = asyncio.ensure_future(_work(users))
                loading = asyncio.ensure_future(kit.tier.load(hit, list(range(40, 52))))
                await asyncio.sleep(0.02)
                owner.signal(signal.SIGKILL)
                loaded = await loading
                users.check(names("a", 12)[:loaded], range(40, 40 + loaded))
                await working  # never a wrong byte, and no wait
                json.loads(await worker.reader.readline())
                await until(lambda: not kit.tier.statistics().attached)
            assert await kit.found(names("a", 12)) == 0
            assert await worker("load", keys=names("a", 12), blocks=list(range(12))) == 0
            assert await worker("store", keys=names("z", 4), blocks=list(range(4))) == 0
            with pytest.raises(PeerLostError, match="no pool answers"):
                async with tier_on("host", 1, pool=path):
                    pass
        # What it left behind is no obstacle.
        async with HostPool(path, 24 * BLOCK) as pool, tier_on("host", 1, pool=pool.path) as kit:
            assert await kit.tier.store(names("a", 4), list(range(4))) == 4
        assert not Path(path).exists()


@pytest.mark.asyncio
async def test_an_owner_that_is_stopped_is_not_waited_for_for_ever(
    parent: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guest, "_SILENCE_S", 0.05)
    monkeypatch.setattr(guest, "_PATIENCE_S", 0.05)
    path = str(tmp_path / "pool")
    async with children(parent, tmp_path) as begin:
        owner = await begin()
        await owner("own", path=path, blocks=24)
        async with tier_on("host", 1, pool=path) as kit:
            assert await kit.tier.store(names("a", 4), list(range(4))) == 4
            owner.signal(signal.SIGSTOP)
            async with asyncio.timeout(PATIENCE_S):
                assert await kit.tier.store(names("b", 4), list(range(4))) == 0
                assert await kit.found(names("a", 4)) == 0
            assert not kit.tier.statistics().attached
            with pytest.raises(PeerLostError, match="doesn't answer"):
                async with tier_on("host", 1, pool=path):
                    pass


async def _work(users: Users) -> None:
    users.free = list(range(40))
    for _ in range(60):
        await users.request()


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.asyncio
async def test_killed_stopped_and_begun_again_at_random(
    parent: subprocess.Popen[bytes], tmp_path: Path, seed: int
) -> None:
    """Workers and owners: never a wrong byte, which would end a worker, and never a wait without end."""
    draw = random.Random(seed)
    path = str(tmp_path / "pool")
    async with children(parent, tmp_path) as begin:
        working: dict[Child, asyncio.Future[bytes]] = {}
        loaded = 0

        async def own() -> Child:
            made = await begin()
            assert await made("own", path=path, blocks=draw.choice([20, 40, 70])) is None
            return made

        async def end(child: Child) -> None:
            child.signal(signal.SIGKILL)
            with contextlib.suppress(ConnectionError):
                await (working.pop(child) if child in working else child.reader.readline())

        def work(child: Child) -> None:
            child.order("work", requests=draw.choice([20, 100, 400]))
            working[child] = asyncio.ensure_future(child.reader.readline())

        owner = await own()
        for _ in range(150):
            while len(working) < 4:
                worker = await begin()
                assert await worker("enter", path=path, kind=draw.choice(["host", "mocked"])) is None
                work(worker)
            await asyncio.sleep(draw.random() * 0.1)
            chosen = draw.choice([owner, *working, *working])
            if draw.random() < 0.4:
                chosen.signal(signal.SIGSTOP)
                await asyncio.sleep(draw.random() * 0.1)
            if draw.random() < 0.4:
                await end(chosen)
                if chosen is owner:
                    owner = await own()
            chosen.signal(signal.SIGCONT)
            for worker, line in list(working.items()):
                if line.done():
                    loaded += json.loads(line.result())
                    work(worker)
        for child in list(working):
            await end(child)
        assert loaded > 0


@pytest.mark.may_block("starts a process")
@pytest.mark.asyncio
async def test_the_command_serves_until_it_is_told_to_end(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    arguments = [sys.executable, "-m", "aiokv", "pool", str(path), "--capacity", f"{24 * BLOCK}"]
    arguments += ["--metrics", "127.0.0.1:0"]
    process = await asyncio.create_subprocess_exec(
        *arguments, stdout=-1, env={**os.environ, "PYTHONPATH": str(Path(aiokv.__file__).parents[1])}
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(PATIENCE_S):
            _, _, page = (await process.stdout.readline()).decode().strip().partition("metrics: ")
            assert await process.stdout.readline() == f"pool: {path}\n".encode()
            assert path.stat().st_mode & 0o777 == 0o600
            async with tier_on("host", 1, pool=str(path)) as kit:
                assert await kit.tier.store(names("a", 4), list(range(4))) == 4
                with urlopen(page, timeout=PATIENCE_S) as answer:  # noqa: ASYNC210 - of another process
                    assert 'aiokv_pool_places{state="used"} 4.0' in answer.read().decode()
                process.send_signal(signal.SIGTERM)
                assert await process.wait() == 0
                assert await kit.found(names("a", 4)) == 0
            await process.stdout.read()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert not path.exists()
