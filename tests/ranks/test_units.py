from __future__ import annotations

import operator

import numpy as np
import pytest

from aiokv.ranks.units import MOST, Blocks, Tokens


def test_blocks_and_tokens_are_never_taken_for_each_other() -> None:
    assert Blocks(3) == Blocks(3) != Tokens(3)
    assert Blocks(3) != 3
    assert len({Blocks(3), Tokens(3), Blocks(3)}) == 2
    for compare in (operator.lt, operator.le, operator.gt, operator.ge):
        with pytest.raises(TypeError):
            compare(Blocks(3), Tokens(4))
    with pytest.raises(TypeError):
        min(Blocks(1), Tokens(2))
    assert min(Blocks(4), Blocks(2)) == Blocks(2)


def test_blocks_cut_a_list_of_blocks_and_tokens_do_not() -> None:
    ids = list(range(10))
    assert ids[: Blocks(3)] == [0, 1, 2]
    assert range(Blocks(2)) == range(2)
    with pytest.raises(TypeError):
        ids[: Tokens(3)]  # type: ignore[misc]


def test_what_is_converted_is_rounded_down_to_whole_blocks() -> None:
    assert Tokens(47).blocks(16) == Blocks(2)
    assert Tokens(15).blocks(16) == Blocks(0)
    assert Blocks(3).tokens(16) == Tokens(48)


@pytest.mark.parametrize("kind", [Blocks, Tokens])
def test_counts_fit_an_int32_and_are_not_negative(kind: type[Blocks]) -> None:
    assert kind(MOST).count == MOST
    assert type(kind(np.int64(7)).count) is int
    for count in (-1, MOST + 1):
        with pytest.raises(ValueError, match="a count from 0 to"):
            kind(count)
    for odd in (1.0, "1", None, True, Blocks(2)):
        if odd == Blocks(2):
            assert kind(odd).count == 2  # type: ignore[arg-type]  # it passes for an integer
            continue
        with pytest.raises(TypeError, match="integer"):
            kind(odd)  # type: ignore[arg-type]


def test_converting_needs_a_block_size_that_is_one() -> None:
    for size, error in ((0, ValueError), (-16, ValueError), (1.5, TypeError)):
        with pytest.raises(error):
            Tokens(3).blocks(size)  # type: ignore[arg-type]
        with pytest.raises(error):
            Blocks(3).tokens(size)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a count from 0 to"):
        Blocks(MOST).tokens(16)


def test_they_can_not_be_changed() -> None:
    with pytest.raises(AttributeError):
        Blocks(3).count = 4  # type: ignore[misc]
