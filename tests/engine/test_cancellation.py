"""A task cancelled at each of its awaits: what comes out, what stays behind (nothing), what the peer sees.

A scenario is run again and again, each time with the cancellation one await later, until a run ends before it
comes. Right after their ``async with``, however they left it, users overwrite their blocks: nobody may take
what then stands there for KV.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any

import numpy as np
import pytest

from aiokv.device.mocked import MockedDevice
from aiokv.engine.engine import TransferEngine
from aiokv.engine.transfer import Fetch, Offer
from aiokv.errors import Refused, TransferAborted
from aiokv.proto.layout import CacheLayout
from aiokv.testing.cancelling import MANNERS, Cancelling, Manner
from aiokv.testing.pairs import LAYOUT as PAIR_LAYOUT
from aiokv.testing.pairs import Engines, check_idle, kv_of, settle, virtual_time

LAYERS = 3
LAYOUT = CacheLayout.attention(
    layers=LAYERS, blocks=8, block_size=4, heads=2, head_size=8, dtype="uint8", axes="bthsd"
)
SOURCE, TARGET = [1, 2], [5, 6]
#: How long a run may take (s): far less than any bound, so nothing may have been waited for in vain.
PROMPT_S = 0.2


class Rank:
    """An engine on a mocked device that steps itself, and what its users do."""

    def __init__(self, engine: TransferEngine, number: int) -> None:
        self.engine = engine
        self.device = engine.cache.device
        self.buffer = engine.cache.buffers[0]
        self.stepping = self.device.autostep(asyncio.get_running_loop(), random.Random(number), 0.0002)
        self.stream = self.device.stream()
        #: What the model computes: bytes by layer and offset, and as KV.
        self.written = [(layer, at, self.buffer.read(at, size)) for layer, at, size in self.spans(SOURCE)]
        self.kv = kv_of(engine.cache, SOURCE)
        #: What users say they got.
        self.landed: list[np.ndarray] = []
        self.overwrite(SOURCE)

    def spans(self, blocks: list[int]) -> Iterator[tuple[int, int, int]]:
        """Layer, offset and bytes of each layer's share of each block, which is contiguous."""
        place, group = self.engine.cache.placement.groups[0], self.engine.cache.layout.groups[0]
        for layer, ((_, offset),) in enumerate(place.layers):
            for block in blocks:
                yield layer, offset + block * place.strides[0], group.block_bytes

    def look(self, blocks: list[int], *layers: int) -> None:
        """Read it, which notes a hazard if somebody may still be writing."""
        for layer, offset, size in self.spans(blocks):
            if layer in layers:
                self.buffer.read(offset, size)

    def overwrite(self, blocks: list[int]) -> None:
        """The blocks are another request's now; notes a hazard if somebody may still use them."""
        written = self.stream.record()
        while not written.done():  # what the model itself had enqueued is over first
            self.device.step(self.stream)
        for _, offset, size in self.spans(blocks):
            self.buffer.write(offset, b"\xee" * size)

    async def produce(self, **arguments: Any) -> None:
        try:
            async with self.engine.offer("t", SOURCE, **arguments) as offer:
                for layer in range(LAYERS):
                    for _, offset, data in (each for each in self.written if each[0] == layer):
                        self.stream.write(self.buffer, offset, data)
                    offer.layer_ready(layer, stream=self.stream)
                    await asyncio.sleep(0.001)
        finally:
            self.overwrite(SOURCE)

    async def consume(self, *sources: Rank, **arguments: Any) -> None:
        addresses = [source.engine.address for source in sources] or None
        try:
            async with self.engine.fetch("t", TARGET, sources=addresses, **arguments) as fetch:
                async for layer in fetch.layers():
                    self.look(TARGET, layer)
            self.landed.append(kv_of(self.engine.cache, TARGET))
        finally:
            self.overwrite(TARGET)


