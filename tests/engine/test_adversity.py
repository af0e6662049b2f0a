"""A peer in another process: killed, stopped and continued in each state of a part, on each transport."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from aiokv.device.cache import KVCache
from aiokv.engine.engine import TransferEngine
from aiokv.engine.transfer import Fetch, Offer
from aiokv.errors import LayoutMismatch, PeerLostError
from aiokv.proto.layout import CacheLayout
from aiokv.proto.parts import State
from aiokv.proto.settings import SECOND, Settings
from aiokv.testing.pairs import check_idle, fill, transfer

CHILD = Path(__file__).with_name("child.py")
spec = importlib.util.spec_from_file_location("engine_child", CHILD)
child = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = child  # where msgspec looks annotations up
spec.loader.exec_module(child)

LAYOUT = CacheLayout.attention(layers=4, blocks=16, block_size=16, heads=4, head_size=32, dtype="float16")
CHANGED = CacheLayout.attention(layers=4, blocks=16, block_size=16, heads=4, head_size=64, dtype="float16")
#: Takes many turns of the loop to copy.
BIG = CacheLayout.attention(layers=4, blocks=16, block_size=64, heads=8, head_size=128, dtype="float16")
SOURCE, TARGET = [1, 2, 3], [7, 6, 5]
PATIENCE_S = 20.0

MS = SECOND // 1000
#: No timer ends anything within a test's patience: only what is certain does.
PATIENT = {
    "heartbeat_ns": 50 * MS,
    "lease_ns": 60 * SECOND,
    "drain_ns": 90 * SECOND,
    "liveness_ns": 100 * SECOND,
}
#: Silence ends a session soon.
QUICK = {"heartbeat_ns": 40 * MS, "lease_ns": 150 * MS, "drain_ns": 500 * MS, "liveness_ns": 400 * MS}
#: The lease ends soon, and silence means nothing.
SHORT_LEASE = QUICK | {"liveness_ns": 100 * SECOND}

every = pytest.mark.parametrize("transport", ["shm", "tcp", "cma"])
both = pytest.mark.parametrize("transport", ["shm", "tcp"])
#: What the other process is.
roles = pytest.mark.parametrize("role", ["producer", "consumer"])
states = pytest.mark.parametrize("state", [State.GRANTED, State.MOVING], ids=lambda state: state.value)


class World:
    """This process's engine, another one in it, and one in another process that plays a role."""

    def __init__(
        self, nursery: Any, stack: AsyncExitStack, role: str, transport: str, settings: dict
    ) -> None:
        self.nursery = nursery
        self.stack = stack
        self.role = role
        self.transport = transport
        self.settings = settings
        self.source, self.target = SOURCE, TARGET
        self.other: Any = None

    async def enter(self, caches: list[KVCache]) -> None:
        self.engine, self.bystander = [
            await self.stack.enter_async_context(
                TransferEngine(cache, transports=[self.transport], settings=Settings(**self.settings))
            )
            for cache in caches
        ]
        await self.start()

    async def start(self, bind: str = "tcp://127.0.0.1:0", layout: CacheLayout | None = None) -> None:
        """Start the other process, or the one that comes after it."""
        config = child.Config(self.transport, layout or self.engine.cache.layout, self.settings, bind)
        pid, sock = self.nursery.start(config)
        self.other = child.Other(pid, *await asyncio.open_connection(sock=sock))
        self.stack.push_async_callback(self.other.kill)
        await self.other.greet()

    async def begin(self, attempt: int = 0) -> Offer | Fetch:
        """Begin both sides of a transfer; gives this one's."""
        if self.role == "producer":
            await self.other.ask("fill", seed=attempt)
            await self.other.ask("offer", attempt=attempt, blocks=self.source)
            handle: Offer | Fetch = self.engine.fetch(
                "t", self.target, sources=[self.other.address], attempt=attempt
            )
        else:
            fill(self.engine.cache, seed=attempt)
            handle = self.engine.offer("t", self.source, attempt=attempt)
            await self.other.ask("fetch", attempt=attempt, blocks=self.target, address=self.engine.address)
        handle.start()
        return handle

    async def ready(self, handle: Offer | Fetch, *layers: int) -> None:
        """Announce layers, whoever is the producer."""
        if self.role == "producer":
            await self.other.ask("ready", layers=list(layers), attempt=handle.attempt)
        else:
            for layer in layers:
                handle.layer_ready(layer)

    async def reach(self, state: State) -> Offer | Fetch:
        """A transfer that both sides have in a state; in all but GRANTED with two layers of four landed."""
        handle = await self.begin()
        (part,) = handle._transfer.parts
        await child.until(lambda: part.accepted)
        if state is State.GRANTED:
            return handle
        await self.ready(handle, 0, 1)
        if self.role == "producer":
            await child.until(lambda: handle.progress.layers == 2)
        else:
            await self.other.ask("layer", layers=[0, 1])
        if state is State.DRAINING:
            await self.other.stop()
            handle.cancel()
        assert part.state is state
        return handle

    async def heard(self, attempt: int = 0) -> Any:
        """How it ended there, where nothing is left of it either."""
        blocks = self.source if self.role == "producer" else self.target
        said = await self.other.ask("wait", attempt=attempt, blocks=blocks)
        await self.other.ask("idle")
        return said

    def digest(self) -> str:
        blocks = self.target if self.role == "producer" else self.source
        return child.digest(self.engine.cache, blocks)

    def check(self, said: Any, content: str) -> None:
        """It says that it failed; or, where it has what was sent before that, that this is right."""
        assert said.error in ("PeerLostError", "TransferAborted") or said.digest == content, said

    async def right(self, handle: Offer | Fetch) -> None:
        """It ends well at both sides, with the right bytes."""
        await handle.wait()
        said = await self.heard(handle.attempt)
        assert not said.error, said.text
        assert said.digest == self.digest()

    async def go_on_after(self, what: str, offer: Offer, content: str) -> None:
        """The other process, which is stopped, goes on when something has happened; then all that is over."""
        if what == "the lease ends":
            await asyncio.sleep(2 * self.settings["lease_ns"] / SECOND)
        else:
            if what == "it is given up":
                offer.cancel()
            await child.until(offer.done)
            fill(self.engine.cache, seed=99)
        self.other.go_on()
        said = await self.heard(offer.attempt)
        self.check(said, content)
        assert not said.error or what != "the lease ends"
        await child.until(offer.done)
        offer._course.observed = True
        check_idle(self.engine)

    async def transfer(self, attempt: int) -> None:
        """One that goes well."""
        handle = await self.begin(attempt)
        await self.ready(handle, *range(4))
        await self.right(handle)

    async def again(self, how: str) -> None:
        """The next attempts find who is there again; the first may still meet the end of what was before."""
        if how == "kill":
            await self.start(self.other.address)
        else:
            self.other.go_on()
        for attempt in range(1, 4):
            handle = await self.begin(attempt)
            await self.ready(handle, *range(4))
            # The consumer's end is looked at first: an offer that nobody comes for hears of nothing.
            if self.role == "producer":
                with contextlib.suppress(PeerLostError):
                    return await self.right(handle)
                await self.other.ask("cancel", attempt=attempt)
            else:
                said = await self.heard(attempt)
                if not said.error:
                    assert said.digest == self.digest()
                    return await handle.wait()
                assert said.error == "PeerLostError"
                handle.cancel()
                await child.until(handle.done)
                handle._course.observed = True
        pytest.fail("no attempt went well")

    async def lost(self, handle: Offer | Fetch) -> None:
        """It ends for want of its peer, and gives everything back; others are served meanwhile."""
        await transfer(self.engine, self.bystander, "meanwhile", source=[9, 10], target=[9, 10])
        await transfer(self.bystander, self.engine, "meanwhile", source=[9, 10], target=[9, 10])
        with pytest.raises(PeerLostError):
            await handle.wait()
        check_idle(self.engine)


