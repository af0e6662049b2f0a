"""How long is waited for something, and what a process that stood still makes of it."""

from __future__ import annotations

import asyncio

import pytest

from aiokv.testing.virtual import VirtualLoop
from aiokv.transports.patience import Patience


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