class World:
    """Ranks by name."""

    def __init__(self, engines: Engines) -> None:
        self.engines = engines
        self.ranks: dict[str, Rank] = {}
        #: Whose KV the consumers get, by heads.
        self.sources: list[Rank] = []

    async def add(self, name: str, heads: tuple[int, int] | None = None) -> Rank:
        device = MockedDevice(seed=1, name=name)
        engine = await self.engines.add(name, LAYOUT, heads=heads, device=device)
        self.ranks[name] = Rank(engine, len(self.ranks))
        return self.ranks[name]

    async def check(self) -> None:
        """Nothing is left of any transfer, and whoever said that it got the KV did."""
        await asyncio.sleep(0.01)  # the poller has yet to see that the model's last layers are written
        right = np.concatenate([source.kv for source in self.sources], axis=3)
        for rank in self.ranks.values():
            check_idle(rank.engine)
            core = rank.engine._core
            assert not core.poller.pending
            assert not core.mover.movements
            assert not core.courses
            assert not rank.device.hazards
            for landed in rank.landed:
                np.testing.assert_array_equal(landed, right)


Users = dict[str, Coroutine[Any, Any, None]]


async def pull(world: World) -> Callable[[int], Users]:
    p, c = await world.add("producer"), await world.add("consumer")
    world.sources = [p]
    return lambda attempt: {"producer": p.produce(attempt=attempt), "consumer": c.consume(p, attempt=attempt)}


async def push(world: World) -> Callable[[int], Users]:
    p, c = await world.add("producer"), await world.add("consumer")
    world.sources, to = [p], [c.engine.address]
    return lambda attempt: {
        "producer": p.produce(to=to, attempt=attempt),
        "consumer": c.consume(attempt=attempt),
    }


async def two_sources(world: World) -> Callable[[int], Users]:
    p, q = await world.add("producer", (0, 1)), await world.add("other", (1, 2))
    c, world.sources = await world.add("consumer"), [p, q]
    return lambda attempt: {
        "producer": p.produce(attempt=attempt),
        "other": q.produce(attempt=attempt),
        "consumer": c.consume(p, q, attempt=attempt),
    }


async def two_readers(world: World) -> Callable[[int], Users]:
    p, c, d = await world.add("producer"), await world.add("consumer"), await world.add("other")
    world.sources = [p]
    return lambda attempt: {
        "producer": p.produce(readers=2, attempt=attempt),
        "consumer": c.consume(p, attempt=attempt),
        "other": d.consume(p, attempt=attempt),
    }


Scenario = Callable[[World], Awaitable[Callable[[int], Users]]]
scenarios = pytest.mark.parametrize("scenario", [pull, push, two_sources, two_readers])
everybody = pytest.mark.parametrize("who", ["producer", "consumer"])


async def run(
    scenario: Scenario, who: str, wrap: Callable[[Coroutine[Any, Any, Any]], Coroutine[Any, Any, None]]
) -> asyncio.Task[None]:
    """Run a scenario with one user wrapped, check what holds in any case, and give that user's task."""
    async with Engines() as engines:
        world = World(engines)
        users = await scenario(world)
        started = [
            asyncio.create_task(wrap(work) if name == who else work, name=name)
            for name, work in users(0).items()
        ]
        await asyncio.wait(started)
        for task in started:
            if task.get_name() != who:
                error = task.exception()
                assert error is None or isinstance(error, TransferAborted | Refused), repr(error)
        await world.check()
        async with asyncio.TaskGroup() as group:  # the next one goes well
            for work in users(1).values():
                group.create_task(work)
        assert world.ranks["consumer"].landed
        for rank in world.ranks.values():
            rank.stepping.close()
        await world.check()
        assert asyncio.all_tasks() == {asyncio.current_task()}
    return next(task for task in started if task.get_name() == who)


@scenarios
@everybody
@pytest.mark.parametrize("manner", MANNERS)
@virtual_time
async def test_at_each_await(scenario: Scenario, who: str, manner: Manner) -> None:
    for at in itertools.count(1):
        cancelling = Cancelling(at, manner)
        begun = asyncio.get_running_loop().time()
        task = await run(scenario, who, cancelling)
        assert asyncio.get_running_loop().time() - begun < PROMPT_S
        if not cancelling.hit:
            assert task.exception() is None
            break
        assert task.cancelled(), at
    assert at > LAYERS


