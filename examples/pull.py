"""Pull: the consumer names the producer, and fetches what it offers under an id that both know.

Two engines in one process stand for two processes, or two hosts: only the address passes between them.
"""

from __future__ import annotations

import asyncio

import torch
import uvloop

import aiokv

LAYOUT = aiokv.CacheLayout.attention(
    layers=4, blocks=64, block_size=16, heads=8, head_size=64, dtype="float32", model=b"example"
)


async def produce(engine: aiokv.TransferEngine, blocks: list[int]) -> None:
    # Nothing else to announce here: leaving the context says that all layers are ready, and
    # waits until the consumer has them. Then the blocks may be used for the next request.
    async with engine.offer("request-1", blocks):
        pass


async def consume(engine: aiokv.TransferEngine, blocks: list[int], source: str) -> None:
    async with engine.fetch("request-1", blocks, sources=[source], deadline=10) as transfer:
        await transfer.wait()
        print(f"pulled {transfer.progress.bytes_moved} bytes from {source}")


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
        # Either may come first.
        group.create_task(consume(decode, ours, prefill.address))
        group.create_task(produce(prefill, theirs))
    for layer in range(LAYOUT.layers):
        for sent, landed in zip(producer.tensor(layer), consumer.tensor(layer), strict=True):
            assert torch.equal(landed[ours], sent[theirs])
    print("equal")


if __name__ == "__main__":
    # Before the loop runs, since making memory blocks.
    uvloop.run(main(aiokv.KVCache.allocate(LAYOUT), aiokv.KVCache.allocate(LAYOUT)))
