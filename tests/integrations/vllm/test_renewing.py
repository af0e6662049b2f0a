"""What is said to the prefill side while requests wait in the queue, in virtual time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from aiokv.errors import CapacityError, ClosedError
from aiokv.integrations.vllm.orders import Queued, Ticket
from aiokv.integrations.vllm.renewing import Renewing
from aiokv.testing.virtual import VirtualLoop, VirtualTime


class Engine:
    """Notes what is renewed."""

    def __init__(self) -> None:
        self.said: list[tuple[str, int, tuple[str, ...]]] = []
        self.error: Exception | None = None

    def renew(self, tid: str, *, sources: Sequence[str], attempt: int) -> None:
        if self.error is not None:
            raise self.error
        self.said.append((tid, attempt, tuple(sources)))


class World:
    def __init__(self) -> None:
        self.time = VirtualTime()
        self.loop = VirtualLoop(self.time, "worker")
        self.engine = Engine()
        self.renewing = Renewing(self.engine, 30)  # type: ignore[arg-type]

    def begin(self, name: str = "t", **more: float) -> Ticket:
        ticket = Ticket(name, 1)
        self.loop.within(self.renewing.begin, Queued(ticket, ("there",), **more))
        return ticket

    def wait(self, seconds: float) -> int:
        """How often something was said in this time."""
        before, passed = len(self.engine.said), []
        self.loop.call_later(seconds, passed.append, None)
        self.time.run(lambda: bool(passed))
        return len(self.engine.said) - before


@pytest.fixture
def world() -> Iterator[World]:
    found = World()
    yield found
    found.loop.close()


def test_from_the_first_moment_until_it_is_fetched(world: World) -> None:
    ticket = world.begin()
    assert world.wait(0.01) == 1
    assert world.engine.said == [("t", 1, ("there",))]
    assert world.wait(100) == 10
    world.loop.within(world.renewing.end, ticket)
    assert world.wait(100) == 0


def test_what_is_fetched_at_once_is_not_mentioned(world: World) -> None:
    def both() -> None:
        world.renewing.begin(Queued(Ticket("t"), ("there",)))
        world.renewing.end(Ticket("t"))

    world.loop.within(both)
    assert world.wait(100) == 0


def test_as_often_as_the_prefill_side_needs_it(world: World) -> None:
    world.begin("slow")
    world.begin("fast", hold=3.0)
    world.begin("mad", hold=1e-6)
    world.wait(10.01)
    said = [name for name, _, _ in world.engine.said]
    assert (said.count("slow"), said.count("fast")) == (2, 11)
    assert said.count("mad") <= 102


def test_nothing_in_the_queue_costs_nothing(world: World) -> None:
    world.begin("t")
    world.wait(50)
    world.loop.within(world.renewing.end, Ticket("t", 1))
    assert world.loop.idle
    world.loop.within(world.renewing.end, Ticket("never"))
    world.begin("u")
    world.loop.within(world.renewing.close)
    assert world.loop.idle


@pytest.mark.parametrize("error", [ClosedError("closed"), ValueError("no address")])
def test_what_cannot_be_said_is_left_to_the_fetch(world: World, error: Exception) -> None:
    world.engine.error = error
    world.begin("t")
    world.wait(50)
    assert world.loop.idle


def test_what_there_is_no_room_for_now_is_said_later(world: World) -> None:
    world.engine.error = CapacityError("too many peers")
    ticket = world.begin("t")
    assert world.wait(15) == 0
    world.engine.error = None
    assert world.wait(10) == 1
    world.loop.within(world.renewing.end, ticket)
    assert world.loop.idle
