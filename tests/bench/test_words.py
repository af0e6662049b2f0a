"""The device whose events are words in shared memory, and the ways to wait for them."""

from __future__ import annotations

import asyncio
import time

import pytest

from aiokv.bench.child import child
from aiokv.bench.waiters import Polling, waiters
from aiokv.bench.words import KEPT, RING, Words


def test_an_event_is_done_when_its_word_has_come_so_far() -> None:
    with Words() as words:
        stream = words.streams[2]
        first, second = stream.launch(10), stream.launch(10)
        assert not first.done()
        words.words[8 + 2] = 1
        assert first.done()
        assert not second.done()


@pytest.mark.asyncio
@pytest.mark.may_block(reason="starting a process blocks")
@pytest.mark.parametrize("way", ["aiokv", "sleep(0)", "sleep(1 ms)"])
async def test_each_way_sees_all_operations_after_they_ended(way: str) -> None:
    with Words() as words:
        async with child("aiokv.bench.words:operate", fds=[words.fd], fd=words.fd):
            waiter = waiters()[way]
            seen: list[tuple[int, int]] = []

            async def wait(number: int) -> None:
                for duration in (200_000, 100_000, 0):
                    event = words.streams[number % 2].launch(duration)
                    await waiter.wait(event, words.streams[number % 2], expected_ns=duration)
                    assert event.done()
                    seen.append((event.ended_ns, time.monotonic_ns()))

            await asyncio.gather(*map(wait, range(5)))
            waiter.close()
    assert len(seen) == 15
    assert all(0 < ended <= now for ended, now in seen)


@pytest.mark.asyncio
async def test_polling_ends_when_nothing_is_waited_for() -> None:
    class Done:
        def done(self) -> bool:
            return True

    polling = Polling(0)
    await polling.wait(Done(), "stream")
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        await asyncio.wait(others)
    polling.close()


def test_more_can_be_on_its_way_than_is_ever_pending() -> None:
    assert KEPT > 1000
    assert RING > 1000
