"""aiokv without an event loop of one's own: a synchronous program transfers, and keeps blocks on the host."""

from __future__ import annotations

import torch

import aiokv
from aiokv import blocking

LAYOUT = aiokv.CacheLayout.attention(
    layers=4, blocks=64, block_size=16, heads=8, head_size=64, dtype="float32", model=b"example"
)


def prefill(producer: blocking.TransferEngine, blocks: list[int]) -> None:
    """What a model's step does: it writes layer after layer, and says so."""
    with producer.offer("request-1", blocks) as offer:
        for layer in range(LAYOUT.layers):
            for plane in producer.cache.tensor(layer):  # K, and V
                plane[blocks] = torch.rand_like(plane[blocks])
            offer.layer_ready(layer)  # never blocks
    # across: the blocks are ours again


def main(here: aiokv.KVCache, there: aiokv.KVCache) -> None:
    tokens, blocks = list(range(48)), [3, 1, 4]
    with (
        blocking.TransferEngine(aiokv.TransferEngine(here)) as producer,
        blocking.TransferEngine(aiokv.TransferEngine(there)) as consumer,
        blocking.HostTier(
            aiokv.HostTier(there, "8MiB", engine=consumer.engine), thread=consumer.thread
        ) as tier,
    ):
        fetch = consumer.fetch("request-1", [20, 21, 22], sources=[producer.address])
        fetch.start()
        prefill(producer, blocks)
        fetch.wait().result()  # a concurrent.futures.Future, as everything that asyncio would await
        print("the KV is there")

        hashes = aiokv.block_hashes(tokens, LAYOUT.groups[0].block_size)
        kept = tier.store(hashes, [20, 21, 22])
        print(f"{kept.result()} blocks are kept on the host")
        with tier.lookup(hashes) as hit:
            print(f"{tier.load(hit, [40, 41, 42]).result()} came back")

    for layer in range(LAYOUT.layers):
        for one, other in zip(here.tensor(layer), there.tensor(layer), strict=True):
            assert torch.equal(one[blocks], other[[40, 41, 42]])
    print("equal")


if __name__ == "__main__":
    with aiokv.KVCache.allocate(LAYOUT) as one, aiokv.KVCache.allocate(LAYOUT) as other:
        main(one, other)
