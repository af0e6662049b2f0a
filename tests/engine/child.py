"""Engines in processes of their own, told what to do by lines of JSON on a socket; both ends of that.

Started as a program this is a nursery: it imports everything once. For each configuration that it is sent
with a socket it forks a process that runs an engine, and obeys what comes by that socket until it is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

import aiokv
from aiokv.control.zmq import ZmqChannel
from aiokv.device.cache import KVCache
from aiokv.engine.engine import TransferEngine
from aiokv.engine.transfer import Fetch, Offer
from aiokv.errors import AiokvError
from aiokv.proto.layout import CacheLayout
from aiokv.proto.settings import Settings
from aiokv.testing.pairs import check_idle, fill, kv_of
from aiokv.transports import cma, shm, tcp

#: Imported here, so that it isn't for each engine.
LOADED = (ZmqChannel, cma, shm, tcp)


class Config(msgspec.Struct):
    """What an engine is started with."""

    transport: str
    layout: CacheLayout
    settings: dict[str, int]
    bind: str = "tcp://127.0.0.1:0"


class Told(msgspec.Struct):
    """What it is to do. What a command doesn't need is left out."""

    #: A method of ``Child``.
    do: str
    tid: str = "t"
    attempt: int = 0
    blocks: list[int] = []
    #: Who is named (offer), or asked (fetch); empty for nobody.
    address: str = ""
    layers: list[int] = []
    #: Of the bytes to fill the cache with, or number of a copy.
    seed: int = 0


class Said(msgspec.Struct):
    """The answer to each command, and one at the start."""

    address: str = ""
    #: How a transfer ended: the kind of its error and the text; empty if it ended well.
    error: str = ""
    text: str = ""
    #: Of the blocks of a transfer that ended well.
    digest: str = ""


def digest(cache: KVCache, blocks: list[int]) -> str:
    return hashlib.sha256(kv_of(cache, blocks).tobytes()).hexdigest()


class Child:
    """An engine, the transfers that it was told of, and what it can be told."""

    def __init__(self, engine: TransferEngine) -> None:
        self.engine = engine
        self.handles: dict[tuple[str, int], Offer | Fetch] = {}

    async def obey(self, told: Told) -> Said:
        said = await getattr(self, told.do)(told)
        return said or Said()

    async def fill(self, told: Told) -> None:
        fill(self.engine.cache, told.seed)

    async def offer(self, told: Told) -> None:
        named = [told.address] if told.address else []
        self._begin(told, self.engine.offer(told.tid, told.blocks, to=named, attempt=told.attempt))

    async def fetch(self, told: Told) -> None:
        named = [told.address] if told.address else None
        self._begin(told, self.engine.fetch(told.tid, told.blocks, sources=named, attempt=told.attempt))

    def _begin(self, told: Told, handle: Offer | Fetch) -> None:
        handle.start()
        self.handles[told.tid, told.attempt] = handle

    async def ready(self, told: Told) -> None:
        for layer in told.layers:
            self.handles[told.tid, told.attempt].layer_ready(layer)

    async def layer(self, told: Told) -> None:
        for layer in told.layers:
            await self.handles[told.tid, told.attempt].layer(layer)

    async def parked(self, told: Told) -> None:
        await until(lambda: self.engine.statistics().parked > 0)

    async def cancel(self, told: Told) -> None:
        self.handles.pop((told.tid, told.attempt)).cancel()

    async def stop_itself(self, told: Told) -> None:
        """Stop this process just before the n-th copy from now on."""
        device, copied = self.engine.cache.device, itertools.count(1)
        copy = device.copy

        def stopping(*args: Any, **kwargs: Any) -> None:
            if next(copied) == told.seed:
                os.kill(os.getpid(), signal.SIGSTOP)
            copy(*args, **kwargs)

        device.copy = stopping

    async def wait(self, told: Told) -> Said:
        try:
            await self.handles.pop((told.tid, told.attempt)).wait()
        except AiokvError as error:
            return Said(error=type(error).__name__, text=str(error))
        return Said(digest=digest(self.engine.cache, told.blocks))

    async def idle(self, told: Told) -> None:
        check_idle(self.engine)


async def run(config: Config, sock: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=sock)

    def say(said: Said) -> None:
        writer.write(msgspec.json.encode(said) + b"\n")

    cache, settings = KVCache.allocate(config.layout), Settings(**config.settings)
    engine = TransferEngine(cache, bind=config.bind, transports=[config.transport], settings=settings)
    async with engine:
        child = Child(engine)
        say(Said(address=engine.address))
        while line := await reader.readline():
            try:
                say(await child.obey(msgspec.json.decode(line, type=Told)))
            except Exception as error:  # noqa: BLE001 - the test is told, and fails
                say(Said(error="fault", text=repr(error)))
    cache.close()
    writer.close()


# -- the test's end ------------------------------------------------------------------------------


async def until(reached: Callable[[], bool]) -> None:
    while not reached():  # noqa: ASYNC110 - nothing tells of what other processes do
        await asyncio.sleep(0.002)


class Nursery:
    """The process that the others are forked from, in milliseconds; for a test."""

    def __init__(self) -> None:
        self.orders, theirs = socket.socketpair()
        root = str(Path(aiokv.__file__).parents[1])
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={"PYTHONPATH": root, "OPENBLAS_NUM_THREADS": "1"},
        )
        theirs.close()
        self.orders.recv(8)  # it has imported everything

    def start(self, config: Any) -> tuple[int, socket.socket]:
        mine, theirs = socket.socketpair()
        socket.send_fds(self.orders, [msgspec.json.encode(config)], [theirs.fileno()])
        theirs.close()
        return int.from_bytes(self.orders.recv(8), "big"), mine

    def close(self) -> None:
        self.orders.close()
        self.process.wait()


class Other:
    """The test's end of another process."""

    def __init__(self, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.pid = pid
        self.reader, self.writer = reader, writer
        self.address = ""

    async def greet(self) -> None:
        self.address = (await self.hear()).address

    async def hear(self) -> Any:
        said = msgspec.json.decode(await self.reader.readline(), type=Said)
        assert said.error != "fault", said.text
        return said

    def tell(self, do: str, **arguments: Any) -> None:
        self.writer.write(msgspec.json.encode(Told(do, **arguments)) + b"\n")

    async def ask(self, do: str, **arguments: Any) -> Any:
        self.tell(do, **arguments)
        return await self.hear()

    async def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        await self.stopped()

    async def stopped(self) -> None:
        stat = Path(f"/proc/{self.pid}/stat")
        await until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    async def kill(self) -> None:
        if not self.writer.is_closing():
            os.kill(self.pid, signal.SIGKILL)
            with contextlib.suppress(ConnectionError):
                await self.reader.read()  # until it is gone
            self.writer.close()
            await self.writer.wait_closed()


# -- the program ----------------------------------------------------------------------------------


def nursery(orders: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    orders.sendall(b"\0" * 8)
    while True:
        data, fds, _, _ = socket.recv_fds(orders, 1 << 16, 1)
        if not data:
            return
        pid = os.fork()
        sock = socket.socket(fileno=fds[0])
        if not pid:
            orders.close()
            asyncio.run(run(msgspec.json.decode(data, type=Config), sock))
            return
        sock.close()
        orders.sendall(pid.to_bytes(8, "big"))


if __name__ == "__main__":
    nursery(socket.socket(fileno=int(sys.argv[1])))
