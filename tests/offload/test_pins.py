"""Counts of use, one at a time and many at once."""

from __future__ import annotations

import random

import pytest

from aiokv.errors import LocalProtocolError
from aiokv.offload.pins import Pins
from aiokv.offload.places import Places


@pytest.mark.parametrize("count", [3, 100])
def test_up_and_down(count: int) -> None:
    pins = Pins()
    pins.grow(10)
    pins.grow(count)
    places = list(range(count))
    assert pins.up(places) == count
    assert pins.up(places[1:]) == 0
    assert pins.down(places) == [0]
    assert pins.down(places[1:]) == places[1:]
    assert pins.unused() == list(range(count + 10))
    with pytest.raises(LocalProtocolError, match="more often"):
        pins.down(places)


def test_a_list_that_was_cut_off_counts_for_what_is_left() -> None:
    pins = Pins()
    pins.grow(100)
    places = Places(random.Random(1).sample(range(100), 60))
    pins.up(places)
    rest = places[50:]
    del places[50:]
    assert sorted(pins.down(rest)) == sorted(rest)
    assert sorted(pins.down(places)) == sorted(places)
    assert len(pins.unused()) == 100
