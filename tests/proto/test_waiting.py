"""What waits for its other half, and what is remembered of transfers that are over."""

from __future__ import annotations

import msgspec
import pytest

from aiokv.proto.layout import CacheLayout
from aiokv.proto.messages import Grant, Hello, Offer
from aiokv.proto.placement import Placement
from aiokv.proto.session import Identity, Session
from aiokv.proto.settings import SECOND, Settings
from aiokv.proto.waiting import Tombstone, Tombstones, Waiting

LAYOUT = CacheLayout.attention(layers=1, blocks=1, block_size=1, heads=1, head_size=1, dtype="uint8")
HELLO = Hello((1, 1), "memory://me", LAYOUT, Placement.dense(LAYOUT), {})
KEY = ("t", 0)


def session(address: str) -> Session:
    return Session(Identity(b"m" * 16, HELLO), 1, address, Settings(), 0)


def grant(tid: str = "t", attempt: int = 0) -> Grant:
    return Grant(tid, attempt, 1_000_000, "shm", b"link", 0, -1, ((0, 1),))


def offer(tid: str = "t", attempt: int = 0) -> Offer:
    return Offer(tid, attempt, 1_000_000)


@pytest.fixture
def waiting() -> Waiting:
    return Waiting(per_peer=3)


# -- waiting ----------------------------------------------------------------------------------------


def test_what_waits_is_claimed_once_in_order_of_arrival(waiting: Waiting) -> None:
    first, second = session("memory://first"), session("memory://second")
    assert waiting.park(first, grant(), "consumer", 50) == ""
    assert waiting.park(second, grant(), "consumer", 40) == ""
    assert [parked.session for parked in waiting.claim(KEY, "consumer")] == [first, second]
    assert waiting.claim(KEY, "consumer") == []
    assert len(waiting) == 0
    assert waiting.next_timer() is None


def test_grants_and_offers_of_one_id_are_apart(waiting: Waiting) -> None:
    peer = session("memory://peer")
    waiting.park(peer, grant(), "consumer", 50)
    waiting.park(peer, offer(), "producer", 50)
    waiting.park(peer, grant(attempt=1), "consumer", 50)
    assert [type(parked.message) for parked in waiting.claim(KEY, "producer")] == [Offer]
    assert len(waiting) == 2


def test_something_is_wanted_by_all_who_take_what_there_is(waiting: Waiting) -> None:
    """Also by those to whom others give what they need: of ranks that have the same heads one is asked."""
    came = []
    waiting.came = came.append
    assert waiting.wanted(KEY, 1) == -1
    waiting.park(session("memory://first"), msgspec.structs.replace(grant(), first_token=9), "consumer", 50)
    assert (waiting.wanted(KEY, 1), waiting.wanted(KEY, 2)) == (9, -1)
    nothing = msgspec.structs.replace(grant(), first_token=7, link="", link_id=b"")
    waiting.park(session("memory://second"), nothing, "consumer", 50)
    assert waiting.wanted(KEY, 2) == 7
    assert came == [KEY, KEY]
    waiting.park(session("memory://third"), msgspec.structs.replace(grant(), tokens=0), "consumer", 50)
    assert waiting.wanted(KEY, 2) == -1


def test_it_is_known_of_whom_something_waits(waiting: Waiting) -> None:
    peer, other = session("memory://peer"), session("memory://other")
    waiting.park(peer, grant(), "consumer", 50)
    assert (peer.parked, other.parked) == (1, 0)
    waiting.claim(KEY, "consumer")
    assert not peer.parked


def test_the_same_request_twice_may_not_wait(waiting: Waiting) -> None:
    peer = session("memory://peer")
    assert waiting.park(peer, grant(), "consumer", 50) == ""
    assert waiting.park(peer, grant(), "consumer", 60) == "duplicate"
    assert len(waiting.claim(KEY, "consumer")) == 1


