"""The producer's side: who may claim an offer, what is refused and why, and how layers are announced."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from aiokv.errors import CapacityError, LayoutMismatch, Refused
from aiokv.proto.messages import Abort, Accept, Grant, Landed, Offer, Ready, Refuse
from aiokv.proto.parts import State
from aiokv.proto.session import Session
from aiokv.proto.settings import SECOND, Settings
from aiokv.testing.tables import LAYOUT, Member, Net


@pytest.fixture
def net() -> Net:
    return Net()


@pytest.fixture
def a(net: Net) -> Member:
    return net.add("a")


@pytest.fixture
def b(net: Net) -> Member:
    return net.add("b")


@pytest.fixture
def session(net: Net, a: Member, b: Member) -> Session:
    """A's session with b, up; b says what the tests make up."""
    b.session(a)
    net.run()
    return a.session(b)


def grant(tid: str = "t", **changes: object) -> Grant:
    made = Grant(tid, 0, 30_000_000, "read", b"link", 0, -1, ((0, 4),))
    return msgspec.structs.replace(made, **changes)


def says(net: Net, member: Member, session: Session, message: Grant | Landed) -> None:
    """Have ``member`` take a message, and everybody what comes of it."""
    member.table.receive(session, message, net.now)
    net.run()


def refusals(member: Member) -> list[tuple[str, str]]:
    return [(message.reason, message.text) for message in member.sent if isinstance(message, Refuse)]


# -- a grant finds its offer ------------------------------------------------------------------------


def test_a_grant_is_accepted_with_the_blocks_and_what_is_ready(net: Net, a: Member, session: Session) -> None:
    offer = a.offer("t", [3, 1], tokens=7)
    a.ready(offer, 0, 3)
    says(net, a, session, grant())
    (accept,) = [message for message in a.sent if isinstance(message, Accept)]
    assert accept == Accept(
        "t",
        0,
        7,
        ((0, np.array([3, 1], "<u4").tobytes()),),
        b"\x09",
        net.now + Settings().lease_ns,
    )
    assert offer.parts[0].state is State.MOVING


def test_a_grant_that_came_first_waits_for_its_offer(net: Net, a: Member, session: Session) -> None:
    says(net, a, session, grant())
    assert len(a.table.waiting) == 1
    offer = a.offer("t")
    net.run()
    assert len(a.table.waiting) == 0
    assert offer.parts[0].accepted


def test_a_grant_that_waited_in_vain_is_refused_by_its_own_deadline(
    net: Net, a: Member, session: Session
) -> None:
    says(net, a, session, grant(remaining_us=1_000_000))
    assert a.next_timer() == net.now + SECOND
    net.wait(SECOND)
    assert refusals(a) == [("unknown", "it was not offered here before its deadline")]
    assert a.next_timer() is None


def test_grants_beyond_the_bound_are_refused_at_once(net: Net, b: Member) -> None:
    tight = net.add("tight", settings=Settings(parked_per_peer=2))
    b.session(tight)
    net.run()
    for number in range(3):
        says(net, tight, tight.session(b), grant(f"t{number}"))
    assert refusals(tight) == [("capacity", "the grant may not wait here for its offer")]


def test_a_malformed_grant_that_waited_is_refused_and_does_not_hurt_the_offer(
    net: Net, a: Member, session: Session
) -> None:
    for number in range(16):
        says(net, a, session, grant(f"t{number}", blocks=((0, b"\xff\xff\xff\x7f"),)))
    offers = [a.offer(f"t{number}") for number in range(16)]
    net.run()
    assert [offer.error for offer in offers] == [None] * 16
    assert {reason for reason, _ in refusals(a)} == {"blocks"}


# -- refusals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason", "text"),
    [
        ({"tokens": 9}, "tokens", "9 tokens asked for, 8 are offered"),
        ({"heads": ()}, "heads", "heads of 0 groups asked for, there are 1"),
        ({"heads": ((0, 4), (0, 4))}, "heads", "heads of 2 groups asked for, there are 1"),
        ({"heads": ((0, 5),)}, "heads", "heads 0..4 asked for; both sides have 0..3"),
        ({"heads": ((2**40, 2**41),)}, "heads", "both sides have 0..3"),
    ],
)
def test_a_grant_that_cannot_be_served_is_refused_and_the_offer_stays(
    net: Net, a: Member, session: Session, changes: dict[str, object], reason: str, text: str
) -> None:
    offer = a.offer("t")
    says(net, a, session, grant(**changes))
    ((found, said),) = refusals(a)
    assert found == reason
    assert text in said
    assert offer.parts[0].state is State.OFFERED
    says(net, a, session, grant())
    assert offer.parts[0].state is State.GRANTED


