"""Ends before the sides have met, of many parts at once, and by a peer that says what it must not."""

from __future__ import annotations

from typing import Any

import pytest

from aiokv.errors import InvalidBlocks, RemoteProtocolError, TransferAborted
from aiokv.proto.layout import CacheLayout
from aiokv.proto.messages import Abort, Accept, Pong, Ready
from aiokv.proto.parts import State
from aiokv.proto.settings import Settings
from aiokv.proto.transfers import ActionKind
from aiokv.proto.waiting import Withdrawn
from aiokv.testing.tables import Member, Net

SETTINGS = Settings()

#: The shape of a net's members.
SHAPE: dict[str, Any] = {
    "layers": 4, "blocks": 16, "block_size": 4, "heads": 4, "head_size": 8, "dtype": "uint8", "model": b"m",
}  # fmt: skip


@pytest.fixture
def net() -> Net:
    return Net()


@pytest.fixture
def a(net: Net) -> Member:
    return net.add("a")


@pytest.fixture
def b(net: Net) -> Member:
    return net.add("b")


# -- a consumer that gives up before it has asked ---------------------------------------------------


@pytest.mark.parametrize("in_contact", [False, True])
def test_a_reader_that_gives_up_before_it_asks_frees_the_producer(
    net: Net, a: Member, b: Member, in_contact: bool
) -> None:
    # It asks nobody before it has a link to every source, and this one never answers.
    never = net.add("never")
    net.hold(b, never)
    offer = a.offer("t")
    fetch = b.fetch("t", sources=[a, never])
    if in_contact:
        net.run()
    b.abort(fetch, TransferAborted("enough"))
    net.run()
    assert fetch.resolved
    assert offer.resolved
    assert offer.parts[0].state is State.ABORTED
    assert "given up by the consumer at memory://b: enough" in str(offer.error)


@pytest.mark.parametrize("asked", [False, True])
def test_a_reader_that_gave_up_before_the_offer_frees_it_when_it_comes(
    net: Net, a: Member, b: Member, asked: bool
) -> None:
    fetch = b.fetch("t", sources=[a])
    if asked:
        net.run()
    b.abort(fetch, TransferAborted("enough"))
    net.run()
    assert fetch.resolved
    offer = a.offer("t", deadline=600)
    net.run()
    assert offer.resolved
    assert offer.parts[0].state is State.ABORTED
    assert "given up by the consumer at memory://b before: enough" in str(offer.error)
    assert not len(a.table.withdrawn)


def test_who_comes_in_time_has_what_another_gave_up(net: Net, a: Member, b: Member) -> None:
    c = net.add("c")
    given_up, fetch = b.fetch("t", sources=[a]), c.fetch("t", sources=[a])
    b.abort(given_up, TransferAborted("enough"))
    net.run()
    a.offer("t")
    net.run()
    c.land(fetch)
    net.run()
    assert fetch.error is None


def test_what_was_given_up_is_forgotten(net: Net, a: Member, b: Member) -> None:
    """After a while, with the peer, and when there is too much of it."""
    for number in range(4):
        b.abort(b.fetch(f"t{number}", sources=[a]), TransferAborted("enough"))
    net.run()
    assert len(a.table.withdrawn) == 4
    net.now += SETTINGS.tombstone_ns + 1
    offer = a.offer("t3")
    net.run()
    assert not offer.resolved
    for session in list(a.sessions.values()):
        a.table.lost(session, TransferAborted("gone"), certain=True)
    assert not len(a.table.withdrawn)


def test_the_oldest_of_too_many_that_gave_up_are_forgotten(net: Net, a: Member, b: Member) -> None:
    b.fetch("t", sources=[a])
    net.run()
    (session,) = a.sessions.values()
    withdrawn = Withdrawn(10, 3)
    for now, name in enumerate(("t0", "t1", "t2", "t3", "t1")):
        withdrawn.note(session, Abort(name, 1, "consumer", "aborted", "enough"), now)
    assert len(withdrawn) == 3
    assert not withdrawn.claim(("t0", 1), 5)
    assert not withdrawn.claim(("t2", 1), 12), "for as long as it says"
    assert len(withdrawn.claim(("t1", 1), 13)) == 1, "said again, it counts from then on"


def test_a_source_that_is_gone_costs_the_other_sources_nothing(net: Net, a: Member, b: Member) -> None:
    never = net.add("never")
    net.hold(b, never)
    offer = a.offer("t", deadline=600)
    fetch = b.fetch("t", sources=[a, never], deadline=600)
    while not fetch.resolved:
        assert net.wait_for_timer()
    assert offer.resolved
    assert net.now < offer.deadline - 500 * 10**9


def test_only_one_reader_ends_and_only_once(net: Net, a: Member, b: Member) -> None:
    c = net.add("c")
    offer = a.offer("t", readers=2, ready=True)
    fetch = b.fetch("t", sources=[a])
    b.abort(fetch, TransferAborted("enough"))
    net.run()
    b.session(a).send(b.sent[0])
    net.run()
    assert not offer.resolved
    other = c.fetch("t", sources=[a])
    net.run()
    c.land(other)
    net.run()
    assert other.error is None
    assert offer.resolved


