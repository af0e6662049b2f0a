"""The consumer's side: whom it asks for what, what it makes of answers, and offers it waits for."""

from __future__ import annotations

import msgspec
import pytest

from aiokv.errors import InvalidBlocks, LayoutMismatch, PeerLostError, TransferAborted
from aiokv.proto.messages import Abort, Accept, Grant, Landed, Offer, Ready, Refuse
from aiokv.proto.parts import State
from aiokv.proto.settings import SECOND, Settings
from aiokv.proto.transfers import ActionKind
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


def grants(member: Member) -> list[Grant]:
    return [message for message in member.sent if isinstance(message, Grant)]


def accept(**changes: object) -> Accept:
    made = Accept("t", 0, 8, ((0, bytes(8)),), b"\0", 0)
    return msgspec.structs.replace(made, **changes)


def answer(net: Net, producer: Member, consumer: Member, *messages: object) -> None:
    """Have ``producer`` say what it never would, and everybody do what comes of it."""
    for message in messages:
        producer.session(consumer).send(message)
    net.run()


# -- asking -----------------------------------------------------------------------------------------


def test_a_source_is_asked_for_what_is_needed(net: Net, a: Member, b: Member) -> None:
    b.fetch("t", [4, 5], sources=[a], first_token=3, tokens=7, deadline=9, attempt=2)
    net.run()
    assert grants(b) == [Grant("t", 2, 9_000_000, "read", b"link", 3, 7, ((0, 4),))]


def test_where_the_producer_sends_it_is_told_the_blocks(net: Net, a: Member, b: Member) -> None:
    b.one_sided = False
    b.fetch("t", [4, 5], sources=[a])
    net.run()
    (grant,) = grants(b)
    assert grant.link == "sent"
    assert grant.blocks == ((0, b"\4\0\0\0\5\0\0\0"),)


def test_heads_are_shared_out_among_sources(net: Net, b: Member) -> None:
    low, high = net.add("low", heads=(0, 1)), net.add("high", heads=(1, 4))
    b.fetch("t", sources=[high, low])
    net.run()
    assert [grant.heads for grant in grants(b)] == [((1, 4),), ((0, 1),)]


def test_nobody_is_asked_before_all_sources_are_in_contact(net: Net, a: Member, b: Member) -> None:
    c = net.add("c")
    net.hold(b, c)
    b.fetch("t", sources=[a, c])
    net.run()
    assert grants(b) == []
    net.release()
    net.run()
    assert len(grants(b)) == 2


def test_heads_that_no_source_has_fail_the_fetch_and_nobody_was_asked(net: Net, a: Member, b: Member) -> None:
    low, middle = net.add("low", heads=(0, 1)), net.add("middle", heads=(1, 2))
    fetch = b.fetch("t", sources=[low, middle])
    net.run()
    assert isinstance(fetch.error, LayoutMismatch)
    assert "'t'" in str(fetch.error)
    assert "no source holds KV head 2 of 0..3 (the sources hold 0..0, 1..1)" in str(fetch.error)
    assert fetch.resolved
    assert grants(b) == []


def test_a_source_with_another_layout_fails_the_fetch_here(net: Net, a: Member, b: Member) -> None:
    other = net.add("other", msgspec.structs.replace(LAYOUT, model=b"n"))
    offer = other.offer("t")
    fetch = b.fetch("t", sources=[a, other])
    net.run()
    assert isinstance(fetch.error, LayoutMismatch)
    assert "this cache and that of memory://other differ: model fingerprint 6d against 6e" in str(fetch.error)
    assert fetch.resolved
    assert grants(b) == []
    assert not offer.resolved  # it is for whoever comes, and whose layout fits


def test_a_link_that_cannot_be_opened_fails_the_fetch(net: Net, a: Member, b: Member) -> None:
    b.link_error = PeerLostError("no data path to memory://a")
    fetch = b.fetch("t", sources=[a])
    net.run()
    assert fetch.error is b.link_error
    assert fetch.resolved


# -- nothing to get ---------------------------------------------------------------------------------


def test_a_prefix_that_is_here_in_full_is_not_fetched(net: Net, a: Member, b: Member) -> None:
    offer = a.offer("t")
    fetch = b.fetch("t", sources=[a], first_token=8, tokens=8)
    net.run()
    (grant,) = grants(b)
    assert (grant.link, grant.link_id, grant.blocks) == ("", b"", ())
    assert fetch.parts[0].state is State.LANDED
    assert offer.parts[0].state is State.LANDED
    assert not [message for message in b.sent if isinstance(message, Landed)]


def test_a_source_without_a_head_to_add_ends_at_once_and_the_others_go_on(
    net: Net, a: Member, b: Member
) -> None:
    c = net.add("c")
    offers = [member.offer("t", ready=True) for member in (a, c)]
    fetch = b.fetch("t", sources=[a, c])
    net.run()
    assert [part.state for part in fetch.parts] == [State.MOVING, State.LANDED]
    assert offers[1].resolved
    assert not fetch.resolved
    b.land(fetch)
    net.run()
    assert fetch.resolved
    assert offers[0].resolved
    assert fetch.error is None


