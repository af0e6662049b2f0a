"""The command line that prefill and decode share, and what is made from it."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from collections.abc import Coroutine
from typing import Any

import torch
import uvloop

import aiokv
from serving.model import NAMES

__all__ = ["TRANSPORTS", "arguments", "engine_for", "run", "tell_parent"]

#: Those for host memory, the best first.
TRANSPORTS = ("shm", "cma", "tcp")


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The options of one process of the pair."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    shared = parser.add_argument
    shared("--model", choices=NAMES, default="smollm2", help="what to run")
    shared("--bind", default="tcp://127.0.0.1:0", help="where the transfer engine listens")
    shared("--advertise", help="where other hosts reach it, if not at the address bound")
    shared("--transport", choices=TRANSPORTS, help="use this one only, not the best that both have")
    shared("--blocks", type=int, default=256, help="blocks of the KV cache")
    shared("--block-size", type=int, default=16, help="tokens per block")
    shared("--deadline", type=float, default=60.0, help="seconds that a prefill and its transfer may take")
    shared("--threads", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="CPU threads of the model")
    shared("--with-parent", action="store_true", help="end when standard input is closed")
    return parser


def engine_for(cache: aiokv.KVCache, options: argparse.Namespace) -> aiokv.TransferEngine:
    """The transfer engine that the command line asks for."""
    transports = (options.transport,) if options.transport else TRANSPORTS
    return aiokv.TransferEngine(cache, bind=options.bind, advertise=options.advertise, transports=transports)


def run(main: Coroutine[Any, Any, None], options: argparse.Namespace) -> None:
    """Run ``main`` on uvloop until it returns, a signal comes, or the parent goes away."""
    torch.set_num_threads(options.threads)
    try:
        uvloop.run(_until_told(main, with_parent=options.with_parent))
    except (KeyboardInterrupt, asyncio.CancelledError):
        return


def tell_parent(**facts: str) -> None:
    """Print one line of JSON: where this process can be reached."""
    print(json.dumps(facts), flush=True)


async def _until_told(main: Coroutine[Any, Any, None], *, with_parent: bool) -> None:
    loop = asyncio.get_running_loop()
    task = loop.create_task(main)
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    if not with_parent:
        return await task
    # A pipe that closes also tells of a parent that was killed.
    pipe = asyncio.StreamReader()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(pipe), sys.stdin)
    watch = loop.create_task(pipe.read())
    watch.add_done_callback(lambda _: task.cancel())
    try:
        await task
    finally:
        watch.cancel()
        transport.close()
