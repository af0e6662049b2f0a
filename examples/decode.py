"""The decode process: has prompts prefilled elsewhere, fetches their KV meanwhile, and writes the answers.

It can be started alone, on any host, and then answers the prompts given, or the lines of its input:

    python examples/decode.py --prefill 127.0.0.1:7001 --prompt "Name three colours."

or serves requests that say where each is to be prefilled, as a router would:

    python examples/decode.py --listen 127.0.0.1:7003
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import closing
from typing import Any

import aiokv
from serving.channel import Message, Reply, request, serve
from serving.compute import Compute
from serving.model import Model, load
from serving.options import arguments, engine_for, run, tell_parent
from serving.paged import BlockPool, PagedCache


class Decode:
    """Answers ``{"tokens", "limit", "prefill"}`` with pieces of text, then with tokens and times."""

    def __init__(
        self, model: Model, cache: aiokv.KVCache, engine: aiokv.TransferEngine, options: argparse.Namespace
    ) -> None:
        self._model = model
        self._cache = cache
        self._engine = engine
        self._block_size: int = options.block_size
        self._deadline: float = options.deadline
        self._pool = BlockPool(options.blocks)
        self._compute = Compute()

    async def answer(self, message: Message, reply: Reply) -> None:
        """One request."""
        asked = time.monotonic_ns()
        prompt: list[int] = message["tokens"]
        async with self._pool.take(self._blocks_for(len(prompt) + message["limit"])) as blocks:
            received = await self._receive(prompt, blocks, message["prefill"])
            cache = PagedCache(self._cache, blocks, length=len(prompt))
            tokens: list[int] = [received["prefill"]["token"]]
            times = [time.monotonic_ns()]
            shown = ""
            while True:
                text = self._model.tokenizer.decode(tokens)
                # A character may need more tokens than one; until then it decodes to U+FFFD.
                if not text.endswith("\ufffd"):
                    await reply({"text": text[len(shown) :]})
                    shown = text
                if tokens[-1] == self._model.tokenizer.eos or len(tokens) == message["limit"]:
                    break
                tokens.append(await self._compute.run(self._model.next_token, tokens[-1:], cache))
                times.append(time.monotonic_ns())
        await reply({"answer": tokens, "asked": asked, "tokens_at": times, **received})

    async def _receive(self, prompt: list[int], blocks: list[int], prefill: str) -> Message:
        """Have ``prompt`` prefilled, and its KV in ``blocks``, each layer as soon as it is computed."""
        # Whoever starts both sides names the transfer. It is never an inference engine's own request id.
        transfer_id = uuid.uuid4().hex
        wanted = {"id": transfer_id, "tokens": prompt, "deadline": self._deadline}
        landed = [0] * self._model.layers
        async with request(prefill, wanted) as replies:
            source = (await replies.next())["source"]
            async with self._engine.fetch(
                transfer_id,
                blocks[: self._blocks_for(len(prompt))],
                sources=[source],
                tokens=len(prompt),
                deadline=self._deadline,
            ) as transfer:
                async for layer in transfer.layers():
                    landed[layer] = time.monotonic_ns()
            return {
                "prefill": await replies.next(),
                "landed": landed,
                "bytes": transfer.progress.bytes_total,
            }

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_size)


async def prompts(options: argparse.Namespace) -> AsyncIterator[str]:
    """Those of the command line, or one for each line of standard input."""
    for prompt in options.prompt:
        yield prompt
    while not options.prompt and (line := await asyncio.to_thread(sys.stdin.readline)):
        yield line.strip()


async def show(message: dict[str, Any]) -> None:
    """Print an answer as it comes."""
    print(message.get("text", "\n"), end="", flush=True)


async def main(model: Model, cache: aiokv.KVCache, options: argparse.Namespace) -> None:
    async with engine_for(cache, options) as engine:
        decode = Decode(model, cache, engine, options)
        if options.listen:
            async with serve(options.listen, decode.answer) as listening:
                tell_parent(listen=listening, engine=engine.address)
                await asyncio.Event().wait()
        async for prompt in prompts(options):
            tokens = model.tokenizer.chat(prompt)
            await decode.answer({"tokens": tokens, "limit": options.limit, "prefill": options.prefill}, show)


if __name__ == "__main__":
    parser = arguments(__doc__)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--listen", help="host:port for requests")
    where.add_argument("--prefill", help="host:port of the prefill process, to answer prompts from here")
    parser.add_argument("--prompt", action="append", default=[], help="may be given more than once")
    parser.add_argument("--limit", type=int, default=64, help="tokens of an answer, at most")
    chosen = parser.parse_args()
    loaded = load(chosen.model)
    # Before there is a loop, since making memory blocks; closed after the engine that uses it.
    with closing(aiokv.KVCache.allocate(loaded.layout(chosen.blocks, chosen.block_size))) as memory:
        run(main(loaded, memory, chosen), chosen)
