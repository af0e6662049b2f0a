"""A mocked device that steps itself, on a loop that is counted and on real ones."""

from __future__ import annotations

import asyncio
import random
import threading

import pytest

from aiokv.device.mocked import MockedBuffer, MockedDevice, MockedEvent
from aiokv.device.poller import CompletionPoller


@pytest.fixture
def device(seed: int) -> MockedDevice:
    return MockedDevice(seed)


@pytest.fixture
def buffer(device: MockedDevice) -> MockedBuffer:
    return device.allocate(8)


class LaterLoop:
    """Counts what is scheduled, and runs it when told."""

    def __init__(self) -> None:
        self.calls: list[tuple[float, LaterHandle]] = []

    def call_later(self, delay: float, callback: object) -> LaterHandle:
        handle = LaterHandle(self, callback)
        self.calls.append((delay, handle))
        return handle

    def run(self) -> int:
        count = 0
        while self.calls:
            self.calls.pop(0)[1].callback()
            count += 1
        return count


class LaterHandle:
    def __init__(self, loop: LaterLoop, callback: object) -> None:
        self.loop = loop
        self.callback = callback

    def cancel(self) -> None:
        self.loop.calls = [call for call in self.loop.calls if call[1] is not self]


def test_steps_itself_and_schedules_nothing_when_idle(device: MockedDevice, buffer: MockedBuffer) -> None:
    loop = LaterLoop()
    device.autostep(loop, random.Random(1), 1e-3)
    assert not loop.calls
    stream = device.stream()
    stream.write(buffer, 0, b"x")
    event = stream.record()
    assert len(loop.calls) == 1
    assert loop.run() == 2
    assert event.done()


def test_a_stream_blocked_on_another_device_is_taken_up_when_that_gets_there(seed: int) -> None:
    first, second = MockedDevice(seed), MockedDevice(seed)
    loop = LaterLoop()
    second.autostep(loop, random.Random(1), 1e-3)
    ahead, behind = first.stream(), second.stream()
    behind.wait(ahead.record())
    event = behind.record()
    assert not loop.calls
    first.run()
    assert loop.calls
    loop.run()
    assert event.done()


def test_a_closed_autostep_leaves_nothing_behind(device: MockedDevice) -> None:
    loop = LaterLoop()
    stepping = device.autostep(loop, random.Random(1), 1e-3)
    device.stream().record()
    assert loop.calls
    stepping.close()
    stepping.close()
    device.stream().record()
    assert not loop.calls


@pytest.mark.asyncio
async def test_steps_what_another_thread_submits(device: MockedDevice) -> None:
    stepping = device.autostep(asyncio.get_running_loop(), random.Random(1), 1e-4)
    events: list[MockedEvent] = []
    thread = threading.Thread(target=lambda: events.append(device.stream().record()))
    thread.start()
    thread.join()
    poller = CompletionPoller(asyncio.get_running_loop())
    await poller.wait(events[0], "stream")
    poller.close()
    stepping.close()
