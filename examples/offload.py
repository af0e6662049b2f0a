"""A chat of several turns that the cache has no room for: with the host tier its KV comes back.

Some conversations take turns, and the cache has room for one of them. So before each turn the blocks of the
others have taken the place of what was there. The tier keeps them in host memory, and brings back what the
next turn begins with; without it all is computed again. Printed is the time to the first token of each turn,
both ways; the answers must be equal.

    python examples/offload.py
    python examples/offload.py --model tiny-random     # needs no weights, and answers nonsense
    python examples/offload.py --device cuda           # on a GPU
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import uvloop
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import aiokv
from serving.compute import Compute
from serving.model import NAMES, Model, device_name, load, usual
from serving.options import count, lacking
from serving.paged import PagedCache, memory

QUESTIONS = (
    "Who is the story about?",
    "Where does it take place?",
    "How does it end?",
    "Name one object in it.",
)


@dataclass
class Turn:
    """What one turn came to."""

    conversation: int
    number: int
    tokens: int
    loaded: int
    first_token_s: float
    answer: list[int] = field(default_factory=list)


class Chat:
    """Answers turns one after another, each in an empty cache.

    Args:
        model: The model.
        cache: Room for one conversation.
        tier: Where KV is kept from turn to turn; None: nowhere.
        limit: Tokens of an answer.
    """

    def __init__(self, model: Model, cache: aiokv.KVCache, tier: aiokv.HostTier | None, limit: int) -> None:
        self._model = model
        self._cache = cache
        self._tier = tier
        self._limit = limit
        group = cache.layout.groups[0]
        self._size = group.block_size
        self._blocks = list(range(group.blocks))
        self._compute = Compute()

    async def turn(self, conversation: int, number: int, tokens: list[int]) -> Turn:
        """Answer ``tokens``, the conversation so far."""
        began = time.monotonic()
        loaded = await self._load(tokens)
        kv = PagedCache(self._cache, self._blocks, length=loaded)
        answer = [await self._compute.run(self._model.next_token, tokens[loaded:], kv)]
        first = time.monotonic() - began
        while answer[-1] != self._model.tokenizer.eos and len(answer) < self._limit:
            answer.append(await self._compute.run(self._model.next_token, answer[-1:], kv))
        # The last token was chosen, but not run: there is no KV of it yet.
        await self._store([*tokens, *answer[:-1]])
        return Turn(conversation, number, len(tokens), loaded, first, answer)

    async def _load(self, tokens: list[int]) -> int:
        """Bring back what the tier has of this conversation; how many tokens it is."""
        if self._tier is None:
            return 0
        # At least one token is left to run: the answer begins with what that gives.
        hashes = aiokv.block_hashes(tokens[:-1], self._size)
        async with self._tier.lookup(hashes) as hit:
            return self._size * await self._tier.load(hit, self._blocks[: len(hit)])

    async def _store(self, tokens: list[int]) -> None:
        if self._tier is not None:
            hashes = aiokv.block_hashes(tokens, self._size)
            await self._tier.store(hashes, self._blocks[: len(hashes)])


def asked(model: Model, question: str) -> list[int]:
    """A further turn of a conversation, as tokens."""
    text = f"<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    return model.tokenizer.encode(text)


async def conversations(chat: Chat, model: Model, options: argparse.Namespace) -> list[Turn]:
    """All turns, one conversation after the other in each round."""
    story = Path(__file__).with_name("story.txt").read_text()
    so_far = [
        model.tokenizer.chat(f"Story {number}.\n\n{story}\n{QUESTIONS[0]}")
        for number in range(options.conversations)
    ]
    turns = []
    for number in range(options.turns):
        for which, tokens in enumerate(so_far):
            turn = await chat.turn(which, number, tokens)
            turns.append(turn)
            following = asked(model, QUESTIONS[(number + 1) % len(QUESTIONS)])
            so_far[which] = [*tokens, *turn.answer, *following]
    return turns


def table(without: list[Turn], tier: list[Turn]) -> Table:
    """The times side by side."""
    shown = Table(box=SIMPLE_HEAD, pad_edge=False)
    titles = ("turn", "conversation", "tokens", "from the host", "first token ms, without", "with the tier")
    for title in titles:
        shown.add_column(title, justify="right")
    for one, other in zip(without, tier, strict=True):
        times = (f"{each.first_token_s * 1e3:.0f}" for each in (one, other))
        numbers = (other.number + 1, other.conversation + 1, other.tokens, other.loaded)
        shown.add_row(*map(str, numbers), *times)
    return shown


async def main(model: Model, cache: aiokv.KVCache, options: argparse.Namespace) -> int:
    console = Console()
    without = await conversations(Chat(model, cache, None, options.limit), model, options)
    async with aiokv.HostTier(cache, options.capacity) as tier:
        kept = await conversations(Chat(model, cache, tier, options.limit), model, options)
        found = tier.statistics()
    console.print(table(without, kept))
    print(f"{found.bytes_stored / 2**20:.0f} MiB stored, {found.bytes_loaded / 2**20:.0f} MiB loaded")
    different = [one for one, other in zip(without, kept, strict=True) if one.answer != other.answer]
    if different:
        print(f"DIFFERENT: {len(different)} of {len(without)} answers")
        return 1
    if not all(turn.loaded for turn in kept if turn.number):
        print("NOT LOADED: a later turn found nothing in the tier")
        return 1
    print(f"equal: all {len(without)} answers are the same with the tier and without")
    return 0


def parsed(line: list[str] | None = None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option("--model", choices=NAMES, help="what to run (default: smollm2; on a GPU 1b-random without it)")
    option(
        "--device",
        type=device_name,
        default="cpu",
        help="where to run it: cpu, cuda or cuda:N (default: %(default)s)",
    )
    option("--blocks", type=count, default=256, help="blocks of the cache (default: %(default)s)")
    option("--block-size", type=count, default=16, help="tokens per block (default: %(default)s)")
    option("--capacity", default="1GiB", help="host memory for blocks (default: %(default)s)")
    option("--conversations", type=count, default=2, help="that take turns (default: %(default)s)")
    option("--turns", type=count, default=3, help="of each (default: %(default)s)")
    option("--limit", type=count, default=24, help="tokens of an answer, at most (default: %(default)s)")
    threads = max(1, (os.cpu_count() or 2) // 2)
    option("--threads", type=count, default=threads, help="CPU threads of the model (default: %(default)s)")
    return parser.parse_args(line)


def start(options: argparse.Namespace) -> int:
    """Do it all; gives the exit status."""
    torch.set_num_threads(options.threads)
    if why := lacking(options):
        print(f"failed: {why}", file=sys.stderr)
        return 2
    model = load(options.model or usual(options.device), options.device)
    try:
        # Before there is a loop, since making memory blocks.
        with memory(model.layout(options.blocks, options.block_size), model.device) as cache:
            return uvloop.run(main(model, cache, options))
    except (aiokv.AiokvError, ValueError) as error:
        print(f"failed: {error}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130


if __name__ == "__main__":
    sys.exit(start(parsed()))
