"""The group of one process does what a backend does, also what is unpleasant."""

from __future__ import annotations

import numpy as np
import pytest

from aiokv.errors import ClosedError, DeviceError
from aiokv.ranks.vector import LENGTH
from aiokv.testing.ranks import MemoryRanks


class Clock:
    now = 0

    def __call__(self) -> int:
        return self.now


def test_each_lane_comes_to_the_least_once_all_are_there() -> None:
    ranks = MemoryRanks(3)
    collectives = [ranks.collective(rank) for rank in range(3)]
    for collective in collectives:
        collective.vector[:] = np.arange(LENGTH) * (collective.rank - 1)
    events = [collective.reduce(1) for collective in collectives[:2]]
    assert not any(event.done() for event in events)
    events.append(collectives[2].reduce(1))
    assert all(event.done() for event in events)
    for collective in collectives:
        assert (collective.vector == -np.arange(LENGTH)).all()
    assert (ranks.reductions, ranks.entered(0)) == (1, 1)


def test_reductions_take_as_long_as_the_seed_says() -> None:
    def times(seed: int) -> list[int]:
        clock = Clock()
        ranks = MemoryRanks(2, seed=seed, longest_ns=100, clock=clock)
        events = [ranks.collective(rank).reduce(1) for rank in range(2)]
        found = [0, 0]
        for clock.now in range(101):
            for rank, event in enumerate(events):
                if event.done() and not found[rank]:
                    found[rank] = clock.now
        return found

    assert times(1) == times(1)
    assert len({tuple(times(seed)) for seed in range(5)}) > 1


def test_a_lost_rank_comes_no_more_and_is_heard_of() -> None:
    ranks = MemoryRanks(2)
    collectives = [ranks.collective(rank) for rank in range(2)]
    first = [collective.reduce(1) for collective in collectives]
    waiting = collectives[0].reduce(1)
    ranks.lose(1)
    with pytest.raises(DeviceError, match="rank 1 is gone"):
        waiting.done()
    with pytest.raises(DeviceError, match="gone itself"):
        collectives[1].reduce(1)
    assert all(event.done() for event in first)  # what was complete is an answer all the same


def test_what_can_not_be_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one rank"):
        MemoryRanks(0)
    with pytest.raises(ValueError, match="ranks are 0 to 1"):
        MemoryRanks(2).collective(2)
    collective = MemoryRanks(1).collective(0)
    collective.close()
    with pytest.raises(ClosedError):
        collective.reduce(1)
