"""Medians, quartiles and ratios, and what a report makes of them."""

from __future__ import annotations

import json

import pytest

from aiokv.bench.figures import Spread, highest, lowest, over, quantile
from aiokv.bench.report import Goal, Report

GOALS = {"some.rate": Goal(0.85, "higher"), "some.lag": Goal(20, "lower"), "some.other": Goal(None, "higher")}


def report() -> Report:
    found = Report({"cores": 2})
    found.begin("some", GOALS)
    return found


def test_a_spread_is_the_median_and_the_quartiles() -> None:
    assert Spread.of([3, 1, 2, 5, 4]) == Spread(3, 2, 4, 5)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0, 1)


def test_there_is_no_spread_of_nothing() -> None:
    with pytest.raises(ValueError, match="no values"):
        quantile([], 0.5)


def test_ratios_are_taken_round_by_round() -> None:
    assert over([2.0, 6.0], [4.0, 3.0]) == [0.5, 2.0]


def test_the_lowest_of_several_cases_is_that_with_the_lowest_median() -> None:
    cases = {"small": [1.0, 9.0, 9.0], "large": [8.0, 8.0, 8.0]}
    assert lowest(cases) == [8.0, 8.0, 8.0]
    assert highest(cases) == [1.0, 9.0, 9.0]


@pytest.mark.parametrize(
    ("name", "values", "holds"),
    [
        ("some.rate", [0.9], True),
        ("some.rate", [0.85], True),
        ("some.rate", [0.8], False),
        ("some.lag", [19], True),
        ("some.lag", [21], False),
        ("some.other", [1], None),
    ],
)
def test_a_goal_holds_or_not(name: str, values: list[float], holds: bool | None) -> None:
    found = report()
    found.ratio(name, values)
    assert found.ratios[name].holds is holds


def test_a_figure_whose_spread_hides_the_answer_is_absent() -> None:
    found = report()
    found.ratio("some.rate", [0.4, 0.9, 1.2])
    assert "some.rate" not in found.ratios
    assert "hides" in found.absent["some.rate"]


def test_a_wide_spread_on_one_side_of_the_goal_hides_nothing() -> None:
    found = report()
    found.ratio("some.lag", [2, 5, 9])
    assert found.ratios["some.lag"].holds


def test_what_was_not_measured_is_absent() -> None:
    found = report()
    found.ratio("some.rate", [1])
    found.leave_out(["some.lag"], "no clock")
    found.end()
    assert found.absent == {"some.lag": "no clock", "some.other": "not measured"}


def test_a_figure_needs_its_goal() -> None:
    with pytest.raises(KeyError):
        report().ratio("some.figure", [1])


def test_json_has_the_form_that_readers_expect() -> None:
    found = report()
    found.row("rates", {"size": "64 KiB", "GB/s": Spread(2.0, 1.0, 4.0, 5), "streams": 4})
    found.ratio("some.rate", [0.9, 1.0, 1.1])
    found.end()
    whole = json.loads(found.to_json())
    assert whole["machine"] == {"cores": 2}
    assert whole["rows"] == [
        {
            "benchmark": "some",
            "table": "rates",
            "size": "64 KiB",
            "GB/s": {"median": 2.0, "low": 1.0, "high": 4.0, "rounds": 5},
            "streams": 4,
        }
    ]
    ratio = whole["ratios"]["some.rate"]
    assert ratio == {"value": 1.0, "goal": 0.85, "better": "higher", "spread": pytest.approx(0.1)}
    assert set(whole["absent"]) == {"some.lag", "some.other"}


def test_a_reason_that_was_given_is_kept() -> None:
    found = report()
    found.ratio("some.rate", [0.4, 0.9, 1.2])
    found.leave_out(["some.rate"], "not with --quick")
    found.end("failed")
    assert "hides" in found.absent["some.rate"]
