"""One rank of a group that prefills or decodes together, each with some of the heads; for `pair.py --tp 2`.

Each rank is a process with an engine and a cache of its own. Requests come to all ranks of a group, one after
another. Before they enter the model, in which they wait for each other, the ranks agree that all of them have
what they need: one that failed alone would leave the others waiting in there.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime as dt
import sys
from contextlib import AsyncExitStack

import torch.distributed as dist

import aiokv
from aiokv import Blocks, Hit, Tokens
from serving.channel import Message, Reply, RequestFailed, serve
from serving.compute import Compute
from serving.model import Model
from serving.options import arguments, count, loaded, start, tell_parent
from serving.paged import BlockPool, PagedCache
from serving.split import split


class Rank:
    """Answers ``{"do": "prefill" or "decode", "id", "tokens", ...}``."""

    def __init__(
        self, model: Model, engine: aiokv.TransferEngine, ranks: aiokv.RankGroup, options: argparse.Namespace
    ) -> None:
        self._model = model
        self._engine = engine
        self._ranks = ranks
        self._block_size: int = options.block_size
        self._deadline: float = options.deadline
        self._pool = BlockPool(options.blocks)
        self._compute = Compute()

    async def answer(self, message: Message, reply: Reply) -> None:
        """One request, which the other ranks of the group have, too."""
        await (self._prefill if message["do"] == "prefill" else self._decode)(message, reply)

    async def _prefill(self, message: Message, reply: Reply) -> None:
        """Offer the KV of a prompt to ``readers``, compute it, and answer with the first token."""
        tokens: list[int] = message["tokens"]
        async with AsyncExitStack() as stack:
            async with self._batch(message["id"]) as batch:
                blocks = await stack.enter_async_context(self._pool.take(self._blocks_for(len(tokens))))
                batch[0] = Hit(Blocks(len(blocks)))
            self._check(batch)
            offer = await stack.enter_async_context(
                self._engine.offer(
                    message["id"],
                    blocks,
                    tokens=len(tokens),
                    readers=message["readers"],
                    deadline=self._deadline,
                )
            )
            cache = PagedCache(self._engine.cache, blocks, on_layer=offer.layer_ready)
            await reply({"token": await self._compute.run(self._model.next_token, tokens, cache)})
        await reply({"read": len(blocks)})

    async def _decode(self, message: Message, reply: Reply) -> None:
        """Fetch this rank's heads of a prompt's KV from ``sources``, and go on from the first ``token``."""
        prompt: list[int] = message["tokens"]
        needed, total = (self._blocks_for(len(prompt) + more) for more in (0, message["limit"]))
        async with AsyncExitStack() as stack:
            async with self._batch(message["id"]) as batch:
                blocks = await stack.enter_async_context(self._pool.take(total))
                async with self._engine.fetch(
                    message["id"],
                    blocks[:needed],
                    sources=message["sources"],
                    tokens=len(prompt),
                    deadline=self._deadline,
                ) as fetch:
                    await fetch.wait()
                batch[0] = Hit(Tokens(len(prompt)))
            self._check(batch)
            cache = PagedCache(self._engine.cache, blocks, length=len(prompt))
            answer: list[int] = [message["token"]]
            while len(answer) < message["limit"] and answer[-1] != self._model.tokenizer.eos:
                answer.append(await self._compute.run(self._model.next_token, answer[-1:], cache))
        await reply({"answer": answer})

    def _batch(self, transfer_id: str) -> aiokv.ranks.Batch:
        """What the ranks have for one request; a rank that fails in it enters all the same."""
        return self._ranks.batch(1, keys=[transfer_id.encode()], deadline=self._deadline)

    def _check(self, batch: aiokv.ranks.Batch) -> None:
        """Go on only where all ranks can."""
        (agreed,) = batch.agreed
        if not isinstance(agreed, Hit):
            raise RequestFailed(f"rank {self._ranks.rank} could go on, and another can't: {agreed}")

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_size)


def part_of(options: argparse.Namespace) -> Model:
    """This rank's part of the model, once all ranks have met."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{options.store}",
        rank=options.rank,
        world_size=options.ranks,
        timeout=dt.timedelta(seconds=options.deadline),
    )
    try:
        return split(loaded(options), options.rank, options.ranks)
    except ValueError as error:
        raise SystemExit(f"failed: {error}") from error


async def main(model: Model, engine: aiokv.TransferEngine, options: argparse.Namespace) -> int:
    # The model has the default group to itself, and so has aiokv this one.
    group = await asyncio.to_thread(dist.new_group, backend="gloo")
    with aiokv.RankGroup(group) as ranks:
        async with engine:
            rank = Rank(model, engine, ranks, options)
            async with serve("127.0.0.1:0", rank.answer) as listening:
                tell_parent(listen=listening, engine=engine.address)
                await asyncio.Event().wait()
    return 0


def parsed(line: list[str] | None = None) -> argparse.Namespace:
    """The command line, checked."""
    parser = arguments(__doc__)
    parser.add_argument("--rank", type=int, default=0, help="number of this rank (default: %(default)s)")
    parser.add_argument(
        "--ranks", type=count, default=1, help="how many there are in its group (default: %(default)s)"
    )
    parser.add_argument("--store", required=True, help="a new file, where the ranks of the group meet")
    return parser.parse_args(line)


if __name__ == "__main__":
    sys.exit(start(main, parsed(), part_of))
