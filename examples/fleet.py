"""A router, two prefill and two decode servers, a mixed load, and one of each killed in the middle.

Every request has to end by its deadline: answered as one process alone answers it, or failed with an error.

    python examples/fleet.py
    python examples/fleet.py --model tiny-random     # needs no weights, and answers nonsense

Needs the extras `examples` and `router`, and `openai`, whose client sends the requests.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import signal
import sys
import threading
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import openai
import torch
import uvloop
from pair import Stopped, alone
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from serving.model import Model, load, prepare, usual
from serving.options import add_model, count, lacking, seconds
from serving.processes import line_with, program

QUESTIONS = (
    "Name three colours.",
    "What does a harbour pilot do?",
    "Why is the sky blue?",
    "Write a sentence about rain.",
    "What is the capital of France?",
    "How do bees make honey?",
    "Give me one word for very cold.",
    "What is two plus three?",
)


@dataclass
class Asked:
    """A request and what became of it."""

    number: int
    question: str
    stream: bool
    limit: int
    began: float = 0.0
    first: float = 0.0
    took: float = 0.0
    text: str = ""
    tokens: int = 0
    error: str = ""
    #: It was sent when the two had been killed.
    after: bool = False


@dataclass
class Fleet:
    """What was started."""

    url: str
    client: openai.AsyncOpenAI
    servers: dict[str, list[asyncio.subprocess.Process]]
    model: str
    deadline: float
    asked: list[Asked] = field(default_factory=list)
    killed: bool = False

    async def ask(self, asked: Asked) -> None:
        """Send one request, and note how it ends."""
        asked.after = self.killed
        asked.began = time.monotonic()
        try:
            if asked.stream:
                await self._stream(asked)
            else:
                await self._whole(asked)
        except openai.APIError as error:
            asked.error = f"{type(error).__name__}: {error}"
        asked.took = time.monotonic() - asked.began

    async def _whole(self, asked: Asked) -> None:
        answer = await self.client.chat.completions.create(
            model=self.model,
            messages=[{"role": "user", "content": asked.question}],
            max_completion_tokens=asked.limit,
            extra_headers={"X-Request-Timeout": f"{self.deadline:g}"},
        )
        asked.text = answer.choices[0].message.content or ""
        asked.tokens = answer.usage.completion_tokens if answer.usage else 0

    async def _stream(self, asked: Asked) -> None:
        pieces = await self.client.chat.completions.create(
            model=self.model,
            messages=[{"role": "user", "content": asked.question}],
            max_completion_tokens=asked.limit,
            stream=True,
            stream_options={"include_usage": True},
            extra_headers={"X-Request-Timeout": f"{self.deadline:g}"},
        )
        async for piece in pieces:
            asked.first = asked.first or time.monotonic() - asked.began
            if piece.choices:
                asked.text += piece.choices[0].delta.content or ""
            if piece.usage:
                asked.tokens = piece.usage.completion_tokens

    def kill(self) -> None:
        """One of each, as SIGKILL does it: nobody is told."""
        for role in ("prefill", "decode"):
            self.servers[role][0].send_signal(signal.SIGKILL)
        self.killed = True

    @property
    def ended(self) -> int:
        """Requests that ended."""
        return sum(each.took > 0 for each in self.asked)


async def load_it(fleet: Fleet, requests: list[Asked], at_once: int) -> None:
    """All requests, so many at once; the kills come when a third has ended."""
    fleet.asked = requests
    waiting = iter(requests)

    async def one_after_another() -> None:
        for asked in waiting:
            await fleet.ask(asked)
            if not fleet.killed and fleet.ended >= len(requests) // 3:
                fleet.kill()

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(one_after_another())


async def ready(url: str, patience: float) -> None:
    """Until the router has two servers of each role."""
    async with asyncio.timeout(patience), aiohttp.ClientSession() as session:
        while True:
            async with session.get(url + "/feed.json") as response:
                feed = await response.json()
            up = [each["role"] for each in feed["instances"] if each["state"] == "up"]
            if up.count("prefill") >= 2 and up.count("decode") >= 2:
                return
            await asyncio.sleep(0.2)


def expected(model: Model, requests: list[Asked], options: argparse.Namespace) -> dict[str, list[int]]:
    """What one process alone answers to each question, as tokens."""
    limit = max(each.limit for each in requests)
    given = argparse.Namespace(blocks=options.blocks, block_size=options.block_size, limit=limit)
    prompts = {each.question: model.tokenizer.chat(each.question) for each in requests}
    return alone(model, prompts, given, threading.Event())


def right(model: Model, asked: Asked, tokens: list[int]) -> bool:
    """Whether it was answered as one process answers."""
    return asked.text == model.tokenizer.decode(tokens[: asked.limit])


def table(requests: list[Asked], good: dict[int, str]) -> Table:
    """What became of each."""
    shown = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in ("request", "how", "first token s", "took s", "tokens", "ended"):
        shown.add_column(
            name, justify="left" if name in ("how", "ended") else "right", no_wrap=name != "ended"
        )
    for each in requests:
        shown.add_row(
            f"{each.number}",
            ("stream" if each.stream else "whole") + (", after the kills" if each.after else ""),
            f"{each.first:.2f}" if each.first else "",
            f"{each.took:.2f}",
            f"{each.tokens}" if each.tokens else "",
            good[each.number],
        )
    return shown


async def main(options: argparse.Namespace) -> int:
    console = Console(width=None if sys.stdout.isatty() else 120)
    serve = str(Path(__file__).with_name("serve.py"))
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(
            program(
                "-m", "aiokv", "router", "--http=127.0.0.1:0", "--control=tcp://127.0.0.1:0", "--with-parent"
            )
        )
        url = (await line_with(router, "clients:")).removesuffix("/v1")
        control = await line_with(router, "instances:")
        servers: dict[str, list[asyncio.subprocess.Process]] = {"prefill": [], "decode": []}
        names = ("model", "device", "blocks", "block_size")
        passed_on = [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in names]
        for role in ("prefill", "prefill", "decode", "decode"):
            server = program(
                serve, f"--role={role}", f"--router={control}", "--with-parent", "--threads=1", *passed_on
            )
            servers[role].append(await stack.enter_async_context(server))
        model = await asyncio.to_thread(load, options.model, options.device)
        gc.freeze()
        await ready(url, 120)
        console.print(f"two prefill and two decode servers at {url}, which is also the page to watch")
        client = await stack.enter_async_context(
            openai.AsyncOpenAI(
                base_url=url + "/v1", api_key="none", max_retries=0, timeout=2 * options.deadline
            )
        )
        fleet = Fleet(url, client, servers, options.model, options.deadline)
        draw = random.Random(options.seed)  # noqa: S311 - a load, not a key
        requests = [
            Asked(number, draw.choice(QUESTIONS), draw.random() < 0.6, draw.randrange(8, options.limit + 1))
            for number in range(options.requests)
        ]
        await load_it(fleet, requests, options.at_once)
        async with aiohttp.ClientSession() as session, session.get(url + "/feed.json") as response:
            feed = await response.json()
    return await judged(console, model, fleet, feed, options)


async def judged(
    console: Console, model: Model, fleet: Fleet, feed: dict[str, object], options: argparse.Namespace
) -> int:
    """Show what became of each request; gives the exit status."""
    console.print("Now the same questions in one process ...")
    try:
        answers = await asyncio.to_thread(expected, model, fleet.asked, options)
    except Stopped:
        return 1
    good: dict[int, str] = {}
    for each in fleet.asked:
        if each.took > fleet.deadline + 3:
            good[each.number] = f"LATE: {each.error}"
        elif each.error:
            good[each.number] = f"failed: {each.error[:90]}"
        else:
            good[each.number] = "right" if right(model, each, answers[each.question]) else "WRONG"
    console.print(table(fleet.asked, good))
    verdicts = list(good.values())
    answered = verdicts.count("right")
    after = sum(each.after and good[each.number] == "right" for each in fleet.asked)
    console.print(
        f"{len(verdicts)} requests ended: {answered} answered right, {after} of those sent after the kills; "
        f"{sum(each.startswith('failed') for each in verdicts)} failed with an error by their deadline; "
        f"{verdicts.count('WRONG')} wrong, {sum(each.startswith('LATE') for each in verdicts)} late"
    )
    console.print(f"attempts that failed, by kind: {feed['failures']}", markup=False)
    bad = any(each == "WRONG" or each.startswith("LATE") for each in verdicts)
    return 0 if fleet.killed and after and not bad else 1


def parsed(line: list[str] | None = None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model(parser)
    option = parser.add_argument
    option("--requests", type=count, default=36, help="how many (default: %(default)s)")
    option("--at-once", type=count, default=6, help="requests under way at once (default: %(default)s)")
    option("--limit", type=count, default=32, help="tokens of an answer, at most (default: %(default)s)")
    option("--deadline", type=seconds, default=60.0, help="of a request, in seconds (default: %(default)g)")
    option("--seed", type=int, default=7, help="draws the load (default: %(default)s)")
    return parser.parse_args(line)


def start(options: argparse.Namespace) -> int:
    """Do it all; gives the exit status."""
    torch.set_num_threads(options.threads)
    if why := lacking(options):
        print(f"failed: {why}", file=sys.stderr)
        return 2
    options.model = options.model or usual(options.device)
    prepare(options.model)
    try:
        return uvloop.run(main(options))
    except (RuntimeError, TimeoutError) as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(start(parsed()))
