"""Timers: earliest first, and nothing is kept that no longer matters."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from aiokv.proto.timers import Timers


@dataclass(eq=False)
class Thing:
    over: bool = False


def timers() -> Timers[Thing]:
    return Timers(lambda thing: thing.over)


def test_nothing_set_is_nothing_due() -> None:
    assert timers().next() is None
    assert timers().take(10**30) is None


def test_the_earliest_comes_first_and_what_is_due_at_once_in_the_order_it_was_set() -> None:
    found, things = timers(), [Thing() for _ in range(4)]
    for when, thing in zip((5, 0, 3, 0), things, strict=True):
        found.set(when, thing)
    assert found.next() == 0
    assert [found.take(4) for _ in range(4)] == [things[1], things[3], things[2], None]
    assert found.next() == 5


def test_what_is_over_is_neither_due_nor_awaited() -> None:
    found, thing = timers(), Thing()
    found.set(5, thing)
    found.set(7, thing)
    thing.over = True
    assert found.take(6) is None
    assert found.next() is None
    assert len(found) == 0


def test_what_is_over_is_let_go_long_before_it_is_due() -> None:
    found = timers()
    kept = Thing()
    found.set(1, kept)
    for _ in range(10_000):
        thing = Thing()
        found.set(10**18, thing)
        thing.over = True
    assert len(found) < 200
    assert found.take(1) is kept


@given(st.lists(st.tuples(st.integers(0, 50), st.booleans()), max_size=300), st.integers(0, 50))
def test_everything_that_matters_is_taken_in_order(entries: list[tuple[int, bool]], now: int) -> None:
    found, things = timers(), []
    for when, over in entries:
        thing = Thing()
        found.set(when, thing)
        thing.over = over
        things.append((when, thing))
    expected = [thing for when, thing in sorted(things, key=lambda e: e[0]) if when <= now and not thing.over]
    taken = []
    while (thing := found.take(now)) is not None:
        taken.append(thing)
    assert taken == expected
    left = [when for when, thing in things if when > now and not thing.over]
    assert found.next() == min(left, default=None)
