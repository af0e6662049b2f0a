"""Processes that share a pool: one that begins others by forking, so that each is there at once.

Run with nothing, it forks a process for each line on its standard input, which connects to the unix socket
that the line names, and does what it is told there: JSON, a line for each order and each answer.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from contextlib import AsyncExitStack

import uvloop

from aiokv.errors import AiokvError
from aiokv.offload.sharing.owner import HostPool
from aiokv.testing.parent import end_with
from aiokv.testing.tiers import BLOCK, Kit, tier_on
from aiokv.testing.tierusers import Users


class Child:
    def __init__(self) -> None:
        self.stack = AsyncExitStack()
        self.going: list[asyncio.Future[int]] = []
        self.kit: Kit
        self.users: Users
        self.hit = None

    async def own(self, path: str, blocks: int) -> None:
        pool = HostPool(path, blocks * BLOCK, segment_bytes=16 * BLOCK)
        await self.stack.enter_async_context(pool)

    async def enter(self, path: str, kind: str = "host", *, stepping: bool = True) -> None:
        self.kit = await self.stack.enter_async_context(tier_on(kind, 1, pool=path, stepping=stepping))
        self.users = Users(self.kit, 1)

    async def store(self, keys: list[str], blocks: list[int]) -> int:
        self.users.write(keys, blocks)
        return await self.kit.tier.store(keys, blocks)

    async def begin_store(self, keys: list[str], blocks: list[int]) -> None:
        self.users.write(keys, blocks)
        self.going.append(asyncio.ensure_future(self.kit.tier.store(keys, blocks)))

    async def load(self, keys: list[str], blocks: list[int]) -> int:
        loaded = await self.kit.get(keys, blocks)
        self.users.check(keys[:loaded], blocks[:loaded])
        return loaded

    async def hold(self, keys: list[str]) -> int:
        self.hit = await self.stack.enter_async_context(self.kit.tier.lookup(keys))
        return len(self.hit)

    async def load_held(self, keys: list[str], blocks: list[int]) -> int:
        assert self.hit is not None
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


async def serve(path: str) -> None:
    reader, writer = await asyncio.open_unix_connection(path)
    child = Child()
    writer.write(json.dumps(os.getpid()).encode() + b"\n")
    while line := await reader.readline():
        what, arguments = json.loads(line)
        try:
            answer = await getattr(child, what)(**arguments)
        except AiokvError as error:
            answer = {"error": type(error).__name__, "says": str(error)}
        writer.write(json.dumps(answer).encode() + b"\n")
    os._exit(0)  # at once, with whatever it holds


def main() -> None:
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
            uvloop.run(serve(path))
            sys.exit()


if __name__ == "__main__":
    main()
