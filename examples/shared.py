"""Two processes share a pool of host memory: what one stored the other finds, and loads.

Here the first is the pool's owner, too, and starts the other; ``python -m aiokv pool`` is an owner by itself.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import tempfile
from pathlib import Path

import torch
import uvloop

import aiokv

LAYOUT = aiokv.CacheLayout.attention(
    layers=4, blocks=64, block_size=16, heads=8, head_size=64, dtype="float32", model=b"example"
)
HASHES = aiokv.block_hashes(range(96), 16)


async def replica(path: Path, *, first: bool) -> None:
    """What each process does: have a prefix from the pool, or compute and store it."""
    blocks = list(range(6)) if first else list(range(20, 26))
    with await asyncio.to_thread(aiokv.KVCache.allocate, LAYOUT) as cache:
        planes = [plane for layer in range(LAYOUT.layers) for plane in cache.tensor(layer)]  # K, and V
        async with aiokv.HostTier(cache, pool=path) as tier:
            async with tier.lookup(HASHES) as hit:
                loaded = await tier.load(hit, blocks[: len(hit)])
            if loaded < len(HASHES):
                for plane in planes:
                    plane[blocks] = 7.0  # the model's part
                await tier.store(HASHES, blocks)
            print(f"{'first' if first else 'second'} process: {loaded} of {len(HASHES)} blocks from the pool")
            assert loaded == (0 if first else len(HASHES))
            assert all(torch.all(plane[blocks] == 7.0) for plane in planes)


async def main(path: Path, other: multiprocessing.process.BaseProcess) -> None:
    async with aiokv.HostPool(path, capacity="8MiB") as pool:
        await replica(path, first=True)
        await asyncio.to_thread(other.start)
        await asyncio.to_thread(other.join)
        print(f"the pool holds {pool.statistics().places_used} blocks")


def second(path: Path) -> None:
    uvloop.run(replica(path, first=False))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        socket = Path(folder) / "pool"
        process = multiprocessing.get_context("spawn").Process(target=second, args=(socket,))
        uvloop.run(main(socket, process))
    assert process.exitcode == 0, "the other process failed"
    print("equal")
