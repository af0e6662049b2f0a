"""The vLLM that is played with two KV cache groups, one of which has a sliding window.

As in vLLM, blocks of both groups are taken from one pool, and are the same memory: a layer of each group is a
view of the same tensor. Blocks before the window are given to others as soon as they are, without a word, and
where a request comes with tokens that are computed, there are none in their place.
"""

from __future__ import annotations

import numpy as np
import torch
from aiokv_vllm_played import LAYERS, SIZE, Played, Request, answer, numbers  # see conftest.py

from aiokv.integrations.vllm.layout import Group

__all__ = ["Windows", "answer"]


class Windows(Played):
    """Two groups: all tokens, and the last ``WINDOW``."""

    WINDOW = 2 * SIZE + 5

    def groups(self) -> list[Group]:
        return [
            Group(LAYERS[:1], SIZE, 2, 8),
            Group(LAYERS[1:], SIZE, 2, 8, "window", self.WINDOW),
        ]

    def allocate(self, blocks: int) -> dict[str, torch.Tensor]:
        return dict.fromkeys(LAYERS, torch.zeros(blocks, 2, SIZE, 16))

    # -- blocks

    def before(self, tokens: int) -> int:
        """Blocks that the window doesn't reach any more, with so many tokens computed."""
        return max(0, tokens - self.WINDOW + 1) // SIZE

    def take(self, request: Request, tokens: int) -> bool:
        self.slide(request)
        counts = [-(-tokens // SIZE) - len(ids) for ids in request.table]
        if sum(max(0, count) for count in counts) > len(self.free):
            return False
        for ids, count in zip(request.table, counts, strict=True):
            for _ in range(count):
                block, _ = self.free.popitem(last=False)
                name = self.names.pop(block, None)
                if name is not None and self.cached.get(name) == block:
                    del self.cached[name]
                self.users[block] = 1
                ids.append(block)
        return True

    def slide(self, request: Request) -> None:
        """Give up what is before the window by now."""
        ids = request.table[1]
        for at in reversed(range(min(self.before(request.num_computed_tokens), len(ids)))):
            if ids[at]:
                self.let_go(ids[at])
                ids[at] = 0

    def let_go(self, block: int) -> None:
        self.users[block] -= 1
        if not self.users[block]:
            self.free[block] = None

    def give(self, request: Request) -> None:
        for ids in request.table:
            for block in reversed(ids):
                if block:
                    self.let_go(block)
        request.table = [[], []]

    def cache(self, request: Request) -> None:
        for group, ids in enumerate(request.table):
            for at in range(min(request.num_computed_tokens // SIZE, len(request.block_hashes))):
                name, block = (group, request.block_hashes[at]), ids[at]
                if block and name not in self.cached and block not in self.names:
                    self.cached[name], self.names[block] = block, name

    def hits(self, request: Request) -> list[list[int]]:
        names = request.block_hashes[: (len(request.tokens) - 1) // SIZE]
        most = next((at for at, name in enumerate(names) if (0, name) not in self.cached), len(names))
        for count in range(most, -1, -1):
            first = self.before(count * SIZE)
            if all((1, name) in self.cached for name in names[first:count]):
                return [
                    [self.cached[0, name] for name in names[:count]],
                    [0] * first + [self.cached[1, name] for name in names[first:count]],
                ]
        raise AssertionError

    def covered(self, there: list[list[int]]) -> int:
        return len(there[0]) * SIZE

    def adopt(self, request: Request, there: list[list[int]], tokens: int) -> None:
        first = self.before(tokens)
        there[1] = [0] * first + there[1][first:]
        for block in (block for ids in there for block in ids if block):
            self.users[block] += 1
            self.free.pop(block, None)
        request.table = there

    def arrive(self, request: Request) -> None:
        """Of a load that failed nothing is left: block ids would mean blocks of both groups."""
        failed, request.empty = bool(request.empty), None
        if failed:
            self.give(request)
            request.num_computed_tokens = 0
            return
        self.cache(request)
        request.num_computed_tokens = min(request.num_computed_tokens, len(request.tokens) - 1)

    # -- the model

    def compute(self, chosen: list[tuple[Request, int, int]]) -> None:
        for group, tensor in enumerate(self.tensors.values()):
            content = tensor.numpy()
            assert not content[0].any(), "the block that stands for none is written"
            for request, first, tokens in chosen:
                last = first + tokens
                wanted = np.array(numbers(request.truth[:last], self.weights), np.float32)
                wanted += group / 2
                reach = max(0, first - self.WINDOW + 1) if group else 0
                at = np.arange(reach, last)
                blocks = np.array(request.table[group])[at // SIZE]
                assert blocks.all(), f"{request.request_id} has no block where the window reaches"
                there = content[blocks, :, at % SIZE].reshape(len(at), -1)[: first - reach]
                assert (there == wanted[reach:first, None]).all(), f"{request.request_id} reads another's"
                content[blocks[first - reach :], :, at[first - reach :] % SIZE] = wanted[first:, None, None]
            self.worker.written(group, self.stream)
        for request, _, tokens in chosen:
            self.computed += tokens
            self.cache(request)

    def flood(self) -> None:
        self.answer([self.computed % 49, *range(SIZE * (len(self.free) - 9))], 1)
