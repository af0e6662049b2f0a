"""The decode process: has prompts prefilled elsewhere, fetches their KV meanwhile, and writes the answers.

It can be started alone, by hand, and then answers the prompts given, or the lines of its input:

    python examples/decode.py --prefill 127.0.0.1:7001 --prompt "Name three colours."

With the prefill process on another host, both need --bind with an address that the other can reach:

    python examples/prefill.py --keys DIR --listen HOST:7001 --bind tcp://HOST:7002
    python examples/decode.py --keys DIR --bind tcp://OTHER:0 --prefill HOST:7001

DIR is made by `python -m aiokv keygen DIR` on each host, and DIR/allowed holds both hosts' DIR/aiokv.pub; or
say --insecure in place of it, on a network where everybody is trusted.

Or it serves requests that say where each is to be prefilled, as a router would:

    python examples/decode.py --listen 127.0.0.1:7003
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import aiokv
from serving.channel import Message, Reply, RequestFailed, request, serve
from serving.compute import Compute
from serving.model import Model
from serving.options import address, arguments, count, peer, start, tell_parent
from serving.paged import BlockPool, PagedCache
from serving.typed import lines


class Decode:
    """Answers ``{"tokens", "limit", "prefill"}`` with pieces of text, then with tokens and times."""

    def __init__(self, model: Model, engine: aiokv.TransferEngine, options: argparse.Namespace) -> None:
        self._model = model
        self._cache = engine.cache
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
            try:
                async with self._engine.fetch(
                    transfer_id,
                    blocks[: self._blocks_for(len(prompt))],
                    sources=[source],
                    tokens=len(prompt),
                    deadline=self._deadline,
                ) as transfer:
                    async for layer in transfer.layers():
                        landed[layer] = time.monotonic_ns()
            except (aiokv.DeadlineExceeded, aiokv.PeerLostError) as error:
                raise RequestFailed(
                    f"{error}\n  It is told to reach this process at {self._engine.address}. On two hosts, "
                    "both processes need a --bind (or --advertise) that is reached from the other host."
                ) from error
            return {
                "prefill": await replies.next(),
                "landed": landed,
                "bytes": transfer.progress.bytes_total,
                "transport": "+".join(transfer.progress.transports),
            }

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_size)


async def prompts(options: argparse.Namespace) -> AsyncIterator[str]:
    """Those of the command line, or one for each line of standard input that says anything."""
    for prompt in filter(str.strip, options.prompt):
        yield prompt
    if not options.prompt:
        async for line in lines(sys.stdin):
            if line:
                yield line


async def show(message: dict[str, Any]) -> None:
    """Print an answer as it comes."""
    print(message.get("text", "\n"), end="", flush=True)


async def answer_prompts(model: Model, decode: Decode, options: argparse.Namespace) -> int:
    """Answer one prompt after the other, whatever became of the last; gives the exit status."""
    status = 0
    async for prompt in prompts(options):
        try:
            tokens = model.tokenizer.chat(prompt)
            await decode.answer({"tokens": tokens, "limit": options.limit, "prefill": options.prefill}, show)
        except (aiokv.AiokvError, RequestFailed, OSError, ValueError) as error:
            print(f"failed: {error}", file=sys.stderr, flush=True)
            status = 1
    return status


async def main(model: Model, engine: aiokv.TransferEngine, options: argparse.Namespace) -> int:
    async with engine:
        decode = Decode(model, engine, options)
        if not options.listen:
            return await answer_prompts(model, decode, options)
        async with serve(options.listen, decode.answer) as listening:
            tell_parent(listen=listening, engine=engine.address)
            await asyncio.Event().wait()
    return 0


def parsed(line: list[str] | None = None) -> argparse.Namespace:
    """The command line, checked."""
    parser = arguments(__doc__)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--listen",
        type=address,
        help="host:port for requests; port 0 takes a free one (default: answers prompts from here)",
    )
    where.add_argument(
        "--prefill",
        type=peer,
        help="host:port of the prefill process that the prompts go to (default: each request names its own)",
    )
    parser.add_argument(
        "--prompt",
        action="append",
        default=[],
        help="with --prefill, and may be given more than once (default: the lines of standard input)",
    )
    parser.add_argument(
        "--limit",
        type=count,
        default=64,
        help="with --prefill: tokens of an answer, at most (default: %(default)s)",
    )
    options = parser.parse_args(line)
    if options.listen and options.prompt:
        parser.error("argument --prompt: not allowed with argument --listen: requests bring their own")
    if options.with_parent and options.prefill and not options.prompt:
        parser.error("argument --with-parent: standard input is read for prompts; give some with --prompt")
    return options


if __name__ == "__main__":
    sys.exit(start(main, parsed()))
