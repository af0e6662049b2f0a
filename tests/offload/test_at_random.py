"""Many requests at once, with failures, cancellations and resets: never a wrong byte, and nothing left."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
import torch

from aiokv.offload.policies import SecondSight
from aiokv.testing.tiers import BLOCKS, Kit, tier_on

NAMES = "abcdefgh"


class Users:
    """Requests that share prefixes, each with blocks of its own, as in an engine without a prefix cache."""

    def __init__(self, kit: Kit, seed: int) -> None:
        self.kit = kit
        self.draw = random.Random(seed)
        self.free = list(range(BLOCKS))
        self.loaded = 0

    @asynccontextmanager
    async def blocks(self, count: int) -> AsyncIterator[list[int]]:
        if len(self.free) < count:
            yield []
            return
        self.draw.shuffle(self.free)
        taken = [self.free.pop() for _ in range(count)]
        try:
            yield taken
        finally:
            self.free += taken

    def write(self, keys: Sequence[str], blocks: Sequence[int]) -> None:
        for key, block in zip(keys, blocks, strict=True):
            made = torch.Generator().manual_seed(hash_of(key))
            for plane in self.kit.planes():
                part = plane.select(1, block)
                part.copy_(torch.randn(part.shape, generator=made))

    def check(self, keys: Sequence[str], blocks: Sequence[int]) -> None:
        for key, block in zip(keys, blocks, strict=True):
            made = torch.Generator().manual_seed(hash_of(key))
            for plane in self.kit.planes():
                part = plane.select(1, block)
                assert torch.equal(part, torch.randn(part.shape, generator=made)), f"{key} in block {block}"

    async def request(self) -> None:
        tier, draw = self.kit.tier, self.draw
        name, length = draw.choice(NAMES), draw.randint(1, 12)
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


def hash_of(key: str) -> int:
    return int.from_bytes(key.encode(), "big")


@pytest.mark.parametrize("policy", ["lru", "arc"])
@pytest.mark.parametrize("kind", ["host", "mocked"])
@pytest.mark.asyncio
async def test_never_a_wrong_byte(kind: str, policy: str, seed: int) -> None:
    more = {"admission": SecondSight(64)} if seed % 3 == 0 else {}
    async with tier_on(kind, seed, blocks=24, policy=policy, checksums=0.2, **more) as kit:
        users = Users(kit, seed)
        draw = users.draw
        tasks: set[asyncio.Task[None]] = set()
        for number in range(150):
            tasks.add(asyncio.ensure_future(users.request()))
            for _ in range(draw.randint(0, 6)):
                await asyncio.sleep(0)
            if draw.random() < 0.15:
                draw.choice(sorted(tasks, key=id)).cancel()
            if draw.random() < 0.05 and kind == "mocked":
                for batch in list(kit.tier._opened().copies.batches)[:1]:
                    kit.device.fail(batch.stream)
            if number % 60 == 59:
                assert (await kit.tier.reset()).drained
            if len(tasks) > 5:
                over, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in over:
                    assert task.cancelled() or task.exception() is None
        for done in await asyncio.gather(*tasks, return_exceptions=True):
            assert not isinstance(done, Exception), done
        assert users.loaded > 0
        assert len(users.free) == BLOCKS
