"""Push: the producer names the consumer, which waits for an offer without knowing whose.

Nothing else differs from pull: the same offer, the same fetch, the same guarantees.
"""

from __future__ import annotations

import asyncio

import torch
import uvloop

import aiokv

LAYOUT = aiokv.CacheLayout.attention(
    layers=4, blocks=64, block_size=16, heads=8, head_size=64, dtype="float32", model=b"example"
)


async def produce(engine: aiokv.TransferEngine, blocks: list[int], reader: str) -> None:
    async with engine.offer("request-1", blocks, to=[reader], deadline=10):
        print(f"pushed to {reader}")


async def consume(engine: aiokv.TransferEngine, blocks: list[int]) -> None:
    # No sources: the offer comes here by itself.
    async with engine.fetch("request-1", blocks, deadline=10) as transfer:
        await transfer.wait()
        print(f"took {transfer.progress.bytes_moved} bytes")


async def main(producer: aiokv.KVCache, consumer: aiokv.KVCache) -> None:
    theirs, ours = [3, 1, 4, 15], [9, 2, 6, 5]  # block ids are each side's own
    for layer in range(LAYOUT.layers):
        for plane in producer.tensor(layer):  # K, and V
            plane.normal_()
    async with (
        aiokv.TransferEngine(producer) as prefill,
        aiokv.TransferEngine(consumer) as decode,
        asyncio.TaskGroup() as group,
    ):
        group.create_task(consume(decode, ours))
        group.create_task(produce(prefill, theirs, decode.address))
    for layer in range(LAYOUT.layers):
        for sent, landed in zip(producer.tensor(layer), consumer.tensor(layer), strict=True):
            assert torch.equal(landed[ours], sent[theirs])
    print("equal")


if __name__ == "__main__":
    # Before the loop runs, since making memory blocks.
    uvloop.run(main(aiokv.KVCache.allocate(LAYOUT), aiokv.KVCache.allocate(LAYOUT)))
