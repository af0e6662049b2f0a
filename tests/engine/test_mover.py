"""The mover: which chunk is submitted when, what completions mean, and when a part is quiet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from aiokv.device.cache import KVCache
from aiokv.device.mocked import MockedDevice
from aiokv.engine.mover import Mover
from aiokv.errors import DeviceError, InvalidBlocks, PeerLostError, TransferAborted
from aiokv.proto.parts import State
from aiokv.proto.plan import Chunk
from aiokv.proto.settings import SECOND, Settings
from aiokv.proto.transfers import Fetching, Offering, Part
from aiokv.testing.tables import LAYOUT, Member, Net

#: What the tests move, and the bytes of one layer of it; a chunk is one block.
BLOCKS = (0, 2, 4, 6)
LAYER = 4 * LAYOUT.groups[0].block_bytes
SETTINGS = Settings(chunk_bytes=LAYER // 4, window_bytes=10 * LAYER)


class Event:
    """Done when a test says so."""

    def __init__(self) -> None:
        self.over = False
        self.error: DeviceError | None = None

    def done(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.over


class Link:
    """Both ends of a link in one, which notes what it is asked for."""

    lost = False
    writable = True
    pace = 1
    rate = 0
    writing: Event | None = None

    def __init__(self) -> None:
        self.submitted: list[tuple[Chunk, Event]] = []
        self.expected: dict[Any, Callable[[Chunk], None]] = {}
        self.closed = 0
        self.refuses: Exception | None = None
        self.at_once = False
        self.tell_writable: list[Callable[[], None]] = []
        self.took: list[int] = []

    def _submit(self, chunk: Chunk) -> Event:
        if self.refuses is not None:
            raise self.refuses
        event = Event()
        event.over = self.at_once
        self.submitted.append((chunk, event))
        return event

    def read(self, plan: Any, chunk: Chunk, dst: Any, *, stream: Any) -> Event:
        return self._submit(chunk)

    def send(self, part: Any, plan: Any, chunk: Chunk, src: Any, *, stream: Any) -> Event:
        return self._submit(chunk)

    def on_writable(self, callback: Callable[[], None]) -> None:
        self.tell_writable.append(callback)

    def expect(self, part: Any, plan: Any, dst: Any, landed: Callable[[Chunk], None]) -> None:
        self.expected[part] = landed

    def forget(self, part: Any) -> Event | None:
        self.expected.pop(part, None)
        return self.writing

    def close(self) -> None:
        self.closed += 1


class Poller:
    """Keeps what is watched, and delivers what a test says."""

    def __init__(self) -> None:
        self.watched: list[tuple[Event, object, Callable[[DeviceError | None], None]]] = []
        self.expected: list[int] = []

    def watch(
        self,
        event: Event,
        order: object,
        callback: Callable[[DeviceError | None], None],
        *,
        expected_ns: int = 0,
    ) -> None:
        self.watched.append((event, order, callback))
        self.expected.append(expected_ns)

    def deliver(self, error: DeviceError | None = None, *, count: int = 1000) -> None:
        pending, self.watched = self.watched[:count], self.watched[count:]
        for _, _, callback in pending:
            callback(error)


class Bench:
    """The mover of one side of a net of two, and what it told."""

    def __init__(
        self, *, consumer: bool = True, one_sided: bool = True, settings: Settings = SETTINGS
    ) -> None:
        self.net = Net(settings)
        self.a, self.b = self.net.add("a"), self.net.add("b")
        self.b.one_sided = one_sided
        self.mine: Member = self.b if consumer else self.a
        self.device = MockedDevice(1)
        self.poller = Poller()
        self.wakes = 0
        self.moved: list[tuple[int, bool]] = []
        self.covered: list[int] = []
        self.covering: list[object] = []
        self.link = Link()
        self.clock = lambda: self.net.now
        self.mover = Mover(
            self.mine.table,
            KVCache.allocate(LAYOUT, device=self.device),
            self.poller,
            clock=self._now,
            settings=settings,
            wake=self._wake,
            moved=lambda part, layers, nbytes, through: self.moved.append((nbytes, bool(through))),
            submitted=self._on_submitted,
        )

    def _now(self) -> int:
        return self.clock()

    def _wake(self) -> None:
        self.wakes += 1

    def _on_submitted(self, part: Part, layers: Sequence[int], event: object) -> None:
        self.covered += layers
        self.covering.append(event)

    def begin(self, tid: str = "t", *, ready: tuple[int, ...] = (0, 1, 2, 3), **fetch: Any) -> Part:
        """A transfer up to where its bytes may move; gives this side's part, started and moving."""
        offer: Offering = self.a.offer(tid, BLOCKS)
        fetching: Fetching = self.b.fetch(tid, BLOCKS, sources=[self.a], **fetch)
        self.net.run()
        if ready:
            self.a.ready(offer, *ready)
            self.net.run()
        part = (fetching if self.mine is self.b else offer).parts[0]
        self.mine.busy.add(part)  # the mover says when it is quiet
        self.mover.start(part, self.link)
        mask = sum(1 << layer for layer in ready)
        self.mover.move(part, mask)
        return part

    def submit(self) -> list[tuple[int, int, int]]:
        """One turn; gives layer and pieces of what was submitted in it."""
        before = len(self.link.submitted)
        self.mover.submit()
        return [(chunk.layer, chunk.lo, chunk.hi) for chunk, _ in self.link.submitted[before:]]


