"""Hashes of blocks: chained, salted, and the same everywhere."""

from __future__ import annotations

import numpy as np
import pytest

from aiokv.offload.hashes import block_hashes


def test_equal_prefixes_have_equal_hashes_and_nothing_else_has() -> None:
    first = block_hashes(range(40), 16)
    assert len(first) == 2, "what isn't full has no hash"
    assert block_hashes([*range(39), 7], 16) == first
    changed = block_hashes([99, *range(1, 40)], 16)
    assert not set(changed) & set(first), "a block's hash covers all that came before it"
    assert block_hashes(range(40), 8)[1] != first[0]
    assert block_hashes(np.arange(40, dtype=np.int32), 16) == first


def test_a_salt_keeps_tenants_apart() -> None:
    tokens = range(32)
    found = {bytes(h) for salt in ("", "a", "b") for h in block_hashes(tokens, 16, salt=salt)}
    assert len(found) == 6
    assert block_hashes(tokens, 16, salt="a") == block_hashes(tokens, 16, salt=b"a")


def test_it_goes_on_from_a_parent() -> None:
    whole = block_hashes(range(64), 16, salt="x")
    assert block_hashes(range(32, 64), 16, parent=whole[1]) == whole[2:]


def test_they_are_those_of_every_version() -> None:
    (found,) = block_hashes([1, -2, 3, 2**40], 4)
    assert found.hex() == "30eea746321731742ee70edd7ec1b75791d12502dea9bb9163cbb73639dc77f9"


@pytest.mark.parametrize(
    ("kind", "arguments", "more"),
    [
        (ValueError, ([1], 0), {}),
        (ValueError, ([2**64], 1), {}),
        (TypeError, (["a"], 1), {}),
        (TypeError, ([1.5], 1), {}),
        (TypeError, ([1], 1), {"salt": 5}),
        (TypeError, ([1], 1), {"parent": "x"}),
        (ValueError, ([1], 1), {"parent": b"x", "salt": "y"}),
    ],
)
def test_what_cannot_be_meant(kind: type[Exception], arguments: tuple, more: dict) -> None:
    with pytest.raises(kind):
        block_hashes(*arguments, **more)
