"""Two tables and more, joined by sessions: each transfer ends once on both sides, whatever happens when."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from aiokv.errors import DeadlineExceeded, DeviceError, PeerLostError, TransferAborted
from aiokv.proto.messages import Abort, Aborted, Ready
from aiokv.proto.parts import State
from aiokv.proto.settings import SECOND, Settings
from aiokv.proto.transfers import ActionKind, Fetching, Offering
from aiokv.testing.tables import Net

SETTINGS = Settings()


class Pair:
    """A producer, a consumer, and one transfer between them, taken to a state."""

    def __init__(self, *, one_sided: bool = True, push: bool = False) -> None:
        self.net = Net()
        self.a, self.b = self.net.add("a"), self.net.add("b")
        self.b.one_sided = one_sided
        self.push = push
        self.offer: Offering | None = None
        self.fetch: Fetching | None = None

    def begin_offer(self, deadline: float = 30) -> Offering:
        self.offer = self.a.offer("t", to=[self.b] if self.push else [], deadline=deadline)
        return self.offer

    def begin_fetch(self, deadline: float = 30) -> Fetching:
        self.fetch = self.b.fetch("t", sources=[] if self.push else [self.a], deadline=deadline)
        return self.fetch

    def reach(self, state: str, deadline: float = 30) -> Pair:
        """Bring both sides to a state, given by name in ``STATES``."""
        match state:
            case "offered":
                self.begin_offer(deadline)
            case "asked":
                self.begin_fetch(deadline)
            case _:
                self.begin_offer(deadline)
                self.begin_fetch(deadline)
        self.net.run()
        if state in ("moving", "nearly"):
            self.a.ready(self.offer, 0, *((1, 2, 3) if state == "nearly" else ()))
            self.net.run()
        if state == "nearly":
            self.b.land(self.fetch, 0, 1, 2)
        return self

    @property
    def begun(self) -> list[Offering | Fetching]:
        return [transfer for transfer in (self.offer, self.fetch) if transfer is not None]

    def check_over(self) -> None:
        """Both sides have ended, in one outcome each, and nothing is left."""
        for transfer in self.begun:
            assert transfer.resolved
            assert all(part.ended for part in transfer.parts)
        for member in (self.a, self.b):
            ledger = member.table.ledger
            assert ledger.parts == {}
            assert ledger.transfers == {}
            assert len(member.table.waiting) == 0
            assert member.table.next_timer() is None
            assert member.faults == []
            assert member.kinds.count(ActionKind.ENDED) == member.kinds.count(ActionKind.RESOLVED)
            assert all(session.live == 0 for session in member.sessions.values())


#: How far a transfer has come: offered only, asked for only, granted, first layer ready, all but one landed.
STATES = ["offered", "asked", "granted", "moving", "nearly"]
#: The same with a side that has begun by then.
SIDES = pytest.mark.parametrize(
    ("side", "state"),
    [("producer", state) for state in STATES if state != "asked"]
    + [("consumer", state) for state in STATES if state != "offered"],
)
KINDS = pytest.mark.parametrize("one_sided", [True, False], ids=["read", "sent"])
WAYS = pytest.mark.parametrize("push", [False, True], ids=["pull", "push"])


@KINDS
@WAYS
@pytest.mark.parametrize("offer_first", [True, False])
def test_it_lands_on_both_sides(one_sided: bool, push: bool, offer_first: bool) -> None:
    pair = Pair(one_sided=one_sided, push=push)
    begin = [pair.begin_offer, pair.begin_fetch]
    for step in begin if offer_first else reversed(begin):
        step()
        pair.net.run()
    for layer in (2, 0, 3, 1):
        pair.a.ready(pair.offer, layer)
        pair.net.run()
        pair.b.land(pair.fetch, layer)
        pair.net.run()
    assert [transfer.error for transfer in pair.begun] == [None, None]
    assert [transfer.parts[0].state for transfer in pair.begun] == [State.LANDED, State.LANDED]
    pair.check_over()


def test_a_ready_transfer_takes_six_frames() -> None:
    pair = Pair()
    pair.reach("granted")
    before = sum(len(session.take_frames()) for session in pair.a.sessions.values())
    assert before == 0
    sent = len(pair.a.sent) + len(pair.b.sent)
    pair.a.ready(pair.offer)
    pair.net.run()
    pair.b.land(pair.fetch)
    pair.net.run()
    # HELLO each way and GRANT, ACCEPT; then READY and LANDED.
    assert (sent, len(pair.a.sent) + len(pair.b.sent)) == (4, 6)


def test_each_reader_ends_by_itself_and_the_offer_with_the_last() -> None:
    net = Net()
    a, readers = net.add("a"), [net.add(name) for name in "bcd"]
    offer = a.offer("t", readers=3, ready=True)
    fetches = []
    for number, reader in enumerate(readers):
        assert not offer.resolved
        fetches.append(reader.fetch("t", sources=[a]))
        net.run()
        reader.land(fetches[-1])
        net.run()
        assert fetches[-1].resolved
        assert offer.resolved is (number == 2)
    assert offer.error is None


def test_a_reader_that_fails_leaves_the_others_alone_and_the_offer_fails_at_the_end() -> None:
    net = Net()
    a, b, c = (net.add(name) for name in "abc")
    offer = a.offer("t", readers=2, ready=True)
    fetches = [reader.fetch("t", sources=[a]) for reader in (b, c)]
    net.run()
    b.abort(fetches[0], TransferAborted("enough"))
    net.run()
    assert not offer.resolved
    c.land(fetches[1])
    net.run()
    assert offer.resolved
    assert "given up by the consumer at memory://b: enough" in str(offer.error)
    assert fetches[1].error is None


# -- somebody gives it up ---------------------------------------------------------------------------


@KINDS
@WAYS
@SIDES
def test_an_abort_in_any_state_ends_both_sides(one_sided: bool, push: bool, state: str, side: str) -> None:
    pair = Pair(one_sided=one_sided, push=push).reach(state)
    member, transfer = (pair.a, pair.offer) if side == "producer" else (pair.b, pair.fetch)
    error = TransferAborted("enough")
    member.abort(transfer, error)
    pair.net.run()
    pair.check_over()
    assert transfer.error is error
    for other in pair.begun:
        assert other.parts[0].state is State.ABORTED
        if other is not transfer:
            assert type(other.error) is TransferAborted
            assert f"given up by the {side} at memory://{member.name}: enough" in str(other.error)


@KINDS
@pytest.mark.parametrize("state", ["granted", "moving", "nearly"])
@pytest.mark.parametrize("busy", [(), ("a",), ("b",), ("a", "b")], ids=lambda busy: "".join(busy) or "idle")
def test_aborts_that_cross_end_both_sides(one_sided: bool, state: str, busy: tuple[str, ...]) -> None:
    pair = Pair(one_sided=one_sided).reach(state)
    for member, transfer in ((pair.a, pair.offer), (pair.b, pair.fetch)):
        if member.name in busy:
            member.busy.add(transfer.parts[0])
        member.abort(transfer, TransferAborted(f"enough at {member.name}"))
    pair.net.run()
    pair.b.rest(pair.fetch.parts[0])
    pair.net.run()
    pair.a.rest(pair.offer.parts[0])
    pair.net.run()
    pair.check_over()
    assert [str(transfer.error) for transfer in pair.begun] == ["enough at a", "enough at b"]


@pytest.mark.parametrize("state", ["moving", "nearly"])
def test_blocks_that_are_read_are_the_producers_again_only_when_nobody_reads(state: str) -> None:
    pair = Pair().reach(state)
    part = pair.fetch.parts[0]
    pair.b.busy.add(part)
    pair.a.abort(pair.offer, TransferAborted("enough"))
    pair.net.run()
    assert part.state is State.DRAINING
    assert not pair.offer.resolved
    pair.b.rest(part)
    pair.net.run()
    pair.check_over()


def test_landed_and_an_abort_that_cross_leave_the_consumer_landed() -> None:
    pair = Pair().reach("nearly")
    pair.b.land(pair.fetch)
    pair.a.abort(pair.offer, TransferAborted("enough"))
    pair.net.run()
    pair.check_over()
    # "consumer done, producer failed" can happen; the reverse never.
    assert pair.fetch.parts[0].state is State.LANDED
    assert pair.offer.parts[0].state is State.ABORTED


@pytest.mark.parametrize("role", ["producer", "consumer"])
def test_an_abort_of_what_is_not_known_is_answered(role: str) -> None:
    net = Net()
    a, b = net.add("a"), net.add("b")
    b.session(a).send(Abort("never", 3, role, "cancelled", ""))
    net.run()
    other = "consumer" if role == "producer" else "producer"
    assert [message for message in a.sent if isinstance(message, Aborted)] == [Aborted("never", 3, other)]
    assert b.faults == []


@pytest.mark.parametrize("state", ["granted", "moving"])
def test_aborted_out_of_nowhere_ends_the_part(state: str) -> None:
    pair = Pair().reach(state)
    pair.b.session(pair.a).send(Aborted("t", 0, "consumer"))
    pair.net.run()
    assert pair.offer.resolved
    assert type(pair.offer.error) is TransferAborted


# -- deadlines --------------------------------------------------------------------------------------


@KINDS
@WAYS
@pytest.mark.parametrize("state", STATES)
def test_a_deadline_in_any_state_ends_both_sides(one_sided: bool, push: bool, state: str) -> None:
    pair = Pair(one_sided=one_sided, push=push).reach(state, deadline=1)
    pair.net.wait(SECOND)
    pair.check_over()
    for transfer in pair.begun:
        assert isinstance(transfer.error, DeadlineExceeded)
        assert "'t'" in str(transfer.error)


@KINDS
@SIDES
def test_without_a_peer_each_side_ends_by_its_deadline_and_the_drain_bound(
    one_sided: bool, state: str, side: str
) -> None:
    pair = Pair(one_sided=one_sided).reach(state, deadline=2)
    transfer = pair.offer if side == "producer" else pair.fetch
    pair.net.hold(pair.a, pair.b)
    until = pair.net.now + 2 * SECOND + SETTINGS.drain_ns
    while not transfer.resolved:
        assert pair.net.wait_for_timer()
        assert pair.net.now <= until
    assert transfer.error is not None
    assert isinstance(transfer.error, TimeoutError | ConnectionError)


# -- a peer that is gone ----------------------------------------------------------------------------


@KINDS
@SIDES
@pytest.mark.parametrize("certain", [True, False])
def test_the_loss_of_the_peer_ends_each_state(one_sided: bool, state: str, certain: bool, side: str) -> None:
    pair = Pair(one_sided=one_sided).reach(state)
    pair.net.hold(pair.a, pair.b)
    member, other = (pair.a, pair.b) if side == "producer" else (pair.b, pair.a)
    transfer = pair.offer if side == "producer" else pair.fetch
    if state == "offered":  # nobody came for it yet: another may
        member.session(other)
        member.lose(other, certain=certain)
        assert not transfer.resolved
        return
    member.lose(other, certain=certain)
    pair.net.run()
    readable = one_sided and side == "producer" and state in ("moving", "nearly")
    assert transfer.resolved is (certain or not readable)
    assert isinstance(transfer.error, PeerLostError)
    pair.net.wait(0)
    pair.net.wait(SETTINGS.lease_ns + 1)
    assert transfer.resolved
    assert ActionKind.QUARANTINE not in member.kinds


def test_a_silent_peer_is_lost_within_the_bound_and_its_lease() -> None:
    pair = Pair().reach("moving")
    pair.net.hold(pair.a, pair.b)
    began = pair.net.now
    while not (pair.offer.resolved and pair.fetch.resolved):
        assert pair.net.wait_for_timer()
    assert pair.net.now - began <= SETTINGS.liveness_ns + SETTINGS.lease_ns + SECOND // 10
    assert isinstance(pair.offer.error, PeerLostError)
    assert isinstance(pair.fetch.error, PeerLostError)
    assert "has been silent for 3.0 s" in str(pair.offer.error)


def test_a_waiting_request_goes_with_its_peer() -> None:
    pair = Pair().reach("asked")
    assert len(pair.a.table.waiting) == 1
    pair.a.lose(pair.b, certain=False)
    assert len(pair.a.table.waiting) == 0


# -- several parts ----------------------------------------------------------------------------------


class Ranks:
    """Two producers with half of the heads each, and a consumer with all, in mid-transfer."""

    def __init__(self, *, one_sided: bool = True) -> None:
        self.net = Net()
        self.low, self.high = self.net.add("low", heads=(0, 2)), self.net.add("high", heads=(2, 4))
        self.b = self.net.add("b")
        self.b.one_sided = one_sided
        self.offers = [member.offer("t") for member in (self.low, self.high)]
        self.fetch = self.b.fetch("t", sources=[self.low, self.high])
        self.net.run()
        for member, offer in zip((self.low, self.high), self.offers, strict=True):
            member.ready(offer, 0)
        self.net.run()


FAULTS: dict[str, Callable[[Ranks], object]] = {
    "source aborts": lambda ranks: ranks.high.abort(ranks.offers[1], TransferAborted("enough")),
    "copy fails": lambda ranks: ranks.b.table.fail(ranks.fetch.parts[1], DeviceError("broken")),
    "source is lost": lambda ranks: ranks.b.lose(ranks.high, certain=True),
}


@KINDS
@pytest.mark.parametrize("fault", FAULTS)
def test_the_first_part_that_fails_ends_its_siblings(one_sided: bool, fault: str) -> None:
    ranks = Ranks(one_sided=one_sided)
    FAULTS[fault](ranks)
    ranks.net.run()
    assert ranks.fetch.resolved
    assert ranks.fetch.parts[0].state is State.ABORTED
    assert ranks.fetch.error is ranks.fetch.parts[1].life.error
    assert "another part failed" in str(ranks.fetch.parts[0].life.error)
    assert ranks.offers[0].resolved
    assert "another part failed" in str(ranks.offers[0].error)


def test_a_fetch_is_over_only_when_no_part_can_touch_its_blocks() -> None:
    ranks = Ranks()
    first, second = ranks.fetch.parts
    ranks.b.busy.add(first)
    ranks.b.table.fail(second, DeviceError("broken"))
    ranks.net.run()
    assert second.ended
    assert first.state is State.DRAINING
    assert not ranks.fetch.resolved
    ranks.b.rest(first)
    ranks.net.run()
    assert ranks.fetch.resolved
    assert isinstance(ranks.fetch.error, DeviceError)


def test_news_of_several_transfers_share_a_frame() -> None:
    net = Net()
    a, b = net.add("a"), net.add("b")
    offers = [a.offer(f"t{number}") for number in range(10)]
    for number in range(10):
        b.fetch(f"t{number}", sources=[a])
    net.run()
    sent = a.session(b).next_send
    for offer in offers:
        a.ready(offer, 0)
        a.ready(offer, 1)
    net.run()
    assert a.session(b).next_send == sent + 1
    assert sum(isinstance(message, Ready) for message in a.sent) == 10
