"""The completion poller, on a simulated clock and loop: every figure here is simulated time."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable

import pytest

from aiokv.device.mocked import MockedDevice
from aiokv.device.poller import CompletionPoller
from aiokv.errors import ClosedError, DeviceError

US, MS = 1_000, 1_000_000


class Handle:
    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class World:
    """A clock, a loop and its timer; time passes only by turns and while the loop sleeps."""

    def __init__(self) -> None:
        self.now = 1_000 * MS
        self.turn_ns = 2 * US
        #: How late a timer wakes the loop.
        self.late_ns = 8 * US
        self.soon: list[Handle] = []
        self.due: int | None = None
        self.armings = 0
        self.timer_closed = False
        self.errors: list[object] = []
        self.poller = CompletionPoller(self, clock=lambda: self.now, timer=self._make_timer)

    # the loop
    def call_soon(self, callback: Callable[[], None]) -> Handle:
        self.soon.append(Handle(callback))
        return self.soon[-1]

    def call_exception_handler(self, context: dict[str, object]) -> None:
        self.errors.append(context["exception"])

    # the timer
    def _make_timer(self, loop: object, callback: Callable[[], None]) -> World:
        self.on_timer = callback
        return self

    def arm(self, delay_ns: int) -> None:
        assert delay_ns >= 0
        self.armings += 1
        self.due = self.now + delay_ns

    def disarm(self) -> None:
        self.due = None

    def close(self) -> None:
        self.due, self.timer_closed = None, True

    @property
    def idle(self) -> bool:
        return self.due is None and not any(handle.callback for handle in self.soon)

    # time
    def turn(self) -> None:
        """One turn of the loop: what is due runs, after a sleep if nothing is."""
        ready, self.soon = self.soon, []
        if not ready and self.due is not None:
            self.now = max(self.now, self.due + self.late_ns)
        if self.due is not None and self.due <= self.now:
            self.due = None
            self.on_timer()
        self.now += self.turn_ns
        for handle in ready:
            if handle.callback is not None:
                handle.callback()

    def run(self, until: int | None = None) -> None:
        """Turns until nothing is scheduled, or until a time is reached."""
        for _ in range(1_000_000):
            if self.idle or (until is not None and self.now >= until):
                return
            self.turn()
        raise AssertionError("the poller never comes to rest")


class At:
    """An event that is done, or fails, at a time."""

    def __init__(self, world: World, delay_ns: float, error: Exception | None = None) -> None:
        self.world = world
        self.at = world.now + int(delay_ns)
        self.error = error
        self.queries: list[int] = []

    def done(self) -> bool:
        self.queries.append(self.world.now)
        if self.world.now < self.at:
            return False
        if self.error is not None:
            raise self.error
        return True


@pytest.fixture
def world() -> World:
    return World()


class Log(list):
    """Callbacks that note who was called, when, and with what."""

    def __init__(self, world: World) -> None:
        self.world = world

    def of(self, name: object) -> Callable[[DeviceError | None], None]:
        return lambda error: self.append((name, error, self.world.now))

    @property
    def names(self) -> list[object]:
        return [name for name, _, _ in self]


@pytest.fixture
def log(world: World) -> Log:
    return Log(world)


# -- idle -----------------------------------------------------------------------------------------


def test_nothing_pending_nothing_scheduled(world: World, log: Log) -> None:
    assert world.idle
    assert world.armings == 0
    for expected in (0, MS):
        world.poller.watch(At(world, MS), "s", log.of(expected), expected_ns=expected)
        assert not world.idle
        world.run()
        assert world.idle
    assert log.names == [0, MS]
    assert world.poller.pending == 0
    assert world.poller._lanes == {}


def test_the_timer_is_disarmed_when_what_it_was_for_came_early(world: World, log: Log) -> None:
    world.poller.watch(At(world, 100 * US), "s", log.of("first"), expected_ns=100 * US)
    world.poller.watch(At(world, 101 * US), "s", log.of("second"), expected_ns=500 * MS)
    world.run(world.now + 400 * US)
    assert log.names == ["first", "second"]
    assert world.idle


# -- delivery -------------------------------------------------------------------------------------


def test_never_calls_back_within_watch(world: World, log: Log) -> None:
    event = At(world, 0)
    world.poller.watch(event, "s", log.of("it"), expected_ns=50 * MS)
    assert log == []
    assert world.poller.pending == 1
    world.turn()
    assert log.names == ["it"]
    assert world.armings == 0


def test_each_stream_keeps_its_order(world: World, log: Log) -> None:
    for n in range(5):
        world.poller.watch(At(world, (n + 1) * MS), "a", log.of(("a", n)), expected_ns=MS)
        world.poller.watch(At(world, (5 - n) * MS), "b", log.of(("b", n)), expected_ns=MS)
    world.run()
    for stream in "ab":
        assert [n for name, n in log.names if name == stream] == list(range(5))
    assert all(error is None for _, error, _ in log)


def test_only_the_oldest_event_of_a_stream_is_queried(world: World, log: Log) -> None:
    streams = [f"stream {n}" for n in range(8)]
    events = [At(world, (10 + n // 8) * MS) for n in range(1000)]
    for n, event in enumerate(events):
        world.poller.watch(event, streams[n % 8], log.of(n))
    assert world.poller.pending == 1000
    before = world.poller.statistics
    world.run(world.now + 9 * MS)
    after = world.poller.statistics
    assert log == []
    assert after.queries > before.queries
    assert after.queries <= 8 * after.turns
    assert all(not event.queries for event in events[8:])
    world.run()
    assert len(log) == 1000
    assert world.poller.statistics.queries <= 1000 + 8 * world.poller.statistics.turns


def test_a_callback_may_watch_the_next(world: World, log: Log) -> None:
    def next_one(error: DeviceError | None) -> None:
        log.of(len(log))(error)
        if len(log) < 50:
            world.poller.watch(At(world, 0), "s", next_one)

    world.poller.watch(At(world, 0), "s", next_one)
    world.turn()
    assert len(log) == 1, "one that always adds another must not hold the loop"
    world.run()
    assert len(log) == 50


def test_what_a_callback_adds_behind_others_is_found_when_those_are(world: World, log: Log) -> None:
    def add(error: DeviceError | None) -> None:
        log.of("first")(error)
        world.poller.watch(At(world, 0), "s", log.of("third"), expected_ns=50 * MS)

    world.poller.watch(At(world, 0), "s", add)
    world.poller.watch(At(world, 0), "s", log.of("second"))
    start = world.now
    world.run()
    assert log.names == ["first", "second", "third"]
    assert world.now - start < MS


# -- errors ---------------------------------------------------------------------------------------


def test_an_error_is_delivered_to_its_own_watch(world: World, log: Log) -> None:
    failure = DeviceError("ECC")
    world.poller.watch(At(world, MS), "s", log.of("fine"))
    world.poller.watch(At(world, MS, failure), "s", log.of("failed"))
    world.poller.watch(At(world, 2 * MS), "other", log.of("also fine"))
    world.run()
    assert {name: error for name, error, _ in log} == {"fine": None, "failed": failure, "also fine": None}
    statistics = world.poller.statistics
    assert (statistics.delivered, statistics.failed, statistics.pending) == (3, 1, 0)


def test_an_event_that_has_failed_already_is_delivered_in_the_next_turn(world: World, log: Log) -> None:
    failure = DeviceError("ECC")
    world.poller.watch(At(world, 0, failure), "s", log.of("it"), expected_ns=50 * MS)
    assert log == []
    world.turn()
    assert [(name, error) for name, error, _ in log] == [("it", failure)]


def test_whatever_a_query_raises_reaches_the_watch(world: World, log: Log) -> None:
    broken = ValueError("driver")
    world.poller.watch(At(world, MS, broken), "s", log.of("it"))
    world.run()
    assert isinstance(log[0][1], DeviceError)
    assert log[0][1].__cause__ is broken


def test_a_callback_that_raises_stops_nothing(world: World, log: Log) -> None:
    def fail(error: DeviceError | None) -> None:
        raise LookupError

    world.poller.watch(At(world, MS), "s", fail)
    world.poller.watch(At(world, MS), "s", log.of("next"))
    world.poller.watch(At(world, MS), "t", log.of("other"))
    world.run()
    assert sorted(log.names) == ["next", "other"]
    assert [type(error) for error in world.errors] == [LookupError]
    assert world.idle


def test_an_interrupt_passes_and_loses_nothing(world: World, log: Log) -> None:
    def interrupt(error: DeviceError | None) -> None:
        raise KeyboardInterrupt

    world.poller.watch(At(world, 0), "s", interrupt)
    world.poller.watch(At(world, 0), "s", log.of("next"))
    world.poller.watch(At(world, MS), "t", log.of("other"))
    with pytest.raises(KeyboardInterrupt):
        world.run()
    world.run()
    assert log.names == ["next", "other"]


# -- when it looks --------------------------------------------------------------------------------


def test_sleeps_while_it_is_far(world: World, log: Log) -> None:
    event = At(world, 10 * MS)
    start = world.now
    world.poller.watch(event, "s", log.of("it"), expected_ns=10 * MS)
    assert event.queries == [start], "the loop is awake anyway when something is watched"
    world.turn()
    assert event.queries[1] > start + 9 * MS
    world.run()
    assert world.poller.statistics.wakeups <= 2
    assert log[0][2] - event.at < 200 * US, "the first of its kind; later ones are met better"


def test_looks_each_turn_around_the_time_and_then_ever_less(world: World, log: Log) -> None:
    for _ in range(30):  # until it knows that the guess is good
        world.poller.watch(At(world, MS), "s", log.of("usual"), expected_ns=MS)
        world.run()
    event = At(world, 900 * MS)
    start = world.now
    world.poller.watch(event, "s", log.of("it"), expected_ns=MS)
    world.run()
    gaps = [b - a for a, b in itertools.pairwise(event.queries[1:])]
    spinning = [gap for gap in gaps if gap <= 2 * world.turn_ns]
    assert 20 < len(spinning) < 100
    assert gaps[: len(spinning)] == spinning
    later = gaps[len(spinning) : -1]
    assert later == sorted(later)
    assert later[0] < 50 * US
    assert later[-1] > MS
    assert log[-1][2] - event.at < 0.02 * 900 * MS
    assert len(event.queries) < 1000
    assert event.queries[1] - start < MS


def test_without_an_expectation_it_looks_less_and_less(world: World, log: Log) -> None:
    for taken in (20 * US, 200 * US, 2 * MS, 20 * MS):
        event = At(world, taken)
        world.poller.watch(event, "s", log.of(taken))
        world.run()
        assert log[-1][2] - event.at <= max(taken // 3, 50 * US)
        assert len(event.queries) < 130


def test_backs_off_when_the_loop_is_late(world: World, log: Log) -> None:
    world.turn_ns = 300 * US
    event = At(world, 100 * MS)
    world.poller.watch(event, "s", log.of("it"))
    world.run()
    assert len(event.queries) < 150, "each look costs whoever holds the loop"
    assert log[0][2] - event.at < 3 * MS
    assert max(b - a for a, b in itertools.pairwise(event.queries)) < 3 * MS


def test_a_late_loop_is_forgotten_when_nothing_is_pending(world: World, log: Log) -> None:
    world.late_ns = 5 * MS
    world.poller.watch(At(world, 10 * MS), "s", log.of("late"), expected_ns=MS)
    world.run()
    world.late_ns = 8 * US
    event = At(world, MS + 50 * US)
    world.poller.watch(event, "t", log.of("timely"), expected_ns=MS)
    world.run()
    assert log[1][2] - event.at < 50 * US


def test_a_clock_that_stands_still_while_there_are_turns_is_no_trap(world: World, log: Log) -> None:
    world.turn_ns = 0
    world.poller.watch(At(world, 5 * MS), "s", log.of("it"))
    world.run()
    assert log.names == ["it"]


def test_a_timer_that_fires_early_is_armed_again(world: World, log: Log) -> None:
    world.late_ns = -400 * US
    event = At(world, 10 * MS)
    world.poller.watch(event, "s", log.of("it"), expected_ns=10 * MS)
    world.run()
    assert 0 <= log[0][2] - event.at < MS


def test_a_far_stream_is_left_alone_while_another_is_polled(world: World, log: Log) -> None:
    far = At(world, 50 * MS)
    world.poller.watch(far, "far", log.of("far"), expected_ns=50 * MS)
    for count in range(1, 11):
        world.poller.watch(At(world, 150 * US), "near", log.of("near"), expected_ns=100 * US)
        while len(log) < count:
            world.turn()
    assert log.names == ["near"] * 10
    assert len(far.queries) == 1
    world.run()
    assert log.names[-1] == "far"


# -- what it learns -------------------------------------------------------------------------------


@pytest.mark.parametrize("truth", [0.4, 0.9, 1.0, 1.3, 3.0])
def test_a_wrong_expectation_is_corrected_by_what_is_seen(world: World, truth: float) -> None:
    lags: list[int] = []

    def again(_: DeviceError | None = None) -> None:
        lags.append(world.now - events[-1].at)
        if len(events) < 100:
            start()

    def start() -> None:
        events.append(At(world, truth * MS))
        world.poller.watch(events[-1], "s", again, expected_ns=MS)

    events: list[At] = []
    start()
    world.run()
    before, after = sum(len(event.queries) for event in events[:50]), events[50:]
    assert len(lags) == 100
    assert sum(lags[50:]) / 50 < 12 * US
    assert sum(len(event.queries) for event in after) / 50 < 20
    assert before > 0


def test_lag_and_looks_stay_small_when_durations_vary(world: World, seed: int) -> None:
    rng = random.Random(seed)
    lags: list[int] = []

    def again(_: DeviceError | None) -> None:
        lags.append(world.now - events[-1].at)
        if len(events) < 400:
            start()

    def start() -> None:
        events.append(At(world, MS * rng.uniform(0.9, 1.1)))
        world.poller.watch(events[-1], "s", again, expected_ns=MS)

    events: list[At] = []
    start()
    world.run()
    assert sorted(lags)[200] < 50 * US
    assert sum(lags) / 400 < 60 * US
    assert sum(len(event.queries) for event in events) / 400 < 20
    assert world.poller.statistics.wakeups < 6 * 400


def test_a_chain_on_one_stream_is_met_link_by_link(world: World, log: Log) -> None:
    """Each expectation counts from when the stream comes to it."""
    events: list[At] = []
    for _ in range(40):
        start = world.now
        for n in range(1, 5):
            events.append(At(world, 1.2 * n * MS))
            world.poller.watch(events[-1], "s", log.of(len(events)), expected_ns=MS)
        world.run()
        assert world.now - start < 6 * MS
    assert log.names == list(range(1, 161))
    lags = [seen - event.at for (_, _, seen), event in zip(log, events, strict=True)]
    assert all(lag >= 0 for lag in lags)
    assert sum(lags[80:]) / 80 < 20 * US
    assert sum(len(event.queries) for event in events[80:]) / 80 < 20


def test_errors_do_not_add_up_over_what_is_queued(world: World, log: Log, seed: int) -> None:
    rng = random.Random(seed)
    events: list[At] = []
    lags: list[int] = []
    ends = float(world.now)

    def add() -> None:
        nonlocal ends
        ends += MS * rng.uniform(0.9, 1.1)
        number = len(events)
        events.append(At(world, ends - world.now))
        world.poller.watch(events[number], "s", lambda error: ended(number), expected_ns=MS)

    def ended(number: int) -> None:
        lags.append(world.now - events[number].at)
        if len(events) < 600:
            add()

    for _ in range(100):
        add()
    world.run()
    assert len(lags) == 600
    assert sum(lags[300:]) / 300 < 60 * US
    assert max(lags[300:]) < 400 * US
    assert sum(len(event.queries) for event in events[300:]) / 300 < 20


def test_events_that_come_at_once_cost_one_wakeup(world: World, log: Log) -> None:
    for n in range(100):
        world.poller.watch(At(world, 5 * MS), n % 4, log.of(n), expected_ns=5 * MS)
    world.run()
    assert len(log) == 100
    assert world.poller.statistics.wakeups <= 3


def test_what_was_over_before_it_was_watched_teaches_nothing(world: World, log: Log) -> None:
    for _ in range(50):
        world.poller.watch(At(world, 0), "s", log.of("over"), expected_ns=10 * MS)
        world.run()
    event = At(world, 10 * MS)
    world.poller.watch(event, "s", log.of("it"), expected_ns=10 * MS)
    world.run()
    assert len(event.queries) < 10


def test_statistics_tell_wakeups_and_lag(world: World, log: Log) -> None:
    for _ in range(30):
        world.poller.watch(At(world, MS), "s", log.of("it"), expected_ns=MS)
        world.run()
    statistics = world.poller.statistics
    assert statistics.delivered == 30
    assert 30 <= statistics.wakeups < 50
    assert statistics.wakeup_lag_ns == statistics.wakeups * world.late_ns
    assert statistics.wakeup_lag_max_ns == world.late_ns
    assert 15 < statistics.polled < 30
    assert 0 < statistics.lag_ns <= statistics.polled * statistics.lag_max_ns
    assert statistics.lag_max_ns < 50 * US


# -- closing --------------------------------------------------------------------------------------


def test_close_abandons_all(world: World, log: Log) -> None:
    world.poller.watch(At(world, 0), "s", log.of("soon"))
    world.poller.watch(At(world, MS), "t", log.of("later"), expected_ns=MS)
    world.poller.close()
    world.poller.close()
    assert world.idle
    assert world.timer_closed
    assert world.poller.pending == 0
    world.run()
    assert log == []
    with pytest.raises(ClosedError):
        world.poller.watch(At(world, 0), "s", log.of("it"))


def test_a_callback_may_close_it(world: World, log: Log) -> None:
    world.poller.watch(At(world, 0), "s", lambda _: world.poller.close())
    world.poller.watch(At(world, 0), "s", log.of("same stream"))
    world.poller.watch(At(world, 0), "t", log.of("other stream"))
    world.run()
    assert log == []
    assert world.idle


# -- on a loop, with a device ---------------------------------------------------------------------


@pytest.mark.asyncio
async def test_events_as_awaitables(seed: int) -> None:
    loop = asyncio.get_running_loop()
    device = MockedDevice(seed)
    stepping = device.autostep(loop, random.Random(seed), 1e-4)
    poller = CompletionPoller(loop)
    buffer = device.allocate(64)
    order = []

    async def work(name: int) -> None:
        stream = device.stream()
        for n in range(5):
            stream.write(buffer, name, bytes([n]))
            await poller.wait(stream.record(), stream, expected_ns=200 * US)
            order.append((name, n))

    async with asyncio.TaskGroup() as group:
        for name in range(4):
            group.create_task(work(name))
    for name in range(4):
        assert [n for who, n in order if who == name] == list(range(5))
    assert device.hazards == []
    assert poller.pending == 0
    poller.close()
    stepping.close()


@pytest.mark.asyncio
async def test_cancelling_one_waiter_changes_nothing_for_others(seed: int) -> None:
    device = MockedDevice(seed)
    poller = CompletionPoller(asyncio.get_running_loop())
    stream = device.stream()
    event = stream.record()
    waiters = [asyncio.ensure_future(poller.wait(event, stream)) for _ in range(3)]
    waiters[1].cancel()
    await asyncio.sleep(0)
    assert poller.pending == 3
    device.run()
    await waiters[0]
    await waiters[2]
    assert waiters[1].cancelled()
    assert poller.pending == 0
    assert not poller._futures
    poller.close()


@pytest.mark.asyncio
async def test_a_failed_event_raises_where_it_is_awaited(seed: int) -> None:
    device = MockedDevice(seed)
    poller = CompletionPoller(asyncio.get_running_loop())
    stream = device.stream()
    device.fail(stream, "ECC")
    stream.write(device.allocate(1), 0, b"x")
    waiter = poller.wait(stream.record(), stream)
    device.run()
    with pytest.raises(DeviceError, match="ECC"):
        await waiter
    poller.close()


@pytest.mark.asyncio
async def test_who_waits_hears_of_the_close(seed: int) -> None:
    device = MockedDevice(seed)
    poller = CompletionPoller(asyncio.get_running_loop())
    stream = device.stream()
    waited, cancelled, unheard = (poller.wait(stream.record(), stream, expected_ns=MS) for _ in range(3))
    cancelled.cancel()
    poller.close()
    with pytest.raises(ClosedError):
        await waited
    with pytest.raises(ClosedError):
        poller.wait(stream.record(), stream)
    del unheard  # and is no error that the loop reports
