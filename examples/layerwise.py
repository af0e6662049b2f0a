"""Layer by layer: a layer's KV travels while the next layer is computed, and is used while others travel."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import torch
import uvloop

import aiokv

LAYOUT = aiokv.CacheLayout.attention(
    layers=8, blocks=64, block_size=16, heads=8, head_size=64, dtype="float32", model=b"example"
)


def prefill(cache: aiokv.KVCache, blocks: list[int], on_layer: Callable[[int], None]) -> None:
    """Stands for a model's forward over a prompt, in a worker thread."""
    hidden, weight = torch.randn(64, 512), torch.randn(512, 512)
    for layer in range(LAYOUT.layers):
        hidden = torch.tanh(hidden @ weight)
        keys, values = cache.tensor(layer)
        keys[blocks] = hidden.view(4, 16, 8, 64)
        values[blocks] = -hidden.view(4, 16, 8, 64)
        on_layer(layer)  # from any thread, never blocks; this layer isn't written again until the offer ends


async def produce(engine: aiokv.TransferEngine, cache: aiokv.KVCache, blocks: list[int]) -> None:
    async with engine.offer("request-1", blocks, readers=1, deadline=30) as transfer:
        await asyncio.to_thread(prefill, cache, blocks, transfer.layer_ready)
    # Left normally: all of it is across, and the blocks are free for the next request.


async def consume(engine: aiokv.TransferEngine, cache: aiokv.KVCache, blocks: list[int], source: str) -> None:
    async with engine.fetch("request-1", blocks, sources=[source], deadline=30) as transfer:
        for layer in range(LAYOUT.layers):
            await transfer.layer(layer)
            keys, values = cache.tensor(layer)
            assert torch.equal(keys[blocks], -values[blocks])  # a decoder would attend to it here
            print(f"layer {layer} landed, {transfer.progress.bytes_moved} bytes so far")


async def main(producer: aiokv.KVCache, consumer: aiokv.KVCache) -> None:
    theirs, ours = [3, 1, 4, 15], [9, 2, 6, 5]
    async with aiokv.TransferEngine(producer) as left, aiokv.TransferEngine(consumer) as right:
        await asyncio.gather(produce(left, producer, theirs), consume(right, consumer, ours, left.address))
    for layer in range(LAYOUT.layers):
        for sent, landed in zip(producer.tensor(layer), consumer.tensor(layer), strict=True):
            assert torch.equal(landed[ours], sent[theirs])
    print("equal")


if __name__ == "__main__":
    # Before the loop runs, since making memory blocks.
    uvloop.run(main(aiokv.KVCache.allocate(LAYOUT), aiokv.KVCache.allocate(LAYOUT)))
