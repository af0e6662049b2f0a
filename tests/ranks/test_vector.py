"""The vector: what MIN makes of it says all that ranks have to know of each other."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiokv.errors import DeviceError, LocalProtocolError, RemoteProtocolError
from aiokv.ranks.outcomes import Failed, Hit, Miss, Severity
from aiokv.ranks.units import MOST, Blocks, Tokens
from aiokv.ranks.vector import HEADER, LENGTH, REQUESTS, Header, compared, encoded, hashed, read, write

ROOT = Header(batch=4, round=0, size=3, hashes=(5, 6), unit=1, rank=0, world=2, faulty=False)
OTHER = ROOT._replace(rank=1)
LANES = encoded([Hit(Blocks(4)), Miss(), Failed(Severity.TIMEOUT)])


def vector_of(header: Header) -> np.ndarray:
    vector = np.full(LENGTH, -77, np.int32)  # whatever was left there
    write(vector, header, LANES, 0)
    return vector


def least(*headers: Header) -> np.ndarray:
    return np.minimum.reduce([vector_of(header) for header in headers])


def test_its_length_is_part_of_the_format() -> None:
    # gloo ends the process of whoever brings another length. Two versions of aiokv may meet.
    assert (LENGTH, HEADER, REQUESTS) == (532, 20, 256)


def test_what_is_written_is_read_and_nothing_else_is_left() -> None:
    vector = vector_of(ROOT)
    assert read(vector, 3) == ([4, 0, 0], [0, 0, -Severity.TIMEOUT])
    assert not vector[HEADER + 3 : HEADER + REQUESTS].any()
    assert not vector[HEADER + REQUESTS + 3 :].any()
    assert vector.min() >= -MOST  # each has a negative


def test_ranks_with_the_same_batch_find_no_difference() -> None:
    assert compared(least(ROOT, OTHER), ROOT) == (4, None)
    # A rank without a hit has no unit, and gets along with any.
    assert compared(least(ROOT, OTHER._replace(unit=0)), ROOT) == (4, None)
    nobody = least(ROOT._replace(unit=0), OTHER._replace(unit=0))
    assert compared(nobody, ROOT._replace(unit=0)) == (4, None)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"batch": 6}, "batch number 4 to 6 (4 on this rank)"),
        ({"round": 1}, "round 0 to 1 (0 on this rank)"),
        ({"size": 2}, "requests 2 to 3 (3 on this rank)"),
        ({"hashes": (5, 7)}, "other keys"),
        ({"hashes": (4, 7)}, "other keys"),
        ({"unit": 2}, "blocks or tokens"),
        ({"size": 9, "hashes": (0, 0)}, "requests 3 to 9 (3 on this rank), other keys"),
    ],
)
def test_each_difference_is_named_on_every_rank(change: dict, told: str) -> None:
    for header in (ROOT, OTHER._replace(**change)):
        finding = compared(least(ROOT, OTHER._replace(**change)), header)
        assert isinstance(finding.error, LocalProtocolError)
        here = told if header is ROOT else told.replace("(4 on", "(6 on").replace("(0 on", "(1 on")
        if "size" in change and header is not ROOT:
            here = told.replace("(3 on", f"({change['size']} on")
        assert str(finding.error) == f"the ranks came with different batches: {here}"
        assert finding.batch == max(4, change.get("batch", 0))


def test_a_faulty_batch_is_told_to_all_but_who_brought_it() -> None:
    faulty = OTHER._replace(faulty=True, size=0)
    vector = least(ROOT, faulty)
    error = compared(vector, ROOT).error
    assert isinstance(error, RemoteProtocolError)
    assert "rank 1" in str(error)
    assert not isinstance(compared(vector, faulty).error, RemoteProtocolError)


def test_a_reduction_over_some_of_the_ranks_is_none() -> None:
    three = ROOT._replace(world=3)
    with pytest.raises(DeviceError, match="ranks 0 to 1 came into a reduction over 3 ranks"):
        compared(least(three, three._replace(rank=1)), three)
    with pytest.raises(DeviceError):
        compared(vector_of(OTHER), OTHER)
    with pytest.raises(DeviceError):
        compared(np.zeros(LENGTH, np.int32), ROOT)


@given(st.lists(st.binary(max_size=5), max_size=6), st.lists(st.binary(max_size=5), max_size=6))
def test_keys_are_told_apart_wherever_they_are_cut(one: list[bytes], other: list[bytes]) -> None:
    left, right = hashed(one, len(one)), hashed(other, len(other))
    assert (left == right) == (one == other)
    assert all(0 <= lane <= MOST for lane in (*left, *right))


def test_keys_are_bytes_and_as_many_as_requests() -> None:
    assert hashed(None, 3) == (0, 0)
    assert hashed(iter([b"a"]), 1) == hashed([b"a"], 1) != (0, 0)
    with pytest.raises(ValueError, match="2 keys for 3 requests"):
        hashed([b"a", b"b"], 3)
    for odd in (["text"], [7], [None]):
        with pytest.raises(TypeError, match="a key is bytes"):
            hashed(odd, 1)  # type: ignore[arg-type]


def test_outcomes_become_lanes() -> None:
    assert encoded([]) == ([], [], 0, False)
    assert encoded([Miss(), Failed(Severity.FAULT)]) == ([0, 0], [0, -7], 0, False)
    assert encoded([Hit(Tokens(MOST))]) == ([MOST], [0], 2, False)
    assert encoded([Hit(Blocks(0)), Hit(Blocks(2))]) == ([0, 2], [0, 0], 1, True)


@pytest.mark.parametrize(
    ("outcomes", "told"),
    [
        ([Hit(Blocks(1)), Hit(Tokens(1))], "counts blocks, or it counts tokens"),
        ([Hit(3)], "request 0 of a batch: a Hit holds Blocks or Tokens, not 3"),
        ([Miss(), 3], "request 1 of a batch is a Hit, Miss or Failed, not 3"),
    ],
)
def test_what_is_no_outcome_is_refused(outcomes: list, told: str) -> None:
    with pytest.raises(TypeError, match=told):
        encoded(outcomes)
