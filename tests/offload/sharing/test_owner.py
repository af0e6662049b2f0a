"""Where a pool is met: its socket, who may come there, and what is said that mustn't be."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from aiokv.device.cache import KVCache
from aiokv.errors import BusyError, CapacityError, ClosedError, DeviceError, PeerLostError, Refused
from aiokv.offload.sharing import door, line, owner
from aiokv.offload.sharing.form import GroupForm
from aiokv.offload.sharing.messages import (
    MOST_FRAME,
    Attach,
    Clear,
    Find,
    Keep,
    Kept,
    Mapped,
    Refusal,
    Release,
    Spoilt,
    Welcome,
    Written,
    frame,
    from_owner,
)
from aiokv.offload.sharing.owner import HostPool
from aiokv.offload.tier import HostTier
from aiokv.testing.cancelling import MANNERS, Cancelling, Manner
from aiokv.testing.tiers import BLOCK, LAYOUT, SMALL, names, tier_on

FORM = (GroupForm(3, BLOCK // 3, "bsthd", False),)
HELLO = Attach(1, b"d" * 16, FORM)


@asynccontextmanager
async def stranger(path: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        yield reader, writer
    finally:
        writer.close()
        await reader.read()


async def hear(reader: asyncio.StreamReader) -> object:
    size = int.from_bytes(await reader.readexactly(4), "big")
    return from_owner(await reader.readexactly(size))


@pytest.mark.asyncio
async def test_a_socket_for_its_own_user_that_goes_with_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    before = os.umask(0)
    try:
        async with HostPool(path, "1MiB") as pool:
            assert path.stat().st_mode & 0o777 == 0o600
            with pytest.raises(BusyError, match="already"):
                async with HostPool(path, "1MiB"):
                    pass
            assert repr(pool) == f"<HostPool open at {path}, 0 tiers>"
            assert pool.statistics().pool_bytes == 0, "no memory is taken before anybody comes"
    finally:
        os.umask(before)
    assert not path.exists()
    with pytest.raises(ClosedError):
        await pool.__aenter__()
    await pool.aclose()


@pytest.mark.asyncio
async def test_what_was_left_behind_is_replaced_and_what_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    async with HostPool(path, "1MiB") as pool:
        # Another's by now: it is not this one's to take away.
        path.rename(tmp_path / "moved")
        path.write_text("another's")
        assert pool.path == str(path)
    assert path.read_text() == "another's"
    with pytest.raises(ValueError, match="left alone"):
        async with HostPool(path, "1MiB"):
            pass
    with pytest.raises(DeviceError, match="no pool can listen"):
        async with HostPool(tmp_path / "none" / "pool", "1MiB"):
            pass


@pytest.mark.asyncio
async def test_what_can_not_be_meant(tmp_path: Path) -> None:
    for path, says in (("", "1 to 107"), ("x" * 108, "1 to 107"), ("a\0b", "1 to 107")):
        with pytest.raises(ValueError, match=says):
            HostPool(path, "1MiB")
    for bad in (5, b"x"):
        with pytest.raises(TypeError):
            HostPool(bad, "1MiB")  # type: ignore[arg-type]
    for capacity in (0, -1, "much"):
        with pytest.raises(ValueError, match="capacity"):
            HostPool("pool", capacity)
    with pytest.raises(ValueError, match="policy"):
        HostPool("pool", "1MiB", "mru")
    with pytest.raises(TypeError, match="admission"):
        HostPool("pool", "1MiB", admission=5)  # type: ignore[arg-type]
    with pytest.raises(CapacityError, match="are available"):
        async with HostPool(tmp_path / "pool", 1 << 60):
            pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("manner", MANNERS)
@pytest.mark.one_loop
@pytest.mark.asyncio
async def test_cancelled_at_each_await_of_coming_and_going(tmp_path: Path, manner: Manner) -> None:
    """Of the owner and of a tier: no socket, memory or descriptor is left."""
    path = tmp_path / "pool"
    cache = await asyncio.to_thread(KVCache.allocate, LAYOUT)

    async def owner_alone() -> None:
        async with HostPool(path, 32 * BLOCK):
            pass

    async def tier_alone() -> None:
        async with HostTier(cache, pool=path, settings=SMALL) as tier:
            await tier.grown()

    async def each_await(work: Callable[[], Coroutine[object, object, None]]) -> AsyncIterator[None]:
        for at in itertools.count(1):
            cancelling = Cancelling(at, manner)
            await asyncio.wait([asyncio.create_task(cancelling(work()))])
            yield
            if not cancelling.hit:
                break

    async for _ in each_await(owner_alone):
        async with asyncio.timeout(20):
            while path.exists():  # noqa: ASYNC110 - it is taken away off the loop
                await asyncio.sleep(0)
    async with HostPool(path, 32 * BLOCK, segment_bytes=16 * BLOCK) as pool:
        async for _ in each_await(tier_alone):
            async with asyncio.timeout(20):
                while pool.statistics().guests:  # noqa: ASYNC110 - another task's doing
                    await asyncio.sleep(0)
        assert pool.statistics().guests_lost == 0
    cache.close()


@pytest.mark.asyncio
async def test_nobody_there(tmp_path: Path, seed: int) -> None:
    with pytest.raises(PeerLostError, match=r"no pool answers at .*python -m aiokv pool"):
        async with tier_on("host", seed, pool=str(tmp_path / "pool")):
            pass


@pytest.mark.asyncio
async def test_who_can_not_be_watched_or_is_another_is_refused(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with HostPool(tmp_path / "pool", "1MiB") as pool:
        monkeypatch.setattr(door, "_SO_PEERPIDFD", 9999)  # as before Linux 6.5
        async with tier_on("host", seed, pool=pool.path) as kit:
            assert await kit.tier.store(names("a", 2), [0, 1]) == 2
        monkeypatch.delattr(os, "pidfd_open")  # as before Linux 5.3
        with pytest.raises(Refused, match="can't be watched"):
            async with tier_on("host", seed, pool=pool.path):
                pass
        monkeypatch.undo()
        monkeypatch.setattr(owner, "same_user", lambda _: False)
        with pytest.raises(Refused, match="another user's"):
            async with tier_on("host", seed, pool=pool.path):
                pass
        monkeypatch.undo()
        monkeypatch.setattr(door, "same_user", lambda _: False)
        with pytest.raises(Refused, match="another user's"):
            async with tier_on("host", seed, pool=pool.path):
                pass
        monkeypatch.undo()
        monkeypatch.setattr(owner, "_MOST_GUESTS", 0)
        with pytest.raises(Refused, match="0 tiers share"):
            async with tier_on("host", seed, pool=pool.path):
                pass
        await asyncio.sleep(0)
        assert pool.statistics().guests == 0


@pytest.mark.asyncio
async def test_memory_that_runs_out_leaves_a_smaller_pool(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = owner.shared

    def shared(nbytes: int):  # type: ignore[no-untyped-def]
        if pool._segments:
            raise CapacityError("the test has no more")
        return made(nbytes)

    monkeypatch.setattr(owner, "shared", shared)
    cache = await asyncio.to_thread(KVCache.allocate, LAYOUT)
    async with HostPool(tmp_path / "pool", 32 * BLOCK, segment_bytes=16 * BLOCK) as pool:
        for _ in range(2):
            async with HostTier(cache, pool=pool.path) as tier:
                with pytest.raises(CapacityError, match="no more than 16 places: the test has no more"):
                    await tier.grown()
                assert await tier.store(names("a", 20), list(range(20))) == 16
                assert (tier.statistics().places, tier.statistics().places_wanted) == (16, 32)
    cache.close()


NONSENSE = [
    b"\0\0\0\1\xc1",
    b"\0\0\0\0",
    (MOST_FRAME + 1).to_bytes(4, "big"),
    b"\xff" * 64,
    frame(Clear(1)),  # before it attaches
    frame(HELLO) + frame(HELLO),
    frame(HELLO) + frame(Release([0])),
    frame(HELLO) + frame(Written(1, [3], True)),
    frame(HELLO) + frame(Spoilt(1, [2**40])),
    frame(HELLO) + frame(Mapped(10**6)),
    frame(HELLO) + frame(Find(1, [b"a", b"a"])),
    frame(HELLO) + frame(Keep(1, [b"a", b"a"], None)),
    frame(HELLO) + frame(Welcome(1, 1, FORM, 1)),  # type: ignore[arg-type]
    frame(HELLO) + b"\0\0\0\6\x93\2\1\x91\xa1a",
    frame(HELLO) + frame(Find(1, [b"x" * 2000])),
]


@pytest.mark.parametrize("nonsense", range(len(NONSENSE)))
@pytest.mark.one_loop
@pytest.mark.asyncio
async def test_nonsense_ends_its_own_connection_alone(tmp_path: Path, nonsense: int, seed: int) -> None:
    async with (
        HostPool(tmp_path / "pool", 32 * BLOCK) as pool,
        tier_on("host", seed, pool=pool.path) as kit,
    ):
        await kit.tier.store(names("a", 4), list(range(4)))
        async with stranger(pool.path) as (reader, writer):
            writer.write(NONSENSE[nonsense])
            async with asyncio.timeout(20):
                while not reader.at_eof():
                    await reader.read(1000)
        assert await kit.get(names("a", 4), range(10, 14)) == 4
        # What it held is its process's, which is this one.
        assert pool.statistics().places_pending == 0


@pytest.mark.one_loop
@pytest.mark.asyncio
async def test_random_bytes(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    async with (
        HostPool(tmp_path / "pool", 128 * BLOCK) as pool,
        tier_on("host", seed, pool=pool.path) as kit,
    ):
        await kit.tier.store(names("a", 4), list(range(4)))
        for _ in range(60):
            async with stranger(pool.path) as (_, writer):
                body = bytearray(frame(draw.choice([HELLO, Find(1, [b"a"]), Keep(2, [b"b"], None)])))
                for _ in range(draw.randint(1, 4)):
                    body[draw.randrange(4, len(body))] = draw.randrange(256)
                writer.write(frame(HELLO) * draw.randint(0, 1) + bytes(body))
                writer.write_eof()
        assert await kit.get(names("a", 4), range(10, 14)) == 4


@pytest.mark.asyncio
async def test_who_does_not_read_is_given_up(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line, "_FULL", 1000)
    async with HostPool(tmp_path / "pool", 32 * BLOCK) as pool, stranger(pool.path) as (reader, writer):
        writer.write(frame(HELLO))
        assert isinstance(await hear(reader), Welcome)
        (desk,) = pool._desks
        sock = desk._line._sock
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        asked = [b"%d" % index for index in range(500)]
        # Nothing more of it is read while it doesn't read; then all is answered, in order.
        for number in range(300):
            writer.write(frame(Keep(number, asked, None)))
        async with asyncio.timeout(20):
            while not desk._line._paused:  # noqa: ASYNC110 - it says nothing
                await asyncio.sleep(0)
            for number in range(300):
                answer = await hear(reader)
                while not isinstance(answer, Kept):
                    answer = await hear(reader)
                assert (answer.id, answer.refused) == (number, 500)
        assert not desk._line._paused
        monkeypatch.setattr(line, "_TOO_FULL", 10000)
        for _ in range(3000):
            desk.say(Refusal("refused", "x" * 1000))
        async with asyncio.timeout(20):
            while not desk._line.closed:  # noqa: ASYNC110 - it says nothing
                await asyncio.sleep(0)


def test_a_process_is_watched_by_its_descriptor() -> None:
    one, other = socket.socketpair(socket.AF_UNIX)
    with one, other:
        assert door.same_user(one)
        os.close(door.watched(one))
