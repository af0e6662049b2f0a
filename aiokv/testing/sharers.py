"""Processes that share a pool: one that begins others by forking, so that each is there at once.

Run as a program, it forks a process for each line on its standard input, which connects to the unix socket
that the line names, and does what it is told there: JSON, a line for each order and each answer. ``parent``
and ``children`` are for the test that tells them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import uvloop

import aiokv
from aiokv.device.cache import Allocator
from aiokv.errors import AiokvError
from aiokv.offload.lookup import Lookup
from aiokv.offload.sharing.owner import HostPool
from aiokv.testing.parent import end_with
from aiokv.testing.tiers import BLOCK, Kit, tier_on
from aiokv.testing.tierusers import Users

__all__ = ["PATIENCE_S", "Begin", "Child", "children", "parent"]

#: Seconds after which a test gives a child up.
PATIENCE_S = 30


class _Doing:
    """What a child does; each method is an order."""

    def __init__(self) -> None:
        self.stack = contextlib.AsyncExitStack()
        self.going: list[asyncio.Future[int]] = []
        self.kit: Kit
        self.users: Users
        self.hit: Lookup

    async def own(self, path: str, blocks: int) -> None:
        pool = HostPool(path, blocks * BLOCK, segment_bytes=16 * BLOCK)
        await self.stack.enter_async_context(pool)

    async def enter(self, path: str, kind: str = "host", *, stepping: bool = True) -> None:
        device = _cuda() if kind == "cuda" else kind
        self.kit = await self.stack.enter_async_context(tier_on(device, 1, pool=path, stepping=stepping))
        self.users = Users(self.kit, 1)

    async def store(self, keys: list[str], blocks: list[int]) -> int:
        self.users.write(keys, blocks)
        return await self.kit.tier.store(keys, blocks)

    async def begin_store(self, keys: list[str], blocks: list[int], cycles: int = 0) -> None:
        """Store; on a GPU, behind so many cycles of it."""
        self.users.write(keys, blocks)
        stream = None
        if cycles:
            torch.cuda.synchronize()  # what the blocks hold was written on another stream
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream):
                torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
        self.going.append(asyncio.ensure_future(self.kit.tier.store(keys, blocks, stream=stream)))

    async def load(self, keys: list[str], blocks: list[int]) -> int:
        loaded = await self.kit.get(keys, blocks)
        self.users.check(keys[:loaded], blocks[:loaded])
        return loaded

    async def hold(self, keys: list[str]) -> int:
        self.hit = await self.stack.enter_async_context(self.kit.tier.lookup(keys))
        return len(self.hit)

    async def load_held(self, keys: list[str], blocks: list[int]) -> int:
        loaded = await self.kit.tier.load(self.hit, blocks)
        self.users.check(keys[:loaded], blocks[:loaded])
        return loaded

    async def work(self, requests: int) -> int:
        """Requests at random, as long as they are wanted."""
        for _ in range(requests):
            await self.users.request()
        return self.users.loaded

    async def begin_work(self, requests: int) -> None:
        self.going.append(asyncio.ensure_future(self.work(requests)))

    async def attached(self) -> bool:
        return self.kit.tier.statistics().attached

    async def leave(self) -> None:
        await self.stack.aclose()


def _cuda() -> Allocator:
    from aiokv.device.cuda import CudaDevice

    return CudaDevice(0)


async def _serve(path: str) -> None:
    reader, writer = await asyncio.open_unix_connection(path)
    child = _Doing()
    writer.write(json.dumps(os.getpid()).encode() + b"\n")
    while line := await reader.readline():
        what, arguments = json.loads(line)
        try:
            answer = await getattr(child, what)(**arguments)
        except AiokvError as error:
            answer = {"error": type(error).__name__, "says": str(error)}
        writer.write(json.dumps(answer).encode() + b"\n")
    os._exit(0)  # at once, with whatever it holds


def _main() -> None:
    parent = os.getppid()
    end_with(parent)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # none is waited for
    own = os.getpid()
    print("ready", flush=True)
    # Unbuffered: what a child inherits of a buffer would be read twice.
    line = b""
    while byte := os.read(0, 1):
        line += byte
        if byte != b"\n":
            continue
        path, line = line.decode().strip(), b""
        if os.fork() == 0:
            end_with(own)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            uvloop.run(_serve(path))
            sys.exit()


# -- for tests


@contextlib.contextmanager
def parent() -> Iterator[subprocess.Popen[bytes]]:
    """Begins the others; all end with it."""
    path = [str(Path(aiokv.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    with subprocess.Popen(
        [sys.executable, "-m", __spec__.name],
        stdin=-1,
        stdout=-1,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
    ) as process:
        if process.stdin is None or process.stdout is None or process.stdout.readline() != b"ready\n":
            raise AssertionError("the process that forks others didn't begin")
        yield process
        process.stdin.close()


class Child:
    """One of them, as the test sees it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pid: int) -> None:
        self.reader, self.writer, self.pid = reader, writer, pid

    async def __call__(self, what: str, **arguments: Any) -> Any:  # noqa: ANN401 - JSON
        """Have it do something, and give what came of it."""
        self.order(what, **arguments)
        async with asyncio.timeout(PATIENCE_S):
            return json.loads(await self.reader.readline())

    def order(self, what: str, **arguments: Any) -> None:  # noqa: ANN401 - JSON
        """Have it do something; its answer is the next line of ``reader``."""
        self.writer.write(json.dumps([what, arguments]).encode() + b"\n")

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal; nothing where it is gone."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


Begin = Callable[[], Awaitable[Child]]


@contextlib.asynccontextmanager
async def children(parent: subprocess.Popen[bytes], folder: Path) -> AsyncIterator[Begin]:
    """Children of a ``parent``, begun one at a time by what this gives; all are killed at the end."""
    come: asyncio.Queue[Child] = asyncio.Queue()

    async def met(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        come.put_nowait(Child(reader, writer, json.loads(await reader.readline())))

    path = folder / "orders"
    server = await asyncio.start_unix_server(met, path)
    there: list[Child] = []

    async def begin() -> Child:
        await asyncio.to_thread(os.write, parent.stdin.fileno(), f"{path}\n".encode())  # type: ignore[union-attr]
        async with asyncio.timeout(PATIENCE_S):
            there.append(await come.get())
        return there[-1]

    try:
        yield begin
    finally:
        for child in there:
            child.signal(signal.SIGKILL)
            with contextlib.suppress(ConnectionError):
                await child.reader.read()  # it is over when the kernel has closed this
            child.writer.close()
        server.close()
        await asyncio.sleep(0)


if __name__ == "__main__":
    _main()
