"""Checksums: drawn, hashed in slices, and closed without anybody waiting for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from aiokv.offload import checksums
from aiokv.offload.checksums import Checksums, hasher

MEMORY = {place: bytearray(bytes([place]) * (700 << 10)) for place in range(4)}


def views(place: int) -> Iterator[memoryview]:
    view = memoryview(MEMORY[place])
    yield view[: 300 << 10]
    yield view[300 << 10 :]


async def until(done: list[bool], count: int) -> None:
    while len(done) < count:  # noqa: ASYNC110
        await asyncio.sleep(0)


@pytest.mark.parametrize("make", [checksums._Crc, hasher()])
@pytest.mark.asyncio
async def test_a_change_is_found(make) -> None:  # type: ignore[no-untyped-def]
    looked: list[bool] = []
    sums = Checksums(asyncio.get_running_loop(), 1.0, views, make=make)
    sums.make("a", 0, looked.append)
    await until(looked, 1)
    assert sums.known(["b", "a"])
    sums.check("a", 0, looked.append)
    await until(looked, 2)
    MEMORY[0][-1] ^= 1
    sums.check("a", 0, looked.append)
    await until(looked, 3)
    MEMORY[0][-1] ^= 1
    assert looked == [True, True, False]
    assert (sums.checked, sums.failed) == (2, 1)
    sums.check("unknown", 1, looked.append)
    assert looked[-1], "what has no checksum is taken as it is"
    sums.forget(["a"])
    assert not sums.known(["a"])
    sums.close()


@pytest.mark.asyncio
async def test_closing_leaves_nobody_waiting() -> None:
    sums = Checksums(asyncio.get_running_loop(), 1.0, views)
    told: list[bool] = []
    sums.make("a", 0, told.append)
    await until(told, 1)
    sums.make("b", 1, told.append)
    sums.check("a", 0, told.append)
    sums.close()
    sums.close()
    assert told == [True, False, True]
    assert len(sums) == 1


def test_the_share_is_drawn() -> None:
    loop = asyncio.new_event_loop()
    places = list(range(1000))
    assert Checksums(loop, 0.0, views).sampled(places) == []
    assert Checksums(loop, 1.0, views).sampled(places) == places
    assert 50 < len(Checksums(loop, 0.1, views, seed=1).sampled(places)) < 150
    loop.close()
