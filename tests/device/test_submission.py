"""Long copies are submitted a slice at a time, and loads go before what is left of stores."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from aiokv.device.mocked import MockedDevice
from aiokv.device.poller import CompletionPoller
from aiokv.device.submission import Submissions
from aiokv.errors import ClosedError, DeviceError
from aiokv.proto.layout import CacheLayout
from aiokv.proto.placement import Placement
from aiokv.proto.plan import Chunk, CopyPlan, GroupBlocks, Side, plan_copy

LAYOUT = CacheLayout.attention(layers=1, blocks=64, block_size=4, heads=2, head_size=8, dtype="float16")
PLACE = Placement.dense(LAYOUT)


def plan_of(blocks: int) -> CopyPlan:
    side = Side(LAYOUT, PLACE, (GroupBlocks(0, np.arange(blocks)),))
    return plan_copy(side, side, first_token=0, tokens=4 * blocks, heads=(0, 2))


class Device(MockedDevice):
    """Notes what it is given, each of which takes a quarter of its budget by its own clock."""

    def __init__(self) -> None:
        super().__init__(seed=1)
        self.now = 0
        self.given: list[tuple[CopyPlan, Chunk]] = []

    def clock(self) -> int:
        return self.now

    def copy(self, plan, chunk, src, dst, *, stream) -> None:  # type: ignore[no-untyped-def]
        super().copy(plan, chunk, src, dst, stream=stream)
        self.given.append((plan, chunk))
        self.now += int(self.budget_s * 1e9 / 4)


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def add(device: Device) -> Iterator[Callable]:
    """Adds a copy of so many chunks."""
    buffers = [device.allocate(PLACE.buffers[0])], [device.allocate(PLACE.buffers[0])]

    def added(submissions: Submissions, blocks: int, *, urgent: bool = False, **more):  # type: ignore[no-untyped-def]
        plan = plan_of(blocks)
        chunks = plan.chunks((0,), 128)
        return plan, submissions.add(plan, chunks, *buffers, stream=device.stream(), urgent=urgent, **more)

    yield added
    device.run()


def submissions_of(device: Device) -> Submissions:
    return Submissions(device, asyncio.get_running_loop(), clock=device.clock)


@pytest.mark.asyncio
async def test_a_turn_submits_no_more_than_the_budget_allows(device: Device, add: Callable) -> None:
    submissions = submissions_of(device)
    _, store = add(submissions, 32)
    assert not device.given
    for turn in range(1, 4):
        await asyncio.sleep(0)
        assert len(device.given) == 4 * turn
    event = await store.submitted()
    assert not event.done()
    device.run()
    assert event.done()
    assert store.nbytes == plan_of(32).total
    assert not len(submissions)


@pytest.mark.asyncio
async def test_loads_go_between_the_slices_of_stores(device: Device, add: Callable) -> None:
    submissions = submissions_of(device)
    stored, store = add(submissions, 32)
    await asyncio.sleep(0)
    loaded, load = add(submissions, 2, urgent=True)
    await load.submitted()
    await store.submitted()
    order = [plan for plan, _ in device.given]
    assert order[:4] == [stored] * 4
    first = order.index(loaded)
    assert first == 4
    assert order[first:].index(stored) == order.count(loaded)


@pytest.mark.asyncio
async def test_what_is_cancelled_is_covered_by_its_event(device: Device, add: Callable) -> None:
    submissions = submissions_of(device)
    _, store = add(submissions, 32)
    await asyncio.sleep(0)
    store.cancel()
    store.cancel()
    event = await store.submitted()
    await asyncio.sleep(0)
    assert len(device.given) == 4
    assert not len(submissions)
    assert not event.done()
    device.run()
    assert event.done()


@pytest.mark.asyncio
async def test_a_copy_that_fails_fails_alone(device: Device, add: Callable) -> None:
    submissions = submissions_of(device)
    plan = plan_of(2)
    bad = submissions.add(plan, plan.chunks((0,), 128), [], [], stream=device.stream(), urgent=True)
    broken = submissions.add(
        plan,
        [Chunk(0, 1, 9, 0, 1, 128)],
        [device.allocate(8)],
        [device.allocate(8)],
        stream=device.stream(),
        urgent=True,
    )
    _, fine = add(submissions, 2)
    with pytest.raises(DeviceError, match="no such chunk"):
        await broken.submitted()
    assert broken.event is not None
    assert (await fine.submitted()) is not None
    with pytest.raises(DeviceError, match="IndexError"):
        await bad.submitted()


@pytest.mark.asyncio
async def test_closing_ends_all_that_waits(device: Device, add: Callable) -> None:
    submissions = submissions_of(device)
    _, store = add(submissions, 32)
    waiting = asyncio.ensure_future(store.submitted())
    await asyncio.sleep(0)
    submissions.close()
    submissions.close()
    with pytest.raises(ClosedError):
        await waiting
    assert store.event is not None
    assert store.over


@pytest.mark.asyncio
async def test_of_loads_the_more_urgent_goes_first_and_then_the_one_that_came_first(
    device: Device, add: Callable
) -> None:
    submissions = submissions_of(device)
    add(submissions, 2)  # then there is a turn to come
    plans = [add(submissions, 2, urgent=True, priority=priority) for priority in (0, 5, 0, 7)]
    for _, added in plans:
        await added.submitted()
    order = list(dict.fromkeys(plan for plan, _ in device.given))
    assert order[:4] == [plans[index][0] for index in (3, 1, 0, 2)]
    submissions.close()


@pytest.mark.asyncio
async def test_a_store_that_somebody_waits_for_goes_with_the_loads(device: Device, add: Callable) -> None:
    submissions = submissions_of(device)
    other, _ = add(submissions, 2)
    wanted, store = add(submissions, 2)
    submissions.promote(store)
    submissions.promote(store)
    await store.submitted()
    assert next(iter(device.given))[0] is wanted
    assert other not in [plan for plan, _ in device.given[:2]]
    submissions.close()


@pytest.mark.asyncio
async def test_no_more_than_a_window_is_in_flight_and_loads_have_their_own(
    device: Device, add: Callable
) -> None:
    loop = asyncio.get_running_loop()
    poller = CompletionPoller(loop)
    submissions = Submissions(device, loop, poller=poller, window_bytes=256, clock=device.clock)
    over: list[int] = []
    _, store = add(submissions, 16, then=lambda submission: over.append(submission.nbytes))
    for _ in range(5):
        await asyncio.sleep(0)
    assert store.nbytes == submissions.in_flight(urgent=False) == 256
    _, load = add(submissions, 1, urgent=True)
    await load.submitted()
    store.cancel()
    assert over == [256], "what is cancelled is no more than the window"
    while poller.pending:
        device.run()
        await asyncio.sleep(0)
    assert submissions.in_flight(urgent=False) == submissions.in_flight(urgent=True) == 0
    poller.close()
    submissions.close()


@pytest.mark.asyncio
async def test_what_waits_for_the_caller_takes_nothing_of_the_window(device: Device, add: Callable) -> None:
    loop = asyncio.get_running_loop()
    poller = CompletionPoller(loop)
    submissions = Submissions(device, loop, poller=poller, window_bytes=128, clock=device.clock)
    gate = device.stream().record()
    _, held = add(submissions, 8, urgent=True, after=gate)
    await held.submitted()
    assert submissions.in_flight(urgent=True) == 0
    poller.close()
    submissions.close()


@pytest.mark.asyncio
async def test_while_there_is_room_a_call_submits_by_itself(device: Device, add: Callable) -> None:
    """Who begins many copies in one turn doesn't have the device wait for the next one."""
    loop = asyncio.get_running_loop()
    poller = CompletionPoller(loop, clock=device.clock)
    submissions = Submissions(device, loop, clock=device.clock, poller=poller, window_bytes=6 * 128)
    for calls, given in enumerate([4, 6, 6], 1):  # a budget's worth each, until the window is full
        _, store = add(submissions, 32)
        assert len(device.given) == given, calls
    gate = device.stream()
    _, held = add(submissions, 32, after=gate.record())
    assert len(device.given) == 6, "what is held up wouldn't begin"
    submissions.close()
    assert store.over
    assert held.over
    device.run()
    poller.close()