def test_a_reader_with_another_layout_is_refused_and_told_what_differs(net: Net, a: Member) -> None:
    group = msgspec.structs.replace(LAYOUT.groups[0], dtype="int8", head_size=4)
    other = net.add("other", msgspec.structs.replace(LAYOUT, groups=(group,), model=b"n"))
    other.session(a)
    net.run()
    offer = a.offer("t")
    says(net, a, a.session(other), grant())
    ((reason, text),) = refusals(a)
    assert reason == "layout"
    for part in ("model fingerprint 6d against 6e", "head_size 8 against 4", "dtype uint8 against int8"):
        assert part in text
    assert offer.parts[0].state is State.OFFERED


def test_the_same_part_twice_is_refused_and_the_first_goes_on(net: Net, a: Member, session: Session) -> None:
    offer = a.offer("t", readers=2)
    says(net, a, session, grant())
    says(net, a, session, grant())
    assert refusals(a) == [("duplicate", "the offer has no reader left for this engine")]
    assert [part.state for part in offer.parts] == [State.GRANTED, State.OFFERED]


def test_the_same_part_again_after_it_ended_is_refused(net: Net, a: Member, session: Session) -> None:
    offer = a.offer("t", readers=2)
    says(net, a, session, grant())
    says(net, a, session, Landed("t", 0))
    assert offer.parts[0].state is State.LANDED
    says(net, a, session, grant())
    assert [reason for reason, _ in refusals(a)] == ["duplicate"]


def test_a_reader_too_many_is_refused(net: Net, a: Member, b: Member, session: Session) -> None:
    c = net.add("c")
    c.session(a)
    net.run()
    a.offer("t")
    says(net, a, session, grant())
    says(net, a, a.session(c), grant())
    assert [reason for reason, _ in refusals(a)] == ["readers"]


def test_a_named_reader_cannot_be_replaced_by_another(net: Net, a: Member, session: Session) -> None:
    c = net.add("c")
    a.offer("t", to=[c])
    net.run()
    says(net, a, session, grant())
    assert [reason for reason, _ in refusals(a)] == ["readers"]


def test_what_has_ended_is_refused_and_told_how(net: Net, a: Member, session: Session) -> None:
    offer = a.offer("t")
    a.abort(offer, Refused("changed my mind"))
    says(net, a, session, grant())
    assert refusals(a) == [("failed", "the offer ended: changed my mind")]


def test_the_consumer_gets_an_error_of_the_kind_of_the_refusal(net: Net, a: Member, b: Member) -> None:
    fetches = {}
    for reason, kind in (("layout", LayoutMismatch), ("capacity", CapacityError), ("readers", Refused)):
        fetches[reason] = kind, b.fetch(reason, sources=[a])
    net.run()
    for reason in fetches:
        a.session(b).send(Refuse(reason, 0, "producer", reason, "no"))
    net.run()
    for reason, (kind, fetch) in fetches.items():
        assert type(fetch.error) is kind
        assert str(fetch.error) == f"transfer {reason!r}: memory://a refused ({reason}): no"
        assert fetch.resolved


# -- readers ----------------------------------------------------------------------------------------


def test_a_reader_with_nothing_to_get_ends_at_once(net: Net, a: Member, session: Session) -> None:
    offer = a.offer("t")
    says(net, a, session, grant(link="", link_id=b""))
    assert offer.parts[0].state is State.LANDED
    assert offer.resolved
    assert not [message for message in a.sent if isinstance(message, Accept)]


def test_what_the_consumer_says_of_its_deadline_shortens_ours(net: Net, a: Member, session: Session) -> None:
    offer = a.offer("t")
    says(net, a, session, grant(remaining_us=2_000_000))
    assert offer.parts[0].deadline == net.now + 2 * SECOND
    other = a.offer("u", deadline=1)
    says(net, a, session, grant("u", remaining_us=2**61))
    assert other.parts[0].deadline == net.now + SECOND


def test_landed_decides_whatever_we_meant_to_do(net: Net, a: Member, session: Session) -> None:
    offer = a.offer("t", ready=True)
    says(net, a, session, grant())
    net.hold(*net.members.values())
    a.abort(offer, Refused("changed my mind"))
    says(net, a, session, Landed("t", 0))
    assert offer.resolved
    assert offer.parts[0].state is State.ABORTED


