"""Rates: bytes over the time in which any were on their way, of late."""

from __future__ import annotations

import pytest

from aiokv.offload.rates import Rate

SECOND = 10**9


def test_what_overlaps_counts_once() -> None:
    rate = Rate()
    assert rate.value == 0
    rate.began(0)
    rate.began(0)
    rate.ended(SECOND // 2, 500)
    rate.ended(SECOND, 500)
    assert rate.value == pytest.approx(1000)


def test_idle_time_does_not_count_nor_what_failed() -> None:
    rate = Rate()
    for start in (0, 100 * SECOND):
        rate.began(start)
        rate.ended(start + SECOND // 10, 100)
    assert rate.value == pytest.approx(1000)
    rate.began(200 * SECOND)
    rate.ended(300 * SECOND, 0)
    assert rate.value == pytest.approx(1000)


def test_what_is_long_ago_is_forgotten() -> None:
    rate, now = Rate(), 0
    for speed in (1000, 10):
        for _ in range(20):
            rate.began(now)
            now += SECOND
            rate.ended(now, speed)
    assert rate.value < 20
