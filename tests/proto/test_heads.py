"""Which source sends which heads: each head once, from a source that has it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiokv.errors import LayoutMismatch
from aiokv.proto.heads import assign_heads
from aiokv.proto.layout import CacheLayout, GroupLayout

TOTAL = 16


def group(first: int, last: int, *, layer: int = 0, total: int = TOTAL) -> GroupLayout:
    return GroupLayout(
        layers=(layer,),
        blocks=4,
        block_size=4,
        heads=(first, last),
        total_heads=total,
        head_size=8,
        dtype="uint8",
    )


def layout(*ranges: tuple[int, int]) -> CacheLayout:
    return CacheLayout(tuple(group(*heads, layer=layer) for layer, heads in enumerate(ranges)))


def shares(wanted: tuple[int, int], *sources: tuple[int, int]) -> list[tuple[int, int]]:
    return [share for (share,) in assign_heads(layout(wanted), [layout(source) for source in sources])]


@pytest.mark.parametrize(
    ("wanted", "sources", "expected"),
    [
        ((0, 16), [(0, 16)], [(0, 16)]),
        ((0, 16), [(0, 8), (8, 16)], [(0, 8), (8, 16)]),
        ((0, 16), [(8, 16), (0, 8)], [(8, 16), (0, 8)]),
        ((4, 8), [(0, 16)], [(4, 8)]),
        ((4, 8), [(0, 8), (8, 16)], [(4, 8), (0, 0)]),
        ((6, 10), [(0, 8), (8, 16)], [(6, 8), (8, 10)]),
        # Two ranks that keep the same heads: the second has nothing to add.
        ((0, 8), [(0, 8), (0, 8)], [(0, 8), (0, 0)]),
        # Where ranges overlap, the one that reaches furthest is taken.
        ((0, 12), [(0, 6), (4, 12)], [(0, 6), (6, 12)]),
        ((0, 12), [(0, 4), (2, 6), (0, 12)], [(0, 0), (0, 0), (0, 12)]),
    ],
)
def test_heads_are_shared_out(
    wanted: tuple[int, int], sources: list[tuple[int, int]], expected: list[tuple[int, int]]
) -> None:
    assert shares(wanted, *sources) == expected


@pytest.mark.parametrize(
    ("wanted", "sources", "missing"),
    [((0, 16), [(0, 8)], 8), ((0, 16), [(8, 16)], 0), ((0, 12), [(0, 4), (6, 12)], 4)],
)
def test_a_head_that_no_source_has_is_named(
    wanted: tuple[int, int], sources: list[tuple[int, int]], missing: int
) -> None:
    with pytest.raises(LayoutMismatch, match=f"no source holds KV head {missing} of"):
        shares(wanted, *sources)


def test_groups_are_shared_out_apart() -> None:
    latent = group(0, 1, layer=1, total=1)
    wanted = CacheLayout((group(0, 16), latent))
    low, high = CacheLayout((group(0, 8), latent)), CacheLayout((group(8, 16), latent))
    # The latent head is on both ranks; the first one sends it.
    assert assign_heads(wanted, [low, high]) == [((0, 8), (0, 1)), ((8, 16), (0, 0))]


RANGES = st.tuples(st.integers(0, TOTAL - 1), st.integers(1, TOTAL)).filter(lambda r: r[0] < r[1])


@given(RANGES, st.lists(RANGES, min_size=1, max_size=6))
def test_each_head_comes_once_from_who_has_it(
    wanted: tuple[int, int], sources: list[tuple[int, int]]
) -> None:
    held = {head for source in sources for head in range(*source)}
    if not set(range(*wanted)) <= held:
        with pytest.raises(LayoutMismatch):
            shares(wanted, *sources)
        return
    found = shares(wanted, *sources)
    assert sorted(head for share in found for head in range(*share)) == list(range(*wanted))
    for share, source in zip(found, sources, strict=True):
        assert set(range(*share)) <= set(range(*source))
