"""The engine's timer: in virtual time, on a loop that can be held up."""

from __future__ import annotations

from aiokv.engine.alarm import Alarm
from aiokv.testing.virtual import VirtualLoop

MS = 1_000_000


class World:
    """An alarm, and what it called: when, relative to the start, in milliseconds."""

    def __init__(self) -> None:
        self.loop = VirtualLoop()
        self.time = self.loop.virtual
        self.start = self.time.now
        self.called: list[tuple[str, float]] = []
        self.alarm = Alarm(
            self.loop,
            self.time.clock,
            patience_ns=1000 * MS,
            late=lambda now: self.called.append(("late", round((now - self.start) / MS, 3))),
            due=lambda now: self.called.append(("due", round((now - self.start) / MS, 3))),
        )

    def set(self, ms: float | None) -> None:
        self.alarm.set(None if ms is None else self.start + int(ms * MS))

    def run(self, ms: int = 10_000) -> list[tuple[str, float]]:
        assert self.time.settle(ms * MS)
        self.loop.close()
        return self.called


def test_it_comes_when_it_is_due_and_once() -> None:
    world = World()
    world.set(30)
    assert world.run() == [("due", 30)]
    assert world.alarm.lag < MS


def test_it_comes_no_earlier_than_asked_and_at_most_a_millisecond_later() -> None:
    world = World()
    world.set(30.2)
    assert world.run() == [("due", 31)]


def test_an_earlier_time_takes_the_place_of_a_later_one() -> None:
    world = World()
    world.set(50)
    world.set(20)
    assert world.run() == [("due", 20)]


def test_a_later_time_takes_the_place_of_an_earlier_one() -> None:
    world = World()
    world.set(20)
    world.set(50)
    assert world.run() == [("due", 50)]


def test_without_anything_due_nothing_is_scheduled() -> None:
    world = World()
    world.set(20)
    world.set(None)
    assert world.loop.idle
    assert world.run() == []


def test_what_is_due_already_comes_in_the_next_turn() -> None:
    world = World()
    world.alarm.set(0)
    assert world.run() == [("due", 0)]
    assert world.alarm.lag < MS


def test_a_loop_that_was_held_reads_its_input_first() -> None:
    world = World()
    world.set(20)
    world.time.advance(100 * MS)
    assert world.run() == [("due", 105)]
    assert world.alarm.lag // MS == 80


def test_a_loop_that_was_held_for_long_is_told_before_anything_is_judged() -> None:
    world = World()
    world.set(20)
    world.time.advance(5000 * MS)
    assert world.run() == [("late", 5000), ("due", 5005)]


def test_a_loop_that_is_held_again_while_it_reads_its_input_is_told_again() -> None:
    world = World()
    world.set(20)
    world.time.advance(5000 * MS)
    world.loop.call_later(0.002, world.time.advance, 5000 * MS)
    called = world.run(20_000)
    assert [what for what, _ in called] == ["late", "late", "due"]


def test_setting_it_while_input_is_read_leaves_it_as_it_is() -> None:
    world = World()
    world.set(20)
    world.time.advance(100 * MS)
    world.loop.call_later(0.002, world.set, 300)
    assert world.run() == [("due", 105)]


def test_after_cancel_it_does_not_come() -> None:
    world = World()
    world.set(20)
    world.alarm.cancel()
    world.alarm.cancel()
    assert world.loop.idle
    assert world.run() == []
