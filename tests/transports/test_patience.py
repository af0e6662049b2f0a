"""How long is waited for something, and what a process that stood still makes of it."""

from __future__ import annotations

import asyncio

import pytest

from aiokv.testing.virtual import VirtualLoop
from aiokv.transports.patience import Patience, ended_within


@pytest.fixture
def loop():
    made = VirtualLoop()
    yield made
    made.close()


def test_it_is_over_after_so_much_time(loop: VirtualLoop) -> None:
    async def main() -> None:
        over = asyncio.Event()
        began = loop.time()
        Patience(2.0, over.set)
        await over.wait()
        assert loop.time() - began == pytest.approx(2.0)

    loop.run_until_complete(main())


def test_nothing_is_called_once_it_was_cancelled(loop: VirtualLoop) -> None:
    async def main() -> None:
        over = asyncio.Event()
        Patience(2.0, over.set).cancel()
        await asyncio.sleep(10)
        assert not over.is_set()

    loop.run_until_complete(main())


def test_a_timer_that_comes_late_counts_anew(loop: VirtualLoop) -> None:
    async def main() -> None:
        over = asyncio.Event()
        patience = Patience(3.0, over.set)
        patience.cancel()
        patience._look(loop.time() - 1.5)
        assert not over.is_set()
        began = loop.time()
        await over.wait()
        assert loop.time() - began == pytest.approx(3.0)

    loop.run_until_complete(main())


def test_threads_that_do_not_end_are_left_alone(loop: VirtualLoop, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        ends, never, began = loop.create_future(), loop.create_future(), loop.time()
        loop.call_later(1.0, ends.set_result, None)
        assert await ended_within(2.0, {ends}, "one")
        assert await ended_within(2.0, set(), "none")
        assert loop.time() - began == pytest.approx(1.0)
        assert not await ended_within(2.0, {ends, never}, "a driver")
        assert loop.time() - began == pytest.approx(3.0)
        assert "a driver: 1 calls don't return" in caplog.text
        failed = loop.create_future()
        failed.set_exception(ValueError())
        assert await ended_within(2.0, {failed}, "one that failed")
        assert isinstance(failed.exception(), ValueError)

    loop.run_until_complete(main())
