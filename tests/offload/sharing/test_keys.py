"""Names of blocks as bytes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiokv.errors import CapacityError
from aiokv.offload.sharing.keys import decoded, encoded

SINGLE = st.one_of(st.binary(max_size=40), st.text(max_size=20), st.integers())
KEYS = st.recursive(SINGLE, lambda part: st.lists(part, max_size=4).map(tuple), max_leaves=6)


@settings(max_examples=40)
@given(KEYS, KEYS)
def test_names_are_equal_exactly_where_their_bytes_are(one: Any, other: Any) -> None:
    first, second = encoded([one, other])
    assert (first == second) == (one == other)
    assert decoded(first) == one


def test_what_is_equal_to_python_is_equal() -> None:
    assert len(set(encoded([1, True]))) == 1
    assert len(set(encoded([1, "1", b"1", (1,), ((1,),), ("", 1)]))) == 6


def test_what_means_nothing_elsewhere_is_refused() -> None:
    for bad in (1.0, None, frozenset([1]), ("a", 1.5), "\udc80", bytearray(b"x")):
        with pytest.raises(TypeError, match="in a shared pool"):
            encoded([bad])
    assert len(encoded([b"x" * 1000])[0]) < 1024
    with pytest.raises(CapacityError, match="1103 bytes"):
        encoded([b"x" * 1100])
