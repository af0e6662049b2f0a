"""Several requests that decode together: one forward for the next token of each, KV in its own blocks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

import aiokv
from serving.compute import Compute
from serving.model import Model

__all__ = ["Batcher", "Decoding", "step"]


@dataclass(eq=False)
class Decoding:
    """One request that decodes.

    Args:
        blocks: Its blocks, with room for all tokens that it may ever have.
        length: Tokens whose KV the blocks hold.
        last: The token that follows them.
        left: Tokens that are to be generated still.
    """

    blocks: Sequence[int]
    length: int
    last: int
    left: int
    #: What was generated and not taken yet; an exception where the forward failed.
    tokens: asyncio.Queue[int | Exception] = field(default_factory=asyncio.Queue)


class BatchLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # its __init_subclass__
    """One layer of a step.

    Args:
        keys, values: The layer's memory, ``[slots, heads, head size]`` each.
        slots: ``int64[requests, longest]``: where each request's tokens are, the new one among them; padded.
        new: ``int64[requests]``: where the new ones go.
    """

    def __init__(
        self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, new: torch.Tensor
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._keys, self._values, self._slots, self._new = keys, values, slots, new
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the memory is the cache's."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new KV ``[requests, heads, 1, head size]``; return that of all tokens, padded."""
        self._keys[self._new] = key_states[:, :, 0]
        self._values[self._new] = value_states[:, :, 0]
        return self._keys[self._slots].transpose(1, 2), self._values[self._slots].transpose(1, 2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys; the mask is given, so nobody goes by it."""
        return self._slots.shape[1], 0

    def get_seq_length(self) -> int:
        """Tokens before this step, of the longest."""
        return self._slots.shape[1] - 1

    def get_max_length(self) -> int:
        """As many as there are."""
        return self._slots.shape[1]


def step(model: Model, memory: aiokv.KVCache, sequences: Sequence[Decoding]) -> list[int]:
    """The next token of each, in one forward. Blocks, so it belongs in a worker thread.

    Afterwards the KV of each ``last`` is in its blocks. The sequences themselves are left as they are.
    """
    size = memory.layout.groups[0].block_size
    where = model.device
    lengths = torch.tensor([each.length for each in sequences], device=where)
    longest = int(lengths.max()) + 1
    slots = torch.zeros(len(sequences), longest, dtype=torch.int64, device=where)
    for row, each in enumerate(sequences):
        firsts = torch.tensor(each.blocks[: each.length // size + 1], device=where)[:, None] * size
        own = (firsts + torch.arange(size, device=where)).flatten()[: each.length + 1]
        slots[row, : len(own)] = own
    new = slots[torch.arange(len(sequences), device=where), lengths]
    layers: list[Any] = []
    for layer in range(model.layers):
        keys, values = (plane.view(-1, *plane.shape[2:]) for plane in memory.tensor(layer))
        layers.append(BatchLayer(keys, values, slots, new))
    seen = torch.arange(longest, device=where) <= lengths[:, None]
    with torch.inference_mode():
        output = model.network(
            input_ids=torch.tensor([[each.last] for each in sequences], device=where),
            attention_mask=seen[:, None, None, :],
            position_ids=lengths[:, None],
            cache=Cache(layers=layers),
            use_cache=True,
        )
    return [int(token) for token in output.logits[:, -1].argmax(dim=-1)]


class Batcher:
    """Decodes whatever sequences there are, step by step; they join and leave between steps.

    For the tasks of one event loop. It works while there are sequences and has no task otherwise.

    Args:
        compute: The thread of the model.
        forward: ``step`` for a model and its memory.
        most: Sequences in one step; more take turns.
    """

    def __init__(
        self, compute: Compute, forward: Callable[[Sequence[Decoding]], list[int]], most: int
    ) -> None:
        self._compute = compute
        self._forward = forward
        self._most = most
        self._sequences: list[Decoding] = []
        self._stepping: tuple[Decoding, ...] = ()
        self._stepped = asyncio.Condition()
        self._work: asyncio.Task[None] | None = None  # None while there are no sequences

    @property
    def size(self) -> int:
        """Sequences that decode."""
        return len(self._sequences)

    @asynccontextmanager
    async def decoding(self, sequence: Decoding) -> AsyncIterator[AsyncIterator[int]]:
        """Gives the tokens as they come; leaving the context ends it.

        When it is left, no step writes to the sequence's blocks any more.
        """
        self._sequences.append(sequence)
        if self._work is None:
            self._work = asyncio.create_task(self._run())
        try:
            yield self._tokens(sequence)
        finally:
            self._sequences.remove(sequence)
            await self._quiet(sequence)

    @staticmethod
    async def _tokens(sequence: Decoding) -> AsyncIterator[int]:
        while True:
            token = await sequence.tokens.get()
            if isinstance(token, Exception):
                raise token
            yield token

    async def _quiet(self, sequence: Decoding) -> None:
        """Until no step has the sequence; a cancellation comes out after that."""
        cancelled: asyncio.CancelledError | None = None
        while sequence in self._stepping:
            try:
                async with self._stepped:
                    await self._stepped.wait_for(lambda: sequence not in self._stepping)
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled

    async def _run(self) -> None:
        while waiting := [each for each in self._sequences if each.left]:
            self._stepping = tuple(waiting[: self._most])
            # Those that waited for their turn come first the next time.
            self._sequences.sort(key=self._stepping.__contains__)
            try:
                tokens: list[int | Exception] = [*await self._compute.run(self._forward, self._stepping)]
            except Exception as error:  # noqa: BLE001 - whoever waits for these tokens is told
                tokens = [error] * len(self._stepping)
            for each, token in zip(self._stepping, tokens, strict=True):
                each.left -= 1
                if isinstance(token, int):
                    each.length += 1
                    each.last = token
                each.tokens.put_nowait(token)
            self._stepping = ()
            async with self._stepped:
                self._stepped.notify_all()
        self._work = None