@pytest.fixture(scope="module")
def nursery() -> Iterator[Any]:
    found = child.Nursery()
    yield found
    found.close()


@pytest.fixture
def layout() -> CacheLayout:
    return LAYOUT


@pytest.fixture
def world(nursery: Any, layout: CacheLayout) -> Iterator[Callable[..., Any]]:
    caches = [KVCache.allocate(layout) for _ in range(2)]  # not on the loop, which that would block

    @asynccontextmanager
    async def make(role: str, transport: str, settings: dict) -> AsyncIterator[World]:
        async with asyncio.timeout(PATIENCE_S), AsyncExitStack() as stack:
            found = World(nursery, stack, role, transport, settings)
            await found.enter(caches)
            yield found

    yield make
    for cache in caches:
        cache.close()


# -- killed ---------------------------------------------------------------------------------------


@pytest.mark.asyncio
@every
@roles
@states
async def test_killed(world, role: str, state: State, transport: str) -> None:
    async with world(role, transport, PATIENT) as here:
        handle = await here.reach(state)
        await here.other.kill()
        await here.lost(handle)
        await here.start(here.other.address)
        await here.transfer(1)
        assert here.engine.statistics().sessions_lost == 1


@pytest.mark.asyncio
@pytest.mark.parametrize("transport", ["shm", "cma"])
async def test_killed_while_what_it_reads_is_drained(world, transport: str) -> None:
    async with world("consumer", transport, PATIENT) as here:
        offer = await here.reach(State.DRAINING)
        await transfer(here.engine, here.bystander, "meanwhile", source=[9, 10], target=[9, 10])
        assert not offer.done()
        assert here.engine.statistics().blocks_held == len(SOURCE)
        await here.other.kill()
        await child.until(offer.done)
        check_idle(here.engine)
        offer._course.observed = True


