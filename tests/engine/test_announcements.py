"""Layers that are said to be ready: from any thread to the loop, once the stream got there."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from aiokv.device.host import HostDevice
from aiokv.device.mocked import MockedDevice
from aiokv.device.poller import CompletionPoller
from aiokv.engine.announcements import Announcements
from aiokv.testing.virtual import VirtualLoop


class Offer:
    over = False


class World:
    """Announcements in virtual time, and what they led to."""

    def __init__(self) -> None:
        self.loop = VirtualLoop()
        self.device = MockedDevice(seed=1)
        self.stream = self.device.stream()
        self.poller = CompletionPoller(self.loop, clock=self.loop.virtual.clock)
        self.told: list[Any] = []
        self.announcements: Any = Announcements(
            self.loop,
            self.device,
            self.poller,
            ready=lambda offer, mask: self.told.append((offer, mask)),
            failed=lambda offer, error: self.told.append((offer, str(error))),
        )

    def add(self, offer: Offer, layer: int) -> None:
        self.announcements.add(offer, layer, self.stream)

    def turns(self, count: int = 3) -> None:
        async def wait() -> None:
            for _ in range(count):
                await asyncio.sleep(0.01)

        self.loop.run_until_complete(wait())

    def write(self) -> None:
        """Have something queued on the stream that takes a step."""
        buffer = self.device.allocate(8)
        self.stream.write(buffer, 0, b"12345678")


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.poller.close()
    made.loop.close()


def test_what_is_written_already_is_told_once_for_all_layers(world: World) -> None:
    first, second = Offer(), Offer()
    world.add(first, 0)
    world.add(second, 1)
    world.add(first, 3)
    world.device.run()
    assert len(world.announcements) == 3
    world.turns()
    assert world.told == [(first, 0b1001), (second, 0b10)]
    assert not world.announcements


def test_what_is_not_written_yet_is_told_when_it_is(world: World) -> None:
    offer = Offer()
    world.write()
    world.add(offer, 2)
    world.turns()
    assert world.told == []
    world.device.run()
    world.turns()
    assert world.told == [(offer, 0b100)]


@pytest.mark.parametrize("when", ["before it is looked at", "while it is watched"])
def test_what_will_never_be_written_is_told(world: World, when: str) -> None:
    offer = Offer()
    world.write()
    world.add(offer, 0)
    if when == "while it is watched":
        world.turns()
    world.device.fail(world.stream, "broken")
    world.device.run()
    world.turns()
    ((told, message),) = world.told
    assert told is offer
    assert "broken" in message


def test_an_offer_that_is_over_hears_nothing(world: World) -> None:
    offer = Offer()
    world.add(offer, 0)
    world.device.run()
    offer.over = True
    world.turns()
    assert world.told == []


def test_when_closed_nobody_hears_anything(world: World) -> None:
    world.add(Offer(), 0)
    world.device.run()
    world.announcements.close()
    world.turns()
    assert world.told == []


def test_a_loop_that_is_closed_is_no_error(world: World) -> None:
    world.loop.close()
    world.add(Offer(), 0)


@pytest.mark.asyncio
async def test_threads_wake_the_loop() -> None:
    loop, device, seen = asyncio.get_running_loop(), HostDevice(), asyncio.Event()
    poller = CompletionPoller(loop)
    masks: list[int] = []

    def ready(_: object, mask: int) -> None:
        masks.append(mask)
        if sum(masks) == 0xFF:
            seen.set()

    announcements: Any = Announcements(loop, device, poller, ready=ready, failed=lambda *_: None)
    offer = Offer()
    threads = [
        threading.Thread(target=announcements.add, args=(offer, layer, device.stream())) for layer in range(8)
    ]
    for thread in threads:
        thread.start()
    async with asyncio.timeout(20):
        await seen.wait()
    for thread in threads:
        thread.join()
    poller.close()
