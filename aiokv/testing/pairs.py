"""Engines of one process, with caches that are made, filled and closed with them.

``connected_pair`` is all that most tests need::

    async with connected_pair() as (prefill, decode):
        await transfer(prefill, decode, "t", source=[1, 2], target=[3, 4])

``Engines`` makes any number, each as it is told. By default they are joined by memory alone and copy at once,
so that a whole transfer takes a few turns of the loop and no time; with ``virtual_time`` no test needs time.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, ParamSpec, Self, TypedDict, Unpack

import msgspec
import numpy as np
from numpy.typing import NDArray

from aiokv.control.keys import Keys
from aiokv.control.memory import MemoryNetwork
from aiokv.control.tls import Tls
from aiokv.device.cache import Allocator, KVCache
from aiokv.device.host import HostBuffer, HostDevice
from aiokv.device.offloop import off_loop
from aiokv.engine.engine import TransferEngine
from aiokv.proto.layout import CacheLayout
from aiokv.proto.settings import Settings
from aiokv.testing.tables import LAYOUT
from aiokv.testing.virtual import VirtualLoop
from aiokv.transports.base import Transport
from aiokv.transports.memory import MemoryHub, MemoryTransport

__all__ = [
    "LAYOUT",
    "AccessOptions",
    "Engines",
    "check_idle",
    "connected_pair",
    "fill",
    "kv_of",
    "settle",
    "transfer",
    "unharmed",
    "virtual_time",
]

P = ParamSpec("P")

#: Turns of the loop without any of an engine after which nothing more happens that needs no time.
_QUIET_TURNS = 10

#: Of the statistics, what is 0 while nothing goes on.
_HOLDINGS = ("offers", "fetches", "parts", "parked", "leases", "blocks_held", "quarantined", "in_flight")


class _PlainDevice(HostDevice):
    """The host, with memory that costs no call to the system and can't be shared."""

    def allocate(self, nbytes: int) -> HostBuffer:
        memory = bytearray(nbytes)
        return HostBuffer(memoryview(memory), owner=memory)


class AccessOptions(TypedDict, total=False):
    """Who may reach an engine; see ``TransferEngine``."""

    keys: Keys | None
    allow: Sequence[str] | None
    tls: Tls | None
    insecure: bool


