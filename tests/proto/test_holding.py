"""For how long an offer waits: for who says nothing, who says that he will come, and who has come."""

from __future__ import annotations

import pytest

from aiokv.errors import DeadlineExceeded, RemoteProtocolError, TransferAborted
from aiokv.proto.messages import Grant, Offer, Renew
from aiokv.proto.parts import State
from aiokv.proto.settings import SECOND
from aiokv.testing.tables import Member, Net

HOLD, MOST = 1.0, 5.0


@pytest.fixture
def net() -> Net:
    return Net()


@pytest.fixture
def a(net: Net) -> Member:
    return net.add("a")


@pytest.fixture
def b(net: Net) -> Member:
    return net.add("b")


def wait(net: Net, seconds: float) -> None:
    """Let time pass as an engine would see it, timer by timer."""
    end = net.now + int(seconds * SECOND)
    while (timers := [when for each in net.members.values() if (when := each.next_timer()) is not None]) and (
        min(timers) <= end
    ):
        net.wait(max(0, min(timers) - net.now))
    net.wait(end - net.now)


@pytest.mark.parametrize("push", [False, True])
def test_who_says_nothing_is_waited_for_no_longer(net: Net, a: Member, b: Member, push: bool) -> None:
    offer = a.offer("t", deadline=MOST, hold=HOLD, to=[b] if push else ())
    net.run()
    wait(net, HOLD - 0.01)
    assert not offer.resolved
    wait(net, 0.02)
    assert offer.resolved
    assert isinstance(offer.error, DeadlineExceeded)
    assert not len(b.table.waiting)  # who was told of it is told that it is over


@pytest.mark.parametrize("push", [False, True])
def test_who_says_that_he_will_come_is(net: Net, a: Member, b: Member, push: bool) -> None:
    offer = a.offer("t", deadline=MOST, hold=HOLD, to=[b] if push else (), ready=True)
    net.run()
    for _ in range(5):
        wait(net, 0.7 * HOLD)
        b.renew("t", *([] if push else [a]))
        net.run()
    assert not offer.resolved
    fetch = b.fetch("t", [4, 5], sources=[] if push else [a])
    net.run()
    b.land(fetch)
    net.run()
    assert offer.resolved
    assert offer.error is fetch.error is None


def test_at_most_until_the_deadline(net: Net, a: Member, b: Member) -> None:
    offer = a.offer("t", deadline=MOST, hold=HOLD)
    began = net.now
    while not offer.resolved:
        b.renew("t", a)
        net.run()
        wait(net, 0.5 * HOLD)
    assert net.now - began <= (MOST + 0.5 * HOLD) * SECOND
    assert isinstance(offer.error, DeadlineExceeded)


def test_who_has_come_has_until_the_deadline(net: Net, a: Member, b: Member) -> None:
    """It takes as long as it takes to move it, or to compute what is missing of it."""
    offer = a.offer("t", deadline=MOST, hold=HOLD)
    fetch = b.fetch("t", [4, 5], sources=[a], deadline=30)
    net.run()
    wait(net, 3 * HOLD)
    a.ready(offer)
    net.run()
    b.land(fetch)
    net.run()
    assert offer.error is fetch.error is None
    late = a.offer("u", deadline=MOST, hold=HOLD)
    b.fetch("u", [4, 5], sources=[a], deadline=30)
    net.run()
    wait(net, MOST + 0.01)
    assert isinstance(late.error, DeadlineExceeded | TransferAborted)
    assert late.resolved


def test_a_reader_that_is_shorter_of_time_still_decides(net: Net, a: Member, b: Member) -> None:
    offer = a.offer("t", deadline=MOST, hold=HOLD)
    b.fetch("t", [4, 5], sources=[a], deadline=2 * HOLD)
    net.run()
    assert offer.parts[0].deadline <= net.now + 2 * HOLD * SECOND


