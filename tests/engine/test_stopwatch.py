"""How long parts are in each state, and who is told of it."""

from __future__ import annotations

from typing import Any

import pytest

from aiokv.engine.stopwatch import Stopwatch
from aiokv.errors import DeviceError
from aiokv.proto.parts import Event, State
from aiokv.testing.tables import Member, Net

SECOND = 1_000_000_000


class Track:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.steps: list[tuple[State | None, State, int]] = []

    def stepped(self, part: Any, before: State | None, now: int) -> None:
        self.steps.append((before, part.state, now))

    def moved(self, part: Any, layer: int, nbytes: int, now: int, *, through: bool) -> None:
        raise NotImplementedError

    def woke(self, transfer: Any, now: int) -> None:
        raise NotImplementedError


def watched(net: Net, member: Member, track: Track | None = None) -> Stopwatch:
    watch = Stopwatch(lambda: net.now, track)
    member.table.ledger.stepped = watch.stepped
    return watch


def test_times_are_by_role_and_state_until_a_part_ends() -> None:
    net = Net()
    a, b = net.add("a"), net.add("b")
    producer, consumer = watched(net, a), watched(net, b)
    fetching = b.fetch("t", sources=[a])
    net.run()
    net.now += 2 * SECOND
    offering = a.offer("t")
    net.run()
    net.now += SECOND // 4
    a.ready(offering)
    net.run()
    b.land(fetching)
    net.run()
    assert not a.table.ledger.parts
    for watch, role, granted in ((producer, "producer", 0.25), (consumer, "consumer", 2.25)):
        found = {key: times for key, times in watch.snapshot().items() if times.count}
        assert found.keys() == {(role, state) for state in ("offered", "granted", "moving", "draining")}
        assert {times.count for times in found.values()} == {1}
        assert found[role, "granted"].total == pytest.approx(granted, abs=0.1)


def test_a_track_is_told_of_each_step_once() -> None:
    net = Net()
    a = net.add("a")
    track = Track()
    watched(net, a, track)
    a.offer("t")
    (part,) = next(iter(a.table.ledger.transfers.values())).parts
    began = net.now
    net.now += SECOND
    a.table.ledger.settle(part, Event.FAIL, DeviceError("no more"))
    assert track.steps == [
        (None, State.OFFERED, began),
        (State.OFFERED, State.FAILED, began + SECOND),
    ]
