"""A model whose attention is split over the ranks of a group: each has some of the heads, and their KV."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import aiokv
from serving.model import Model

__all__ = ["Part", "split"]


@dataclass(frozen=True, slots=True)
class Part(Model):
    """What one rank runs. All ranks run each forward, in the same order: they wait for each other in it."""

    rank: int
    size: int

    def layout(self, blocks: int, block_size: int) -> aiokv.CacheLayout:
        """The layout of this rank's KV cache: its own heads, of all that the model has."""
        config: Any = self.network.config
        own = config.num_key_value_heads // self.size
        return aiokv.CacheLayout.attention(
            layers=config.num_hidden_layers,
            blocks=blocks,
            block_size=block_size,
            heads=config.num_key_value_heads,
            rank_heads=(self.rank * own, (self.rank + 1) * own),
            head_size=config.head_dim,
            dtype="float32",
            model=self.name.encode(),
        )


class Gathered(nn.Module):
    """What follows attention, given the heads of all ranks.

    Every rank then computes the same, bit for bit, as one that has all heads; a sum over ranks would not.
    """

    def __init__(self, whole: nn.Linear, size: int) -> None:
        super().__init__()
        self.whole = whole
        self.size = size

    def forward(self, own: torch.Tensor) -> torch.Tensor:
        """``own`` is ``[1, tokens, own heads * head size]``; blocks until all ranks are there."""
        heads = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(heads, own.contiguous())
        projected: torch.Tensor = self.whole(torch.cat(heads, dim=-1))
        return projected


def split(model: Model, rank: int, size: int) -> Part:
    """One rank's part of a model, which is changed; the others are met in torch's default group.

    Raises:
        ValueError: The KV heads can't be shared out evenly.
    """
    config: Any = model.network.config
    if config.num_key_value_heads % size:
        raise ValueError(f"{config.num_key_value_heads} KV heads can't be split evenly over {size} ranks")
    if size > 1:
        for layer in model.network.model.layers:
            attention: Any = layer.self_attn
            for name in ("q_proj", "k_proj", "v_proj"):
                setattr(attention, name, _share(getattr(attention, name), rank, size))
            attention.o_proj = Gathered(attention.o_proj, size)
    return Part(model.name, model.network, model.tokenizer, rank, size)


def _share(whole: nn.Linear, rank: int, size: int) -> nn.Linear:
    """A projection to this rank's heads alone."""
    weight = whole.weight.detach().chunk(size)[rank].clone()
    part = nn.Linear(whole.in_features, len(weight), bias=False, device=weight.device, dtype=weight.dtype)
    part.weight = nn.Parameter(weight, requires_grad=False)
    return part
