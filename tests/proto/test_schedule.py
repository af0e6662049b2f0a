"""The chunk scheduler: priority, turns of flows and parts, the window; no chunk lost or doubled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from aiokv.proto.plan import Chunk
from aiokv.proto.schedule import ChunkScheduler


def chunks(count: int, *, nbytes: int = 10, layer: int = 0) -> list[Chunk]:
    return [Chunk(layer, 1, 0, number, number + 1, nbytes) for number in range(count)]


def drained(scheduler: ChunkScheduler[str, str]) -> list[str]:
    """Parts in the order in which their chunks go, each chunk finished before the next."""
    order = []
    while (taken := scheduler.take()) is not None:
        order.append(taken[0])
        scheduler.finished(taken[1].nbytes)
    return order


@pytest.fixture
def scheduler() -> ChunkScheduler[str, str]:
    return ChunkScheduler(1000)


def test_nothing_queued_gives_nothing(scheduler: ChunkScheduler[str, str]) -> None:
    assert not scheduler
    assert scheduler.take() is None


def test_chunks_of_a_part_go_in_their_order(scheduler: ChunkScheduler[str, str]) -> None:
    scheduler.add("flow", "part", chunks(3, layer=1))
    scheduler.add("flow", "part", chunks(2, layer=0))
    taken = [scheduler.take() for _ in range(5)]
    assert [chunk for _, chunk in taken] == chunks(3, layer=1) + chunks(2, layer=0)
    assert scheduler.take() is None


def test_priority_goes_first_whenever_it_comes(scheduler: ChunkScheduler[str, str]) -> None:
    scheduler.add("flow", "low", chunks(2), priority=-1)
    scheduler.add("flow", "usual", chunks(2))
    assert scheduler.take()[0] == "usual"
    scheduler.add("other", "high", chunks(2), priority=5)
    assert drained(scheduler) == ["high", "high", "usual", "low", "low"]


def test_parts_of_a_flow_take_turns(scheduler: ChunkScheduler[str, str]) -> None:
    scheduler.add("flow", "long", chunks(4))
    scheduler.add("flow", "short", chunks(2))
    assert drained(scheduler) == ["long", "short", "long", "short", "long", "long"]


def test_flows_take_turns_however_many_parts_they_have(scheduler: ChunkScheduler[str, str]) -> None:
    for part in ("a", "b", "c"):
        scheduler.add("busy", part, chunks(2))
    scheduler.add("quiet", "z", chunks(3))
    assert drained(scheduler) == ["a", "z", "b", "z", "c", "z", "a", "b", "c"]


def test_a_part_that_comes_later_does_not_wait_for_those_before(scheduler: ChunkScheduler[str, str]) -> None:
    scheduler.add("flow", "long", chunks(100))
    for _ in range(10):
        scheduler.take()
    scheduler.add("flow", "new", chunks(1))
    assert "new" in [scheduler.take()[0] for _ in range(2)]


def test_chunks_are_made_when_their_turn_comes(scheduler: ChunkScheduler[str, str]) -> None:
    made = []

    def lazily() -> Iterator[Chunk]:
        for chunk in chunks(3):
            made.append(chunk)
            yield chunk

    scheduler.add("flow", "part", lazily())
    assert made == []
    scheduler.take()
    assert len(made) == 1


def test_the_window_bounds_what_is_in_flight() -> None:
    scheduler: ChunkScheduler[str, str] = ChunkScheduler(25)
    scheduler.add("flow", "part", chunks(5))
    taken = [scheduler.take() for _ in range(4)]
    assert taken[3] is None
    assert scheduler.in_flight == 30  # the one that reaches the window is the last
    assert scheduler
    scheduler.finished(10)
    assert scheduler.take() is not None
    assert scheduler.take() is None


def test_a_chunk_larger_than_the_window_goes_alone() -> None:
    scheduler: ChunkScheduler[str, str] = ChunkScheduler(5)
    scheduler.add("flow", "part", chunks(2, nbytes=100))
    assert scheduler.take() is not None
    assert scheduler.take() is None
    scheduler.finished(100)
    assert scheduler.take() is not None


def test_what_is_put_back_goes_before_the_rest_of_its_part(scheduler: ChunkScheduler[str, str]) -> None:
    scheduler.add("flow", "part", chunks(3))
    part, first = scheduler.take()
    scheduler.finished(first.nbytes)
    scheduler.put_back("flow", part, first)
    assert scheduler.take() == (part, first)
    assert scheduler.take()[1] == chunks(3)[1]


def test_the_last_chunk_of_a_part_can_be_put_back(scheduler: ChunkScheduler[str, str]) -> None:
    scheduler.add("flow", "part", chunks(1), priority=3)
    part, chunk = scheduler.take()
    scheduler.finished(chunk.nbytes)
    assert scheduler.take() is None
    scheduler.put_back("flow", part, chunk, priority=3)
    scheduler.add("flow", "rival", chunks(1), priority=2)
    assert drained(scheduler) == ["part", "rival"]


def test_a_blocked_flow_waits_and_holds_up_no_other(scheduler: ChunkScheduler[str, str]) -> None:
    scheduler.add("stuck", "a", chunks(2), priority=9)
    scheduler.add("free", "b", chunks(2))
    scheduler.block("stuck")
    assert drained(scheduler) == ["b", "b"]
    assert scheduler
    scheduler.unblock("stuck")
    scheduler.unblock("never blocked")
    assert drained(scheduler) == ["a", "a"]
    assert not scheduler


def test_what_is_dropped_is_forgotten_but_for_what_is_in_flight(scheduler: ChunkScheduler[str, str]) -> None:
    scheduler.add("flow", "gone", chunks(3))
    scheduler.add("flow", "kept", chunks(1))
    assert scheduler.take()[0] == "gone"
    scheduler.drop("gone")
    scheduler.drop("gone")
    scheduler.drop("never there")
    assert scheduler.in_flight == 10
    assert drained(scheduler) == ["kept"]
    assert scheduler.in_flight == 10
    scheduler.finished(10)
    assert scheduler.in_flight == 0


def test_a_dropped_part_may_come_again_elsewhere(scheduler: ChunkScheduler[str, str]) -> None:
    scheduler.add("flow", "part", chunks(3))
    scheduler.drop("part")
    scheduler.add("other", "part", chunks(1), priority=1)
    assert drained(scheduler) == ["part"]


def test_parts_without_chunks_leave_nothing_behind(scheduler: ChunkScheduler[str, str]) -> None:
    for part in range(50):
        scheduler.add("flow", f"part-{part}", [])
    scheduler.add("other", "real", chunks(1))
    assert drained(scheduler) == ["real"]
    assert not scheduler
    assert not scheduler._queues


def test_it_is_empty_once_the_last_chunk_was_taken_and_looked_for(
    scheduler: ChunkScheduler[str, str],
) -> None:
    scheduler.add("flow", "part", chunks(1))
    scheduler.take()
    assert scheduler.take() is None
    assert not scheduler


# -- anything in any order --------------------------------------------------------------------------

PARTS = st.integers(0, 5)


class AnySchedule(RuleBasedStateMachine):
    """Whatever is asked of a scheduler, each chunk comes out once, and in its part's order."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler: ChunkScheduler[int, int] = ChunkScheduler(60)
        self.queued: dict[int, list[Chunk]] = {}
        self.flying: list[tuple[int, Chunk]] = []
        self.blocked: set[int] = set()
        self.made = 0

    @staticmethod
    def flow(part: int) -> int:
        return part % 2

    @staticmethod
    def priority(part: int) -> int:
        return part // 4

    @rule(part=PARTS, sizes=st.lists(st.integers(1, 30), max_size=4))
    def add(self, part: int, sizes: list[int]) -> None:
        new = [Chunk(0, 1, 0, self.made + number, 0, size) for number, size in enumerate(sizes)]
        self.made += len(new)
        self.scheduler.add(self.flow(part), part, iter(new), self.priority(part))
        self.queued.setdefault(part, []).extend(new)

    @rule()
    def take(self) -> None:
        full = sum(chunk.nbytes for _, chunk in self.flying) >= 60
        could = [p for p, chunks in self.queued.items() if chunks and self.flow(p) not in self.blocked]
        taken = self.scheduler.take()
        if full or not could:
            assert taken is None
            return
        assert taken is not None
        part, chunk = taken
        assert part in could
        assert self.priority(part) == max(map(self.priority, could))
        assert chunk == self.queued[part].pop(0)
        self.flying.append(taken)

    @rule(data=st.data())
    @precondition(lambda self: self.flying)
    def finish(self, data: st.DataObject) -> None:
        _, chunk = self.flying.pop(data.draw(st.integers(0, len(self.flying) - 1)))
        self.scheduler.finished(chunk.nbytes)

    @rule()
    @precondition(lambda self: self.flying)
    def put_back(self) -> None:
        part, chunk = self.flying.pop()
        self.scheduler.finished(chunk.nbytes)
        self.scheduler.put_back(self.flow(part), part, chunk, self.priority(part))
        self.queued.setdefault(part, []).insert(0, chunk)

    @rule(part=PARTS)
    def drop(self, part: int) -> None:
        self.scheduler.drop(part)
        self.queued.pop(part, None)

    @rule(flow=st.integers(0, 1))
    def block(self, flow: int) -> None:
        self.scheduler.block(flow)
        self.blocked.add(flow)

    @rule(flow=st.integers(0, 1))
    def unblock(self, flow: int) -> None:
        self.scheduler.unblock(flow)
        self.blocked.discard(flow)

    @invariant()
    def nothing_is_lost_or_doubled(self) -> None:
        assert self.scheduler.in_flight == sum(chunk.nbytes for _, chunk in self.flying)
        if any(self.queued.values()):
            assert self.scheduler

    def teardown(self) -> None:
        for flow in (0, 1):
            self.scheduler.unblock(flow)
        for _, chunk in self.flying:
            self.scheduler.finished(chunk.nbytes)
        expected = Counter((part, chunk) for part, chunks in self.queued.items() for chunk in chunks)
        found: Counter[tuple[int, Chunk]] = Counter()
        while (taken := self.scheduler.take()) is not None:
            self.scheduler.finished(taken[1].nbytes)
            found[taken] += 1
        assert found == expected
        assert not self.scheduler


TestAnySchedule = AnySchedule.TestCase
