"""Paged KV: its memory, a free list of blocks, and attention that keeps a request's KV in its blocks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

import aiokv

__all__ = ["BlockPool", "PagedCache", "memory"]


@contextmanager
def memory(layout: aiokv.CacheLayout, device: torch.device) -> Iterator[aiokv.KVCache]:
    """A cache where the model is. Making it blocks, so no loop should wait."""
    if device.type == "cpu":
        with aiokv.KVCache.allocate(layout) as cache:
            yield cache
        return
    from aiokv.device.cuda import CudaDevice

    with (
        closing(CudaDevice(device.index or 0)) as gpu,
        aiokv.KVCache.allocate(layout, device=gpu) as cache,
    ):
        yield cache


class BlockPool:
    """The free blocks of a cache. For the tasks of one event loop."""

    def __init__(self, blocks: int) -> None:
        self._total = blocks
        self._free = list(range(blocks))
        self._returned = asyncio.Condition()

    @property
    def free(self) -> int:
        """Blocks that nobody has."""
        return len(self._free)

    @asynccontextmanager
    async def take(self, count: int) -> AsyncIterator[list[int]]:
        """Wait for ``count`` blocks; they are given back when the context is left.

        A request takes all that it may ever need at once: two that took some and waited for
        more could wait for each other.

        Raises:
            ValueError: There are not so many blocks at all.
        """
        if count > self._total:
            raise ValueError(f"{count} blocks needed, and there are {self._total}: raise --blocks")
        async with self._returned:
            await self._returned.wait_for(lambda: len(self._free) >= count)
            taken = [self._free.pop() for _ in range(count)]
        try:
            yield taken
        finally:
            # Before anything is awaited, so that no cancellation comes between.
            self._free.extend(taken)
            async with self._returned:
                self._returned.notify_all()


class PagedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # its __init_subclass__
    """One layer of one request: what attention reads and writes, within the request's slots.

    Args:
        keys, values: The layer's memory for all requests, ``[slots, heads, head size]`` each.
        slots: ``int64[capacity]``, the slot of each of this request's token positions.
        length: Tokens whose KV is already there.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, length: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._keys, self._values = keys, values
        self._slots = slots
        self._length = length
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the memory is the cache's."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new tokens' KV ``[1, heads, new, head size]``; return that of all tokens so far."""
        end = self._length + key_states.shape[2]
        if end > len(self._slots):
            raise ValueError(f"{end} tokens don't fit into {len(self._slots)} slots")
        new, so_far = self._slots[self._length : end], self._slots[:end]
        self._keys[new] = key_states[0].transpose(0, 1)
        self._values[new] = value_states[0].transpose(0, 1)
        self._length = end
        return self._keys[so_far].transpose(0, 1)[None], self._values[so_far].transpose(0, 1)[None]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that ``query_length`` new tokens attend to."""
        return self._length + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens whose KV is there."""
        return self._length

    def get_max_length(self) -> int:
        """Tokens that there is room for."""
        return len(self._slots)


class PagedCache(Cache):
    """The KV of one request, in blocks.

    Args:
        cache: The memory, with axes ``sbthd``.
        blocks: The request's blocks, in the order of its tokens.
        length: Tokens whose KV the blocks already hold.
        on_layer: Called with a layer's number once the KV of a forward is written there, in the
            thread that runs the forward.
    """

    def __init__(
        self,
        cache: aiokv.KVCache,
        blocks: Sequence[int],
        *,
        length: int = 0,
        on_layer: Callable[[int], object] | None = None,
    ) -> None:
        block_size = cache.layout.groups[0].block_size
        where = cache.tensor(0)[0].device
        firsts = torch.tensor(blocks, device=where)[:, None] * block_size
        slots = (firsts + torch.arange(block_size, device=where)).flatten()
        layers: list[Any] = []  # the base class wants a union of its kinds, invariantly
        for layer in range(cache.layout.layers):
            # Views, never copies: what is written must be what is sent.
            keys, values = (plane.view(-1, *plane.shape[2:]) for plane in cache.tensor(layer))
            layers.append(PagedLayer(keys, values, slots, length))
        super().__init__(layers=layers)
        self._on_layer = on_layer

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one layer's new KV, and say so."""
        full = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if self._on_layer is not None:
            self._on_layer(layer_idx)
        return full