@pytest.mark.asyncio
@both
@pytest.mark.parametrize("how", ["kill", "stop"])
async def test_gone_before_it_took_up_an_offer(world, how: str, transport: str) -> None:
    async with world("consumer", transport, QUICK) as here:
        offer = here.engine.offer("t", SOURCE, to=[here.other.address])
        offer.start()
        await here.other.ask("parked")
        await getattr(here.other, how)()
        await here.lost(offer)
        await here.again(how)


@pytest.mark.asyncio
@both
@pytest.mark.parametrize("how", ["kill", "stop"])
async def test_gone_before_its_offer_was_taken_up(world, how: str, transport: str) -> None:
    async with world("producer", transport, QUICK) as here:
        await here.other.ask("offer", blocks=SOURCE, address=here.engine.address)
        await child.until(lambda: here.engine.statistics().parked == 1)
        await getattr(here.other, how)()
        fetch = here.engine.fetch("t", TARGET)
        fetch.start()
        await here.lost(fetch)
        await here.again(how)


@pytest.mark.asyncio
@both
@roles
async def test_started_again_with_another_layout(world, role: str, transport: str) -> None:
    async with world(role, transport, PATIENT) as here:
        await here.transfer(0)
        going_on = (
            here.engine.offer("going on", [9, 10]),
            here.bystander.fetch("going on", [9, 10], sources=[here.engine.address]),
        )
        for handle in going_on:
            handle.start()
        await here.other.kill()
        await here.start(here.other.address, CHANGED)
        if role == "producer":
            await here.other.ask("offer", attempt=1, blocks=SOURCE)
            fetch = here.engine.fetch("t", TARGET, sources=[here.other.address], attempt=1)
            fetch.start()
            with pytest.raises(LayoutMismatch, match="head_size"):
                await fetch.wait()
        else:
            offer = here.engine.offer("t", SOURCE, to=[here.other.address], attempt=1)
            offer.start()
            with pytest.raises(LayoutMismatch, match="head_size"):
                await offer.wait()
        await here.other.kill()
        await here.start(here.other.address)
        await here.transfer(2)
        for layer in range(4):
            going_on[0].layer_ready(layer)
        for handle in going_on:
            await handle.wait()
        check_idle(here.engine, here.bystander)


# -- stopped and continued ------------------------------------------------------------------------


@pytest.mark.asyncio
@both
@roles
@states
async def test_stopped_for_long(world, role: str, state: State, transport: str) -> None:
    async with world(role, transport, QUICK) as here:
        handle, content = await here.reach(state), here.digest()
        await here.other.stop()
        if role == "consumer":
            await here.ready(handle, 2, 3)  # lies there unread, until the blocks are another request's
        await here.lost(handle)
        fill(here.engine.cache, seed=99)
        here.other.go_on()
        here.check(await here.heard(), content)
        await here.transfer(1)


@pytest.mark.asyncio
@both
@roles
async def test_stopped_for_longer_than_the_lease_only(world, role: str, transport: str) -> None:
    async with world(role, transport, SHORT_LEASE) as here:
        handle = await here.reach(State.MOVING)
        await here.other.stop()
        if role == "consumer":
            await here.ready(handle, 2, 3)
        await asyncio.sleep(2 * SHORT_LEASE["lease_ns"] / SECOND)
        here.other.go_on()
        if role == "producer":
            await here.ready(handle, 2, 3)
        await here.right(handle)
        assert here.engine.statistics().sessions_lost == 0


@pytest.mark.asyncio
@both
@pytest.mark.parametrize("layout", [BIG], ids=["big"])
@pytest.mark.parametrize("meanwhile", ["it is lost", "the lease ends"])
async def test_stopped_in_the_middle_of_copying(world, meanwhile: str, transport: str) -> None:
    settings = QUICK if meanwhile == "it is lost" else SHORT_LEASE
    async with world("consumer", transport, settings | {"chunk_bytes": 1 << 16}) as here:
        here.source = here.target = list(range(16))
        for attempt in range(3):
            offer, content = await here.begin(attempt), here.digest()
            await child.until(lambda: offer._transfer.parts[0].accepted)  # noqa: B023
            await here.ready(offer, *range(4))
            await asyncio.sleep(attempt / 400)
            await here.other.stop()
            await here.go_on_after(meanwhile, offer, content)


@pytest.mark.asyncio
@pytest.mark.parametrize("chunk", [1, 4], ids=["first", "last"])
@pytest.mark.parametrize("meanwhile", ["it is lost", "it is given up", "the lease ends"])
async def test_stopped_just_before_a_copy(world, meanwhile: str, chunk: int) -> None:
    settings = QUICK if meanwhile == "it is lost" else SHORT_LEASE
    one_layer = len(SOURCE) * LAYOUT.groups[0].block_bytes
    async with world("consumer", "shm", settings | {"chunk_bytes": one_layer}) as here:
        offer, content = await here.begin(), here.digest()
        await here.other.ask("stop_itself", seed=chunk)
        await here.ready(offer, *range(4))
        await here.other.stopped()
        await here.go_on_after(meanwhile, offer, content)
        await here.transfer(1)
