"""The host tier in a few lines: blocks leave the cache, and come back."""

from __future__ import annotations

import torch
import uvloop

import aiokv

LAYOUT = aiokv.CacheLayout.attention(
    layers=4, blocks=64, block_size=16, heads=8, head_size=64, dtype="float32", model=b"example"
)


async def main(cache: aiokv.KVCache) -> None:
    tokens = list(range(100))
    here, there = [3, 1, 4, 15, 9, 2], [20, 21, 22, 23, 24, 25]
    for layer in range(LAYOUT.layers):
        for plane in cache.tensor(layer):  # K, and V
            plane.normal_()
    before = [plane[here].clone() for layer in range(LAYOUT.layers) for plane in cache.tensor(layer)]

    # -- the ten lines
    async with aiokv.HostTier(cache, capacity="8MiB", policy="lru") as tier:
        hashes = aiokv.block_hashes(tokens, LAYOUT.groups[0].block_size)
        kept = await tier.store(hashes, here)  # here[i] holds the KV that hashes[i] names
        print(f"{kept} blocks are kept on the host")

        async with tier.lookup(hashes) as hit:  # the longest prefix, held until this is left
            loaded = await tier.load(hit, there[: len(hit)])
        print(f"{loaded} blocks came back; prefill goes on at token {loaded * tier.block_size}")
    # -- until here

    after = [plane[there] for layer in range(LAYOUT.layers) for plane in cache.tensor(layer)]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    print("equal")


if __name__ == "__main__":
    # Before the loop runs, since making memory blocks.
    with aiokv.KVCache.allocate(LAYOUT) as memory:
        uvloop.run(main(memory))