def test_what_is_not_offered_or_not_any_more_stays_as_it_is(net: Net, a: Member, b: Member) -> None:
    b.renew("t", a)
    b.renew("never", a)
    net.run()
    offer = a.offer("t", deadline=MOST, hold=HOLD, ready=True)
    fetch = b.fetch("t", [4, 5], sources=[a], deadline=1)
    net.run()
    deadline = offer.parts[0].deadline
    b.renew("t", a)  # it is asked for already
    net.run()
    assert offer.parts[0].deadline == deadline
    b.land(fetch)
    net.run()
    b.renew("t", a)
    net.run()
    assert not a.faults
    assert not a.table.ledger.transfers
    assert a.next_timer() is None


def test_only_by_those_for_whom_it_is(net: Net, a: Member, b: Member) -> None:
    c = net.add("c")
    named = a.offer("t", to=[b], deadline=MOST, hold=HOLD)
    both = a.offer("u", to=[b], readers=2, deadline=MOST, hold=HOLD)
    net.run()
    wait(net, 0.7 * HOLD)
    c.renew("t", a)
    c.renew("u", a)
    net.run()
    wait(net, 0.5 * HOLD)
    assert named.resolved
    assert [part.state for part in both.parts] == [State.FAILED, State.OFFERED]


def test_often_is_not_much(net: Net, a: Member, b: Member) -> None:
    """However often a peer says it, one timer is left of it."""
    a.offer("t", deadline=MOST, hold=HOLD)
    for _ in range(300):
        b.renew("t", a)
        net.run()
        wait(net, 0.01)
    assert len(a.table.ledger._timers) <= 2


def test_an_older_peer_is_told_nothing(net: Net, a: Member) -> None:
    """It would end the session for a message that it doesn't know."""
    old = net.add("old", versions=(1, 1))
    b = net.add("b")
    old.offer("t", hold=HOLD)
    b.renew("t", old)  # before there is contact
    net.run()
    b.renew("t", old)
    net.run()
    assert not [message for message in old.heard if isinstance(message, Renew)]
    old.renew("t", b)
    net.run()
    assert not old.faults
    assert not b.faults


def test_an_offer_is_named_until_its_deadline(net: Net, a: Member, b: Member) -> None:
    """A fetch that takes it up has that long; that it is over before is said when it is."""
    a.offer("t", to=[b], deadline=MOST, hold=HOLD)
    net.run()
    (offer,) = [message for message in b.heard if isinstance(message, Offer)]
    assert offer.remaining_us == MOST * 1e6


def test_a_grant_that_waited_has_come(net: Net, a: Member, b: Member) -> None:
    fetch = b.fetch("t", [4, 5], sources=[a], deadline=10)
    net.run()
    assert any(isinstance(message, Grant) for message in a.heard)
    offer = a.offer("t", deadline=MOST, hold=HOLD)
    net.run()
    wait(net, 2 * HOLD)
    assert not offer.resolved
    assert not fetch.resolved


def test_a_consumer_may_not_be_told(net: Net, a: Member, b: Member) -> None:
    """A renewal goes one way: what nobody fetches by that name is no fault either."""
    a.session(b).renew(("t", 0))
    net.run()
    assert not b.faults
    with pytest.raises(RemoteProtocolError):
        b.table.receive(b.session(a), object(), net.now)  # type: ignore[arg-type]


def test_who_comes_when_the_hold_is_over_is_told_so(net: Net, a: Member, b: Member) -> None:
    """It would wait for an offer that doesn't come again, for as long as it can."""
    most = 2 * net.settings.tombstone_ns / SECOND
    a.offer("t", deadline=most, hold=HOLD)
    a.offer("u", deadline=most)
    wait(net, HOLD + net.settings.tombstone_ns / SECOND + 1)
    fetch = b.fetch("t", [4, 5], sources=[a], deadline=60)
    net.run()
    assert fetch.resolved
    assert isinstance(fetch.error, DeadlineExceeded)
    assert "hold of 1 s passed" in str(fetch.error)
