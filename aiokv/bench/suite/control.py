"""A deployment of 96 prefill and 144 decode engines: what a transfer costs as each has more and more peers.

All engines are in this process, joined by memory, with small caches, so that little is measured but the
runtime itself: its tables, sessions and messages. Each pair that meets shakes hands once; from then on what a
transfer costs must not depend on how many others there are.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
from contextlib import AsyncExitStack

import uvloop

import aiokv
from aiokv.bench.figures import Spread
from aiokv.bench.registry import Options
from aiokv.bench.report import Goal, Report
from aiokv.bench.usage import resident_bytes, used_cpu_ns
from aiokv.control.memory import MemoryNetwork
from aiokv.device.host import HostBuffer, HostDevice
from aiokv.transports.memory import MemoryHub, MemoryTransport

__all__ = ["GOALS", "run"]

#: None of them is a ratio that something depends on; the rows show whether the cost is flat.
GOALS: dict[str, Goal] = {}

_SEED = 5
_LAYOUT = aiokv.CacheLayout.attention(
    layers=2, blocks=16, block_size=16, heads=1, head_size=16, dtype="bfloat16", model=b"bench"
)
#: Ended transfers are remembered for a while. With few of them, memory that grows is that of peers.
_SETTINGS = aiokv.Settings(tombstones=16)
#: Transfers at once while pairs meet, and while transfers are counted.
_AT_ONCE = 8


class _PlainDevice(HostDevice):
    """The host, with memory that needs no descriptor: a process has few of those for hundreds of caches."""

    def allocate(self, nbytes: int) -> HostBuffer:
        """New memory of this process alone."""
        memory = bytearray(nbytes)
        return HostBuffer(memoryview(memory), owner=memory)


class _Deployment:
    """Prefill and decode engines, of which more and more know each other."""

    def __init__(self) -> None:
        self._stack = AsyncExitStack()
        self._hub, self._network = MemoryHub(), MemoryNetwork()
        self.prefill: list[aiokv.TransferEngine] = []
        self.decode: list[aiokv.TransferEngine] = []
        #: Pairs that have met.
        self.met = 0
        self._count = itertools.count()
        self._random = random.Random(_SEED)  # noqa: S311 - not a secret

    async def grow(self, prefill: int, decode: int) -> None:
        """Have so many engines, and each pair of them meet."""
        before = len(self.prefill), len(self.decode)
        while len(self.prefill) < prefill:
            self.prefill.append(await self._engine(f"p{len(self.prefill)}"))
        while len(self.decode) < decode:
            self.decode.append(await self._engine(f"d{len(self.decode)}"))
        pairs = [
            (producer, consumer)
            for at, producer in enumerate(self.prefill)
            for to, consumer in enumerate(self.decode)
            if at >= before[0] or to >= before[1]
        ]
        self._random.shuffle(pairs)
        await self._move(pairs)
        self.met += len(pairs)

    async def transfers(self, count: int) -> None:
        """So many, between pairs drawn from those that have met."""
        await self._move(
            [(self._random.choice(self.prefill), self._random.choice(self.decode)) for _ in range(count)]
        )

    async def _move(self, pairs: list[tuple[aiokv.TransferEngine, aiokv.TransferEngine]]) -> None:
        left = iter(pairs)

        async def one_by_one(block: int) -> None:
            for producer, consumer in left:
                await _transfer(producer, consumer, str(next(self._count)), block)

        await asyncio.gather(*map(one_by_one, range(_AT_ONCE)))

    async def _engine(self, name: str) -> aiokv.TransferEngine:
        cache = aiokv.KVCache.allocate(_LAYOUT, device=_PlainDevice())
        self._stack.callback(cache.close)
        return await self._stack.enter_async_context(
            aiokv.TransferEngine(
                cache,
                transports=[MemoryTransport(self._hub)],
                channel=self._network.channel(f"memory://{name}"),
                settings=_SETTINGS,
            )
        )

    @property
    def frames(self) -> int:
        """Messages so far, of all engines."""
        return sum(engine.statistics().frames_sent for engine in (*self.prefill, *self.decode))

    @property
    def sessions(self) -> int:
        """Sessions that are up, at both ends."""
        return sum(engine.statistics().sessions for engine in (*self.prefill, *self.decode))

    async def close(self) -> None:
        """All engines and caches."""
        await self._stack.aclose()


async def _transfer(
    producer: aiokv.TransferEngine, consumer: aiokv.TransferEngine, tid: str, block: int
) -> None:
    async def produce() -> None:
        async with producer.offer(tid, [block]):
            pass

    async def consume() -> None:
        async with consumer.fetch(tid, [block], sources=[producer.address]):
            pass

    await asyncio.gather(produce(), consume())


async def _run(report: Report, options: Options) -> None:
    steps = [(6, 9), (12, 18)] if options.quick else [(6, 9), (12, 18), (24, 36), (48, 72), (96, 144)]
    rounds, count = (2, 200) if options.quick else (5, 2_000)
    deployment = _Deployment()
    await deployment.grow(1, 1)
    await deployment.transfers(count)
    try:
        for prefill, decode in steps:
            await _step(deployment, report, (prefill, decode), rounds, count)
    finally:
        await deployment.close()


async def _step(
    deployment: _Deployment, report: Report, size: tuple[int, int], rounds: int, count: int
) -> None:
    met, frames, cpu_ns, rss = deployment.met, deployment.frames, used_cpu_ns(), resident_bytes()
    await deployment.grow(*size)
    new, handshakes = deployment.met - met, deployment.sessions // 2
    name = f"{size[0]} x {size[1]}"
    report.row(
        "handshake and first transfer of a pair",
        {
            "prefill x decode": name,
            "pairs that met": new,
            "messages": (deployment.frames - frames) / new,
            "CPU us": (used_cpu_ns() - cpu_ns) / new / 1e3,
            "KiB": (resident_bytes() - rss) / new / 1024,
        },
    )
    messages, cpu, memory = [], [], []
    gc.collect()
    for _ in range(rounds):
        frames, cpu_ns, rss = deployment.frames, used_cpu_ns(), resident_bytes()
        await deployment.transfers(count)
        messages.append((deployment.frames - frames) / count)
        cpu.append((used_cpu_ns() - cpu_ns) / count / 1e3)
        memory.append((resident_bytes() - rss) / count)
    report.row(
        "a transfer between pairs that know each other",
        {
            "prefill x decode": name,
            "sessions": handshakes,
            "handshakes": deployment.sessions // 2 - handshakes,
            "messages": Spread.of(messages),
            "CPU us": Spread.of(cpu),
            "bytes kept": Spread.of(memory),
        },
    )


def run(report: Report, options: Options) -> None:
    """Measure."""
    uvloop.run(_run(report, options))
