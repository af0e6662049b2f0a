"""Where tokens are cut into pieces."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiokv.proto.ends import cut


@given(st.integers(0, 60), st.integers(1, 60), st.integers(1, 9), st.integers(1, 9))
def test_pieces_end_where_a_block_of_either_side_does(lo: int, length: int, one: int, other: int) -> None:
    hi = lo + length
    pieces = [(int(start), count) for count, starts in cut(lo, hi, one, other) for start in starts]
    edges = [lo, *(token for token in range(lo + 1, hi) if not token % one or not token % other), hi]
    assert sorted(pieces) == [(start, end - start) for start, end in pairwise(edges)]


@pytest.mark.parametrize(
    ("lo", "hi", "sizes", "expected"),
    [
        (0, 48, (16, 16), [(16, range(0, 48, 16))]),
        (5, 43, (16, 16), [(11, range(5, 6)), (16, range(16, 32, 16)), (11, range(32, 33))]),
        (5, 9, (16, 64), [(4, range(5, 6))]),
        (0, 128, (16, 64), [(16, range(0, 128, 16))]),
    ],
)
def test_blocks_of_one_size_are_a_range(
    lo: int, hi: int, sizes: tuple[int, int], expected: list[tuple[int, range]]
) -> None:
    assert list(cut(lo, hi, *sizes)) == expected
    assert list(cut(lo, hi, *reversed(sizes))) == expected
