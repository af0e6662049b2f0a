"""Real second processes: another address space, and a death that nobody announces."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from aiokv.device.cache import KVCache
from aiokv.device.offloop import off_loop
from aiokv.errors import PeerLostError
from aiokv.proto.plan import Chunk
from aiokv.testing.conformance.transportkit import Engine
from aiokv.transports.base import Link, PeerInfo
from aiokv.transports.cma import CmaTransport
from aiokv.transports.shm import ShmTransport
from aiokv.transports.tcp import TcpTransport

CHILD = Path(__file__).with_name("child.py")
spec = importlib.util.spec_from_file_location("transport_child", CHILD)
child = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = child  # where msgspec looks annotations up
spec.loader.exec_module(child)

TRANSPORTS = {"shm": ShmTransport, "cma": CmaTransport, "tcp": TcpTransport}
PATIENCE_S = 30


class Other:
    """A child process, with what it told of itself."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.told = None

    async def hear(self):
        async with asyncio.timeout(PATIENCE_S):
            self.told = msgspec.json.decode(await self.process.stdout.readline(), type=child.Told)
        return self.told

    def tell(self, engine: Engine, link: bytes = b"") -> None:
        told = child.Told(engine.transport.describe(), engine.cache.placement, link)
        self.process.stdin.write(msgspec.json.encode(told) + b"\n")

    @property
    def info(self) -> PeerInfo:
        return PeerInfo("tcp://127.0.0.1:1", b"i" * 16, self.told.placement)


@contextlib.asynccontextmanager
async def two_processes(kind: str) -> AsyncIterator[tuple[Engine, Other]]:
    transport = TRANSPORTS[kind]()
    cache = await off_loop(lambda: KVCache.allocate(child.LAYOUT), "cache")
    root = str(Path(sys.modules[TcpTransport.__module__].__file__).parents[2])
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(CHILD), kind, stdin=-1, stdout=-1, env={"PYTHONPATH": root}
    )
    try:
        await transport.start(cache, "127.0.0.1")
        other = Other(process)
        await other.hear()
        yield Engine(transport, cache), other
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.stdin.close()
        await process.wait()
        await process.stdout.read()  # closes the pipe
        await transport.aclose()
        cache.close()


async def lost(link: Link) -> None:
    bell = asyncio.Event()
    link.on_lost(bell.set)
    async with asyncio.timeout(PATIENCE_S):
        await bell.wait()


def memory_of(engine: Engine) -> np.ndarray:
    return np.frombuffer(engine.cache.buffers[0].view, np.uint8)


def read_all(engine: Engine, link: Link, plan) -> None:
    stream = engine.cache.device.stream()
    for layer in plan.layers:
        for chunk in plan.chunks((layer,), 1 << 20):
            assert link.read(plan, chunk, engine.cache.buffers, stream=stream).done()


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["shm", "cma"])
async def test_reads_from_another_process_until_it_is_killed(kind: str) -> None:
    async with two_processes(kind) as (engine, other):
        link = await engine.transport.connect(other.told.description, other.info)
        plan = child.plan_to(other.told.placement, engine.cache.placement)
        read_all(engine, link, plan)
        expected = np.arange(plan.total) % 251
        np.testing.assert_array_equal(memory_of(engine)[: plan.total], expected)

        # A process that is stopped is not dead, and its memory can be read.
        other.process.send_signal(signal.SIGSTOP)
        memory_of(engine)[:] = 0
        read_all(engine, link, plan)
        np.testing.assert_array_equal(memory_of(engine)[: plan.total], expected)
        assert not link.lost

        other.process.kill()
        await lost(link)
        with pytest.raises(PeerLostError, match=r"dead|ended"):
            read_all(engine, link, plan)


@pytest.mark.asyncio
async def test_is_sent_to_by_another_process() -> None:
    async with two_processes("tcp") as (engine, other):
        link = await engine.transport.connect(other.told.description, other.info)
        plan = child.plan_to(other.told.placement, engine.cache.placement)
        landed, complete = [0], asyncio.Event()

        def count(chunk: Chunk) -> None:
            landed[0] += chunk.nbytes
            if landed[0] == plan.total:
                complete.set()

        link.expect(("part", 1), plan, engine.cache.buffers, count)
        other.tell(engine, link.id)
        async with asyncio.timeout(PATIENCE_S):
            await complete.wait()
        np.testing.assert_array_equal(memory_of(engine)[: plan.total], np.arange(plan.total) % 251)
        other.process.kill()
        await lost(link)


@pytest.mark.asyncio
async def test_killed_in_the_middle_of_sending() -> None:
    async with two_processes("tcp") as (engine, other):
        link = await engine.transport.connect(other.told.description, other.info)
        plan = child.plan_to(other.told.placement, engine.cache.placement)

        def landed(chunk: Chunk) -> None:
            # What it had sent goes on coming in when it is gone, and may be known to be.
            with contextlib.suppress(ProcessLookupError):
                other.process.kill()

        link.expect(("part", 1), plan, engine.cache.buffers, landed)
        other.tell(engine, link.id)
        await lost(link)
        before = memory_of(engine).copy()
        await asyncio.sleep(0.05)
        np.testing.assert_array_equal(memory_of(engine), before)


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", TRANSPORTS)
async def test_a_consumer_that_is_killed_is_lost(kind: str) -> None:
    async with two_processes(kind) as (engine, other):
        other.tell(engine)
        told = await other.hear()
        end = engine.transport.accepted(told.link)
        assert end is not None
        assert not end.lost
        other.process.kill()
        await lost(end)
        assert engine.transport.accepted(told.link) is None
