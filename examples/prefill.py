"""The prefill process: runs prompts through the model, and offers their KV layer by layer meanwhile.

It can be started alone, on any host:

    python examples/prefill.py --listen 127.0.0.1:7001
"""

from __future__ import annotations

import argparse
import asyncio
import time
from contextlib import closing

import aiokv
from serving.channel import Message, Reply, serve
from serving.compute import Compute
from serving.model import Model, load
from serving.options import arguments, engine_for, run, tell_parent
from serving.paged import BlockPool, PagedCache


class Prefill:
    """Answers ``{"id", "tokens", "deadline"}``: first with where the KV can be fetched, then with a token."""

    def __init__(
        self, model: Model, cache: aiokv.KVCache, engine: aiokv.TransferEngine, options: argparse.Namespace
    ) -> None:
        self._model = model
        self._cache = cache
        self._engine = engine
        self._block_size: int = options.block_size
        self._pool = BlockPool(options.blocks)
        self._compute = Compute()

    async def answer(self, message: Message, reply: Reply) -> None:
        """One prompt. Its blocks are free again when the reader has all of them, or can't have them."""
        tokens: list[int] = message["tokens"]
        async with (
            self._pool.take(-(-len(tokens) // self._block_size)) as blocks,
            self._engine.offer(
                message["id"], blocks, tokens=len(tokens), deadline=message["deadline"]
            ) as transfer,
        ):
            await reply({"source": self._engine.address})
            await reply(await self._compute.run(self._forward, tokens, blocks, transfer))

    def _forward(self, tokens: list[int], blocks: list[int], transfer: aiokv.Offer) -> Message:
        """The forward of a whole prompt, in the worker thread."""
        ready = [0] * self._model.layers

        def written(layer: int) -> None:
            ready[layer] = time.monotonic_ns()
            transfer.layer_ready(layer)

        began = time.monotonic_ns()
        first = self._model.next_token(tokens, PagedCache(self._cache, blocks, on_layer=written))
        return {"token": first, "began": began, "ready": ready, "ended": time.monotonic_ns()}


async def main(model: Model, cache: aiokv.KVCache, options: argparse.Namespace) -> None:
    async with engine_for(cache, options) as engine:
        prefill = Prefill(model, cache, engine, options)
        async with serve(options.listen, prefill.answer) as listening:
            tell_parent(listen=listening, engine=engine.address)
            await asyncio.Event().wait()


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("--listen", default="127.0.0.1:0", help="host:port for requests")
    chosen = parser.parse_args()
    loaded = load(chosen.model)
    # Before there is a loop, since making memory blocks; closed after the engine that uses it.
    with closing(aiokv.KVCache.allocate(loaded.layout(chosen.blocks, chosen.block_size))) as memory:
        run(main(loaded, memory, chosen), chosen)
