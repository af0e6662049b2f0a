"""The prefill process: runs prompts through the model, and offers their KV layer by layer meanwhile.

It can be started alone, by hand, and prints where it listens:

    python examples/prefill.py --listen 127.0.0.1:7001

For a decode process on another host, name an address of this host twice: --listen for the prompts, and
--bind for the transfers, which need a way back; so decode.py needs its own --bind, too:

    python examples/prefill.py --keys DIR --listen HOST:7001 --bind tcp://HOST:7002
    python examples/decode.py --keys DIR --bind tcp://OTHER:0 --prefill HOST:7001

DIR is made by `python -m aiokv keygen DIR` on each host, and DIR/allowed holds both hosts' DIR/aiokv.pub; or
say --insecure in place of it, on a network where everybody is trusted.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time

import aiokv
from serving.channel import Message, Reply, serve
from serving.compute import Compute
from serving.model import Model
from serving.options import address, arguments, start, tell_parent
from serving.paged import BlockPool, PagedCache


class Prefill:
    """Answers ``{"id", "tokens", "deadline"}``: first with where the KV can be fetched, then with a token."""

    def __init__(self, model: Model, engine: aiokv.TransferEngine, options: argparse.Namespace) -> None:
        self._model = model
        self._cache = engine.cache
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


async def main(model: Model, engine: aiokv.TransferEngine, options: argparse.Namespace) -> int:
    async with engine:
        prefill = Prefill(model, engine, options)
        async with serve(options.listen, prefill.answer) as listening:
            tell_parent(listen=listening, engine=engine.address)
            await asyncio.Event().wait()
    return 0


def parsed(line: list[str] | None = None) -> argparse.Namespace:
    """The command line, checked."""
    parser = arguments(__doc__)
    parser.add_argument(
        "--listen",
        type=address,
        default="127.0.0.1:0",
        help="host:port for prompts; port 0 takes a free one (default: %(default)s)",
    )
    return parser.parse_args(line)


if __name__ == "__main__":
    sys.exit(start(main, parsed()))
