"""A first transfer: one side offers the KV of a request, the other fetches it, layer by layer."""

import asyncio

import torch

import aiokv

LAYOUT = aiokv.CacheLayout.attention(
    layers=8, blocks=64, block_size=16, heads=8, head_size=64, dtype="float32", model=b"example"
)


async def prefill(engine: aiokv.TransferEngine, cache: aiokv.KVCache, blocks: list[int]) -> None:
    async with engine.offer("request-1", blocks, deadline=30) as transfer:
        for layer in range(LAYOUT.layers):
            keys, values = cache.tensor(layer)
            keys[blocks], values[blocks] = torch.randn(2, 4, 16, 8, 64)  # here a model would compute them
            transfer.layer_ready(layer)  # from any thread; the layer travels while the next is computed
    # Left normally: all of it is across, and the blocks are free for the next request.


async def decode(engine: aiokv.TransferEngine, blocks: list[int], source: str) -> None:
    async with engine.fetch("request-1", blocks, sources=[source], deadline=30) as transfer:
        async for layer in transfer.layers():  # a decoder could attend to it now
            print(f"layer {layer} landed, {transfer.progress.bytes_moved} bytes so far")


async def main(here: aiokv.KVCache, there: aiokv.KVCache) -> None:
    async with aiokv.TransferEngine(here) as left, aiokv.TransferEngine(there) as right:
        await asyncio.gather(prefill(left, here, [3, 1, 4, 15]), decode(right, [9, 2, 6, 5], left.address))
    for layer in range(LAYOUT.layers):
        for sent, landed in zip(here.tensor(layer), there.tensor(layer), strict=True):
            assert torch.equal(sent[[3, 1, 4, 15]], landed[[9, 2, 6, 5]])
    print("equal")


if __name__ == "__main__":
    with aiokv.KVCache.allocate(LAYOUT) as one, aiokv.KVCache.allocate(LAYOUT) as other:
        asyncio.run(main(one, other))
