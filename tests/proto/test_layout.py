"""Layouts: what they say of memory, and what they refuse."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from aiokv.errors import LayoutMismatch, Refused
from aiokv.proto.layout import MOST_LAYERS, CacheLayout, GroupLayout, itemsize
from aiokv.proto.messages import Frame, Ready, decode_messages, encode_message

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
LAYOUT = CacheLayout(groups=(GROUP, LATENT), model=b"one")


def changed(group: GroupLayout, **changes: object) -> GroupLayout:
    return msgspec.structs.replace(group, **changes)


# -- one group --------------------------------------------------------------------------------------


def test_sizes_of_a_group() -> None:
    assert (GROUP.head_count, GROUP.planes, GROUP.halves) == (2, 1, 2)
    assert GROUP.shape == (2, 5, 4, 2, 16)
    assert GROUP.head_bytes == 32
    assert GROUP.token_bytes == 2 * 2 * 32
    assert GROUP.block_bytes == 4 * 128


def test_sizes_of_a_split_group() -> None:
    split = changed(GROUP, axes="bhtd", split=True)
    assert (split.planes, split.halves) == (2, 2)
    assert split.shape == (5, 2, 4, 16)
    assert split.block_bytes == GROUP.block_bytes


def test_sizes_of_a_latent_group() -> None:
    assert (LATENT.planes, LATENT.halves, LATENT.shape) == (1, 1, (7, 8, 10))
    assert LATENT.block_bytes == 8 * 10


@pytest.mark.parametrize(
    ("axes", "split"),
    [("sbthd", False), ("bsthd", False), ("bshtd", False), ("bhtsd", False), ("bthd", True), ("bhtd", True)],
)
def test_dense_strides_are_those_of_a_contiguous_array(axes: str, split: bool) -> None:
    group = changed(GROUP, axes=axes, split=split)
    array = np.zeros(group.shape, dtype=np.uint16)
    found = dict(zip(axes, array.strides, strict=True))
    assert group.dense_strides() == (found["b"], found.get("s", 0), found["t"], found["h"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": ()}, "layers"),
        ({"layers": (1, 0)}, "layers"),
        ({"layers": (0, 0)}, "layers"),
        ({"layers": (-1, 0)}, "layers"),
        ({"blocks": 0}, "blocks"),
        ({"block_size": -1}, "block_size"),
        ({"head_size": 0}, "head_size"),
        ({"total_heads": 2**40}, "total_heads"),
        ({"heads": (3, 3)}, "heads"),
        ({"heads": (-1, 3)}, "heads"),
        ({"heads": (6, 9)}, "heads"),
        ({"dtype": "int7"}, "unknown dtype 'int7'; known are bfloat16"),
        ({"axes": "sbth"}, "axes"),
        ({"axes": "sbtdh"}, "must be the last axis"),
        ({"axes": "sbthhd"}, "axes"),
        ({"axes": "sbthxd"}, "axes"),
        ({"axes": "sthd"}, "axes"),
        ({"axes": "sbtd"}, "there are 2 heads"),
        ({"split": True}, "have an s"),
        ({"blocks": 2**32}, "blocks"),
        ({"window": 1}, "window 1"),
        ({"window": -1}, "window -1"),
        ({"kind": "window"}, "window 0"),
        ({"kind": "window", "window": -1}, "window -1"),
        ({"kind": "window", "window": 2**48}, "window"),
        ({"kind": "mla"}, "MLA keeps one latent vector"),
        ({"kind": "mla", "axes": "btd", "heads": (2, 3)}, "MLA keeps one latent vector"),
    ],
)
def test_what_no_cache_can_be_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        changed(GROUP, **changes)
    sent = msgspec.to_builtins(GROUP)
    for name, value in changes.items():
        sent[GROUP.__struct_fields__.index(name)] = value
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=GroupLayout)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": ("0", 1)}, "layers must be an integer"),
        ({"layers": 2}, "layers must be a tuple of integers"),
        ({"heads": "ab"}, "heads must be a tuple of integers"),
        ({"blocks": True}, "blocks must be an integer, not "),
        ({"blocks": 5.0}, "blocks must be an integer, not "),
        ({"window": None}, "window must be an integer, not "),
        ({"dtype": torch.bfloat16}, "dtype must be a str"),
        ({"axes": b"sbthd"}, "axes must be a str"),
        ({"split": 0}, "split must be True or False"),
        ({"kind": 1}, "kind must be a str"),
    ],
)
def test_fields_of_other_types_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        changed(GROUP, **changes)


def test_a_range_of_heads_is_two_numbers() -> None:
    with pytest.raises(ValueError, match="heads must be 2 integers"):
        changed(GROUP, heads=(1, 2, 3))


def test_fields_of_numpys_types_can_be_sent() -> None:
    group = GroupLayout(
        layers=np.arange(2),
        blocks=np.int64(5),
        block_size=np.uint8(4),
        heads=(np.int32(2), np.int16(4)),
        total_heads=np.int64(8),
        head_size=np.int64(16),
        dtype=np.str_("bfloat16"),
        window=np.int64(0),
    )
    assert group == GROUP
    assert hash(group) == hash(GROUP)
    assert msgspec.msgpack.encode(group) == msgspec.msgpack.encode(GROUP)
    layout = CacheLayout(groups=[group], model=np.bytes_(b"one"))
    assert layout == CacheLayout(groups=(GROUP,), model=b"one")
    assert type(layout.model) is bytes


def test_itemsize() -> None:
    assert [itemsize(name) for name in ("float32", "bfloat16", "float8_e5m2")] == [4, 2, 1]


# -- a cache ----------------------------------------------------------------------------------------


def test_layers_belong_to_groups() -> None:
    assert LAYOUT.layers == 3
    assert [LAYOUT.group_of(layer) for layer in range(3)] == [0, 0, 1]
    with pytest.raises(IndexError, match=r"layer 3 is not one of 0\.\.2"):
        LAYOUT.group_of(3)


@pytest.mark.parametrize(
    ("groups", "model"),
    [((), b""), ((GROUP,), b"x" * 257), ((GROUP, GROUP), b""), ((changed(GROUP, layers=(0, 2)),), b"")],
)
def test_caches_that_cannot_be_are_refused(groups: tuple[GroupLayout, ...], model: bytes) -> None:
    with pytest.raises(ValueError, match=r"group|fingerprint"):
        CacheLayout(groups=groups, model=model)


@pytest.mark.parametrize("model", ["m", bytearray(b"m"), None, 1])
def test_a_fingerprint_is_bytes(model: object) -> None:
    with pytest.raises(TypeError, match="model must be bytes, not"):
        CacheLayout(groups=(GROUP, LATENT), model=model)


@pytest.mark.parametrize("groups", [GROUP, "ab", (GROUP, "b"), [GROUP, None]])
def test_groups_are_groups(groups: object) -> None:
    with pytest.raises(TypeError, match="groups must be a tuple of GroupLayout"):
        CacheLayout(groups=groups)


def test_layers_are_as_many_as_a_bitmap_can_name() -> None:
    size = {"blocks": 1, "block_size": 1, "heads": 1, "head_size": 1, "dtype": "int8"}
    assert CacheLayout.attention(layers=MOST_LAYERS, **size).layers == MOST_LAYERS
    for layers in (0, MOST_LAYERS + 1, 10**12):
        with pytest.raises(ValueError, match="layers must be from 1 to 8192"):
            CacheLayout.attention(layers=layers, **size)
    with pytest.raises(ValueError, match="8193 layers; a cache has at most 8192"):
        CacheLayout(groups=(changed(GROUP, layers=tuple(range(MOST_LAYERS + 1))),))
    ready = Ready("t", 0, b"\xff" * (MOST_LAYERS // 8))
    frame = Frame(b"s" * 16, b"d" * 16, "a", 1, 1, 1, 1, [msgspec.Raw(encode_message(ready))])
    assert decode_messages(frame) == [ready]


def test_latent_is_one_group_of_one_head_that_all_ranks_keep() -> None:
    layout = CacheLayout.latent(
        layers=2, blocks=7, block_size=8, latent_size=576, dtype="bfloat16", model=b"one"
    )
    (group,) = layout.groups
    assert (group.kind, group.layers, group.shape, layout.model) == ("mla", (0, 1), (7, 8, 576), b"one")
    assert (group.heads, group.total_heads, group.halves) == ((0, 1), 1, 1)
    with_head = CacheLayout.latent(
        layers=2, blocks=7, block_size=4, latent_size=576, dtype="bfloat16", axes="bthd"
    )
    assert with_head.groups[0].shape == (7, 4, 1, 576)
    assert list(layout.differences(msgspec.structs.replace(with_head, model=b"one"))) == []


def test_attention_is_one_group() -> None:
    layout = CacheLayout.attention(
        layers=2, blocks=5, block_size=4, heads=8, head_size=16, dtype="bfloat16", rank_heads=(2, 4)
    )
    assert layout.groups == (GROUP,)
    whole = CacheLayout.attention(
        layers=1, blocks=1, block_size=1, heads=3, head_size=2, dtype="int8", axes="bthd", split=True
    )
    assert (whole.groups[0].heads, whole.groups[0].split, whole.model) == ((0, 3), True, b"")


def test_a_layout_survives_the_wire() -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(LAYOUT), type=CacheLayout) == LAYOUT


@pytest.mark.parametrize(
    "changes",
    [
        {"blocks": 99},
        {"block_size": 16},
        {"axes": "bhtsd"},
        {"axes": "bthd", "split": True},
        {"heads": (0, 8)},
    ],
)
def test_what_a_plan_can_bridge_is_compatible(changes: dict[str, object]) -> None:
    other = CacheLayout(groups=(changed(GROUP, **changes), LATENT), model=b"one")
    assert list(LAYOUT.differences(other)) == []
    LAYOUT.check_compatible(other, "x")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_size": 32}, "group 0: head_size 16 against 32"),
        ({"dtype": "float16"}, "group 0: dtype bfloat16 against float16"),
        ({"total_heads": 16}, "group 0: total_heads 8 against 16"),
        ({"kind": "state"}, "group 0: kind attention against state"),
        ({"axes": "bthd"}, "group 0: halves 2 against 1"),
    ],
)
def test_what_it_cannot_bridge_is_named(changes: dict[str, object], message: str) -> None:
    other = CacheLayout(groups=(changed(GROUP, **changes), LATENT), model=b"one")
    assert list(LAYOUT.differences(other)) == [message]
    with pytest.raises(LayoutMismatch, match=message) as caught:
        LAYOUT.check_compatible(other, "tcp://x")
    assert "tcp://x" in str(caught.value)
    assert isinstance(caught.value, Refused)


def test_windows_of_two_sizes_differ() -> None:
    one, two = (changed(GROUP, kind="window", window=size) for size in (64, 128))
    found = CacheLayout(groups=(one,)).differences(CacheLayout(groups=(two,)))
    assert list(found) == ["group 0: window 64 against 128"]


def test_every_difference_is_named() -> None:
    one = CacheLayout(groups=(changed(GROUP, layers=(0, 1, 2)),), model=b"two")
    two = CacheLayout(groups=(changed(GROUP, dtype="int8"),))
    assert list(one.differences(two)) == [
        "model fingerprint 74776f against empty",
        "group 0: 3 layers against 2",
        "group 0: dtype bfloat16 against int8",
    ]
    assert list(LAYOUT.differences(two)) == [
        "model fingerprint 6f6e65 against empty",
        "2 KV cache groups against 1",
    ]