def test_landed_of_what_was_not_granted_is_against_the_rules(
    net: Net, a: Member, b: Member, session: Session
) -> None:
    offer = a.offer("t", to=[b])
    net.run()
    b.session(a).send(Landed("t", 0))
    net.run()
    (fault,) = a.faults
    assert str(fault) == "memory://b says LANDED of what it was not granted"
    assert offer.resolved


def test_landed_of_an_unknown_transfer_is_ignored(net: Net, a: Member, session: Session) -> None:
    says(net, a, session, Landed("never", 0))
    assert a.faults == []


# -- layers -----------------------------------------------------------------------------------------


def announcements(member: Member) -> list[bytes]:
    return [message.ready for message in member.sent if isinstance(message, Ready)]


def test_a_turn_has_one_announcement_of_all_layers_so_far(net: Net, a: Member, session: Session) -> None:
    offer = a.offer("t")
    says(net, a, session, grant())
    a.ready(offer, 1)
    a.ready(offer, 0)
    a.ready(offer, 0)
    net.run()
    assert announcements(a) == [b"\x03"]
    a.ready(offer, 3)
    net.run()
    assert announcements(a) == [b"\x03", b"\x0b"]
    a.ready(offer, 0, 1, 3)
    net.run()
    assert len(announcements(a)) == 2


def test_what_was_ready_before_the_grant_comes_with_the_answer(net: Net, a: Member, session: Session) -> None:
    a.offer("t", ready=True)
    says(net, a, session, grant())
    assert announcements(a) == []


def test_each_reader_is_told(net: Net, a: Member, b: Member) -> None:
    c = net.add("c")
    offer = a.offer("t", readers=2)
    fetches = [member.fetch("t", sources=[a]) for member in (b, c)]
    net.run()
    a.ready(offer, 2)
    net.run()
    assert announcements(a) == [b"\x04", b"\x04"]
    assert [member.moves[fetch.parts[0]] for member, fetch in zip((b, c), fetches, strict=True)] == [4, 4]


def test_nothing_is_announced_of_what_has_ended(net: Net, a: Member, session: Session) -> None:
    offer = a.offer("t")
    says(net, a, session, grant())
    a.ready(offer, 0)
    a.abort(offer, Refused("no"))
    net.run()
    a.ready(offer, 1)
    net.run()
    assert announcements(a) == []


def test_where_the_producer_sends_nothing_is_announced(net: Net, a: Member, b: Member) -> None:
    b.one_sided = False
    offer, fetch = a.offer("t"), b.fetch("t", sources=[a])
    net.run()
    a.ready(offer, 0, 1)
    net.run()
    assert announcements(a) == []
    assert a.moves[offer.parts[0]] == 0b11
    (accept,) = [message for message in a.sent if isinstance(message, Accept)]
    assert (accept.ready, accept.lease) == (b"\0", 0)
    assert fetch.parts[0].state is State.GRANTED


# -- push -------------------------------------------------------------------------------------------


def test_a_named_reader_is_told_of_the_offer_once_it_is_in_contact(net: Net, a: Member, b: Member) -> None:
    a.offer("t", to=[b], deadline=9)
    net.run()
    (offer,) = [message for message in a.sent if isinstance(message, Offer)]
    assert (offer.tid, offer.remaining_us) == ("t", 9_000_000)


def test_a_named_reader_with_another_layout_fails_the_offer_here_and_is_told_why(net: Net, a: Member) -> None:
    other = net.add("other", msgspec.structs.replace(LAYOUT, model=b"n"))
    fetch = other.fetch("t")
    offer = a.offer("t", to=[other])
    net.run()
    assert isinstance(offer.error, LayoutMismatch)
    assert "model fingerprint 6d against 6e" in str(offer.error)
    assert offer.resolved
    (abort,) = [message for message in a.sent if isinstance(message, Abort)]
    assert "model fingerprint 6d against 6e" in abort.text
    assert fetch.resolved
    assert "model fingerprint 6d against 6e" in str(fetch.error)


def test_a_named_reader_is_told_once_however_often_it_comes_into_contact(
    net: Net, a: Member, b: Member, session: Session
) -> None:
    # An offer that begins in the turn in which the session comes up is connected by both.
    offer = a.offer("t", to=[b])
    a.table.producer.connected(offer.parts[0], net.now)
    net.run()
    assert sum(isinstance(message, Offer) for message in a.sent) == 1
    assert not refusals(b)
    assert not offer.parts[0].ended
