"""A worker's blocks: filled with noise while nobody uses them, and looked at when somebody does again."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from aiokv.device.cache import KVCache

__all__ = ["BlocksChanged", "Store"]

Bytes = NDArray[np.uint8]


class BlocksChanged(Exception):
    """Blocks that belonged to nobody were written to."""


class Store:
    """Gives blocks out and takes them back.

    What comes back is filled with noise at once. Who still reads it reads nothing that could be taken for
    right, and who still writes to it is found out when it is given out again.

    Args:
        cache: Of one group; its memory can be seen by this process.
        seed: Of the noise.
    """

    def __init__(self, cache: KVCache, seed: int) -> None:
        layout, place = cache.layout.groups[0], cache.placement.groups[0]
        stride_b, stride_s, stride_t, stride_h = place.strides
        in_tensor = layout.halves // layout.planes
        shape = (in_tensor, layout.blocks, layout.block_size, layout.head_count, layout.head_bytes)
        strides = (stride_s, stride_b, stride_t, stride_h, 1)
        #: For each layer its tensors, as (half, block, token, head, byte).
        self._layers: list[list[Bytes]] = [
            [
                np.lib.stride_tricks.as_strided(_bytes(cache, number)[offset:], shape, strides)
                for number, offset in planes
            ]
            for planes in place.layers
        ]
        self.layers = len(self._layers)
        self._shape = (layout.halves, layout.block_size, layout.head_count, layout.head_bytes)
        self._chance = random.Random(seed)  # noqa: S311
        self._noise = np.random.default_rng(seed)
        self._free = list(range(layout.blocks))
        self._noted: dict[int, bytes] = {}
        self._spoil(self._free)

    def take(self, count: int) -> list[int]:
        """Blocks for one side of a transfer; none where there aren't so many.

        Raises:
            BlocksChanged: Somebody wrote to them while they were nobody's.
        """
        if count > len(self._free):
            return []
        self._chance.shuffle(self._free)
        taken, self._free = self._free[:count], self._free[count:]
        changed = [block for block in taken if self._look(block) != self._noted[block]]
        if changed:
            raise BlocksChanged(f"blocks {changed} were written to after they had been given back")
        return taken

    def give(self, blocks: Sequence[int]) -> None:
        """Blocks are nobody's again."""
        self._spoil(blocks)
        self._free += blocks

    def made_up(self, count: int) -> Bytes:
        """Random bytes for one layer of so many blocks."""
        halves, *rest = self._shape
        return self._noise.integers(0, 256, (halves, count, *rest), dtype=np.uint8)

    def write(self, layer: int, blocks: Sequence[int], data: Bytes) -> None:
        """Put them in place."""
        for half, tensor in zip(np.split(data, len(self._layers[layer])), self._layers[layer], strict=True):
            tensor[:, list(blocks)] = half

    def read(self, layer: int, blocks: Sequence[int]) -> Bytes:
        """A copy of what is in place."""
        return np.concatenate([tensor[:, list(blocks)] for tensor in self._layers[layer]])

    def _spoil(self, blocks: Sequence[int]) -> None:
        for layer in range(self.layers):
            self.write(layer, blocks, self.made_up(len(blocks)))
        for block in blocks:
            self._noted[block] = self._look(block)

    def _look(self, block: int) -> bytes:
        found = hashlib.blake2b(digest_size=16)
        for layer in range(self.layers):
            found.update(self.read(layer, [block]).tobytes())
        return found.digest()


def _bytes(cache: KVCache, number: int) -> Bytes:
    view: memoryview = cache.buffers[number].view  # type: ignore[attr-defined]
    return np.frombuffer(view, np.uint8)
