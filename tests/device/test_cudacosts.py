"""The way of copying is chosen by what was measured."""

from __future__ import annotations

import pytest

from aiokv.device.cudacosts import DIRECTIONS, PATHS, TYPICAL, CopyCosts, Cost

ALL = set(PATHS)
GIB = 1 << 30


def test_costs_are_fitted_to_samples() -> None:
    samples = [
        (n, size, 5000 + 300.0 * n + size / 50) for n, size in ((256, 1 << 20), (32, 1 << 21), (4, 1 << 22))
    ]
    cost = Cost.fitted(samples)
    assert (cost.start, cost.fragment, cost.byte) == pytest.approx((5000, 300, 0.02), rel=1e-6)


def test_no_cost_is_below_nothing() -> None:
    cost = Cost.fitted([(1, 1 << 20, 1000.0), (2, 1 << 21, 4000.0), (4, 1 << 22, 9000.0)])
    assert min(cost.start, cost.fragment, cost.byte) >= 0
    assert max(cost.start, cost.fragment, cost.byte) > 0


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_typical_choices(direction: str) -> None:
    assert TYPICAL.best(direction, 2048, 1, 8 << 20, ALL) == "staged"
    assert TYPICAL.best(direction, 1, 1, 8 << 20, ALL) == "plain"
    assert TYPICAL.best(direction, 16, 1, 64 << 10, ALL) == "kernel"
    assert TYPICAL.best(direction, 2048, 1, 8 << 20, ALL - {"staged"}) == "kernel"
    # Where the host's memory is scattered, too, staging saves nothing.
    assert TYPICAL.best(direction, 2048, 2048, 8 << 20, ALL) == "kernel"


def test_time_of_multiprocessors_weighs_more() -> None:
    even = Cost(1000, 0, 0.02)
    costs = {"staged": even, "kernel": Cost(1000, 0, 0.019)}
    assert CopyCosts(costs, costs).best("to_host", 100, 1, 8 << 20, ALL) == "staged"
    assert CopyCosts(costs, costs, kernel_weight=1.0).best("to_host", 100, 1, 8 << 20, ALL) == "kernel"


def test_the_table_can_be_read() -> None:
    lines = str(TYPICAL).splitlines()
    assert len(lines) == 1 + len(DIRECTIONS) * len(PATHS)
    assert "GB/s" in lines[0]
