"""The two roles of the serving example, in one process: what they give back when things go wrong."""

from __future__ import annotations

import argparse
import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import aiokv

pytest.importorskip("transformers", reason="the examples need the extra: pip install 'aiokv[examples]'")

from decode import Decode
from prefill import Prefill
from transformers import DynamicCache

from serving.channel import Message, RequestFailed, serve
from serving.model import Model

Caches = tuple[aiokv.KVCache, aiokv.KVCache]
Alone = Callable[[list[int]], list[int]]

OPTIONS = argparse.Namespace(blocks=8, block_size=16, deadline=20.0)
PROMPT = [(7 * position + 3) % 251 for position in range(40)]


@dataclass
class Pair:
    prefill: Prefill
    decode: Decode
    address: str

    async def ask(self, prompt: list[int], limit: int = 6) -> Message:
        """The last reply to a prompt."""
        replies: list[Message] = []

        async def keep(message: Message) -> None:
            replies.append(message)

        await self.decode.answer({"tokens": prompt, "limit": limit, "prefill": self.address}, keep)
        return replies[-1]

    async def quiet(self) -> None:
        """All blocks are given back, at both sides."""
        for side in (self.prefill, self.decode):
            async with side._pool.take(OPTIONS.blocks) as blocks:
                assert sorted(blocks) == list(range(OPTIONS.blocks))


@pytest.fixture
def caches(model: Model) -> Iterator[Caches]:
    """Memory of either side; made here, outside any loop, since making it blocks."""
    layout = model.layout(OPTIONS.blocks, OPTIONS.block_size)
    with closing(aiokv.KVCache.allocate(layout)) as one, closing(aiokv.KVCache.allocate(layout)) as other:
        yield one, other


@asynccontextmanager
async def pair_of(model: Model, caches: Caches, kind: type[Prefill] = Prefill) -> AsyncIterator[Pair]:
    async with (
        aiokv.TransferEngine(caches[0], transports=["shm"]) as left,
        aiokv.TransferEngine(caches[1], transports=["shm"]) as right,
    ):
        prefill, decode = kind(model, left, OPTIONS), Decode(model, right, OPTIONS)
        async with serve("127.0.0.1:0", prefill.answer) as address:
            yield Pair(prefill, decode, address)
    await asyncio.get_running_loop().shutdown_default_executor()


@pytest.fixture(scope="module")
def alone(model: Model) -> Alone:
    """The answer of one process."""

    def answer_of(prompt: list[int], limit: int = 6) -> list[int]:
        kv: Any = DynamicCache()  # transformers' own will do
        answer = [model.next_token(prompt, kv)]
        while len(answer) < limit:
            answer.append(model.next_token(answer[-1:], kv))
        return answer

    return answer_of


@pytest.mark.asyncio
@pytest.mark.parametrize("length", [1, 16, 17, 48])
async def test_answers_as_one_process_does(model: Model, caches: Caches, alone: Alone, length: int) -> None:
    async with pair_of(model, caches) as pair:
        reply = await pair.ask(PROMPT[:length] + PROMPT[: max(0, length - 40)])
        await pair.quiet()
    prompt = PROMPT[:length] + PROMPT[: max(0, length - 40)]
    assert reply["answer"] == alone(prompt)
    assert all(reply["landed"])
    assert reply["bytes"] == length * model.layers * 2 * 4 * 32 * 4


@pytest.mark.asyncio
async def test_more_requests_than_blocks_take_turns(model: Model, caches: Caches, alone: Alone) -> None:
    prompts = [PROMPT[start : start + 20] for start in range(0, 20, 4)]
    async with pair_of(model, caches) as pair:
        replies = await asyncio.gather(*(pair.ask(prompt) for prompt in prompts))
        await pair.quiet()
    assert [reply["answer"] for reply in replies] == [alone(prompt) for prompt in prompts]


class Held(Prefill):
    """A prefill whose next forward waits until it is let go, and then may fail."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.computing, self.go_on = asyncio.Event(), threading.Event()
        self.failing = False
        self._loop = asyncio.get_running_loop()

    def _forward(self, tokens: list[int], blocks: list[int], transfer: aiokv.Offer) -> Message:
        self._loop.call_soon_threadsafe(self.computing.set)
        self.go_on.wait()
        if self.failing:
            raise FloatingPointError("the model diverged")
        return super()._forward(tokens, blocks, transfer)


@pytest.mark.asyncio
async def test_a_reader_that_is_cancelled_gives_all_blocks_back(
    model: Model, caches: Caches, alone: Alone
) -> None:
    async with pair_of(model, caches, Held) as pair:
        assert isinstance(pair.prefill, Held)
        asked = asyncio.create_task(pair.ask(PROMPT))
        await pair.prefill.computing.wait()
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        # The forward can't be called back. It goes on to write into blocks that are still its own.
        pair.prefill.go_on.set()
        await pair.quiet()
        assert (await pair.ask(PROMPT[:20]))["answer"] == alone(PROMPT[:20])


@pytest.mark.asyncio
async def test_a_prefill_that_fails_fails_its_reader(model: Model, caches: Caches, alone: Alone) -> None:
    async with pair_of(model, caches, Held) as pair:
        assert isinstance(pair.prefill, Held)
        pair.prefill.failing = True
        pair.prefill.go_on.set()
        # Refused, when the offer was over before the fetch reached it.
        with pytest.raises((aiokv.TransferAborted, aiokv.Refused), match="the model diverged"):
            await pair.ask(PROMPT)
        await pair.quiet()
        pair.prefill.failing = False
        assert (await pair.ask(PROMPT))["answer"] == alone(PROMPT)


@pytest.mark.asyncio
async def test_a_prompt_that_never_fits_is_refused_by_the_prefill(
    model: Model, caches: Caches, alone: Alone
) -> None:
    async with pair_of(model, caches) as pair:
        pair.prefill._pool = type(pair.prefill._pool)(1)
        with pytest.raises(RequestFailed, match="3 blocks needed, and there are 1: raise --blocks"):
            await pair.ask(PROMPT)


def test_prompts_are_those_at_which_a_transfer_might_go_wrong(model: Model) -> None:
    from pair import requests

    prompts = requests(model, 16)
    assert len(prompts["one token"]) == 1
    assert len(prompts["whole blocks"]) % 16 == 0
    assert len(prompts["long"]) >= 700
    assert torch.tensor([token for prompt in prompts.values() for token in prompt]).max() < 256
