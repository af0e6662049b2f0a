"""Sections by themselves; what plans make of them is in test_plan.py."""

from __future__ import annotations

import numpy as np
import pytest

from aiokv.proto.section import Copy, Loop, Section, minimal


def section(src: list[int], dst: list[int], run: int, loops: list[Loop]) -> Section:
    return Section(
        np.array(src, dtype=np.int64),
        np.array(dst, dtype=np.int64),
        tuple(loop[0] for loop in loops),
        tuple(loop[1] for loop in loops),
        tuple(loop[2] for loop in loops),
        run,
    )


def extents(part: Section, lo: int, hi: int) -> list[tuple[int, ...]]:
    ((source, *offsets, lengths),) = Copy(part, ((3, 1000),), ((4, 2000),)).extents(lo, hi)
    assert (source, offsets.pop(1)) == (3, 4)
    found = (*offsets, lengths)
    assert all(one.dtype == np.int64 for one in found)
    return list(zip(*(one.tolist() for one in found), strict=True))


@pytest.mark.parametrize(
    ("loops", "run", "expected"),
    [
        ([], 8, ([], 8)),
        ([(1, 99, 98)], 8, ([], 8)),
        # Contiguous on both sides: part of the run, in whatever order the loops come.
        ([(4, 8, 8), (3, 32, 32)], 8, ([], 96)),
        ([(3, 32, 32), (4, 8, 8)], 8, ([], 96)),
        # Contiguous on one side only.
        ([(4, 8, 16)], 8, ([(4, 8, 16)], 8)),
        ([(4, 16, 8)], 8, ([(4, 16, 8)], 8)),
        # Two loops that are one, on both sides.
        ([(3, 64, 32), (4, 16, 8)], 8, ([(12, 16, 8)], 8)),
        ([(2, 192, 96), (3, 64, 32), (4, 16, 8)], 8, ([(24, 16, 8)], 8)),
        # The same on one side only: the outermost is the one with the largest steps at the destination.
        ([(4, 16, 8), (3, 64, 40)], 8, ([(3, 64, 40), (4, 16, 8)], 8)),
        ([(4, 32, 8), (3, 8, 32)], 8, ([(3, 8, 32), (4, 32, 8)], 8)),
    ],
)
def test_loops_are_merged(loops: list[Loop], run: int, expected: tuple[list[Loop], int]) -> None:
    assert minimal(loops, run) == expected


def test_sizes() -> None:
    part = section([40, 0], [10, 70], 5, [(2, 15, 30), (3, 5, 6)])
    assert part.piece_bytes == 30
    assert (part.src_reach, part.dst_reach) == (40 + 15 + 10 + 5, 70 + 30 + 12 + 5)
    assert Copy(part, ((0, 0), (0, 90)), ((0, 0), (1, 0))).nbytes == 120


def test_scattered_pieces_stay_apart() -> None:
    part = section([40, 0, 10], [10, 20, 30], 10, [])
    assert part.firsts is not None  # 0 and 10 follow each other, at both sides
    assert extents(part, 0, 3) == [(1040, 2010, 10), (1000, 2020, 20)]
    assert section([40, 0, 10], [10, 20, 31], 10, []).firsts is None


def test_pieces_in_a_row_are_joined_within_a_chunk() -> None:
    part = section([0, 10, 20, 30], [50, 60, 70, 80], 10, [])
    assert extents(part, 0, 4) == [(1000, 2050, 40)]
    assert extents(part, 1, 3) == [(1010, 2060, 20)]
    assert extents(part, 3, 4) == [(1030, 2080, 10)]


def test_the_last_run_of_a_piece_joins_the_first_of_the_next() -> None:
    part = section([40, 60, 0, 20], [15, 35, 80, 115], 5, [(2, 15, 15)])
    assert extents(part, 0, 4) == [
        (1040, 2015, 5),
        (1055, 2030, 10),
        (1075, 2050, 5),
        (1000, 2080, 5),
        (1015, 2095, 5),
        (1020, 2115, 5),
        (1035, 2130, 5),
    ]
    assert extents(part, 1, 3) == [(1060, 2035, 5), (1075, 2050, 5), (1000, 2080, 5), (1015, 2095, 5)]
    assert extents(part, 0, 2) == extents(part, 0, 4)[:3]
