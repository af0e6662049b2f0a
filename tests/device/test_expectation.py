"""When to look: decisions on numbers alone."""

from __future__ import annotations

import random

import pytest

from aiokv.device.expectation import KEPT, Expectations, interval_ns

MS = 1_000_000
#: A look takes place this much after it was due, and every so often while polling.
LATE, TURN = 10_000, 3_000


def run(expectations: Expectations, expected: int, taken: int, stream: object = "s") -> tuple[int, int]:
    """One operation: how much later than done it is seen, and for how long it is polled."""
    slept, pace = expectations.outlook(stream, expected)
    first = look = slept + LATE
    pending = 0
    while look < taken:
        pending, look = look, look + (TURN if pace == 0 else interval_ns(look - first, pace))
    if pending:
        expectations.polled(stream, expected, (pending + look) // 2 - first)
    else:
        expectations.overslept(stream, expected)
    return look - taken, look - first


def test_knows_nothing_of_what_nobody_expects() -> None:
    expectations = Expectations()
    assert expectations.outlook("s", 0) == (0, 0)
    expectations.polled("s", 0, 5)
    expectations.overslept("s", 0)
    assert expectations.outlook("s", 0) == (0, 0)


def test_sleeps_almost_as_long_as_expected_and_not_for_trifles() -> None:
    expectations = Expectations()
    assert 0.9 * MS < expectations.outlook("s", MS).sleep_ns < MS
    assert expectations.outlook("s", 20_000).sleep_ns == 0


@pytest.mark.parametrize("factor", [0.2, 0.5, 0.9, 1.0, 1.1, 2.0, 5.0])
def test_finds_the_true_duration_from_a_wrong_guess(factor: float) -> None:
    expectations = Expectations()
    for _ in range(60):
        run(expectations, MS, int(factor * MS))
    seen = [run(expectations, MS, int(factor * MS)) for _ in range(50)]
    assert sum(lag for lag, _ in seen) / 50 < 10_000
    assert max(lag for lag, _ in seen) < 30_000
    assert sum(polled for _, polled in seen) / 50 < 40_000


def test_looks_each_turn_only_where_that_is_soon_over(seed: int) -> None:
    rng = random.Random(seed)
    expectations = Expectations()
    for _ in range(60):
        run(expectations, MS, MS, "steady")
        run(expectations, MS, int(MS * rng.uniform(0.5, 1.5)), "wavering")
    assert expectations.outlook("steady", MS).pace_ns == 0
    assert 30_000 <= expectations.outlook("wavering", MS).pace_ns <= 300_000
    assert expectations.outlook("steady", 50 * MS).pace_ns > 0, "nothing is known of that yet"


def test_does_not_grow_by_its_own_oversleeping() -> None:
    """The trap: fed with the time of the look, the guess would stay at where it looked."""
    expectations = Expectations()
    lags = [run(expectations, 10 * MS, 7 * MS)[0] for _ in range(40)]
    assert lags[0] > 2.9 * MS
    assert max(lags[20:]) < 0.2 * MS


def test_one_that_was_held_up_does_not_make_the_next_late(seed: int) -> None:
    expectations = Expectations()
    for _ in range(50):
        run(expectations, MS, MS)
    run(expectations, MS, 2000 * MS)
    assert run(expectations, MS, MS)[0] < 60_000


@pytest.mark.parametrize("variation", [0.1, 0.3])
def test_lag_is_a_small_part_of_what_durations_vary_by(seed: int, variation: float) -> None:
    rng = random.Random(seed)
    expectations = Expectations()
    seen = [
        run(expectations, 10 * MS, int(10 * MS * (1 + rng.uniform(-variation, variation))))
        for _ in range(600)
    ][100:]
    assert sum(lag for lag, _ in seen) / len(seen) < variation / 5 * 10 * MS
    assert sorted(lag for lag, _ in seen)[len(seen) // 2] < variation / 8 * 10 * MS


def test_streams_and_sizes_are_learnt_apart() -> None:
    expectations = Expectations()
    for _ in range(60):
        run(expectations, MS, 3 * MS, "slow")
        run(expectations, MS, MS // 2, "fast")
        run(expectations, 50 * MS, 50 * MS, "slow")
    assert expectations.outlook("slow", MS).sleep_ns == pytest.approx(3 * MS, rel=0.1)
    assert expectations.outlook("fast", MS).sleep_ns == pytest.approx(MS / 2, rel=0.1)
    assert expectations.outlook("slow", 50 * MS).sleep_ns == pytest.approx(50 * MS, rel=0.1)


def test_keeps_a_bounded_number_of_streams() -> None:
    expectations = Expectations()
    for stream in range(3 * KEPT):
        run(expectations, MS, 2 * MS, stream)
    assert len(expectations._corrections) == KEPT


def test_intervals_grow_with_the_time_waited() -> None:
    waited = [0, 50_000, 200_000, MS, 5 * MS, 50 * MS, 500 * MS, 5000 * MS]
    intervals = [interval_ns(w) for w in waited]
    assert intervals == sorted(intervals)
    assert intervals[0] == 30_000
    assert interval_ns(50 * MS) == MS
    assert interval_ns(0, 77_000) == interval_ns(MS, 77_000) == 77_000
    assert interval_ns(2 * MS, 77_000) == interval_ns(2 * MS)
    assert interval_ns(500 * MS) == 5 * MS
    assert interval_ns(3600 * 1000 * MS) == 10 * MS
