"""How parts settle, drain and end, whatever their role; most of it on one side alone."""

from __future__ import annotations

import pytest

from aiokv.errors import BusyError, DeadlineExceeded, DeviceError, PeerLostError, Refused, TransferAborted
from aiokv.proto.messages import Abort, Aborted, Message
from aiokv.proto.parts import Event, State
from aiokv.proto.settings import SECOND, Settings
from aiokv.proto.transfers import ActionKind, Part
from aiokv.testing.tables import Member, Net

SETTINGS = Settings()


@pytest.fixture
def net() -> Net:
    return Net()


@pytest.fixture
def a(net: Net) -> Member:
    return net.add("a")


@pytest.fixture
def b(net: Net) -> Member:
    return net.add("b")


def moving(net: Net, a: Member, b: Member, tid: str = "t") -> tuple[Part, Part]:
    """The producer's and the consumer's part of a transfer that moves."""
    offer, fetch = a.offer(tid), b.fetch(tid, sources=[a])
    net.run()
    a.ready(offer, 0)
    net.run()
    return offer.parts[0], fetch.parts[0]


# -- the same id again ------------------------------------------------------------------------------


def test_an_id_that_is_going_on_is_refused_in_the_same_role(a: Member) -> None:
    a.offer("t")
    with pytest.raises(BusyError, match="^transfer 't' is being offered already"):
        a.offer("t")
    a.fetch("t")
    with pytest.raises(BusyError, match="^transfer 't' is being fetched already"):
        a.fetch("t")


def test_each_attempt_is_a_transfer_of_its_own(a: Member) -> None:
    a.offer("t")
    a.offer("t", attempt=1)
    with pytest.raises(BusyError, match="^transfer 't' attempt 1 is being offered already"):
        a.offer("t", attempt=1)


def test_an_id_that_has_ended_is_refused_and_says_how_it_ended(a: Member) -> None:
    offer = a.offer("t")
    a.abort(offer, TransferAborted("enough"))
    with pytest.raises(BusyError, match="was offered before and ended: enough; use a new attempt number"):
        a.offer("t")
    a.offer("t", attempt=1)


def test_an_id_is_free_again_once_nobody_remembers_it(net: Net, a: Member) -> None:
    a.abort(a.offer("t", deadline=1), TransferAborted("enough"))
    net.now += SECOND + SETTINGS.tombstone_ns
    a.offer("t")


# -- settling ---------------------------------------------------------------------------------------


def test_what_was_never_granted_ends_at_once_and_without_a_word(a: Member) -> None:
    offer = a.offer("t")
    error = TransferAborted("enough")
    a.abort(offer, error)
    assert offer.resolved
    assert offer.error is error
    assert offer.parts[0].state is State.ABORTED
    assert [action.kind for action in a.table.actions] == [ActionKind.ENDED, ActionKind.RESOLVED]
    assert a.next_timer() is None


def test_the_first_reason_stays(net: Net, a: Member, b: Member) -> None:
    part, _ = moving(net, a, b)
    first = DeviceError("first")
    a.table.fail(part, first)
    a.table.fail(part, PeerLostError("second"))
    a.abort(part.transfer, TransferAborted("third"))
    net.run()
    assert part.state is State.FAILED
    assert part.transfer.error is first


def test_an_ended_part_takes_nothing_more(net: Net, a: Member, b: Member) -> None:
    part, other = moving(net, a, b)
    a.abort(part.transfer, TransferAborted("enough"))
    net.run()
    sent = len(a.sent)
    a.table.fail(part, DeviceError("late"))
    a.table.ledger.quiet(part)
    a.table.ledger.unreachable(part, PeerLostError("late"))
    net.run()
    assert part.state is State.ABORTED
    assert other.state is State.ABORTED
    assert len(a.sent) == sent
    assert b.faults == a.faults == []


def test_the_peer_is_told_once_and_in_words_that_fit(net: Net, a: Member, b: Member) -> None:
    part, other = moving(net, a, b)
    a.table.fail(part, DeviceError("x" * 10_000))
    a.table.fail(part, DeviceError("again"))
    net.run()
    (abort,) = [message for message in a.sent if isinstance(message, Abort)]
    assert abort.text == "x" * 2048
    assert abort.role == "producer"
    assert other.state is State.ABORTED
    assert b.faults == []


