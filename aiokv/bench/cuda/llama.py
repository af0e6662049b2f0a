"""KV caches in the memory of a GPU as an inference engine keeps them: a tensor of torch for each layer."""

from __future__ import annotations

from typing import Any

import numpy as np

import aiokv
from aiokv.bench.cuda.gpu import Gpu
from aiokv.device.cuda import CudaDevice
from aiokv.proto.layout import CacheLayout

__all__ = ["BLOCK_TOKENS", "LAYERS", "Llama", "block_ids", "layout_of", "token_bytes"]

LAYERS, HEADS, HEAD_SIZE, BLOCK_TOKENS = 32, 8, 128, 16


def token_bytes() -> int:
    """Bytes of a token in all layers."""
    return LAYERS * 2 * HEADS * HEAD_SIZE * 2


def block_ids(tokens: int, blocks: int, seed: int, *, scattered: bool) -> list[int]:
    """Blocks for so many tokens: anywhere among all, or one after another.

    Raises:
        ValueError: There are not so many.
    """
    if tokens > blocks * BLOCK_TOKENS:
        raise ValueError(f"{blocks} blocks have no room for {tokens} tokens")
    ids = np.random.default_rng(seed).permutation(blocks) if scattered else np.arange(blocks)
    found: list[int] = ids[: tokens // BLOCK_TOKENS].tolist()
    return found


def layout_of(blocks: int, layers: int = LAYERS, heads: int = HEADS) -> CacheLayout:
    """What is in such a cache."""
    return CacheLayout.attention(
        layers=layers,
        blocks=blocks,
        block_size=BLOCK_TOKENS,
        heads=heads,
        head_size=HEAD_SIZE,
        dtype="bfloat16",
        model=b"llama",
    )


class Llama:
    """The tensors of all layers, and the cache that they are; by default Llama-3-8B's.

    Args:
        gpu: Where.
        blocks: Of each layer.
        layers: How many.
        heads: KV heads.
        device: What copies; the GPU's by default.
    """

    def __init__(
        self,
        gpu: Gpu,
        blocks: int,
        *,
        layers: int = LAYERS,
        heads: int = HEADS,
        device: CudaDevice | None = None,
    ) -> None:
        self._torch = torch = gpu.torch
        self._gpu = gpu
        self.blocks = blocks
        shape = (2, blocks, BLOCK_TOKENS, heads, HEAD_SIZE)
        self.tensors: list[Any] = [
            torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in range(layers)
        ]
        layout = layout_of(blocks, layers, heads)
        self.cache = aiokv.KVCache.from_tensors(layout, self.tensors, device=device or gpu.device)
        gpu.synchronize()

    def _drawn(self, layer: int, seed: int) -> Any:  # noqa: ANN401 - a tensor
        torch = self._torch
        drawing = torch.Generator(device="cuda").manual_seed(seed * 1000 + layer)
        found = torch.empty(self.tensors[layer].shape, dtype=torch.int16, device="cuda")
        return found.random_(generator=drawing)

    def fill(self, seed: int) -> None:
        """Write random numbers, the same in every process for the same seed."""
        for layer, tensor in enumerate(self.tensors):
            tensor.view(self._torch.int16).copy_(self._drawn(layer, seed))
        self._gpu.synchronize()

    def same(self, seed: int, there: list[int], here: list[int]) -> bool:
        """Whether these blocks have what ``fill`` wrote with this seed to those blocks of another cache."""
        torch = self._torch
        for layer, tensor in enumerate(self.tensors):
            if not torch.equal(tensor.view(torch.int16)[:, here], self._drawn(layer, seed)[:, there]):
                return False
        return True
