"""vLLM's KV cache groups and tensors as a ``CacheLayout``.

vLLM says what a group keeps (heads, head size, block size), and its attention backend decides in which order
a tensor has its axes; that order is read from the shapes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiokv.errors import LayoutMismatch
from aiokv.proto.layout import CacheLayout, GroupLayout, Kind

if TYPE_CHECKING:
    import torch

__all__ = ["Group", "cache_layout", "layer_order", "rank_heads"]

#: Orders of axes that backends use, tried in turn: FlashAttention's and FlashInfer's, that of CPUs, MLA's.
_AXES = ("sbthd", "bsthd", "bhtsd", "bthd", "bhtd", "btd")


@dataclass(frozen=True, slots=True)
class Group:
    """What vLLM says of one KV cache group.

    Attributes:
        layers: Names of its layers.
        block_size: Tokens per block.
        heads: KV heads of this rank.
        head_size: Elements of a head.
        kind: What it keeps.
        window: Tokens of a sliding window; else 0.
    """

    layers: tuple[str, ...]
    block_size: int
    heads: int
    head_size: int
    kind: Kind = "attention"
    window: int = 0


def layer_order(names: Sequence[str]) -> list[str]:
    """Names of layers in the model's order, by the numbers in them (``model.layers.10.self_attn``)."""

    def key(name: str) -> list[tuple[int, int, str]]:
        parts = re.split(r"(\d+)", name)
        return [(1, int(part), "") if part.isdigit() else (0, 0, part) for part in parts]

    return sorted(names, key=key)


def rank_heads(total: int, ranks: int, rank: int) -> tuple[int, int]:
    """The KV heads that a rank keeps, half-open: its share, or one where there are more ranks than heads.

    Raises:
        ValueError: They can't be shared out.
    """
    if total % ranks and ranks % total:
        raise ValueError(f"{total} KV heads can't be shared out among {ranks} ranks")
    if ranks > total:
        head = rank * total // ranks
        return head, head + 1
    share = total // ranks
    return rank * share, (rank + 1) * share


def cache_layout(
    groups: Sequence[Group],
    tensors: Mapping[str, torch.Tensor],
    *,
    heads: tuple[int, int],
    total_heads: int,
    model: bytes,
) -> tuple[CacheLayout, list[torch.Tensor]]:
    """The layout of what vLLM registered, and the tensors in the order of its layers.

    Args:
        groups: vLLM's KV cache groups, in their order.
        tensors: By the names of layers.
        heads: KV heads that this rank keeps, half-open.
        total_heads: KV heads of the model.
        model: Fingerprint.

    Raises:
        LayoutMismatch: A tensor isn't what its group says; the message names the layer.
    """
    names = [name for group in groups for name in group.layers]
    if missing := set(names) - set(tensors):
        raise LayoutMismatch(f"no KV cache was registered for {', '.join(sorted(missing))}")
    order = layer_order(names)
    places = {name: index for index, name in enumerate(order)}
    found = []
    for group in groups:
        inner = sorted(group.layers, key=places.__getitem__)
        first = tensors[inner[0]]
        axes, blocks = _axes(inner[0], group, tuple(first.shape))
        latent = group.kind == "mla"
        found.append(
            GroupLayout(
                layers=tuple(places[name] for name in inner),
                blocks=blocks,
                block_size=group.block_size,
                heads=(0, 1) if latent else heads,
                total_heads=1 if latent else total_heads,
                head_size=group.head_size,
                dtype=str(first.dtype).removeprefix("torch."),
                axes=axes,
                kind=group.kind,
                window=group.window,
            )
        )
    return CacheLayout(groups=tuple(found), model=model), [tensors[name] for name in order]


def _axes(layer: str, group: Group, shape: tuple[int, ...]) -> tuple[str, int]:
    """The order of a tensor's axes, and how many blocks it has."""
    known = {"t": group.block_size, "h": group.heads, "d": group.head_size, "s": 2}
    for axes in _AXES:
        if ("s" in axes) == (group.kind == "mla"):
            continue
        joined = axes.endswith("sd") and len(shape) == len(axes) - 1
        wanted = [known.get(axis) for axis in axes]
        if joined:
            wanted[-2:] = [2 * group.head_size]
        if len(wanted) == len(shape) and all(
            want in (None, size) for want, size in zip(wanted, shape, strict=True)
        ):
            return axes, shape[axes.index("b")]
    raise LayoutMismatch(
        f"{layer}: a tensor of shape {shape} is in no order of axes that is known for {group.heads} heads of "
        f"{group.head_size} elements in blocks of {group.block_size} tokens"
    )