def test_what_a_peer_lets_wait_is_bounded_and_leaves_room_to_others(waiting: Waiting) -> None:
    greedy, other = session("memory://greedy"), session("memory://other")
    found = [waiting.park(greedy, grant(f"t{number}"), "consumer", 50) for number in range(5)]
    assert found == ["", "", "", "capacity", "capacity"]
    assert waiting.park(other, grant("t0"), "consumer", 50) == ""
    waiting.claim(("t0", 0), "consumer")
    assert waiting.park(greedy, grant("t9"), "consumer", 50) == ""


def test_a_request_expires_by_its_own_deadline(waiting: Waiting) -> None:
    peer = session("memory://peer")
    for tid, deadline in (("late", 90), ("soon", 30), ("next", 60)):
        waiting.park(peer, grant(tid), "consumer", deadline)
    assert waiting.next_timer() == 30
    assert waiting.expired(29) == []
    assert [parked.message.tid for parked in waiting.expired(60)] == ["soon", "next"]
    assert waiting.claim(("soon", 0), "consumer") == []
    assert waiting.next_timer() == 90
    assert len(waiting) == 1


def test_what_was_claimed_neither_expires_nor_keeps_a_timer(waiting: Waiting) -> None:
    peer = session("memory://peer")
    waiting.park(peer, grant(), "consumer", 30)
    waiting.claim(KEY, "consumer")
    assert waiting.next_timer() is None
    assert waiting.expired(100) == []


def test_a_peer_can_withdraw_its_own_request_only(waiting: Waiting) -> None:
    peer, other = session("memory://peer"), session("memory://other")
    waiting.park(peer, grant(), "consumer", 50)
    waiting.park(other, grant(), "consumer", 50)
    waiting.withdraw(peer, KEY, "consumer")
    waiting.withdraw(peer, KEY, "consumer")
    waiting.withdraw(peer, ("unknown", 0), "consumer")
    assert [parked.session for parked in waiting.claim(KEY, "consumer")] == [other]


def test_with_a_peer_goes_all_that_it_asked_for(waiting: Waiting) -> None:
    peer, other = session("memory://peer"), session("memory://other")
    waiting.park(peer, grant("a"), "consumer", 50)
    waiting.park(peer, offer("b"), "producer", 50)
    waiting.park(other, grant("a"), "consumer", 70)
    waiting.lost(peer)
    waiting.lost(peer)
    waiting.lost(session("memory://never"))
    assert len(waiting) == 1
    assert waiting.next_timer() == 70
    assert waiting.claim(("b", 0), "producer") == []


def test_a_withdrawn_request_may_come_again(waiting: Waiting) -> None:
    peer = session("memory://peer")
    waiting.park(peer, grant(), "consumer", 50)
    waiting.withdraw(peer, KEY, "consumer")
    assert waiting.park(peer, grant(), "consumer", 60) == ""
    assert waiting.expired(50) == []
    assert len(waiting.expired(60)) == 1


# -- tombstones -------------------------------------------------------------------------------------


def test_an_ended_transfer_is_remembered_by_id_attempt_and_role() -> None:
    stones = Tombstones(keep_ns=10 * SECOND, most=10)
    stone = Tombstone("ended", "landed", SECOND)
    stones.bury(KEY, "producer", stone)
    assert stones.find(KEY, "producer", 0) is stone
    assert stones.find(KEY, "consumer", 0) is None
    assert stones.find(("t", 1), "producer", 0) is None
    assert len(stones) == 1


def test_a_tombstone_lasts_beyond_the_deadline_and_no_longer() -> None:
    stones = Tombstones(keep_ns=10 * SECOND, most=10)
    stone = Tombstone("ended", "landed", 5 * SECOND)
    stones.bury(KEY, "producer", stone)
    assert stones.find(KEY, "producer", 15 * SECOND - 1) is stone
    assert stones.find(KEY, "producer", 15 * SECOND) is None
    assert len(stones) == 0


def test_the_oldest_tombstone_gives_way() -> None:
    stones = Tombstones(keep_ns=SECOND, most=2)
    for number in range(4):
        stones.bury((f"t{number}", 0), "consumer", Tombstone("ended", "landed", number))
    found = [stones.find((f"t{n}", 0), "consumer", 0) for n in range(4)]
    assert [stone and stone.deadline for stone in found] == [None, None, 2, 3]
