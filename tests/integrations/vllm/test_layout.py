from __future__ import annotations

import pytest
import torch

from aiokv.device.cache import KVCache
from aiokv.errors import LayoutMismatch
from aiokv.integrations.vllm.layout import Group, cache_layout, layer_order, rank_heads

NAMES = ("model.layers.0.attn", "model.layers.1.attn", "model.layers.10.attn")


def test_layers_are_in_the_models_order() -> None:
    assert layer_order(["model.layers.10.attn", "model.layers.9.attn"]) == [
        "model.layers.9.attn",
        "model.layers.10.attn",
    ]


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((2, 6, 32, 4, 8), "sbthd"),
        ((6, 2, 32, 4, 8), "bsthd"),
        ((6, 4, 32, 16), "bhtsd"),
    ],
)
def test_axes_are_read_from_shapes(shape: tuple[int, ...], axes: str) -> None:
    storage = torch.zeros(3, *shape)
    tensors = dict(zip(NAMES, storage, strict=True))
    layout, ordered = cache_layout(
        [Group(NAMES, 32, 4, 8)], tensors, heads=(0, 4), total_heads=8, model=b"model"
    )
    (group,) = layout.groups
    assert (group.axes, group.blocks, group.heads, group.total_heads) == (axes, 6, (0, 4), 8)
    with KVCache.from_tensors(layout, ordered) as cache:
        assert len(cache.buffers) == 1


@pytest.mark.parametrize(
    ("shape", "axes"), [((6, 32, 72), "btd"), ((6, 1, 32, 72), "bhtd"), ((6, 32, 1, 72), "bthd")]
)
def test_latent_attention(shape: tuple[int, ...], axes: str) -> None:
    tensors = {name: torch.zeros(*shape) for name in NAMES}
    layout, ordered = cache_layout(
        [Group(NAMES, 32, 1, 72, "mla")], tensors, heads=(0, 4), total_heads=8, model=b""
    )
    assert (layout.groups[0].axes, layout.groups[0].heads) == (axes, (0, 1))
    KVCache.from_tensors(layout, ordered).close()


def test_groups() -> None:
    tensors = {name: torch.zeros(6, 4, 32, 16) for name in NAMES}
    groups = [Group(NAMES[1:2], 32, 4, 8, "window", 64), Group(NAMES[::2], 32, 4, 8)]
    layout, _ = cache_layout(groups, tensors, heads=(0, 4), total_heads=4, model=b"")
    assert [(group.layers, group.kind) for group in layout.groups] == [
        ((1,), "window"),
        ((0, 2), "attention"),
    ]


def test_what_is_not_understood_is_named() -> None:
    group = Group(NAMES[:1], 32, 4, 8)
    with pytest.raises(LayoutMismatch, match=r"layers.0.*\(6, 7, 8\)"):
        cache_layout([group], {NAMES[0]: torch.zeros(6, 7, 8)}, heads=(0, 4), total_heads=4, model=b"")
    with pytest.raises(LayoutMismatch, match=r"layers\.0"):
        cache_layout([group], {}, heads=(0, 4), total_heads=4, model=b"")


def test_heads_of_ranks() -> None:
    assert [rank_heads(8, 2, rank) for rank in range(2)] == [(0, 4), (4, 8)]
    assert [rank_heads(2, 4, rank) for rank in range(4)] == [(0, 1), (0, 1), (1, 2), (1, 2)]
    with pytest.raises(ValueError, match="shared out"):
        rank_heads(6, 4, 0)
