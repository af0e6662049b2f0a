"""The kit that joins transfer tables: what it carries, holds and lets pass."""

from __future__ import annotations

import pytest

from aiokv.errors import PeerLostError, TransferAborted
from aiokv.proto.messages import Grant, Hello, Landed, Reset
from aiokv.proto.settings import SECOND, Settings
from aiokv.testing.tables import START, Net


def test_the_example_in_its_docstring_works() -> None:
    net = Net()
    prefill, decode = net.add("prefill"), net.add("decode")
    offer = prefill.offer("t", [0, 1])
    fetch = decode.fetch("t", [5, 6], sources=[prefill])
    net.run()
    prefill.ready(offer)
    net.run()
    decode.land(fetch)
    net.run()
    assert offer.resolved
    assert fetch.resolved
    assert [type(message) for message in decode.sent] == [Hello, Grant, Landed]


def test_what_is_held_stays_on_the_wire_until_it_is_released() -> None:
    net = Net()
    a, b = net.add("a"), net.add("b")
    b.fetch("t", sources=[a])
    net.hold(a, b)
    net.run()
    assert a.heard == []
    assert len(net.wire["b", "a"]) == 1
    net.release()
    net.run()
    assert [type(message) for message in a.heard] == [Grant]


def test_frames_can_be_carried_one_by_one() -> None:
    net = Net()
    a, b = net.add("a"), net.add("b")
    for number in range(3):
        b.session(a).send(Landed("t", number))
        b.turn()
    assert [len(frames) for frames in net.wire.values()] == [4]
    assert net.carry(1) == 1
    assert a.heard == []
    assert net.carry(2) == 2
    assert [message.attempt for message in a.heard] == [0, 1]


def test_time_passes_when_it_is_told_so() -> None:
    net = Net()
    a = net.add("a", settings=Settings(contact_ns=SECOND))
    fetch = a.fetch("t", sources=[net.add("b")])
    net.members.pop("b")
    net.held.add(("a", "b"))
    net.run()
    assert net.now == START
    while not fetch.resolved:
        assert net.wait_for_timer()
    assert net.now == START + SECOND
    assert isinstance(fetch.error, PeerLostError)
    assert not net.wait_for_timer()


def test_members_may_keep_a_part_of_the_heads() -> None:
    net = Net()
    a = net.add("a", heads=(1, 3))
    assert a.table.ledger.layout.groups[0].heads == (1, 3)


def test_what_is_in_flight_keeps_a_part_from_being_quiet() -> None:
    net = Net()
    a, b = net.add("a"), net.add("b")
    a.offer("t", ready=True)
    fetch = b.fetch("t", sources=[a])
    net.run()
    part = fetch.parts[0]
    b.busy.add(part)
    b.abort(fetch, TransferAborted("enough"))
    net.run()
    assert part in b.stopped
    assert not part.ended
    b.rest(part)
    assert part.ended


def test_who_breaks_the_rules_loses_the_session_and_the_next_one_works() -> None:
    net = Net()
    a, b = net.add("a"), net.add("b")
    a.session(b)
    net.run()
    a.session(b).send(Reset(1, "session", "has no place here"))
    net.run()
    assert len(b.faults) == 1
    assert a.address not in b.sessions
    a.lose(b, certain=False)
    a.offer("t", ready=True)
    fetch = b.fetch("t", sources=[a])
    net.run()
    b.land(fetch)
    net.run()
    assert fetch.error is None
    assert fetch.resolved


def test_answers_without_end_are_an_error() -> None:
    net = Net()
    a = net.add("a")
    a.turn = lambda: True  # type: ignore[method-assign]
    with pytest.raises(RecursionError, match="go on answering"):
        net.run()
