"""``python -m aiokv router``: the router as a program."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from aiokv.control.keys import Keys
from aiokv.control.tls import Tls
from aiokv.router.settings import RouterSettings

if TYPE_CHECKING:
    from aiokv.router.server import Router

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a router until SIGTERM or Ctrl-C; gives the exit status."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(
        level=logging.DEBUG if options.verbose else logging.INFO,
        format="%(asctime)s %(levelname)s %(message)s",
    )
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # a traceback for each malformed request
    try:
        import aiohttp  # noqa: F401
        import prometheus_client  # noqa: F401
    except ModuleNotFoundError as error:
        print(f"{error}; pip install 'aiokv[router]'", file=sys.stderr)
        return 2
    try:
        return uvloop.run(_run(options))
    except (ValueError, TypeError, OSError) as error:
        print(f"failed: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


async def _run(options: argparse.Namespace) -> int:
    router = await asyncio.to_thread(_made, options)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    async with router:
        print(f"clients:   {router.http}/v1")
        print(f"instances: {router.control}")
        print(f"page:      {router.page or 'none (--page HOST:PORT)'}", flush=True)
        gc.freeze()  # what stays till the end; looking through it would hold the loop
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        async with _parent(stop) if options.with_parent else nullcontext():
            await stop.wait()
        for number in (signal.SIGTERM, signal.SIGINT):  # a second one doesn't wait
            loop.remove_signal_handler(number)
        await router.drain(options.grace)
    return 0


@asynccontextmanager
async def _parent(gone: asyncio.Event) -> AsyncIterator[None]:
    """Set ``gone`` when standard input is closed, as it is when whoever started this ends."""
    pipe = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(pipe), sys.stdin)
    watch = loop.create_task(pipe.read())
    watch.add_done_callback(lambda _: gone.set())
    try:
        yield
    finally:
        watch.cancel()
        transport.close()


def _made(options: argparse.Namespace) -> Router:
    """The router; reads files, so it is made off the loop."""
    from aiokv.router.server import Router

    return Router(
        http=options.http,
        control=options.control,
        page=options.page,
        advertise=options.advertise,
        keys=Keys.load(options.keys) if options.keys else None,
        allow=Keys.listed(options.keys) if options.keys else None,
        tls=Tls.load(options.tls[0], options.tls[1], ca=options.tls[2]) if options.tls else None,
        api_keys=_listed(options.api_keys) if options.api_keys else (),
        insecure=options.insecure,
        settings=RouterSettings(
            **{each.name: getattr(options, each.name) for each in fields(RouterSettings)}
        ),
    )


def _listed(file: Path) -> list[str]:
    """API keys, one a line; what follows # is for people."""
    lines = (line.partition("#")[0].strip() for line in file.read_text(encoding="utf-8").splitlines())
    found = [line for line in lines if line]
    if not found:
        raise ValueError(f"{file}: it lists no key, so that nobody could be answered")
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m aiokv router",
        description="Routes OpenAI's completions and chat completions to prefill and decode servers that "
        "register themselves and may come and go.",
    )
    option = parser.add_argument
    option("--http", default="127.0.0.1:8000", metavar="HOST:PORT", help="for clients (default: %(default)s)")
    option(
        "--control",
        default="tcp://127.0.0.1:7000",
        metavar="ADDRESS",
        help="for servers: tcp://host:port, stream:// or tls:// (default: %(default)s)",
    )
    option(
        "--page",
        metavar="HOST:PORT",
        help="for operators: page, feed and metrics (default: with the clients; with --api-keys nowhere)",
    )
    option("--advertise", metavar="ADDRESS", help="what servers are told in place of --control")
    option(
        "--keys",
        metavar="DIR",
        help="folder of `python -m aiokv keygen`, with the servers' public keys in DIR/allowed",
    )
    option("--tls", nargs=3, metavar=("CERT", "KEY", "CA"), help="certificates, for a tls:// --control")
    option("--api-keys", type=Path, metavar="FILE", help="keys of which clients show one, one a line")
    option("--insecure", action="store_true", help="let other hosts reach what has no keys")
    option("--grace", type=float, default=30.0, help="seconds to finish after SIGTERM (default: %(default)g)")
    option("--with-parent", action="store_true", help="end when standard input is closed")
    option("--verbose", action="store_true", help="log more")
    bounds = parser.add_argument_group("bounds and times (seconds, bytes)")
    for each in fields(RouterSettings):
        kind = int if each.type == "int" else float
        bounds.add_argument(
            f"--{each.name.replace('_', '-')}",
            type=kind,
            default=each.default,
            metavar="N",
            help="(default: %(default)s)",
        )
    return parser