class Engines:
    """Engines of one process; an async context manager that closes them and their caches.

    Args:
        settings: Of all engines that are added without their own.
        network: Joins their control channels; a faultless one by default.
        clock: Nanoseconds; in virtual time the loop's by default.

    Attributes:
        hub: Joins their memory transports.
        network: As given.
    """

    def __init__(
        self,
        *,
        settings: Settings | None = None,
        network: MemoryNetwork | None = None,
        clock: Callable[[], int] | None = None,
    ) -> None:
        self.settings = settings
        self.hub = MemoryHub()
        self.network = network or MemoryNetwork()
        self._clock = clock
        self._engines: list[TransferEngine] = []

    async def add(
        self,
        name: str,
        layout: CacheLayout = LAYOUT,
        *,
        heads: tuple[int, int] | None = None,
        settings: Settings | None = None,
        device: Allocator | None = None,
        transports: Sequence[str | Transport] | None = None,
        bind: str | None = None,
        advertise: str | None = None,
        cache: KVCache | None = None,
        **access: Unpack[AccessOptions],
    ) -> TransferEngine:
        """A new engine, entered, whose cache holds random bytes.

        Args:
            name: Its address is ``memory://name``, unless it is bound elsewhere.
            layout: Of its cache.
            heads: Range of the layout's heads that it keeps; all by default.
            settings: Timers and bounds.
            device: Where its cache is; by default plain memory, which can't be shared between processes.
            transports: Of its data plane; the memory of this process by default.
            bind: An address such as ``tcp://127.0.0.1:0``; by default it is in the network.
            advertise: As of ``TransferEngine``.
            cache: The cache, which stays the caller's, in place of ``layout``, ``heads`` and ``device``.
            access: ``keys``, ``allow``, ``tls`` and ``insecure``, as of ``TransferEngine``.
        """
        engine = self.make(
            name,
            cache or await self.cache(layout, heads=heads, device=device, shared=transports is not None),
            settings=settings,
            transports=transports,
            bind=bind,
            advertise=advertise,
            **access,
        )
        await self.enter(engine)
        return engine

    async def cache(
        self,
        layout: CacheLayout = LAYOUT,
        *,
        heads: tuple[int, int] | None = None,
        device: Allocator | None = None,
        shared: bool = False,
    ) -> KVCache:
        """A cache of random bytes; closed with the engine that is made of it."""
        if heads is not None:
            groups = tuple(msgspec.structs.replace(group, heads=heads) for group in layout.groups)
            layout = msgspec.structs.replace(layout, groups=groups)
        if device is None and shared:
            cache = await off_loop(lambda: KVCache.allocate(layout), "aiokv-cache")
        else:
            cache = KVCache.allocate(layout, device=device or _PlainDevice())
        fill(cache, seed=len(self._engines))
        return cache

    def make(
        self,
        name: str,
        cache: KVCache,
        *,
        settings: Settings | None = None,
        transports: Sequence[str | Transport] | None = None,
        bind: str | None = None,
        advertise: str | None = None,
        **access: Unpack[AccessOptions],
    ) -> TransferEngine:
        """An engine that is not entered yet."""
        loop = asyncio.get_running_loop()
        clock = self._clock or (loop.virtual.clock if isinstance(loop, VirtualLoop) else time.monotonic_ns)
        return TransferEngine(
            cache,
            settings=settings or self.settings,
            transports=[MemoryTransport(self.hub)] if transports is None else transports,
            channel=self.network.channel(f"memory://{name}") if bind is None else None,
            bind=bind or "tcp://127.0.0.1:0",
            advertise=advertise,
            clock=clock,
            **access,
        )

    async def enter(self, engine: TransferEngine) -> None:
        """Open an engine that was made here."""
        self._engines.append(engine)
        await engine.__aenter__()

    async def close(self, engine: TransferEngine) -> None:
        """Close an engine and its cache before the others."""
        await engine.aclose()
        engine.cache.close()
        self._engines.remove(engine)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for engine in list(self._engines):
            await self.close(engine)


@asynccontextmanager
async def connected_pair(
    layout: CacheLayout = LAYOUT,
    *,
    settings: Settings | None = None,
    transports: Sequence[str | Transport] | None = None,
    bind: str | None = None,
    check: bool = True,
) -> AsyncIterator[tuple[TransferEngine, TransferEngine]]:
    """Two engines that have met, each with a cache of ``layout`` full of random bytes.

    Args:
        layout: Of both caches.
        settings: Timers and bounds of both.
        transports: Of their data planes; the memory of this process by default.
        bind: Where their control channels listen; by default they are joined by memory.
        check: At the end, look whether either still holds blocks or parts.

    Yields:
        Two engines, alike.
    """
    async with Engines(settings=settings) as engines:
        first = await engines.add("a", layout, transports=transports, bind=bind)
        second = await engines.add("b", layout, transports=transports, bind=bind)
        await transfer(first, second, "first contact")
        yield first, second
        if check:
            check_idle(first, second)


@asynccontextmanager
async def unharmed(
    layout: CacheLayout = LAYOUT, *, settings: Settings | None = None
) -> AsyncIterator[tuple[TransferEngine, TransferEngine]]:
    """A pair, joined by memory, that at the end has to be as good as new, whatever was done to it.

    Raises:
        AssertionError: Something is left of what was done, or the next transfer goes wrong.
    """
    async with connected_pair(layout, settings=settings) as (producer, consumer):
        yield producer, consumer
        await settle(producer, consumer)
        check_idle(producer, consumer)
        await transfer(producer, consumer, "afterwards")