def test_what_needs_nothing_does_not_wait_for_an_offer(net: Net, a: Member, b: Member) -> None:
    fetch = b.fetch("t", sources=[a], tokens=0)
    net.run()
    assert fetch.resolved
    assert fetch.error is None


# -- answers ----------------------------------------------------------------------------------------


def test_tokens_are_those_offered_unless_fewer_were_asked_for(net: Net, a: Member, b: Member) -> None:
    for tid in "tu":
        a.offer(tid, tokens=7)
    whole, less = b.fetch("t", sources=[a]), b.fetch("u", sources=[a], tokens=5)
    net.run()
    assert (whole.parts[0].tokens, less.parts[0].tokens) == (7, 5)


def test_more_tokens_than_the_blocks_have_room_for_fail_the_fetch(net: Net, a: Member, b: Member) -> None:
    offer = a.offer("t", [0, 1, 2])
    fetch = b.fetch("t", [0, 1], sources=[a])
    net.run()
    assert isinstance(fetch.error, InvalidBlocks)
    assert str(fetch.error) == "transfer 't': 12 tokens are offered, the blocks have room for 8"
    assert fetch.resolved
    assert isinstance(offer.error, TransferAborted)
    assert "12 tokens are offered, the blocks have room for 8" in str(offer.error)
    assert offer.resolved
    assert ActionKind.START not in b.kinds


def test_an_answer_said_twice_counts_once(net: Net, a: Member, b: Member) -> None:
    fetch = b.fetch("t", sources=[a])
    net.run()
    answer(net, a, b, accept(), accept(ready=b"\x0f", tokens=4))
    assert b.kinds.count(ActionKind.START) == 1
    assert fetch.parts[0].tokens == 8
    assert b.moves[fetch.parts[0]] == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blocks": ()}, "block lists for 0 groups"),
        ({"blocks": ((0, b"\x10\0\0\0"),)}, "block 16 of a cache with 16 blocks"),
        ({"blocks": ((1, bytes(4)),)}, "malformed block list"),
        ({"lease": 2**61}, "its clock is not ours"),
    ],
)
def test_an_answer_that_cannot_be_meant_ends_the_session(
    net: Net, a: Member, b: Member, changes: dict[str, object], message: str
) -> None:
    fetch = b.fetch("t", sources=[a])
    net.run()
    answer(net, a, b, accept(**changes))
    (fault,) = b.faults
    assert message in str(fault)
    assert isinstance(fetch.error, PeerLostError)
    assert fetch.resolved


def test_fewer_tokens_than_asked_for_are_against_the_rules(net: Net, a: Member, b: Member) -> None:
    fetch = b.fetch("t", sources=[a], tokens=8)
    net.run()
    answer(net, a, b, accept(tokens=4))
    assert [str(fault) for fault in b.faults] == ["memory://a accepted 8 tokens of 4"]
    assert fetch.resolved


@pytest.mark.parametrize(
    "message",
    [accept(tid="u"), accept(attempt=1), Ready("u", 0, b"\x0f"), Ready("t", 0, b"\x0f"), Landed("t", 0)],
)
def test_what_means_nothing_here_changes_nothing(net: Net, a: Member, b: Member, message: object) -> None:
    fetch = b.fetch("t", sources=[a])
    net.run()
    answer(net, a, b, message)
    assert fetch.parts[0].state is State.GRANTED
    assert b.faults == []
    assert b.moves[fetch.parts[0]] == 0


def test_an_answer_brings_its_lease(net: Net, a: Member, b: Member) -> None:
    a.offer("t")
    fetch = b.fetch("t", sources=[a])
    net.run()
    assert fetch.parts[0].session.lease_held == net.now + Settings().lease_ns


# -- layers -----------------------------------------------------------------------------------------


def test_layers_may_be_read_as_they_are_announced_each_once(net: Net, a: Member, b: Member) -> None:
    offer = a.offer("t")
    fetch = b.fetch("t", sources=[a])
    part = fetch.parts[0]
    net.run()
    a.ready(offer, 2)
    net.run()
    assert (b.moves[part], part.state) == (0b0100, State.MOVING)
    b.land(fetch)
    answer(net, a, b, Ready("t", 0, b"\x04"))
    assert b.moves[part] == 0
    a.ready(offer, 0)
    net.run()
    assert b.moves[part] == 0b0001


def test_layers_that_no_model_has_are_ignored(net: Net, a: Member, b: Member) -> None:
    fetch = b.fetch("t", sources=[a])
    net.run()
    answer(net, a, b, accept(), Ready("t", 0, b"\xff" * 100))
    assert b.moves[fetch.parts[0]] == 0b1111


