"""One batch through its rounds, on ranks that are called one after another."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiokv.errors import LocalProtocolError
from aiokv.ranks.agreement import Agreement
from aiokv.ranks.outcomes import Hit, Miss, Outcome
from aiokv.ranks.units import Blocks
from aiokv.ranks.vector import LENGTH, REQUESTS
from aiokv.testing.conformance.ranks import drawn, expected


def agreements(*brought: list[Outcome], numbers: list[int] | None = None) -> list[Agreement]:
    return [
        Agreement(outcomes, None, batch=numbers[rank] if numbers else 1, rank=rank, world=len(brought))
        for rank, outcomes in enumerate(brought)
    ]


def reduced(ranks: list[Agreement]) -> list[bool]:
    """One round; gives which ranks want another."""
    vectors = [np.zeros(LENGTH, np.int32) for _ in ranks]
    for rank, vector in zip(ranks, vectors, strict=True):
        rank.write(vector)
    least = np.minimum.reduce(vectors)
    return [rank.read(least) for rank in ranks]


@given(
    seed=st.integers(0, 2**32),
    world=st.integers(1, 4),
    size=st.sampled_from([1, 2, REQUESTS - 1, REQUESTS, REQUESTS + 1, 2 * REQUESTS, 2 * REQUESTS + 5]),
)
def test_rounds_go_on_until_every_request_is_agreed_on(seed: int, world: int, size: int) -> None:
    brought = [drawn(seed, rank, size) for rank in range(world)]
    ranks = agreements(*brought)
    rounds = -(-size // REQUESTS)
    for number in range(rounds):
        assert reduced(ranks) == [number + 1 < rounds] * world
    assert {rank.rounds for rank in ranks} == {rounds}
    for rank in ranks:
        assert rank.agreed() == expected(brought)


def test_the_same_on_all_ranks_is_what_each_brought() -> None:
    brought: list[Outcome] = [Hit(Blocks(3)), Miss()]
    ranks = agreements(brought, list(brought))
    reduced(ranks)
    assert [outcome is own for outcome, own in zip(ranks[0].agreed(), brought, strict=True)] == [True] * 2


def test_a_hit_of_nothing_is_a_miss_also_where_all_have_it() -> None:
    ranks = agreements([Hit(Blocks(0))], [Hit(Blocks(0))])
    reduced(ranks)
    assert [rank.agreed() for rank in ranks] == [[Miss()]] * 2


def test_ranks_that_counted_differently_go_on_from_the_highest() -> None:
    ranks = agreements([Miss()], [Miss()], numbers=[3, 5])
    assert reduced(ranks) == [False, False]
    assert [rank.ahead for rank in ranks] == [2, 0]
    for rank in ranks:
        with pytest.raises(LocalProtocolError, match="batch number 3 to 5"):
            rank.agreed()


def test_a_difference_ends_long_batches_after_one_round() -> None:
    ranks = agreements([Miss()] * 3 * REQUESTS, [Miss()])
    assert reduced(ranks) == [False, False]


def test_what_is_known_to_be_empty_is_empty_also_with_keys_too_many() -> None:
    assert Agreement([], None, batch=1, rank=0, world=1).empty
    assert Agreement([], [b"one too many"], batch=1, rank=0, world=1).empty
    assert not Agreement(None, None, batch=1, rank=0, world=1).empty  # type: ignore[arg-type]
