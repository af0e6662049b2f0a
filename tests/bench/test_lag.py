"""A held loop is late for each millisecond that it is held."""

from __future__ import annotations

import asyncio
import time

import pytest

from aiokv.bench.lag import Ticker


def hold(seconds: float) -> None:
    """Let the loop come to nothing, for at least so long."""
    time.sleep(seconds)


@pytest.mark.asyncio
@pytest.mark.may_block(reason="the test is about a loop that is held")
async def test_a_long_hold_counts_for_each_of_its_milliseconds() -> None:
    ticker = Ticker()
    ticker.start()
    await asyncio.sleep(0.005)
    hold(0.02)
    await asyncio.sleep(0.005)
    found = ticker.stop()
    ticker.close()
    assert found == sorted(found)
    assert found[0] >= 0
    # Held for 20 ms, it was late by 19, 18, ... of them.
    assert sum(late > 1_000_000 for late in found) >= 17


@pytest.mark.asyncio
@pytest.mark.may_block(reason="the test is about a loop that is held")
async def test_what_is_due_when_it_stops_counts() -> None:
    ticker = Ticker()
    ticker.start()
    hold(0.004)
    assert max(ticker.stop()) >= 2_000_000
    ticker.close()
