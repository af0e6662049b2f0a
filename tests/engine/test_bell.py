"""The bell: wakes all who wait, and carries nothing."""

from __future__ import annotations

import asyncio

import pytest

from aiokv.engine.bell import Bell

pytestmark = pytest.mark.asyncio


async def waiters(bell: Bell, count: int) -> list[asyncio.Task[None]]:
    tasks = [asyncio.create_task(bell.wait()) for _ in range(count)]
    await asyncio.sleep(0)
    return tasks


async def test_all_who_wait_are_woken() -> None:
    bell = Bell()
    tasks = await waiters(bell, 3)
    bell.ring()
    await asyncio.gather(*tasks)


async def test_who_comes_after_the_ring_waits_for_the_next() -> None:
    bell = Bell()
    bell.ring()
    (task,) = await waiters(bell, 1)
    await asyncio.sleep(0)
    assert not task.done()
    bell.ring()
    await task


async def test_cancelling_one_leaves_the_others_waiting() -> None:
    bell = Bell()
    first, second, third = await waiters(bell, 3)
    second.cancel()
    await asyncio.wait([second])
    assert second.cancelled()
    assert not first.done()
    bell.ring()
    await asyncio.gather(first, third)


async def test_who_is_cancelled_in_the_turn_of_the_ring_takes_nothing_with_it() -> None:
    bell = Bell()
    first, second = await waiters(bell, 2)
    bell.ring()
    first.cancel()
    await asyncio.wait([first, second])
    assert first.cancelled()
    assert second.exception() is None
    bell.ring()


async def test_nobody_is_remembered() -> None:
    bell = Bell()
    tasks = await waiters(bell, 3)
    tasks[0].cancel()
    await asyncio.wait(tasks[:1])
    bell.ring()
    await asyncio.wait(tasks)
    assert not bell._waiters