# -- draining ---------------------------------------------------------------------------------------


def test_a_consumer_drains_until_its_own_copies_are_quiet(net: Net, a: Member, b: Member) -> None:
    part, other = moving(net, a, b)
    b.busy.add(other)
    b.abort(other.transfer, TransferAborted("enough"))
    net.run()
    assert other.state is State.DRAINING
    assert part.state is State.DRAINING  # the copies read its blocks
    b.rest(other)
    net.run()
    assert (part.state, other.state) == (State.ABORTED, State.ABORTED)


def test_a_producer_that_is_read_drains_until_the_consumer_says_so(net: Net, a: Member, b: Member) -> None:
    part, other = moving(net, a, b)
    b.busy.add(other)
    a.abort(part.transfer, TransferAborted("enough"))
    net.run()
    assert part.state is State.DRAINING
    assert not part.transfer.resolved
    b.rest(other)
    net.run()
    assert part.transfer.resolved


def test_a_producer_that_is_read_drains_until_the_lease_is_over(net: Net, a: Member, b: Member) -> None:
    part, other = moving(net, a, b)
    b.busy.add(other)
    until = part.session.lease_given
    net.hold(a, b)
    a.abort(part.transfer, TransferAborted("enough"))
    net.wait(0)
    net.wait(until - net.now)
    assert part.state is State.DRAINING
    net.wait(1)
    assert part.state is State.ABORTED
    assert ActionKind.QUARANTINE not in a.kinds


def test_a_lease_that_was_extended_holds_the_producer_longer(net: Net, a: Member, b: Member) -> None:
    part, other = moving(net, a, b)
    first = part.session.lease_given
    for _ in range(3):  # heartbeats, which also keep the session alive
        net.wait(SETTINGS.heartbeat_ns)
    assert part.session.lease_given > first
    b.busy.add(other)
    net.hold(a, b)
    a.abort(part.transfer, TransferAborted("enough"))
    net.wait(0)
    net.wait(first - net.now + 1)
    assert part.state is State.DRAINING


def test_a_producer_whose_consumer_cannot_read_yet_needs_not_wait(net: Net, a: Member, b: Member) -> None:
    offer, fetch = a.offer("t"), b.fetch("t", sources=[a])
    net.run()
    assert offer.parts[0].state is State.GRANTED
    net.hold(a, b)
    a.abort(offer, TransferAborted("enough"))
    net.run()
    assert offer.resolved
    net.release()
    net.run()
    assert fetch.resolved


def test_what_is_not_quiet_within_the_bound_is_kept_for_ever(net: Net, a: Member, b: Member) -> None:
    _, part = moving(net, a, b)
    b.busy.add(part)
    b.abort(part.transfer, TransferAborted("enough"))
    net.wait(0)
    net.wait(SETTINGS.drain_ns - 1)
    assert part.state is State.DRAINING
    net.wait(1)
    assert part.state is State.FAILED
    assert isinstance(part.transfer.error, DeviceError)
    assert "blocks not quiet 2 s after it ended; they stay leased" in str(part.transfer.error)
    assert b.kinds[-3:] == [ActionKind.QUARANTINE, ActionKind.ENDED, ActionKind.RESOLVED]
    b.rest(part)  # far too late
    assert part.state is State.FAILED


