"""Cancellation where there are sockets: of opening and closing an engine at each await, and of its users."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aiokv.device.cache import KVCache
from aiokv.engine.engine import TransferEngine
from aiokv.errors import ClosedError, PeerLostError, Refused, TransferAborted
from aiokv.testing.cancelling import MANNERS, Cancelling, Manner
from aiokv.testing.pairs import LAYOUT, check_idle, fill, kv_of, transfer

LAYERS = LAYOUT.layers
SOURCE, TARGET = [1, 2], [3, 4]

manners = pytest.mark.parametrize("manner", MANNERS)
transports = pytest.mark.parametrize("transport", ["shm", "tcp"])


@pytest.fixture
def caches() -> Iterator[list[KVCache]]:
    """Allocated before the loop runs, which that would block."""
    made = [KVCache.allocate(LAYOUT) for _ in range(2)]
    yield made
    for cache in made:
        cache.close()


def descriptors() -> set[str]:
    """What this process has open, but for what a thread looks at in passing."""
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            target = str(descriptor.readlink())
        except FileNotFoundError:  # the one that lists the others
            continue
        if not target.startswith("/proc/"):
            found.add(f"{descriptor.name} {target}")
    return found


async def ended(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    task = asyncio.create_task(work)
    await asyncio.wait([task])
    return task


def begin(producer: TransferEngine, consumer: TransferEngine, attempt: int = 0):
    offer = producer.offer("t", SOURCE, attempt=attempt)
    fetch = consumer.fetch("t", TARGET, sources=[producer.address], attempt=attempt)
    offer.start()
    fetch.start()
    return offer, fetch


@pytest.mark.asyncio
@manners
async def test_opening(caches: list[KVCache], manner: Manner) -> None:
    async with TransferEngine(caches[0]) as first:
        bind = first.address
    before = descriptors(), asyncio.all_tasks()
    for at in itertools.count(1):
        engine = TransferEngine(caches[0], bind=bind)
        cancelling = Cancelling(at, manner)
        task = await ended(cancelling(engine.__aenter__()))
        if not cancelling.hit:
            assert task.exception() is None
            assert engine.address == bind
            await engine.aclose()
            break
        assert task.cancelled()
        assert (descriptors(), asyncio.all_tasks()) == before
        with pytest.raises(ClosedError, match="closed"):
            engine.offer("t", SOURCE)
        async with TransferEngine(caches[0], bind=bind) as other:
            assert other.address == bind
    assert at > 1


@pytest.mark.asyncio
@transports
@manners
@pytest.mark.parametrize("role", ["producer", "consumer"])
async def test_closing(caches: list[KVCache], role: str, manner: Manner, transport: str) -> None:
    bind = "tcp://127.0.0.1:0"
    async with TransferEngine(caches[0], transports=[transport]) as peer:
        for at in itertools.count(1):
            engine = TransferEngine(caches[1], transports=[transport], bind=bind)
            await engine.__aenter__()
            bind = engine.address
            pair = (engine, peer) if role == "producer" else (peer, engine)
            offer, fetch = begin(*pair, attempt=at)
            offer.layer_ready(0)
            await fetch.layer(0)
            mine, theirs = (offer, fetch) if role == "producer" else (fetch, offer)

            cancelling = Cancelling(at, manner)
            task = await ended(cancelling(engine.aclose()))
            assert task.cancelled() is cancelling.hit
            assert mine.done()
            with pytest.raises(ClosedError, match="its engine was closed"):
                await mine.wait()
            with pytest.raises(TransferAborted, match="its engine was closed"):
                await theirs.wait()
            await engine.aclose()
            assert not engine._core.peers._peers
            check_idle(engine, peer)
            if not cancelling.hit:
                break
        assert at > 1


@pytest.mark.asyncio
@transports
@pytest.mark.parametrize("role", ["producer", "consumer"])
async def test_closing_while_a_path_is_being_opened(caches: list[KVCache], role: str, transport: str) -> None:
    bind = "tcp://127.0.0.1:0"
    async with TransferEngine(caches[0], transports=[transport]) as peer:
        for turns in itertools.count(0, 2):
            async with TransferEngine(caches[1], transports=[transport], bind=bind) as engine:
                bind = engine.address
                offer, fetch = begin(
                    *((engine, peer) if role == "producer" else (peer, engine)), attempt=turns
                )
                for _ in range(turns):
                    await asyncio.sleep(0)
                granted = "offered" not in fetch.progress.parts
            mine, theirs = (offer, fetch) if role == "producer" else (fetch, offer)
            with pytest.raises(ClosedError):
                await mine.wait()
            theirs.cancel()  # who was closed before it said anything is waited for
            with pytest.raises((TransferAborted, PeerLostError, Refused)):
                await theirs.wait()
            check_idle(engine, peer)
            if granted:
                break


@pytest.mark.asyncio
@transports
async def test_all_tasks_at_once_while_engines_are_closed(caches: list[KVCache], transport: str) -> None:
    """As ``asyncio.run`` does when its main task is over."""
    engines = [TransferEngine(cache, transports=[transport]) for cache in caches]
    for engine in engines:
        await engine.__aenter__()
    before = asyncio.all_tasks()
    offer, fetch = begin(*engines)
    offer.layer_ready(0)
    await fetch.layer(0)
    closing = [asyncio.create_task(engine.aclose()) for engine in engines]
    await asyncio.sleep(0)
    for task in asyncio.all_tasks() - before:
        task.cancel()
    await asyncio.wait(closing)
    assert all(task.cancelled() for task in closing)
    assert asyncio.all_tasks() == before
    assert offer.done()
    assert fetch.done()
    check_idle(*engines)
    for handle in (offer, fetch):
        with pytest.raises((ClosedError, TransferAborted)):
            await handle.wait()


@asynccontextmanager
async def two(caches: list[KVCache], transport: str) -> AsyncIterator[tuple[TransferEngine, TransferEngine]]:
    async with (
        TransferEngine(caches[0], transports=[transport]) as producer,
        TransferEngine(caches[1], transports=[transport]) as consumer,
    ):
        yield producer, consumer


async def produce(engine: TransferEngine, attempt: int) -> None:
    fill(engine.cache, seed=attempt)
    try:
        async with engine.offer("t", SOURCE, attempt=attempt) as offer:
            for layer in range(LAYERS):
                offer.layer_ready(layer)
                await asyncio.sleep(0.002)
    finally:
        fill(engine.cache, seed=1000 + attempt)  # they are another request's now


async def consume(engine: TransferEngine, source: TransferEngine, attempt: int, got: list[Any]) -> None:
    async with engine.fetch("t", TARGET, sources=[source.address], attempt=attempt) as fetch:
        async for _ in fetch.layers():
            pass
    got.append(kv_of(engine.cache, TARGET))


@pytest.mark.asyncio
@transports
@manners
@pytest.mark.parametrize("who", ["producer", "consumer"])
async def test_users(caches: list[KVCache], who: str, manner: Manner, transport: str) -> None:
    async with two(caches, transport) as (producer, consumer):
        for at in itertools.count(1):
            cancelling, got = Cancelling(at, manner), []
            works = {"producer": produce(producer, at), "consumer": consume(consumer, producer, at, got)}
            works[who] = cancelling(works[who])
            tasks = {name: asyncio.create_task(work) for name, work in works.items()}
            await asyncio.wait(tasks.values())
            fill(producer.cache, seed=at)
            for landed in got:
                np.testing.assert_array_equal(landed, kv_of(producer.cache, SOURCE))
            task = tasks.pop(who)
            assert task.cancelled() is cancelling.hit
            (other,) = tasks.values()
            assert isinstance(other.exception(), TransferAborted | Refused | None), other.exception()
            check_idle(producer, consumer)
            if not cancelling.hit:
                assert got
                assert task.exception() is other.exception() is None
                break
        await transfer(producer, consumer, "after all")
        assert at > 1
