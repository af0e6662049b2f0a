"""Different tensor parallelism: two prefill ranks with half of the KV heads each, one decode rank with all.

It is one transfer of two parts. Each part moves the heads that its two ends have in common.
"""

from __future__ import annotations

import asyncio

import torch
import uvloop

import aiokv


def layout(first: int, last: int) -> aiokv.CacheLayout:
    """The cache of a rank that keeps the KV heads ``first`` to ``last`` of 8."""
    return aiokv.CacheLayout.attention(
        layers=4, blocks=64, block_size=16, heads=8, head_size=64, dtype="float32", model=b"example",
        rank_heads=(first, last),
    )  # fmt: skip


async def produce(engine: aiokv.TransferEngine, blocks: list[int]) -> None:
    async with engine.offer("request-1", blocks, deadline=10):
        pass


async def main(low: aiokv.KVCache, high: aiokv.KVCache, whole: aiokv.KVCache) -> None:
    theirs, ours = [3, 1, 4, 15], [9, 2, 6, 5]
    for layer in range(4):
        for plane in (*low.tensor(layer), *high.tensor(layer)):  # K, and V, of both
            plane.normal_()
    async with (
        aiokv.TransferEngine(low) as prefill_0,
        aiokv.TransferEngine(high) as prefill_1,
        aiokv.TransferEngine(whole) as decode,
        asyncio.TaskGroup() as group,
    ):
        group.create_task(produce(prefill_0, theirs))
        group.create_task(produce(prefill_1, theirs))
        sources = [prefill_0.address, prefill_1.address]
        async with decode.fetch("request-1", ours, sources=sources, deadline=10) as transfer:
            async for layer in transfer.layers():
                print(f"layer {layer} landed from both ranks")
    for layer in range(4):
        for first, second, landed in zip(
            low.tensor(layer), high.tensor(layer), whole.tensor(layer), strict=True
        ):
            assert torch.equal(landed[ours], torch.cat([first[theirs], second[theirs]], dim=2))
    print("equal")


if __name__ == "__main__":
    # Before the loop runs, since making memory blocks.
    uvloop.run(main(*(aiokv.KVCache.allocate(layout(*heads)) for heads in ((0, 4), (4, 8), (0, 8)))))
