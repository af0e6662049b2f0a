"""Two engines in virtual time, each on a loop and a device of its own, which a test can have stand still."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from aiokv.device.cache import KVCache
from aiokv.device.mocked import MockedDevice
from aiokv.engine.engine import TransferEngine
from aiokv.engine.transfer import Fetch, Offer
from aiokv.errors import AiokvError
from aiokv.proto.layout import CacheLayout
from aiokv.proto.parts import State
from aiokv.proto.settings import SECOND, Settings
from aiokv.testing.faultynetwork import FaultyNetwork
from aiokv.testing.virtual import VirtualLoop, VirtualTime
from aiokv.transports.base import Link, PeerInfo
from aiokv.transports.memory import MemoryHub, MemoryTransport

LAYOUT = CacheLayout.attention(layers=4, blocks=8, block_size=4, heads=2, head_size=8, dtype="uint8")


class Transport(MemoryTransport):
    """Each end belongs to the loop of its own engine; and connecting may take for ever."""

    def __init__(self, hub: MemoryHub, loop: VirtualLoop) -> None:
        super().__init__(hub)
        self._loop = loop
        self.mute = False

    def admit(self, reader: Any) -> Any:
        return self._loop.within(super().admit, reader)

    async def connect(self, description: bytes, peer: PeerInfo) -> Link:
        if self.mute:
            await asyncio.get_running_loop().create_future()
        return await super().connect(description, peer)


class Side:
    """One engine. Its device makes no step before ``device.run``."""

    def __init__(self, world: World, name: str) -> None:
        self.address = f"memory://{name}"
        self.loop = VirtualLoop(world.time, name)
        self.loop.set_exception_handler(lambda _, context: world.errors.append(str(context)))
        self.device = MockedDevice(seed=1, name=name)
        self.cache = KVCache.allocate(LAYOUT, device=self.device)
        self.transport = Transport(world.hub, self.loop)
        self.engine = TransferEngine(
            self.cache,
            channel=world.network.channel(self.address),
            transports=[self.transport],
            settings=world.settings,
            clock=world.time.clock,
        )

    @property
    def counts(self) -> Any:
        return self.engine.statistics()

    def run(self, work: Any) -> Any:
        """Run everybody until this is over here."""
        return self.loop.run_until_complete(work)

    def ready(self, offer: Offer, *layers: int) -> None:
        for layer in layers:
            self.loop.within(offer.layer_ready, layer)

    def offer(self, tid: str = "t", *, ready: int = 0, **arguments: Any) -> Offer:
        """An offer of blocks 0 and 1 that has begun, with so many layers written."""
        offer = self.engine.offer(tid, [0, 1], **arguments)
        self.loop.within(offer.start)
        self.ready(offer, *range(ready))
        self.device.run()
        return offer

    def fetch(self, tid: str = "t", *sources: Side, **arguments: Any) -> Fetch:
        """A fetch into blocks 2 and 3 that has begun."""
        addresses = [source.address for source in sources] or None
        fetch = self.engine.fetch(tid, [2, 3], sources=addresses, **arguments)
        self.loop.within(fetch.start)
        self.device.run()
        return fetch


class World:
    """A producer and a consumer, and whoever is added."""

    def __init__(self) -> None:
        self.settings = Settings()
        self.time = VirtualTime()
        self.network = FaultyNetwork(seed=1)
        self.hub = MemoryHub()
        #: What somebody's loop was told of.
        self.errors: list[str] = []
        #: Engines that are there, and all that were made.
        self.sides: list[Side] = []
        self.made: list[Side] = []
        self.begun = self.time.now
        self.producer, self.consumer = self.add("p"), self.add("c")

    def make(self, name: str) -> Side:
        """An engine that is not there yet."""
        self.made.append(Side(self, name))
        return self.made[-1]

    def add(self, name: str) -> Side:
        return self.enter(self.make(name))

    def enter(self, side: Side) -> Side:
        self.sides.append(side)
        side.run(side.engine.__aenter__())
        return side

    # -- time

    @property
    def now(self) -> float:
        """Seconds since the beginning."""
        return (self.time.now - self.begun) / SECOND

    def until(self, reached: Callable[[], bool]) -> float:
        self.time.run(reached)
        return self.now

    def wait(self, seconds: float) -> None:
        """Let time pass in which everybody may run."""
        passed: list[None] = []
        loop = next(side.loop for side in self.sides if not side.loop.frozen)
        loop.call_later(seconds, passed.append, None)
        self.until(lambda: bool(passed))

    def stall(self, seconds: float) -> None:
        """Let time pass in which nobody can run."""
        self.time.advance(int(seconds * SECOND))

    def reach(self, state: State, *handles: Offer | Fetch) -> None:
        self.until(lambda: all(part.state is state for each in handles for part in each._transfer.parts))

    def over(self, *handles: Offer | Fetch) -> float:
        """Run until these are over; gives the time."""
        return self.until(lambda: all(handle.done() for handle in handles))

    # -- transfers

    def both(
        self, *, push: bool = False, ready: int = 0, producer: float = 30.0, consumer: float = 30.0
    ) -> tuple[Offer, Fetch]:
        """Both sides of one transfer, with a deadline each, and with so many layers written."""
        to = [self.consumer.address] if push else []
        offer = self.producer.offer(ready=ready, to=to, deadline=producer)
        return offer, self.consumer.fetch("t", *([] if push else [self.producer]), deadline=consumer)

    def moving(self, *, landed: int = 2, **arguments: Any) -> tuple[Offer, Fetch]:
        """Both sides of one, of which so many layers of four are there, and none is under way."""
        offer, fetch = self.both(ready=landed, **arguments)
        self.until(lambda: self.consumer.device.run() or fetch.progress.layers == landed)
        self.reach(State.MOVING, offer, fetch)
        return offer, fetch

    def copying(self, **arguments: Any) -> tuple[Offer, Fetch]:
        """Both sides of one whose copies are under way, and stay so until the device makes a step."""
        offer, fetch = self.both(ready=4, **arguments)
        self.until(lambda: self.consumer.counts.in_flight > 0)
        return offer, fetch

    def landed(self, offer: Offer, fetch: Fetch) -> None:
        """Finish the two, which has to go well."""
        self.producer.ready(offer, *(layer for layer in range(4) if not offer._announced >> layer & 1))
        self.producer.device.run()
        self.until(lambda: self.consumer.device.run() or (offer.done() and fetch.done()))
        assert offer.error is None
        assert fetch.error is None

    def transfer(self, attempt: int = 1) -> None:
        """One that goes well."""
        offer = self.producer.offer(attempt=attempt)
        self.landed(offer, self.consumer.fetch("t", self.producer, attempt=attempt))

    # -- what became of it

    def failed(self, handle: Offer | Fetch, kind: type[AiokvError], *patterns: str) -> None:
        """It failed so, and its message says this much."""
        handle._course.observed = True
        assert type(handle.error) is kind, handle.error
        for pattern in patterns:
            assert re.search(pattern, str(handle.error)), handle.error

    def assert_quiet(self) -> None:
        """Nothing goes on: nothing is held, and nothing is scheduled."""
        assert self.time.settle(10 * SECOND)
        for side in self.sides:
            assert side.counts.leases == side.counts.blocks_held == side.counts.quarantined == 0
            assert side.counts.parts == side.counts.parked == side.counts.in_flight == 0
            assert side.counts.offers == side.counts.fetches == 0
            assert not side.device.hazards

    def close(self) -> None:
        for side in self.sides:
            side.loop.frozen = False
        for side in self.sides:
            side.run(side.engine.aclose())
        for side in self.made:
            assert not asyncio.all_tasks(side.loop)
            side.loop.close()
        assert not self.errors


@pytest.fixture
def world() -> Iterator[World]:
    found = World()
    yield found
    found.close()
