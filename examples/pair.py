"""Prefill and decode as two processes of this host, and whether they answer as one process would.

Starts both, sends them several prompts at once, shows the answers as they come and what the
transfers did; then runs the same prompts in this process alone, and compares token for token.

    python examples/pair.py
    python examples/pair.py --model tiny-random     # needs no weights, takes a few seconds
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import torch
import uvloop
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import aiokv
from serving.channel import Message, request
from serving.model import NAMES, Model, load, prepare
from serving.options import TRANSPORTS
from serving.paged import PagedCache

LONG = "long"


def requests(model: Model, block_size: int) -> dict[str, list[int]]:
    """Prompts, as tokens: a usual one, and those at which a transfer might go wrong."""
    chat = model.tokenizer.chat
    # Each further word is one token or a few: some number of them fills the last block to its end.
    polite = (chat("Name three colours." + " Please" * count + ".") for count in range(100 * block_size))
    diary = " ".join(
        f"On day {day}, {3 * day + 2} crates of {('figs', 'dates', 'limes')[day % 3]} came to the harbour."
        for day in range(1, 41)
    )
    return {
        "usual": chat("What does a harbour pilot do?"),
        "one token": model.tokenizer.encode("Once")[:1],
        "whole blocks": next(tokens for tokens in polite if len(tokens) % block_size == 0),
        LONG: chat(f"{diary} What came to the harbour on day 20?"),
    }


@asynccontextmanager
async def children(*arguments: str) -> AsyncIterator[list[asyncio.subprocess.Process]]:
    """The processes of the pair, prefill first. They end when this context, or this process, does."""
    started = []
    try:
        for script in ("prefill.py", "decode.py"):
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                str(Path(__file__).with_name(script)),
                "--listen=127.0.0.1:0",
                "--with-parent",
                *arguments,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            started.append(process)
        yield started
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        await asyncio.gather(*map(ended, started))


async def ended(process: asyncio.subprocess.Process) -> None:
    """Wait until a child has ended, and don't wait for ever."""
    try:
        async with asyncio.timeout(10):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


async def reachable(process: asyncio.subprocess.Process) -> str:
    """Where a child takes requests, once it does."""
    if process.stdout is None:
        raise ValueError("the process was started without a pipe")
    line = await process.stdout.readline()
    if not line:
        raise RuntimeError("a process of the pair ended before it was ready")
    address: str = json.loads(line)["listen"]
    return address


async def ask(console: Console, decode: str, name: str, message: Message) -> Message:
    """Send one request, and show the answer line by line under its name; gives the last reply."""
    line = ""
    async with request(decode, message) as replies:
        while "answer" not in (reply := await replies.next()):
            *full, line = (line + reply["text"]).split("\n")
            if len(line) > 60 and " " in line:
                head, _, line = line.rpartition(" ")
                full.append(head)
            for shown in filter(str.strip, full):
                console.print(f"{name:>12} | {shown}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"{name:>12} | {line}", markup=False, highlight=False, soft_wrap=True)
    return reply


def overlapped(reply: Message) -> int:
    """Layers whose KV had landed in one process before the other had ended the prompt's forward.

    The times are CLOCK_MONOTONIC, which all processes of one host share.
    """
    return sum(landed < reply["prefill"]["ended"] for landed in reply["landed"])


def table(prompts: dict[str, list[int]], replies: dict[str, Message]) -> Table:
    """What the transfers did."""
    shown = Table(
        box=SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
        caption="transfer: from each layer's KV written to landed, summed over layers; "
        "exposed: from the prefill's end to the last layer landed",
    )
    shown.add_column("request", no_wrap=True)
    for title in ("prompt", "KV", "prefill", "transfer", "rate", "over-\nlapped", "exposed", "first\ntoken"):
        shown.add_column(title, justify="right")
    shown.add_row("", "tokens", "MiB", "ms", "ms", "GB/s", "layers", "ms", "ms", style="dim")
    for name, reply in replies.items():
        prefill, landed = reply["prefill"], reply["landed"]
        transfer = sum(landed) - sum(prefill["ready"])
        shown.add_row(
            name,
            f"{len(prompts[name])}",
            f"{reply['bytes'] / 2**20:.2f}",
            f"{(prefill['ended'] - prefill['began']) / 1e6:.0f}",
            f"{transfer / 1e6:.1f}",
            f"{reply['bytes'] / transfer:.2f}",
            f"{overlapped(reply)}/{len(landed)}",
            f"{(max(landed) - prefill['ended']) / 1e6:.1f}",
            f"{(reply['tokens_at'][0] - reply['asked']) / 1e6:.0f}",
        )
    return shown


def alone(model: Model, prompts: dict[str, list[int]], options: argparse.Namespace) -> dict[str, list[int]]:
    """The answers of one process that does it all, through the same paged attention."""
    answers = {}
    with closing(aiokv.KVCache.allocate(model.layout(options.blocks, options.block_size))) as cache:
        for name, prompt in prompts.items():
            blocks = range(-(-(len(prompt) + options.limit) // options.block_size))
            kv = PagedCache(cache, blocks)
            answer = [model.next_token(prompt, kv)]
            while answer[-1] != model.tokenizer.eos and len(answer) < options.limit:
                answer.append(model.next_token(answer[-1:], kv))
            answers[name] = answer
    return answers


async def main(options: argparse.Namespace) -> int:
    if task := asyncio.current_task():
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    console = Console()
    names = ("model", "blocks", "block_size", "threads") + (("transport",) if options.transport else ())
    passed_on = [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in names]
    async with children(*passed_on) as processes:
        model = await asyncio.to_thread(load, options.model)
        prompts = requests(model, options.block_size)
        prefill, decode = [await reachable(process) for process in processes]
        async with asyncio.TaskGroup() as group:
            asked = {
                name: group.create_task(
                    ask(console, decode, name, {"tokens": tokens, "limit": options.limit, "prefill": prefill})
                )
                for name, tokens in prompts.items()
            }
    replies = {name: task.result() for name, task in asked.items()}
    console.print(table(prompts, replies))

    expected = await asyncio.to_thread(alone, model, prompts, options)
    wrong = [name for name, reply in replies.items() if reply["answer"] != expected[name]]
    for name in wrong:
        console.print(f"{name}: the pair answered {replies[name]['answer']}, one process {expected[name]}")
    if not wrong:
        total = sum(map(len, expected.values()))
        console.print(f"equal: {len(expected)} answers of {total} tokens are those of one process alone")
    if not overlapped(replies[LONG]):
        console.print(f"no layer of {LONG!r} landed before its prefill had ended")
        return 1
    return 1 if wrong else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=NAMES, default="smollm2")
    parser.add_argument("--transport", choices=TRANSPORTS, help="use this one only")
    parser.add_argument("--blocks", type=int, default=256)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--limit", type=int, default=32, help="tokens of an answer, at most")
    # The comparison uses as many as the pair: the order of additions, and so the rounding, depends on it.
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    try:
        prepare(chosen.model)
        sys.exit(uvloop.run(main(chosen)))
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit("stopped")