def times() -> Iterator[float]:
    """One time after the other at which something may be going on (s)."""
    return (quarters / 4000 for quarters in itertools.count(1))


@scenarios
@everybody
@virtual_time
async def test_by_a_timeout_at_any_time(scenario: Scenario, who: str) -> None:
    for when in times():

        async def limited(work: Coroutine[Any, Any, Any], when: float = when) -> None:
            async with asyncio.timeout(when):
                await work

        error = (await run(scenario, who, limited)).exception()
        if error is None:
            break
        assert type(error) is TimeoutError
    assert when > 0.001 * LAYERS


@pytest.mark.parametrize("scenario", [pull, two_sources])
@everybody
@virtual_time
async def test_by_a_sibling_that_fails_at_any_time(scenario: Scenario, who: str) -> None:
    for when in times():
        finished: list[bool] = []

        async def fail(work: Coroutine[Any, Any, Any], finished: list[bool], when: float) -> None:
            async with asyncio.TaskGroup() as group:
                user = group.create_task(work)
                await asyncio.sleep(when)
                finished.append(user.done())
                raise LookupError("in the middle of it")

        error = (await run(scenario, who, lambda work: fail(work, finished, when))).exception()  # noqa: B023
        assert isinstance(error, ExceptionGroup)
        assert [type(each) for each in error.exceptions] == [LookupError]
        if finished[0]:
            break
    assert when > 0.001 * LAYERS


# -- who waits without owning it ------------------------------------------------------------------


async def begun(engines: Engines) -> tuple[Offer, Fetch]:
    """A transfer that nobody is inside of, and that waits for its layers to be written."""
    p, c = await engines.add("producer"), await engines.add("consumer")
    offer = p.offer("t", SOURCE)
    fetch = c.fetch("t", TARGET, sources=[p.address])
    offer.start()
    fetch.start()
    await settle(p, c)
    return offer, fetch


def write_all(offer: Offer) -> None:
    for layer in range(PAIR_LAYOUT.layers):
        offer.layer_ready(layer)


@virtual_time
async def test_cancelling_some_who_wait_changes_nothing_for_others() -> None:
    async with Engines() as engines:
        offer, fetch = await begun(engines)
        waits = (offer.wait, fetch.wait, lambda: fetch.layer(0), lambda: fetch.layer_ordered(1))
        cancelled, others = ([asyncio.create_task(wait()) for wait in waits] for _ in range(2))
        await asyncio.sleep(0.01)
        for task in cancelled:
            task.cancel()
        await asyncio.wait(cancelled)
        assert all(task.cancelled() for task in cancelled)
        assert not any(task.done() for task in others)
        write_all(offer)
        await asyncio.gather(*others)
        assert offer.error is fetch.error is None


@virtual_time
async def test_cancelling_all_who_wait_leaves_it_going() -> None:
    async with Engines() as engines:
        offer, fetch = await begun(engines)
        tasks = [asyncio.create_task(wait()) for wait in (offer.wait, fetch.wait)]
        await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        write_all(offer)
        await fetch.wait()
        await offer.wait()


@virtual_time
async def test_cancelled_in_the_turn_in_which_it_ends() -> None:
    async with Engines() as engines:
        offer, fetch = await begun(engines)
        cancelling = Cancelling(1, "awake")
        cancelled, other = asyncio.create_task(cancelling(fetch.wait())), asyncio.create_task(fetch.wait())
        await asyncio.sleep(0.01)
        write_all(offer)
        await asyncio.wait([cancelled])
        assert cancelled.cancelled()
        await other
        await offer.wait()


@virtual_time
async def test_given_up_by_its_handle_while_tasks_wait() -> None:
    async with Engines() as engines:
        offer, fetch = await begun(engines)
        tasks = [asyncio.create_task(wait()) for wait in (offer.wait, fetch.wait, lambda: fetch.layer(0))]
        await asyncio.sleep(0.01)
        fetch.cancel("not needed")
        fetch.cancel("again")
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            assert type(error) is TransferAborted
            assert "not needed" in str(error)
