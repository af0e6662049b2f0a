"""Durations in buckets."""

from __future__ import annotations

import pytest

from aiokv.engine.histogram import BOUNDS, Histogram


def test_bounds_grow() -> None:
    assert list(BOUNDS) == sorted(set(BOUNDS))
    assert BOUNDS[0] == pytest.approx(1e-5)
    assert BOUNDS[-1] == 600


@pytest.mark.parametrize(
    ("ns", "bucket"),
    [(0, 0), (10_000, 0), (10_001, 1), (25_000, 1), (10**9, BOUNDS.index(1.0)), (10**12, len(BOUNDS))],
)
def test_each_duration_counts_up_to_its_bound(ns: int, bucket: int) -> None:
    histogram = Histogram()
    histogram.add(ns)
    found = histogram.snapshot()
    assert [index for index, count in enumerate(found.counts) if count] == [bucket]
    assert (found.count, found.total) == (1, ns / 1e9)


def test_a_snapshot_stays_as_it_is() -> None:
    histogram = Histogram()
    before = histogram.snapshot()
    histogram.add(1)
    assert (before.count, histogram.snapshot().count) == (0, 1)
