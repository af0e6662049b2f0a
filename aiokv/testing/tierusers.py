"""Requests at random on a host tier, that know what each block has to hold."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import torch

from aiokv.device.mocked import MockedStream
from aiokv.testing.tiers import BLOCKS, Kit

__all__ = ["Users", "disturbed"]

_NAMES = "abcdefgh"


class Users:
    """Requests that share prefixes, each with blocks of its own, as in an engine without a prefix cache."""

    def __init__(self, kit: Kit, seed: int) -> None:
        self.kit = kit
        self.draw = random.Random(seed)  # noqa: S311 - a workload, not a secret
        #: Blocks that no request has.
        self.free = list(range(BLOCKS))
        #: Blocks that came from the tier.
        self.loaded = 0

    @asynccontextmanager
    async def blocks(self, count: int) -> AsyncIterator[list[int]]:
        """Blocks for one request; none where there are too few."""
        if len(self.free) < count:
            yield []
            return
        self.draw.shuffle(self.free)
        taken = [self.free.pop() for _ in range(count)]
        try:
            yield taken
        finally:
            self.free += taken

    def _holds(self, key: str, block: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Of each tensor the part that a block has, and what it is to be."""
        made = torch.Generator().manual_seed(_seed_of(key))
        axis = self.kit.cache.layout.groups[0].axes.index("b")
        parts = [plane.select(axis, block) for plane in self.kit.planes()]
        return [(part, torch.randn(part.shape, generator=made)) for part in parts]

    def write(self, keys: Sequence[str], blocks: Sequence[int]) -> None:
        """What a model would compute."""
        for key, block in zip(keys, blocks, strict=True):
            for part, content in self._holds(key, block):
                part.copy_(content)

    def check(self, keys: Sequence[str], blocks: Sequence[int]) -> None:
        """Whether blocks hold what their keys say."""
        for key, block in zip(keys, blocks, strict=True):
            for part, content in self._holds(key, block):
                assert torch.equal(part.cpu(), content), f"block {block} doesn't hold {key}"

    async def request(self) -> None:
        """Load what is there, compute the rest, store it."""
        tier, draw = self.kit.tier, self.draw
        name, length = draw.choice(_NAMES), draw.randint(1, 12)
        keys = [f"{name}{index}" for index in range(length)]
        async with self.blocks(length) as blocks:
            if not blocks:
                await asyncio.sleep(0)
                return
            loaded = 0
            async with tier.lookup(keys) as hit:
                if draw.random() < 0.5:
                    loaded = await tier.load(hit, blocks[: len(hit)], priority=draw.randint(0, 2))
                else:
                    async for loaded in tier.loading(hit, blocks[: len(hit)]):
                        self.check(keys[:loaded], blocks[:loaded])
            self.check(keys[:loaded], blocks[:loaded])
            self.loaded += loaded
            self.write(keys[loaded:], blocks[loaded:])
            first = 0 if draw.random() < 0.5 else loaded
            parent = keys[first - 1] if first else None
            await tier.store(keys[first:], blocks[first:], parent=parent)
            self.check(keys, blocks)


def _seed_of(key: str) -> int:
    return int.from_bytes(key.encode(), "big")


async def disturbed(kit: Kit, seed: int, requests: int) -> Users:
    """So many requests, a few at a time, with cancellations, resets and (mocked) copies that fail."""
    users = Users(kit, seed)
    draw = users.draw
    tasks: set[asyncio.Task[None]] = set()
    for number in range(requests):
        tasks.add(asyncio.ensure_future(users.request()))
        for _ in range(draw.randint(0, 6)):
            await asyncio.sleep(0)
        if draw.random() < 0.15:
            draw.choice(list(tasks)).cancel()
        if draw.random() < 0.05:
            for batch in list(kit.tier._opened().copies.batches)[:1]:
                if isinstance(batch.stream, MockedStream):
                    kit.device.fail(batch.stream)
        if number % 60 == 59:
            assert (await kit.tier.reset()).drained
        if len(tasks) > 5:
            over, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in over:
                assert task.cancelled() or task.exception() is None
    for done in await asyncio.gather(*tasks, return_exceptions=True):
        assert not isinstance(done, Exception), done
    assert len(users.free) == BLOCKS
    return users
