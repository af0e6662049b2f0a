"""The example's server behind the router: what it answers, what it refuses, and what it gives back."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from typing import Any

import pytest

import aiokv

pytest.importorskip("transformers", reason="the examples need the extra: pip install 'aiokv[examples]'")
pytest.importorskip("aiohttp", reason="the router needs the extra: pip install 'aiokv[router]'")

import aiohttp
from serve import Server, listening, parsed
from transformers import DynamicCache

from aiokv.control.memory import MemoryNetwork
from aiokv.router import Instance
from aiokv.router.server import Router
from serving.answer import Text
from serving.batch import Decoding, step
from serving.model import ByteTokenizer, Model
from serving.paged import PagedCache
from serving.wanted import Refused, Wanted, read

PROMPT = "What does a harbour pilot do, and why?"
Alone = Callable[[str, int], str]
#: Blocks of each side.
BLOCKS = 16


@dataclass
class Site:
    url: str
    client: aiohttp.ClientSession
    servers: dict[str, Server]

    async def ask(self, prompt: str = PROMPT, limit: int = 6, **fields: Any) -> tuple[int, Any]:
        body = {"model": "tiny-random", "prompt": prompt, "max_tokens": limit, **fields}
        async with self.client.post(self.url + "/v1/completions", json=body) as response:
            if response.content_type == "text/event-stream":
                return response.status, (await response.text()).strip().split("\n\n")
            return response.status, await response.json()

    async def quiet(self) -> None:
        """All blocks are given back, at both sides."""
        for server in self.servers.values():
            async with server._pool.take(BLOCKS):
                pass


@pytest.fixture
def caches(model: Model) -> Iterator[list[aiokv.KVCache]]:
    layout = model.layout(BLOCKS, 16)
    with closing(aiokv.KVCache.allocate(layout)) as one, closing(aiokv.KVCache.allocate(layout)) as other:
        yield [one, other]


@asynccontextmanager
async def site_of(model: Model, caches: list[aiokv.KVCache]) -> AsyncIterator[Site]:
    network = MemoryNetwork()
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(
            Router(http="127.0.0.1:0", channel=network.channel("memory://router"))
        )
        servers = {}
        for role, cache in zip(("prefill", "decode"), caches, strict=True):
            engine = await stack.enter_async_context(aiokv.TransferEngine(cache, transports=["shm"]))
            options = argparse.Namespace(role=role, blocks=BLOCKS, block_size=16, batch=4)
            server = servers[role] = Server(model, engine, options)
            url = await stack.enter_async_context(listening(server, "127.0.0.1:0"))
            server.instance = Instance(
                "memory://router",
                role=role,  # type: ignore[arg-type]
                http=url,
                models=["tiny-random"],
                fingerprint=server.fingerprint,
                engine=engine.address,
                context=server.context,
                load=server.load,
                interval=0.1,
                channel=network.channel(f"memory://{role}"),
            )
            await stack.enter_async_context(server.instance)
            await server.instance.wait_up()
        client = await stack.enter_async_context(aiohttp.ClientSession())
        yield Site(router.http, client, servers)
    await asyncio.get_running_loop().shutdown_default_executor()


@pytest.fixture(scope="module")
def alone(model: Model) -> Alone:
    """The answer of one process."""

    def answer(prompt: str, limit: int) -> str:
        kv: Any = DynamicCache()
        tokens = [model.next_token(model.tokenizer.encode(prompt), kv)]
        while len(tokens) < limit:
            tokens.append(model.next_token(tokens[-1:], kv))
        return model.tokenizer.decode(tokens)

    return answer


@pytest.mark.asyncio
async def test_answers_as_one_process_does(model: Model, caches: list[aiokv.KVCache], alone: Alone) -> None:
    prompts = [PROMPT, "x", "A" * 48, PROMPT[:16]]
    async with site_of(model, caches) as site:
        answers = await asyncio.gather(*(site.ask(prompt, limit) for limit, prompt in enumerate(prompts, 3)))
        await site.quiet()
    for limit, (prompt, (status, answer)) in enumerate(zip(prompts, answers, strict=True), 3):
        assert status == 200
        assert answer["choices"][0]["text"] == alone(prompt, limit)
        assert answer["usage"] == {
            "prompt_tokens": len(prompt),
            "completion_tokens": limit,
            "total_tokens": len(prompt) + limit,
        }


@pytest.mark.asyncio
async def test_a_stream_with_usage_and_a_stop(
    model: Model, caches: list[aiokv.KVCache], alone: Alone
) -> None:
    whole = alone(PROMPT, 12)
    stop = whole[7:9]
    expected = whole[: whole.index(stop)]
    async with site_of(model, caches) as site:
        _, events = await site.ask(limit=12, stream=True, stop=[stop], stream_options={"include_usage": True})
        _, answer = await site.ask(limit=12, stop=stop)
        await site.quiet()
    assert events[-1] == "data: [DONE]"
    said = [json.loads(each[6:]) for each in events[:-1]]
    assert "".join(each["choices"][0]["text"] for each in said[:-1]) == expected
    assert said[-2]["choices"][0]["finish_reason"] == "stop"
    assert said[-1]["choices"] == [] and said[-1]["usage"]["completion_tokens"] <= 12
    assert answer["choices"][0]["text"] == expected
    assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.asyncio
async def test_what_is_not_supported_is_named(model: Model, caches: list[aiokv.KVCache]) -> None:
    async with site_of(model, caches) as site:
        for fields, name in (
            ({"logit_bias": {"1": 2}}, "logit_bias"),
            ({"temperature": 0.7}, "temperature"),
            ({"n": 2}, "n"),
            ({"stop": ["a"] * 5}, "stop"),
            ({"prompt": ["a", "b"]}, "prompt"),
            ({"prompt": "x" * 251}, "prompt"),
        ):
            status, answer = await site.ask(**fields)
            assert (status, answer["error"]["param"]) == (400, name)
        await site.quiet()


@pytest.mark.asyncio
async def test_nobody_but_the_router_is_answered(model: Model, caches: list[aiokv.KVCache]) -> None:
    async with site_of(model, caches) as site:
        url = site.servers["decode"].instance._report.http + "/v1/completions"
        async with site.client.post(url, json={"prompt": "x"}) as response:
            assert response.status == 401


@pytest.mark.asyncio
async def test_a_client_that_goes_away_gives_all_blocks_back(
    model: Model, caches: list[aiokv.KVCache]
) -> None:
    async with site_of(model, caches) as site:
        for _ in range(4):
            asked = asyncio.ensure_future(site.ask(limit=200, stream=True))
            await asyncio.sleep(0.05)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
        await site.quiet()
        for server in site.servers.values():
            await server.instance.wait_idle()


def test_a_step_of_several_is_that_of_each(model: Model, caches: list[aiokv.KVCache]) -> None:
    prompts = [[(7 * position + number) % 251 for position in range(5 + 13 * number)] for number in range(3)]
    expected, sequences = [], []
    for number, prompt in enumerate(prompts):
        kv: Any = DynamicCache()
        expected.append([model.next_token(prompt, kv)])
        for _ in range(4):
            expected[-1].append(model.next_token(expected[-1][-1:], kv))
        blocks = range(number * 4, number * 4 + 4)
        model.next_token(prompt, PagedCache(caches[0], blocks))
        sequences.append(Decoding(blocks, len(prompt) - 1, prompt[-1], 5))
    for at in range(5):
        tokens = step(model, caches[0], sequences)
        assert tokens == [each[at] for each in expected]
        for sequence, token in zip(sequences, tokens, strict=True):
            sequence.length, sequence.last = sequence.length + 1, token


def test_a_stop_that_only_begins_is_held_back_and_then_shown() -> None:
    text = Text(ByteTokenizer(), ("end!",))
    shown = [text.add(each, last=each == ord("?")) for each in b"the end?"]
    assert "".join(shown) == "the end?" and shown[4:] == ["", "", "", "end?"]
    text = Text(ByteTokenizer(), ("end!",))
    assert "".join(text.add(each) for each in b"the end!") == "the "
    assert text.ended


def wanted(body: object, *, chat: bool = False) -> Wanted:
    return read(body, chat=chat, tokenizer=ByteTokenizer(), context=99, vocabulary=256)


@pytest.mark.parametrize(
    "params", [None, 7, {}, {"transfer_id": 1}, {"transfer_id": "a", "remote_addresses": "x"}]
)
def test_a_request_that_came_by_no_router_is_refused(params: object) -> None:
    with pytest.raises(Refused) as caught:
        wanted({"prompt": "x", "kv_transfer_params": params})
    assert caught.value.param == "kv_transfer_params"


@pytest.mark.parametrize(
    "content", [None, 7, [7], [None], [{"type": "text"}], [{"type": "text", "text": 7}], [{"text": "a"}], {}]
)
def test_messages_that_are_no_text_are_refused(content: object) -> None:
    body = {"messages": [{"role": "user", "content": content}], "kv_transfer_params": {"transfer_id": "a"}}
    with pytest.raises(Refused) as caught:
        wanted(body, chat=True)
    assert caught.value.param == "messages"


def test_messages_of_several_texts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = {"messages": [{"role": "user", "content": parts}], "kv_transfer_params": {"transfer_id": "a"}}
    assert wanted(body, chat=True).tokens == list(b"ab")


@pytest.mark.parametrize("prompt", [[1, 256], [-1], [1, 10**30], [True]])
def test_tokens_that_the_model_does_not_know_are_refused(prompt: object) -> None:
    with pytest.raises(Refused) as caught:
        wanted({"prompt": prompt, "kv_transfer_params": {"transfer_id": "a"}})
    assert caught.value.param == "prompt"


def test_one_token_is_a_prompt_and_null_is_what_is_usual() -> None:
    usual = {"temperature": None, "n": None, "logprobs": None, "max_tokens": None, "tools": None}
    assert wanted({"prompt": [7], "kv_transfer_params": {"transfer_id": "a"}, **usual}).tokens == [7]


def test_the_command_line() -> None:
    options = parsed(["--role", "decode", "--router", "tcp://127.0.0.1:7000"])
    assert (options.http, options.batch) == ("127.0.0.1:0", 8)
    with pytest.raises(SystemExit):
        parsed(["--role", "both", "--router", "tcp://127.0.0.1:7000"])