def test_a_producer_that_gives_up_before_it_has_said_its_offer_ends_who_waits_for_it(
    net: Net, a: Member, b: Member
) -> None:
    fetch = b.fetch("t")
    offer = a.offer("t", to=[b])
    a.abort(offer, TransferAborted("enough"))
    net.run()
    assert fetch.resolved
    assert "given up by the producer at memory://a: enough" in str(fetch.error)


# -- many parts -------------------------------------------------------------------------------------


def test_a_fetch_of_very_many_parts_ends_with_the_first_that_fails(net: Net, b: Member) -> None:
    fetch = b.fetch("t", parts=3000)
    b.table.fail(fetch.parts[1500], TransferAborted("enough"))
    net.run()
    assert fetch.resolved
    assert {len(str(part.life.error)) for part in fetch.parts if part is not fetch.parts[1500]} == {
        len("transfer 't': another part failed: enough")
    }


def test_parts_are_found_by_their_session(net: Net, a: Member, b: Member) -> None:
    c = net.add("c")
    fetches = [b.fetch(f"t{number}", sources=[source]) for number, source in enumerate([a, c, a])]
    assert b.table.parts_of(b.session(a)) == [fetches[0].parts[0], fetches[2].parts[0]]
    b.abort(fetches[0], TransferAborted("enough"))
    b.abort(fetches[1], TransferAborted("enough"))
    assert b.table.parts_of(b.session(a)) == [fetches[2].parts[0]]
    assert b.table.parts_of(b.session(c)) == []


# -- what a peer must not say -----------------------------------------------------------------------


def test_who_sends_must_not_announce_layers(net: Net, a: Member, b: Member) -> None:
    b.one_sided = False
    a.offer("t")
    fetch = b.fetch("t", sources=[a])
    net.run()
    a.session(b).send(Ready("t", 0, b"\x01"))
    net.run()
    assert [type(fault) for fault in b.faults] == [RemoteProtocolError]
    assert fetch.resolved


def test_nor_with_its_answer(net: Net, a: Member, b: Member) -> None:
    b.one_sided = False
    fetch = b.fetch("t", sources=[a])
    net.run()
    blocks = tuple((0, b"\0\0\0\0") for _ in a.table.ledger.layout.groups)
    a.session(b).send(Accept("t", 0, tokens=4, blocks=blocks, ready=b"\x0f", lease=0))
    net.run()
    assert [type(fault) for fault in b.faults] == [RemoteProtocolError]
    assert fetch.resolved
    assert b.moves == {}


def test_a_lease_later_than_one_given_now_is_of_another_clock(net: Net, a: Member, b: Member) -> None:
    fetch = b.fetch("t", sources=[a])
    net.run()
    a.session(b).send(Pong(net.now + SETTINGS.lease_ns))
    net.run()
    assert b.faults == []
    a.session(b).send(Pong(net.now + SETTINGS.lease_ns + 2_000_000))
    net.run()
    assert [type(fault) for fault in b.faults] == [RemoteProtocolError]
    assert fetch.resolved


# -- sources that don't agree -----------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [-1, 8])
def test_sources_that_offer_different_numbers_of_tokens_fail_the_fetch(net: Net, tokens: int) -> None:
    def half(name: str, first: int) -> Member:
        return net.add(name, CacheLayout.attention(**SHAPE, rank_heads=(first, first + 2)))

    low, high, whole = half("low", 0), half("high", 2), net.add("whole")
    offers = [low.offer("t", [0, 1], ready=True), high.offer("t", [0, 1, 2], ready=True)]
    fetch = whole.fetch("t", [0, 1, 2], sources=[low, high], tokens=tokens)
    net.run()
    if tokens < 0:
        assert isinstance(fetch.error, InvalidBlocks)
        assert "different numbers of tokens: [8, 12]" in str(fetch.error)
        assert fetch.resolved
        assert all(offer.resolved for offer in offers)
    else:
        assert fetch.error is None


# -- a consumer that takes no data ------------------------------------------------------------------


def test_a_producer_that_sends_takes_back_what_is_not_taken_before_the_bound(
    net: Net, a: Member, b: Member
) -> None:
    b.one_sided = False
    offer, fetch = a.offer("t", ready=True), b.fetch("t", sources=[a])
    net.run()
    part = offer.parts[0]
    a.busy.add(part)
    a.abort(offer, TransferAborted("enough"))
    net.run()
    assert fetch.resolved
    began = net.now
    while ActionKind.CUT not in a.kinds:
        assert net.wait_for_timer()
    assert net.now < began + SETTINGS.drain_ns
    a.rest(part)
    net.run()
    assert offer.resolved
    assert ActionKind.QUARANTINE not in a.kinds


def test_if_even_that_does_not_help_the_blocks_are_kept(net: Net, a: Member, b: Member) -> None:
    b.one_sided = False
    offer = a.offer("t", ready=True)
    b.fetch("t", sources=[a])
    net.run()
    a.busy.add(offer.parts[0])
    a.abort(offer, TransferAborted("enough"))
    net.wait(100 * SETTINGS.drain_ns)  # it stood still: both times are over when it looks
    net.wait(100 * SETTINGS.drain_ns)
    assert a.kinds.count(ActionKind.CUT) == 1
    assert ActionKind.QUARANTINE not in a.kinds
    net.wait(SETTINGS.drain_ns)
    assert offer.resolved
    assert ActionKind.QUARANTINE in a.kinds
