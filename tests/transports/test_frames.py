from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aiokv.proto.plan import Chunk
from aiokv.transports.frames import HEADER_BYTES, Ranges, pack, tag_of, unpack


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 8)), max_size=40))
def test_ranges_take_every_number_once(ranges: list[tuple[int, int]]) -> None:
    mine, seen = Ranges(), set()
    for lo, count in ranges:
        numbers = set(range(lo, lo + count))
        assert mine.add(lo, lo + count) == (not numbers & seen)
        if not numbers & seen:
            seen |= numbers


def test_ranges_in_order_stay_one() -> None:
    ranges = Ranges()
    assert all(ranges.add(lo, lo + 3) for lo in range(0, 3000, 3))
    assert ranges._los == [0]
    assert ranges._his == [3000]


def test_a_header_says_what_it_was_told() -> None:
    chunk = Chunk(layer=79, copy=1, lo=2**40, hi=2**41, nbytes=2**63)
    header = pack(tag_of(("transfer", 1)), chunk)
    assert len(header) == HEADER_BYTES
    assert unpack(header) == (tag_of(("transfer", 1)), chunk)


def test_every_part_has_a_tag_of_its_own() -> None:
    parts = [("a", 1), ("a", 11), ("a:1", 1), ("1:a", 1), ("", 1), ("ä", 1), ("x" * 10_000, 1)]
    assert len({tag_of(part) for part in parts}) == len(parts)
