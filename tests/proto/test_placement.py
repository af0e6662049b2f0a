"""Placements: where layers are, and which places are refused."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiokv.proto.layout import CacheLayout, GroupLayout
from aiokv.proto.placement import GroupPlacement, Placement

GROUP = GroupLayout(
    layers=(0, 1), blocks=5, block_size=4, heads=(2, 4), total_heads=8, head_size=16, dtype="bfloat16"
)
LATENT = GroupLayout(
    layers=(2,),
    blocks=7,
    block_size=8,
    heads=(0, 1),
    total_heads=1,
    head_size=10,
    dtype="float8_e4m3fn",
    axes="btd",
    kind="mla",
)
LAYOUT = CacheLayout(groups=(GROUP, LATENT))
SPLIT = CacheLayout(groups=(msgspec.structs.replace(GROUP, axes="bthd", split=True), LATENT))
SMALL = CacheLayout(groups=(msgspec.structs.replace(GROUP, layers=(0,)),))
SIZE = 5 * 512


@given(st.sampled_from([1, 64, 4096]))
def test_a_dense_placement_is_aligned_and_without_overlap(align: int) -> None:
    placement = Placement.dense(SPLIT, align)
    placement.check(SPLIT)
    spans = []
    for group, place in zip(SPLIT.groups, placement.groups, strict=True):
        assert place.strides == group.dense_strides()
        size = group.blocks * group.block_bytes // group.planes
        spans += [(offset, offset + size) for planes in place.layers for _, offset in planes]
    assert len(spans) == 5
    assert all(first % align == 0 for first, _ in spans)
    assert all(end <= first for (_, end), (first, _) in pairwise(spans))
    assert placement.buffers[0] - spans[-1][1] < align


def test_a_placement_survives_the_wire() -> None:
    placement = Placement.dense(LAYOUT)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(placement), type=Placement) == placement


def placed(strides: tuple[int, int, int, int], *planes: tuple[int, int]) -> GroupPlacement:
    return GroupPlacement(strides=strides, layers=(planes,))


STRIDES = SMALL.groups[0].dense_strides()


def test_a_placement_may_fill_its_buffer() -> None:
    Placement(buffers=(8, SIZE + 3), groups=(placed(STRIDES, (1, 3)),)).check(SMALL)


@pytest.mark.parametrize(
    ("group", "message"),
    [
        (placed(STRIDES, (0, 1)), "beyond buffer 0"),
        (placed(STRIDES, (0, -1)), "beyond buffer 0"),
        (placed(STRIDES, (0, 2**80)), "beyond buffer 0"),
        (placed(STRIDES, (1, 0)), "no buffer 1"),
        (placed(STRIDES, (-1, 0)), "no buffer -1"),
        (placed((STRIDES[0] + 1, *STRIDES[1:]), (0, 0)), "beyond buffer 0"),
        (placed((-1, *STRIDES[1:]), (0, 0)), "strides out of range"),
        (placed((2**48, *STRIDES[1:]), (0, 0)), "strides out of range"),
        (placed(STRIDES, (0, 0), (0, 0)), "2 tensors instead of 1"),
        (GroupPlacement(strides=STRIDES, layers=()), "different numbers of layers"),
        (None, "different numbers of groups"),
    ],
)
def test_a_placement_that_leads_out_of_its_buffers_is_refused(
    group: GroupPlacement | None, message: str
) -> None:
    placement = Placement(buffers=(SIZE,), groups=(group,) if group else ())
    with pytest.raises(ValueError, match=message):
        placement.check(SMALL)


def test_places_of_numpys_types_can_be_sent() -> None:
    same = Placement(
        buffers=np.array([SIZE]),
        groups=[GroupPlacement(strides=np.array(STRIDES), layers=[[(np.int64(0), np.int32(0))]])],
    )
    plain = Placement(buffers=(SIZE,), groups=(placed(STRIDES, (0, 0)),))
    assert same == plain
    assert msgspec.msgpack.encode(same) == msgspec.msgpack.encode(plain)


def test_places_of_other_types_are_refused() -> None:
    with pytest.raises(TypeError, match="strides must be an integer, not float"):
        GroupPlacement(strides=(1.0, 2, 3, 4), layers=())
    with pytest.raises(ValueError, match="strides must be 4 integers"):
        GroupPlacement(strides=(1, 2, 3), layers=())
    with pytest.raises(ValueError, match="a place must be 2 integers"):
        GroupPlacement(strides=STRIDES, layers=(((0, 1, 2),),))
    with pytest.raises(TypeError, match="buffers must be an integer, not bool"):
        Placement(buffers=(True,), groups=())
    with pytest.raises(TypeError, match="groups must be a tuple of GroupPlacement"):
        Placement(buffers=(1,), groups=(STRIDES,))
    for size in (-1, 2**63):
        with pytest.raises(ValueError, match="a buffer of"):
            Placement(buffers=(size,), groups=())