def test_a_copy_that_hangs_is_never_said_to_be_aborted(
    net: Net, a: Member, b: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    offered, part = moving(net, a, b)
    b.busy.add(part)
    said: list[Message] = []
    session = b.session(a)
    send = session.send
    monkeypatch.setattr(session, "send", lambda message: (said.append(message), send(message)))
    net.hold(a)  # the producer is stopped
    b.abort(part.transfer, TransferAborted("enough"))
    net.wait(0)
    net.wait(SETTINGS.drain_ns)
    assert part.state is State.FAILED
    a.abort(offered.transfer, TransferAborted("so did we"))
    net.release()
    net.run()
    assert [message for message in said if isinstance(message, Abort)]
    assert not [message for message in said if isinstance(message, Aborted)]
    # The end of the lease is what the producer goes by.
    net.wait(0)
    net.wait(SETTINGS.lease_ns)
    assert offered.ended
    assert a.kinds.count(ActionKind.QUARANTINE) == 0


def test_a_copy_that_landed_and_hangs_is_told_as_given_up(
    net: Net, a: Member, b: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    offered, part = moving(net, a, b)
    b.busy.add(part)
    b.table.ledger.settle(part, Event.DONE)
    net.wait(0)
    net.wait(SETTINGS.drain_ns)
    assert part.state is State.FAILED
    net.run()
    net.wait(0)
    net.wait(SETTINGS.lease_ns)
    assert offered.state is State.ABORTED
    assert "blocks not quiet" in str(offered.transfer.error)


def test_the_bound_counts_from_when_a_timer_first_sees_it(net: Net, a: Member, b: Member) -> None:
    _, part = moving(net, a, b)
    b.busy.add(part)
    b.abort(part.transfer, TransferAborted("enough"))
    net.hold(a, b)
    net.wait(100 * SECOND)  # the process was stopped
    assert part.state is State.DRAINING
    net.wait(SETTINGS.drain_ns)
    assert part.state is State.FAILED


def test_a_part_that_landed_is_quarantined_too_if_it_never_becomes_quiet(
    net: Net, a: Member, b: Member
) -> None:
    part, _ = moving(net, a, b)
    a.busy.add(part)
    a.table.ledger.settle(part, Event.DONE)
    net.wait(0)
    net.wait(SETTINGS.drain_ns)
    assert part.state is State.FAILED
    assert isinstance(part.transfer.error, DeviceError)


def test_a_consumer_that_takes_nothing_is_cut_off_before_the_blocks_go_into_quarantine(
    net: Net, a: Member, b: Member
) -> None:
    b.one_sided = False
    part, _ = moving(net, a, b)
    a.busy.add(part)
    a.abort(part.transfer, TransferAborted("enough"))
    net.wait(0)
    net.wait(SETTINGS.drain_ns * 3 // 4 - 1)
    assert ActionKind.CUT not in a.kinds
    net.wait(1)
    assert a.kinds.count(ActionKind.CUT) == 1
    assert part.state is State.DRAINING
    a.rest(part)
    assert part.state is State.ABORTED
    assert ActionKind.QUARANTINE not in a.kinds


# -- deadlines --------------------------------------------------------------------------------------


def test_an_offer_that_nobody_takes_ends_by_its_deadline(net: Net, a: Member) -> None:
    offer = a.offer("t", deadline=5)
    assert a.next_timer() == net.now + 5 * SECOND
    net.wait(5 * SECOND - 1)
    assert not offer.resolved
    net.wait(1)
    assert offer.resolved
    assert isinstance(offer.error, DeadlineExceeded)
    assert "deadline passed at the producer, waiting for GRANT from anybody" in str(offer.error)
    assert a.next_timer() is None


def test_the_earlier_deadline_of_the_two_sides_holds_for_both(net: Net, a: Member, b: Member) -> None:
    offer, fetch = a.offer("t", deadline=30), b.fetch("t", sources=[a], deadline=2)
    net.run()
    net.wait(2 * SECOND)
    assert isinstance(fetch.error, DeadlineExceeded)
    assert isinstance(offer.error, DeadlineExceeded)
    assert offer.resolved
    assert fetch.resolved


def test_a_deadline_does_not_touch_what_drains(net: Net, a: Member, b: Member) -> None:
    offer, fetch = a.offer("t", deadline=1), b.fetch("t", sources=[a])
    net.run()
    a.ready(offer, 0)
    net.run()
    b.busy.add(fetch.parts[0])
    a.abort(offer, TransferAborted("enough"))
    net.wait(SECOND)
    assert isinstance(offer.error, TransferAborted)
    assert offer.parts[0].state is State.DRAINING


# -- the loss of a peer -----------------------------------------------------------------------------


def test_with_the_certain_death_of_its_reader_a_producer_is_quiet(net: Net, a: Member, b: Member) -> None:
    part, _ = moving(net, a, b)
    a.lose(b, certain=True)
    net.run()
    assert part.state is State.FAILED
    assert isinstance(part.transfer.error, PeerLostError)
    assert str(part.transfer.error) == "transfer 't': memory://b is gone"


def test_without_certainty_the_lease_decides(net: Net, a: Member, b: Member) -> None:
    part, _ = moving(net, a, b)
    until = part.session.lease_given
    net.hold(a, b)
    a.lose(b, certain=False)
    net.wait(0)
    assert part.state is State.DRAINING
    net.wait(until - net.now + 1)
    assert part.state is State.FAILED


def test_a_refusal_stays_a_refusal(net: Net, a: Member, b: Member) -> None:
    fetch = b.fetch("t", sources=[a])
    b.lose(a, certain=False, error=Refused("memory://a speaks protocol 5..5"))
    assert type(fetch.error) is Refused
    assert "5..5" in str(fetch.error)


def test_only_the_parts_of_a_lost_peer_end(net: Net, a: Member, b: Member) -> None:
    c = net.add("c")
    lost, _ = moving(net, a, b, "lost")
    kept, other = moving(net, a, c, "kept")
    a.lose(b, certain=True)
    net.run()
    assert lost.ended
    assert (kept.state, other.state) == (State.MOVING, State.MOVING)
    assert a.table.parts_of(kept.session) == [kept]


def test_a_session_counts_its_live_parts(net: Net, a: Member, b: Member) -> None:
    part, other = moving(net, a, b)
    session = part.session
    assert (session.live, other.session.live) == (1, 1)
    b.land(other.transfer)
    a.ready(part.transfer)
    net.run()
    b.land(other.transfer)
    net.run()
    assert (session.live, other.session.live) == (0, 0)
    assert a.table.ledger.parts == b.table.ledger.parts == {}


# -- for people -------------------------------------------------------------------------------------


def explain(member: Member, part: Part) -> str:
    return member.table.ledger.explain(part, member.net.now)


def test_it_explains_what_each_side_waits_for(net: Net, a: Member, b: Member) -> None:
    fetch = b.fetch("t", sources=[a])
    theirs = fetch.parts[0]
    assert explain(b, theirs) == "waiting for a connection to memory://a, 30.0 s left"
    net.run()
    assert explain(b, theirs) == (
        "waiting for ACCEPT from memory://a (read), where it is not offered yet, 30.0 s left"
    )
    offer = a.offer("t")
    ours = offer.parts[0]
    net.run()
    assert explain(a, ours) == "waiting for the first layer, memory://b (read) at the other end, 30.0 s left"
    assert (
        explain(b, theirs) == "waiting for the first layer, memory://a (read) at the other end, 30.0 s left"
    )
    a.ready(offer, 2)
    net.wait(500_000_000)
    assert explain(a, ours) == "1 of 4 layers announced, memory://b (read) at the other end, 29.5 s left"
    b.busy.add(theirs)
    assert explain(b, theirs) == "0 of 4 layers landed, memory://a (read) at the other end, 29.5 s left"
    b.abort(fetch, TransferAborted("enough"))
    assert explain(b, theirs) == (
        "settled as aborted, waiting until it is quiet, memory://a (read) at the other end"
    )
    b.rest(theirs)
    net.run()
    b.rest(theirs)
    assert explain(b, theirs) == "aborted, memory://a (read) at the other end"


def test_it_explains_a_push_and_several_sources(net: Net, a: Member, b: Member) -> None:
    fetch = b.fetch("pushed")
    assert explain(b, fetch.parts[0]) == "waiting for OFFER from anybody, 30.0 s left"
    offer = a.offer("other", to=[b])
    assert explain(a, offer.parts[0]) == "waiting for GRANT from memory://b, 30.0 s left"
    c = net.add("c")
    net.hold(b, c)
    both = b.fetch("both", sources=[a, c])
    net.run()
    assert explain(b, both.parts[0]) == "waiting for the other sources, 30.0 s left"


def test_a_part_says_what_it_is(net: Net, a: Member, b: Member) -> None:
    assert str(a.offer("x", attempt=2).parts[0]) == (
        "part of 'x' attempt 2 with nobody yet (producer, offered)"
    )
    part, other = moving(net, a, b)
    assert str(part) == "part of 't' with memory://b (producer, moving)"
    assert str(other) == "part of 't' with memory://a (consumer, moving)"


def test_an_end_is_told_even_if_nobody_asked(net: Net, a: Member, b: Member) -> None:
    part, other = moving(net, a, b)
    a.table.fail(part, DeviceError("broken"))
    net.run()
    assert [type(m) for m in a.sent if isinstance(m, Abort | Aborted)] == [Abort, Aborted]
    assert [type(m) for m in b.sent if isinstance(m, Abort | Aborted)] == [Aborted]
    assert "given up by the producer at memory://a: broken" in str(other.transfer.error)