def test_what_covers_a_layer_is_an_event_that_the_devices_streams_can_wait_for() -> None:
    bench = Bench()
    bench.begin(ready=(0, 1))
    bench.submit()
    assert bench.covered == [0, 1]
    links_own = [event for _, event in bench.link.submitted]
    for event in bench.covering:
        assert event not in links_own
        bench.device.stream().wait(event)  # type: ignore[arg-type]


def test_a_path_is_given_the_time_that_a_chunk_takes() -> None:
    bench = Bench()
    bench.begin(ready=(0,))
    bench.submit()
    assert set(bench.poller.expected) == {0}
    bench = Bench()
    bench.link.rate = 200
    bench.begin(ready=(0,))
    bench.submit()
    assert bench.poller.expected == [chunk.nbytes // 200 for chunk, _ in bench.link.submitted]


def test_a_ready_layer_is_read_in_chunks_and_lands_with_the_last() -> None:
    bench = Bench()
    part = bench.begin(ready=(2,))
    found = bench.submit()
    assert [layer for layer, _, _ in found] == [2] * 4
    assert bench.covered == [2]
    assert bench.mover.in_flight == 4
    bench.poller.deliver(count=3)
    assert part.landed == 0
    bench.poller.deliver()
    assert part.landed == 0b0100
    assert bench.moved == [(LAYER // 4, False)] * 3 + [(LAYER // 4, True)]
    assert bench.mover.in_flight == 0


def test_when_all_layers_are_there_the_part_has_landed() -> None:
    bench = Bench()
    bench.link.at_once = True
    part = bench.begin()
    bench.submit()
    assert part.state is State.DRAINING
    bench.mover.stop(part, bench.link)
    assert part.state is State.LANDED
    bench.mover.forget(part)
    assert bench.mover.movements == 0
    assert not bench.poller.watched  # what was done at once needed no poll


def test_completions_are_watched_in_the_order_of_their_stream() -> None:
    bench = Bench()
    bench.begin()
    bench.submit()
    assert len({id(order) for _, order, _ in bench.poller.watched}) == 1


def test_parts_are_spread_over_streams() -> None:
    bench = Bench()
    for number in range(4):
        bench.begin(f"t{number}", ready=(0,))
    bench.submit()
    assert len({id(order) for _, order, _ in bench.poller.watched}) == 4


def test_what_goes_over_one_link_at_a_producer_is_watched_in_the_order_of_the_link() -> None:
    bench = Bench(consumer=False, one_sided=False)
    for number in range(4):
        bench.begin(f"t{number}", ready=(0,))
    bench.submit()
    assert len(bench.poller.watched) == 4
    assert len({id(order) for _, order, _ in bench.poller.watched}) == 1


def test_a_turn_has_an_end_by_the_devices_budget() -> None:
    bench = Bench()
    bench.begin()

    def tick() -> int:
        bench.net.now += int(bench.device.budget_s * 1e9) // 2
        return bench.net.now

    bench.clock = tick
    turns = 0
    while bench.mover.submit():
        turns += 1
    assert turns > 4
    assert len(bench.link.submitted) == 16


def test_the_window_bounds_what_is_in_flight() -> None:
    bench = Bench(settings=Settings(chunk_bytes=LAYER // 4, window_bytes=LAYER))
    bench.begin()
    assert len(bench.submit()) == 4
    assert bench.submit() == []
    bench.poller.deliver(count=1)
    assert len(bench.submit()) == 1


def test_higher_priority_goes_first() -> None:
    bench = Bench()
    low, high = bench.begin("low", ready=()), bench.begin("high", ready=())
    high.transfer.priority = 3
    bench.mover.move(low, 0b0001)
    bench.mover.move(high, 0b0010)
    assert [layer for layer, _, _ in bench.submit()] == [1, 1, 1, 1, 0, 0, 0, 0]


def test_layers_with_nothing_to_move_have_landed_from_the_start() -> None:
    bench = Bench()
    part = bench.begin(first_token=16)
    assert part.landed == 0b1111
    assert bench.link.submitted == []


def test_block_lists_that_do_not_fit_together_take_nothing() -> None:
    bench = Bench()
    offer, fetch = bench.a.offer("t", [0]), bench.b.fetch("t", [0], sources=[bench.a])
    bench.net.run()
    bench.a.ready(offer)
    bench.net.run()
    part = fetch.parts[0]
    part.tokens = 99
    with pytest.raises(InvalidBlocks):
        bench.mover.start(part, bench.link)
    assert bench.mover.movements == 0
    bench.mover.retire(bench.link)
    assert bench.link.closed == 1


# -- leases -----------------------------------------------------------------------------------------


def test_nothing_is_read_once_the_lease_is_over_and_the_producer_is_asked() -> None:
    bench = Bench()
    part = bench.begin(ready=(0,))
    bench.net.now = part.session.lease_held
    asked = len(part.session._outbox)
    assert bench.submit() == []
    assert len(part.session._outbox) == asked + 1
    part.session.lease_held += SECOND
    bench.mover.lease_extended(part.session)
    assert len(bench.submit()) == 4
    bench.poller.deliver()
    assert part.landed == 0b0001


def test_what_completed_too_late_counts_once_the_producer_vouches_for_it() -> None:
    bench = Bench()
    part = bench.begin(ready=(0,))
    session = part.session
    bench.submit()
    bench.net.now = late = session.lease_held + 1
    bench.poller.deliver()
    assert part.landed == 0
    session.lease_held = late - 1 + SETTINGS.lease_ns  # said just before it was seen
    bench.mover.lease_extended(session)
    assert part.landed == 0
    session.lease_held = late + SETTINGS.lease_ns
    bench.mover.lease_extended(session)
    assert part.landed == 0b0001
    assert bench.submit() == []  # and it was not read again


def test_the_lease_of_one_producer_says_nothing_of_another() -> None:
    bench = Bench()
    part = bench.begin(ready=(0,))
    bench.net.now = part.session.lease_held
    bench.submit()
    other = bench.b.session(bench.net.add("c"))
    other.lease_held = bench.net.now + SECOND
    bench.mover.lease_extended(other)
    part.session.lease_held += SECOND
    assert bench.submit() == []


# -- failures and the end ---------------------------------------------------------------------------


@pytest.mark.parametrize("error", [PeerLostError("the link is lost"), DeviceError("no such stream")])
def test_a_chunk_that_cannot_be_submitted_fails_its_part(error: Exception) -> None:
    bench = Bench()
    bench.link.refuses = error
    part = bench.begin()
    bench.submit()
    assert part.life.error is error
    bench.device.run()
    bench.poller.deliver()
    assert bench.mover.in_flight == 0
    bench.mover.stop(part, bench.link)
    assert part.ended


def test_what_was_enqueued_of_a_chunk_that_then_failed_is_in_flight() -> None:
    bench = Bench()
    part = bench.begin(ready=(0,))
    stream, rest = bench.mover._movements[part].stream, Event()
    stream.record = lambda: rest  # type: ignore[method-assign]
    bench.link.refuses = DeviceError("no room for the second half")
    bench.mover.submit()
    assert part.life.error is bench.link.refuses
    assert bench.mover.in_flight == 1
    bench.mover.stop(part, bench.link)
    assert part.state is State.DRAINING
    bench.poller.deliver()
    assert part.ended
    assert part.landed == 0
    assert bench.mover.in_flight == 0
    assert bench.moved == []


def test_a_copy_that_fails_fails_its_part_and_the_stream_is_not_used_again() -> None:
    bench = Bench()
    part = bench.begin()
    bench.submit()
    _, broken, _ = bench.poller.watched[0]
    error = DeviceError("broken")
    bench.poller.deliver(error)
    assert part.life.error is error
    bench.mover.stop(part, bench.link)
    for number in range(4):
        bench.begin(f"t{number}", ready=(0,))
    bench.submit()
    assert broken not in [order for _, order, _ in bench.poller.watched]


def test_on_a_lost_device_what_was_in_flight_ends_though_there_is_no_other_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench()
    part = bench.begin(ready=(0,))
    bench.submit()

    def lost() -> None:
        raise DeviceError("the device is lost")

    monkeypatch.setattr(bench.device, "stream", lost)
    bench.poller.deliver(DeviceError("broken"), count=1)
    assert str(part.life.error) == "broken"
    bench.mover.stop(part, bench.link)
    bench.poller.deliver(DeviceError("broken"))
    assert part.ended
    assert bench.mover.in_flight == 0


def test_what_is_stopped_is_quiet_when_nothing_is_in_flight() -> None:
    bench = Bench()
    part = bench.begin()
    bench.submit()
    bench.b.abort(part.transfer, TransferAborted("enough"))
    bench.mover.stop(part, bench.link)
    assert part.state is State.DRAINING
    bench.poller.deliver(count=15)
    assert part.state is State.DRAINING
    bench.poller.deliver()
    assert part.state is State.ABORTED
    assert bench.moved == []


def test_what_is_stopped_submits_nothing_more() -> None:
    bench = Bench(settings=Settings(chunk_bytes=LAYER // 4, window_bytes=LAYER))
    part = bench.begin()
    bench.submit()
    bench.b.abort(part.transfer, TransferAborted("enough"))
    bench.mover.stop(part, bench.link)
    bench.mover.move(part, 0b1111)
    bench.poller.deliver()
    assert bench.submit() == []
    assert part.ended


def test_a_part_that_never_started_is_quiet_at_once() -> None:
    bench = Bench(one_sided=False)
    fetch = bench.b.fetch("t", sources=[bench.a])
    bench.net.run()
    part = fetch.parts[0]
    bench.b.busy.add(part)
    bench.link.expected[part.transfer.key] = lambda layer, nbytes: None
    bench.b.abort(fetch, TransferAborted("enough"))
    bench.mover.stop(part, bench.link)
    assert part.ended
    assert bench.link.expected == {}  # the producer may have begun to send


def test_what_was_sent_here_is_quiet_when_its_link_writes_no_more() -> None:
    bench = Bench(one_sided=False)
    part = bench.begin()
    bench.link.writing = Event()
    bench.b.abort(part.transfer, TransferAborted("enough"))
    bench.mover.stop(part, bench.link)
    assert (part.state, bench.mover.in_flight) == (State.DRAINING, 1)
    bench.mover.retire(bench.link)
    assert not bench.link.closed
    bench.poller.deliver()
    assert part.ended
    assert bench.mover.in_flight == 0


def test_a_faster_path_takes_more_at_a_time_and_more_at_once() -> None:
    bench = Bench(settings=Settings(chunk_bytes=LAYER // 4, window_bytes=LAYER // 2))
    bench.link.pace = 4
    bench.begin()
    assert len(bench.submit()) == 2
    assert [chunk.nbytes for chunk, _ in bench.link.submitted] == [LAYER] * 2
    assert bench.mover.bytes_in_flight == LAYER // 2
    bench.poller.deliver(count=1)
    assert bench.mover.bytes_in_flight == LAYER // 4
    assert len(bench.submit()) == 1


def test_a_link_is_closed_when_nothing_uses_it_any_more() -> None:
    bench = Bench()
    parts = [bench.begin("a", ready=(0,)), bench.begin("b", ready=())]
    bench.submit()
    bench.mover.retire(bench.link)
    for part in parts:
        bench.b.abort(part.transfer, TransferAborted("enough"))
        bench.mover.stop(part, bench.link)
    bench.mover.forget(parts[1])
    assert bench.link.closed == 0
    bench.poller.deliver()
    assert bench.link.closed == 0
    bench.mover.forget(parts[0])
    assert bench.link.closed == 1


# -- two-sided links --------------------------------------------------------------------------------


def test_what_is_sent_here_is_expected_and_lands_as_it_comes() -> None:
    bench = Bench(one_sided=False)
    part = bench.begin(ready=())
    landed = bench.link.expected["t", 0]
    landed(Chunk(1, 1, 0, 0, 2, LAYER // 2))
    assert part.state is State.MOVING
    landed(Chunk(1, 1, 0, 2, 4, LAYER // 2))
    assert part.landed == 0b0010
    bench.b.abort(part.transfer, TransferAborted("enough"))
    bench.mover.stop(part, bench.link)
    assert bench.link.expected == {}
    landed(Chunk(2, 1, 0, 0, 4, LAYER))
    assert part.landed == 0b0010


def test_a_link_that_takes_nothing_is_passed_over_until_it_says_so() -> None:
    settings = Settings(chunk_bytes=LAYER // 16, window_bytes=10 * LAYER)  # four chunks a layer, see below
    bench = Bench(settings=settings, consumer=False, one_sided=False)
    bench.begin("stuck", ready=(0,))
    stuck, bench.link = bench.link, Link()
    stuck.writable = False
    bench.begin("free", ready=(0,))
    assert len(bench.submit()) == 4
    assert stuck.submitted == []
    assert not bench.mover.submit()
    stuck.writable = True
    wakes = bench.wakes
    for tell in stuck.tell_writable:
        tell()
    assert bench.wakes == wakes + 1
    bench.mover.submit()
    assert [chunk.lo for chunk, _ in stuck.submitted] == sorted(chunk.lo for chunk, _ in stuck.submitted)
    assert len(stuck.submitted) == 4


def test_what_is_sent_comes_in_larger_chunks_than_what_is_read() -> None:
    reading, sending = Bench(), Bench(consumer=False, one_sided=False)
    reading.begin(ready=(0,))
    sending.begin(ready=(0,))
    assert len(sending.submit()) == 1
    assert len(reading.submit()) == 4
    assert [chunk.nbytes for chunk, _ in sending.link.submitted] == [LAYER]
    assert reading.covered == [0]
    assert sending.covered == []  # nobody at a producer waits for it


def test_a_producer_that_sends_is_quiet_when_its_memory_is_read_no_more() -> None:
    bench = Bench(consumer=False, one_sided=False)
    part = bench.begin()
    bench.submit()
    bench.a.abort(part.transfer, TransferAborted("enough"))
    bench.mover.stop(part, None)
    assert not part.ended
    bench.mover.cut(part)
    assert bench.link.closed == 1
    bench.poller.deliver(DeviceError("the link was closed"))
    assert part.state is State.ABORTED


def test_what_a_lost_link_did_not_take_fails_for_want_of_the_peer() -> None:
    bench = Bench(consumer=False, one_sided=False)
    part = bench.begin()
    bench.submit()
    error = DeviceError("not all of the chunk was sent")
    error.__cause__ = PeerLostError("tcp link 00 is lost: a connection broke")
    bench.poller.deliver(error)
    assert isinstance(part.life.error, PeerLostError)
    assert "a connection broke" in str(part.life.error)