def test_a_fetch_has_landed_when_all_layers_of_all_sources_have(net: Net, b: Member) -> None:
    low, high = net.add("low", heads=(0, 2)), net.add("high", heads=(2, 4))
    offers = [member.offer("t", ready=True) for member in (low, high)]
    fetch = b.fetch("t", sources=[low, high])
    net.run()
    b.land(fetch, 0, 1, 2)
    assert fetch.parts[0].landed == 0b0111
    b.table.consumer.copied(fetch.parts[0], 0b1000)
    net.run()
    assert [part.state for part in fetch.parts] == [State.LANDED, State.MOVING]
    assert [offer.resolved for offer in offers] == [True, False]
    b.table.consumer.copied(fetch.parts[1], 0b1000)
    net.run()
    assert fetch.resolved
    assert [offer.error for offer in offers] == [None, None]


def test_what_lands_after_the_end_changes_nothing(net: Net, a: Member, b: Member) -> None:
    a.offer("t", ready=True)
    fetch = b.fetch("t", sources=[a])
    net.run()
    b.busy.add(fetch.parts[0])
    b.abort(fetch, TransferAborted("enough"))
    b.table.consumer.copied(fetch.parts[0], 0b1111)
    b.rest(fetch.parts[0])
    net.run()
    b.rest(fetch.parts[0])
    assert fetch.parts[0].state is State.ABORTED


# -- offers that name this engine -------------------------------------------------------------------


def test_an_offer_that_came_first_waits_for_its_fetch(net: Net, a: Member, b: Member) -> None:
    offer = a.offer("t", to=[b], ready=True)
    net.run()
    assert len(b.table.waiting) == 1
    fetch = b.fetch("t")
    net.run()
    assert len(b.table.waiting) == 0
    b.land(fetch)
    net.run()
    assert offer.resolved
    assert fetch.resolved


def test_a_fetch_that_came_first_waits_for_its_offer(net: Net, a: Member, b: Member) -> None:
    fetch = b.fetch("t")
    net.run()
    a.offer("t", to=[b], ready=True)
    net.run()
    assert fetch.parts[0].state is State.MOVING


def test_an_offer_that_waited_in_vain_is_refused_by_its_own_deadline(net: Net, a: Member, b: Member) -> None:
    a.offer("t", to=[b], deadline=1)
    net.run()
    net.wait(SECOND)
    assert len(b.table.waiting) == 0
    assert b.next_timer() is None


def test_an_offer_to_a_fetch_that_has_its_sources_is_refused(net: Net, a: Member, b: Member) -> None:
    c = net.add("c")
    b.fetch("t")
    first = a.offer("t", to=[b])
    net.run()
    second = c.offer("t", to=[b])
    net.run()
    (refusal,) = [message for message in b.sent if isinstance(message, Refuse)]
    assert (refusal.reason, refusal.role) == ("sources", "consumer")
    assert second.resolved
    assert "the fetch has all its sources" in str(second.error)
    assert first.error is None


def test_an_offer_to_a_fetch_that_ended_is_refused_and_told_how(net: Net, a: Member, b: Member) -> None:
    b.abort(b.fetch("t"), TransferAborted("changed my mind"))
    offer = a.offer("t", to=[b])
    net.run()
    assert offer.resolved
    assert isinstance(offer.error, TransferAborted)
    assert "refused (aborted): the fetch ended: changed my mind" in str(offer.error)


def test_several_producers_may_push_to_one_fetch(net: Net, b: Member) -> None:
    low, high = net.add("low", heads=(0, 2)), net.add("high", heads=(2, 4))
    fetch = b.fetch("t", parts=2)
    low.offer("t", to=[b], ready=True)
    net.run()
    assert grants(b) == []
    high.offer("t", to=[b], ready=True)
    net.run()
    assert sorted(grant.heads for grant in grants(b)) == [((0, 2),), ((2, 4),)]
    b.land(fetch)
    net.run()
    assert fetch.resolved
    assert fetch.error is None


def test_a_source_that_is_asked_anyway_may_name_us_too(net: Net, a: Member, b: Member) -> None:
    fetch = b.fetch("t", sources=[a])
    offer = a.offer("t", to=[b], ready=True)
    net.run()
    b.land(fetch)
    net.run()
    assert (offer.resolved, fetch.resolved) == (True, True)
    assert (offer.error, fetch.error) == (None, None)


def test_an_offer_of_who_had_its_part_in_what_landed_is_not_refused(net: Net, a: Member, b: Member) -> None:
    # It comes over another session of the same two, say, and is not told a second time how it ended.
    a.offer("t")
    fetch = b.fetch("t", sources=[a], first_token=8, tokens=8)
    net.run()
    assert fetch.resolved
    assert fetch.error is None
    answer(net, a, b, Offer("t", 0, 1_000_000))
    assert not [message for message in b.sent if isinstance(message, Refuse)]
    c = net.add("c")
    answer(net, c, b, Offer("t", 0, 1_000_000))
    (refusal,) = [message for message in b.sent if isinstance(message, Refuse)]
    assert refusal.reason == "ended"


def test_an_offer_that_is_withdrawn_waits_no_more(net: Net, a: Member, b: Member) -> None:
    offer = a.offer("t", to=[b])
    net.run()
    a.abort(offer, TransferAborted("enough"))
    net.run()
    assert len(b.table.waiting) == 0
    assert [type(message) for message in a.sent if isinstance(message, Offer | Abort)] == [Offer, Abort]
