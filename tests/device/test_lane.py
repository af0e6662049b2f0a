"""When the oldest event of a stream is looked at, and how its completion was found."""

from __future__ import annotations

import pytest

from aiokv.device.expectation import Outlook
from aiokv.device.host import HostDevice
from aiokv.device.lane import MOST_TURNS, Finding, Lane, Watch

US = 1_000
EVENT = HostDevice().stream().record()


def watch(started: int) -> Watch:
    return Watch(EVENT, lambda error: None, 0, started)


def lane_of(started: int, *, sleep: int = 0, pace: int = 0) -> Lane:
    """A lane with one watch, which is looked at after a sleep."""
    lane = Lane("s")
    assert lane.add(watch(started))
    lane.begin(started, Outlook(sleep, pace))
    return lane


def pending(lane: Lane, now: int, *, patience: int = 0) -> int:
    """One look that found nothing; how long it is to the next."""
    lane.pending(now, spin_ns=100 * US, patience_ns=patience)
    return lane.look_at - now


def test_only_the_first_is_to_be_looked_at() -> None:
    lane = lane_of(0, sleep=500 * US)
    assert lane.look_at == 500 * US
    assert not lane.add(watch(1 * US))
    assert lane.look_at == 500 * US


def test_a_look_before_it_is_due_changes_nothing() -> None:
    lane = lane_of(0, sleep=500 * US)
    assert pending(lane, 100 * US) == 400 * US
    assert pending(lane, 505 * US) == 0


def test_looks_each_turn_for_a_while_counted_from_the_first_look() -> None:
    lane = lane_of(0, sleep=500 * US)
    assert pending(lane, 900 * US) == 0, "the loop was late, but that says nothing about the event"
    assert pending(lane, 999 * US) == 0
    assert pending(lane, 1000 * US) == 30 * US
    assert pending(lane, 1300 * US) == 100 * US


def test_a_pace_or_a_late_loop_replace_that() -> None:
    lane = lane_of(0, sleep=500 * US, pace=40 * US)
    assert pending(lane, 500 * US) == 40 * US
    assert pending(lane, 540 * US, patience=300 * US) == 300 * US
    assert pending(lane, 2500 * US) == 500 * US


def test_turns_are_counted_where_time_stands_still() -> None:
    lane = lane_of(0)
    assert [pending(lane, 0) for _ in range(MOST_TURNS)] == [0] * MOST_TURNS
    assert pending(lane, 0) > 0


def test_found_by_polling_is_known_to_half_the_gap() -> None:
    lane = lane_of(0, sleep=500 * US)
    pending(lane, 510 * US)
    pending(lane, 520 * US)
    assert lane.over(530 * US)[1] == Finding(polled_ns=15 * US, overslept=False, gap_ns=10 * US)


def test_found_at_the_first_look_was_overslept() -> None:
    lane = lane_of(0, sleep=500 * US)
    pending(lane, 100 * US)
    assert lane.over(510 * US)[1] == Finding(polled_ns=None, overslept=True, gap_ns=410 * US)


def test_what_is_queued_begins_when_the_one_before_it_ended() -> None:
    lane = lane_of(0)
    second, third = watch(1 * US), watch(2 * US)
    lane.add(second)
    lane.add(third)
    pending(lane, 500 * US)
    lane.over(510 * US)
    lane.begin(510 * US, Outlook(400 * US, 0))
    assert lane.look_at == 905 * US, "the first was over at some time between its last two looks"
    assert pending(lane, 510 * US) == 395 * US
    assert pending(lane, 910 * US) == 0
    assert lane.over(920 * US) == (second, Finding(polled_ns=5 * US, overslept=False, gap_ns=10 * US))
    lane.begin(920 * US, Outlook(0, 0))
    assert lane.watches[0] is third


def test_a_watch_that_came_later_than_the_one_before_it_ended_begins_then() -> None:
    lane = lane_of(0)
    pending(lane, 100 * US)
    lane.add(watch(190 * US))
    lane.over(200 * US)
    lane.begin(200 * US, Outlook(400 * US, 0))
    assert lane.look_at == 590 * US


@pytest.mark.parametrize(("sleep", "overslept"), [(5 * US, False), (900 * US, True)])
def test_what_comes_with_the_one_before_it_took_less_than_it_can_have(sleep: int, overslept: bool) -> None:
    lane = lane_of(0)
    lane.add(watch(0))
    pending(lane, 500 * US)
    lane.over(510 * US)
    lane.begin(510 * US, Outlook(sleep, 0))
    assert lane.over(510 * US)[1] == Finding(polled_ns=None, overslept=overslept, gap_ns=10 * US)


def test_the_next_begins_anew() -> None:
    lane = lane_of(0)
    lane.add(watch(0))
    for now in range(0, 2000 * US, 50 * US):
        pending(lane, now)
    lane.over(2000 * US)
    lane.begin(2000 * US, Outlook(0, 0))
    assert lane.look_at <= 2000 * US
    assert pending(lane, 2000 * US) == 0