async def transfer(
    producer: TransferEngine,
    consumer: TransferEngine,
    tid: str,
    *,
    source: Sequence[int] = (1, 2),
    target: Sequence[int] = (2, 1),
    push: bool = False,
    address: str = "",
    others: bool = True,
) -> None:
    """Move some blocks, which has to go well: afterwards the bytes are compared.

    Args:
        producer: Whose blocks.
        consumer: Where to.
        tid: Transfer id.
        source: Blocks at the producer.
        target: As many blocks at the consumer.
        push: The producer names the consumer, not the consumer the producer.
        address: What the consumer calls the producer, if not what that calls itself.
        others: Look whether other blocks changed, which nobody else may write meanwhile.

    Raises:
        AssertionError: Other bytes arrived, or bytes elsewhere changed.
        AiokvError: The transfer failed, by the error of the side that failed first.
    """
    rest = [block for block in range(consumer.cache.layout.groups[0].blocks) if block not in target]
    before = kv_of(consumer.cache, rest)

    async def produce() -> None:
        async with producer.offer(tid, source, to=[consumer.address] if push else []):
            pass

    async def consume() -> None:
        async with consumer.fetch(tid, target, sources=None if push else [address or producer.address]):
            pass

    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(produce())
            group.create_task(consume())
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from failed
    assert np.array_equal(kv_of(producer.cache, source), kv_of(consumer.cache, target))
    assert not others or np.array_equal(kv_of(consumer.cache, rest), before)


async def settle(*engines: TransferEngine) -> None:
    """Let everything happen that needs no time."""
    quiet, turns = 0, -1
    while quiet < _QUIET_TURNS:
        await asyncio.sleep(0)
        seen = sum(engine.statistics().turns for engine in engines)
        quiet = quiet + 1 if seen == turns else 0
        turns = seen


def check_idle(*engines: TransferEngine) -> None:
    """Look whether engines hold anything of transfers that are over.

    Raises:
        AssertionError: They do.
    """
    for engine in engines:
        found = engine.statistics()
        for name in _HOLDINGS:
            assert getattr(found, name) == 0, f"{engine.address}: {name} is {getattr(found, name)}"


def fill(cache: KVCache, seed: int) -> None:
    """Write random bytes into all buffers of a cache in host memory."""
    random = np.random.default_rng(seed)
    for buffer in cache.buffers:
        view: memoryview = buffer.view  # type: ignore[attr-defined]
        np.frombuffer(view, np.uint8)[:] = random.integers(0, 256, buffer.nbytes, dtype=np.uint8)


def kv_of(cache: KVCache, blocks: Sequence[int], group: int = 0) -> NDArray[np.uint8]:
    """A copy of some blocks' bytes of one group, whatever the cache's axes.

    Returns:
        Bytes by layer, K and V, token, head of this rank, and byte of the head.
    """
    layout, place = cache.layout.groups[group], cache.placement.groups[group]
    stride_b, stride_s, stride_t, stride_h = place.strides
    in_tensor = layout.halves // layout.planes
    shape = (in_tensor, layout.blocks, layout.block_size, layout.head_count, layout.head_bytes)
    strides = (stride_s, stride_b, stride_t, stride_h, 1)
    found = []
    for planes in place.layers:
        halves = []
        for number, offset in planes:
            view: memoryview = cache.buffers[number].view  # type: ignore[attr-defined]
            flat = np.frombuffer(view, np.uint8)[offset:]
            tensor = np.lib.stride_tricks.as_strided(flat, shape, strides, writeable=False)
            picked = tensor[:, list(blocks)]
            halves.append(picked.reshape(in_tensor, -1, layout.head_count, layout.head_bytes))
        found.append(np.concatenate(halves))
    return np.stack(found)


def virtual_time(test: Callable[P, Awaitable[None]]) -> Callable[P, None]:
    """Run an async test in virtual time, on a loop of its own: what takes a minute takes no time."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        loop = VirtualLoop()
        errors: list[dict[str, Any]] = []
        loop.set_exception_handler(lambda _, context: errors.append(context))
        try:
            loop.run_until_complete(_awaited(test(*args, **kwargs)))
            left = [task for task in asyncio.all_tasks(loop) if not task.done()]
            assert not left, left
            assert not errors, errors
        finally:
            loop.close()

    return run


async def _awaited(work: Awaitable[None]) -> None:
    await work
