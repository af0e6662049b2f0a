"""Free places come in runs, and none is lost or given twice."""

from __future__ import annotations

import random

import pytest

from aiokv.offload.places import FreePlaces, ascending, runs_of


def test_runs_are_given_whole_and_grow_together_again() -> None:
    free = FreePlaces()
    free.give(range(100))
    first, second = free.take(30), free.take(30)
    assert first == list(range(30))
    assert second == list(range(30, 60))
    free.give(list(reversed(first)))
    assert free.take(30) == first, "the run that fits, not the longer one"
    free.give(first)
    free.give(second)
    assert (free.runs, len(free)) == (1, 100)
    with pytest.raises(ValueError, match="101"):
        free.take(101)


def test_pieces_are_used_where_no_run_is_long_enough() -> None:
    free = FreePlaces()
    free.give([0, 1, 2, 10, 11, 20])
    taken = free.take(5)
    assert taken[:3] == [0, 1, 2]
    assert len(free) == 1


def test_at_random_nothing_is_lost(seed: int) -> None:
    draw = random.Random(seed)
    free = FreePlaces()
    free.give(range(500))
    out: list[int] = []
    for _ in range(2000):
        if draw.random() < 0.5 and len(free):
            taken = free.take(draw.randint(1, len(free)))
            assert not set(taken) & set(out)
            out += taken
        elif out:
            draw.shuffle(out)
            count = draw.randint(1, len(out))
            free.give(out[:count])
            del out[:count]
        assert len(free) + len(out) == 500
    free.give(out)
    assert (free.runs, len(free)) == (1, 500)


@pytest.mark.parametrize("count", [0, 1, 3, 1000])
def test_runs_of_neighbours(count: int) -> None:
    assert ascending(range(5, 5 + count)) == ([(5, count)] if count else [])
    scattered = list(range(0, 2 * count, 2))
    assert ascending(scattered) == [(place, 1) for place in scattered]
    assert runs_of(list(range(count, 0, -1))) == ([(1, count)] if count else [])
