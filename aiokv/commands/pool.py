"""``python -m aiokv pool``: a pool of host memory as a program."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from importlib.util import find_spec

import uvloop

from aiokv.control.address import bracketed, host_and_port
from aiokv.errors import AiokvError
from aiokv.offload.sharing.owner import HostPool

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a pool until SIGTERM or Ctrl-C; gives the exit status."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(
        level=logging.DEBUG if options.verbose else logging.INFO,
        format="%(asctime)s %(levelname)s %(message)s",
    )
    try:
        uvloop.run(_run(options))
    except (AiokvError, ValueError, OSError) as error:
        print(f"failed: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


async def _run(options: argparse.Namespace) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    pool = HostPool(options.path, options.capacity, options.policy, segment_bytes=options.segment)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(pool)
        if options.metrics is not None:
            stack.callback(await asyncio.to_thread(_show, pool, *options.metrics))
        print(f"pool: {pool.path}", flush=True)
        await stop.wait()


def _show(pool: HostPool, host: str, port: int) -> Callable[[], None]:
    """Serve the pool's metrics from a thread of their own; gives what ends that."""
    from prometheus_client import CollectorRegistry, start_http_server

    from aiokv.metrics import PoolExporter

    registry = CollectorRegistry()
    exporter = PoolExporter(pool, registry)
    shown = bracketed(host)
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise OSError(f"--metrics {shown}:{port}: {error}") from error
    print(f"metrics: http://{shown}:{server.server_port}/metrics", flush=True)

    def end() -> None:
        server.shutdown()
        server.server_close()
        thread.join()
        exporter.close()

    return end


def _address(text: str) -> tuple[str, int]:
    try:
        place = host_and_port(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT") from None
    if find_spec("prometheus_client") is None:
        raise argparse.ArgumentTypeError("it needs pip install 'aiokv[metrics]'")
    return place


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m aiokv pool",
        description="Keeps host memory for KV blocks that the host tiers of several processes share "
        "(HostTier(cache, pool=PATH)); each finds what the others stored. For processes of one user.",
    )
    option = parser.add_argument
    option("path", metavar="PATH", help="of its socket, at most 107 bytes")
    option("--capacity", required=True, metavar="SIZE", help="of memory, such as 64GiB")
    option(
        "--policy", default="lru", metavar="NAME", help="what goes first: lru or arc (default: %(default)s)"
    )
    option(
        "--segment",
        default="256MiB",
        metavar="SIZE",
        help="memory is made and pinned in pieces of about this size (default: %(default)s)",
    )
    option("--metrics", type=_address, metavar="HOST:PORT", help="where Prometheus finds what it holds")
    option("--verbose", action="store_true", help="log more")
    return parser
