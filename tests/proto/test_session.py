"""Sessions: streams that are numbered and acknowledged, heartbeats, leases, and each way to end."""

from __future__ import annotations

import msgspec
import pytest

from aiokv.control.base import MAX_FRAME
from aiokv.errors import ClosedError, PeerLostError, Refused, RemoteProtocolError
from aiokv.proto.layout import CacheLayout
from aiokv.proto.messages import (
    Accept,
    Bye,
    Frame,
    Hello,
    Landed,
    Message,
    Ping,
    Pong,
    Ready,
    Reset,
    decode_frame,
    decode_messages,
    encode_message,
)
from aiokv.proto.placement import Placement
from aiokv.proto.session import _GRACE_NS, Identity, Phase, Session
from aiokv.proto.settings import SECOND, Settings

LAYOUT = CacheLayout.attention(layers=2, blocks=8, block_size=4, heads=1, head_size=8, dtype="uint8")
SETTINGS = Settings()
START = 100 * SECOND
#: A message of the table's, which a session only carries.
NEWS = Landed("t", 0)


def hello(address: str, versions: tuple[int, int] = (1, 1), called: str = "") -> Hello:
    return Hello(versions, address, LAYOUT, Placement.dense(LAYOUT), {"memory": b"m"}, called)


ALICE = Identity(b"a" * 16, hello("memory://alice"))
BOB = Identity(b"b" * 16, hello("memory://bob"))


def session(me: Identity = ALICE, peer: Identity = BOB, *, stream: int = 1, now: int = START) -> Session:
    return Session(me, stream, peer.hello.address, SETTINGS, now)


def deliver(sender: Session, receiver: Session, now: int = START) -> list[Message]:
    """Carry over what the sender has to say; gives what the receiver doesn't keep for itself."""
    found: list[Message] = []
    for data in sender.take_frames():
        frame = decode_frame(data)
        if frame.seq:
            found += receiver.receive(frame, now)
        else:
            (greeting,) = decode_messages(frame)
            assert isinstance(greeting, Hello)
            receiver.receive_hello(frame, greeting, now)
    return found


def pair() -> tuple[Session, Session]:
    """Two sessions that are up, and have nothing more to say."""
    alice, bob = session(), session(BOB, ALICE, stream=7)
    deliver(alice, bob)
    deliver(bob, alice)
    assert (alice.phase, bob.phase) == (Phase.UP, Phase.UP)
    return alice, bob


def frame(sender: Session, seq: int, *messages: Message, **changes: object) -> Frame:
    """One made by hand, as from ``sender`` of a pair that is up."""
    body = [msgspec.Raw(encode_message(message)) for message in messages]
    made = Frame(
        sender.me.incarnation, b"", sender.me.hello.address, sender.mine, sender.theirs, seq, 1, body
    )
    return msgspec.structs.replace(made, **changes)


# -- greeting ---------------------------------------------------------------------------------------


def test_the_first_frame_is_hello_and_knows_nothing_of_the_peer() -> None:
    alice = session(stream=3)
    assert alice.wants_to_send
    (data,) = alice.take_frames()
    greeting = decode_frame(data)
    assert (greeting.src, greeting.dst, greeting.mine, greeting.yours) == (ALICE.incarnation, b"", 3, 0)
    assert (greeting.seq, greeting.reply) == (0, "memory://alice")
    assert decode_messages(greeting) == [hello("memory://alice", called="memory://bob")]
    assert not alice.wants_to_send
    assert alice.take_frames() == []


def test_an_answered_greeting_brings_both_up() -> None:
    alice, bob = pair()
    assert (alice.mine, alice.theirs, bob.mine, bob.theirs) == (1, 7, 7, 1)
    assert (alice.incarnation, bob.incarnation) == (BOB.incarnation, ALICE.incarnation)
    assert alice.hello == hello("memory://bob", called="memory://alice")
    assert bob.hello == hello("memory://alice", called="memory://bob")
    assert alice.version == bob.version == 1


def test_greetings_that_cross_bring_both_up() -> None:
    alice, bob = session(), session(BOB, ALICE, stream=7)
    (from_alice,), (from_bob,) = alice.take_frames(), bob.take_frames()
    for receiver, data in ((bob, from_alice), (alice, from_bob)):
        receiver.receive_hello(decode_frame(data), decode_messages(decode_frame(data))[0], START)
    assert (alice.phase, bob.phase) == (Phase.UP, Phase.UP)
    alice.send(NEWS)
    assert deliver(alice, bob) == [NEWS]


def test_what_was_queued_before_contact_follows_the_greeting() -> None:
    alice, bob = session(), session(BOB, ALICE, stream=7)
    alice.send(NEWS)
    assert deliver(alice, bob) == [NEWS]


def test_a_greeting_said_again_by_who_missed_ours_is_answered_again() -> None:
    alice, bob = pair()
    again = frame(alice, 0, ALICE.hello, yours=0)
    bob.receive_hello(again, ALICE.hello, START)
    (data,) = bob.take_frames()
    assert decode_messages(decode_frame(data)) == [hello("memory://bob", called="memory://alice")]


def test_a_greeting_said_again_by_who_knows_us_is_not() -> None:
    alice, bob = pair()
    bob.receive_hello(frame(alice, 0, ALICE.hello), ALICE.hello, START)
    assert not bob.wants_to_send
    assert bob.phase is Phase.UP


@pytest.mark.parametrize(("versions", "spoken"), [((1, 1), 1), ((1, 9), 2), ((0, 1), 1), ((-3, 2**40), 2)])
def test_the_highest_common_version_is_spoken(versions: tuple[int, int], spoken: int) -> None:
    alice, bob = session(), session(BOB, ALICE, stream=7)
    alice.receive_hello(frame(bob, 0), hello("memory://bob", versions), START)
    assert (alice.phase, alice.version) == (Phase.UP, spoken)


@pytest.mark.parametrize("versions", [(5, 5), (3, 4), (0, 0), (-4, 0), (5, 1)])
def test_without_a_common_version_it_ends_and_says_what_both_speak(versions: tuple[int, int]) -> None:
    alice, bob = session(), session(BOB, ALICE, stream=7)
    alice.receive_hello(frame(bob, 0), hello("memory://bob", versions), START)
    assert alice.phase is Phase.ENDED
    assert isinstance(alice.error, Refused)
    low, high = versions
    assert f"bob speaks protocol {low}..{high}" in str(alice.error)
    assert "alice speaks 1..2" in str(alice.error)
    assert alice.hello is None


def test_who_has_something_to_say_enters_itself() -> None:
    talking: dict[Session, None] = {}
    alice = Session(ALICE, 1, "memory://bob", SETTINGS, START, talking)
    assert list(talking) == [alice]
    bob = session(BOB, ALICE, stream=7)
    deliver(alice, bob)
    deliver(bob, alice)
    talking.clear()
    alice.send(NEWS)
    assert list(talking) == [alice]


# -- streams ----------------------------------------------------------------------------------------


def test_messages_arrive_in_order_many_to_a_frame() -> None:
    alice, bob = pair()
    sent = [Ready("t", 0, bytes([number])) for number in range(50)]
    for message in sent:
        alice.send(message)
    (data,) = alice.take_frames()
    assert bob.receive(decode_frame(data), START) == sent


def test_a_frame_said_twice_counts_once() -> None:
    alice, bob = pair()
    alice.send(NEWS)
    (data,) = alice.take_frames()
    assert bob.receive(decode_frame(data), START) == [NEWS]
    assert bob.receive(decode_frame(data), START) == []
    assert bob.next_receive == 2


@pytest.mark.parametrize("missing", [1, 2, 40])
def test_a_gap_is_an_error_that_says_how_large(missing: int) -> None:
    alice, bob = pair()
    with pytest.raises(RemoteProtocolError, match=f"^{missing} control frames from memory://alice"):
        bob.receive(frame(alice, 1 + missing, NEWS), START)
    assert bob.next_receive == 1


def test_nothing_is_taken_before_the_peers_greeting() -> None:
    alice, bob = session(), session(BOB, ALICE, stream=7)
    assert bob.receive(frame(alice, 1, NEWS), START) == []
    assert bob.next_receive == 1


def test_what_was_meant_for_an_earlier_session_of_ours_is_dropped() -> None:
    alice, bob = pair()
    assert bob.receive(frame(alice, 1, NEWS, yours=6), START) == []
    assert bob.receive(frame(alice, 9, NEWS, yours=6), START) == []
    assert bob.receive(frame(alice, 1, NEWS), START) == [NEWS]


def test_a_frame_from_before_the_peer_knew_our_stream_is_taken_and_acknowledges_nothing() -> None:
    alice, bob = pair()
    bob.send(NEWS)
    bob.take_frames()
    before = bob.unacked
    assert bob.receive(frame(alice, 1, NEWS, yours=0, ack=2), START) == [NEWS]
    assert bob.unacked == before


def test_a_malformed_message_is_an_error_and_takes_nothing() -> None:
    alice, bob = pair()
    with pytest.raises(RemoteProtocolError, match="malformed"):
        bob.receive(frame(alice, 1, body=[msgspec.Raw(b"\x91\x63")]), START)
    assert bob.next_receive == 1


@pytest.mark.parametrize("message", [ALICE.hello, Reset(7, "session", "")])
def test_what_begins_and_ends_streams_has_no_place_within_one(message: Message) -> None:
    alice, bob = pair()
    with pytest.raises(RemoteProtocolError, match=f"{type(message).__name__} in mid-stream"):
        bob.receive(frame(alice, 1, message), START)


def test_goodbye_is_noted() -> None:
    alice, bob = pair()
    alice.send(Bye("done"))
    assert deliver(alice, bob) == []
    assert bob.farewell
    assert bob.phase is Phase.UP


# -- acknowledgements -------------------------------------------------------------------------------


def test_what_was_sent_is_unread_until_the_peer_says_so() -> None:
    alice, bob = pair()
    alice.send(NEWS)
    alice.send(NEWS)
    deliver(alice, bob)
    assert alice.unacked > 0
    bob.send(NEWS)
    deliver(bob, alice)
    assert alice.unacked == 0


def test_asking_brings_an_answer_that_acknowledges() -> None:
    alice, bob = pair()
    alice.send(NEWS)
    deliver(alice, bob)
    alice.ask()
    deliver(alice, bob)
    deliver(bob, alice)
    assert alice.unacked == 0


@pytest.mark.parametrize("ack", [0, 1, 2**40])
def test_an_acknowledgement_neither_goes_back_nor_beyond_what_was_sent(ack: int) -> None:
    alice, bob = pair()
    alice.send(NEWS)
    deliver(alice, bob)
    bob.send(NEWS)
    deliver(bob, alice)
    assert alice.acked == 2
    alice.receive(frame(bob, 2, NEWS, ack=ack), START)
    assert (alice.acked, alice.unacked) == (2, 0)


# -- size -------------------------------------------------------------------------------------------


def test_a_large_outbox_is_split_in_order_and_fits_the_channel() -> None:
    alice, bob = pair()
    sent = [Accept("t", n, 1, ((0, bytes(400_000)),), b"", 0) for n in range(7)]
    for message in sent:
        alice.send(message)
    frames = alice.take_frames()
    assert len(frames) == 4
    assert max(map(len, frames)) <= MAX_FRAME
    assert [message for data in frames for message in bob.receive(decode_frame(data), START)] == sent


def test_the_largest_block_list_that_a_transfer_can_have_fits_one_frame() -> None:
    alice, bob = pair()
    large = Accept("t" * 256, 0, 1, ((0, bytes(4 * 200_000)),), bytes(1024), 0)
    for message in (NEWS, large, NEWS):
        alice.send(message)
    frames = alice.take_frames()
    assert max(map(len, frames)) <= MAX_FRAME
    assert [m for data in frames for m in bob.receive(decode_frame(data), START)] == [NEWS, large, NEWS]


def test_many_small_messages_share_one_frame() -> None:
    alice, _ = pair()
    for number in range(1000):
        alice.send(Landed("transfer", number))
    assert len(alice.take_frames()) == 1


# -- leases -----------------------------------------------------------------------------------------


def test_a_sign_of_life_extends_the_lease_on_both_sides() -> None:
    alice, bob = pair()
    alice.ask()
    deliver(alice, bob)
    deliver(bob, alice)
    assert bob.lease_given == alice.lease_held == START + SETTINGS.lease_ns


def test_a_lease_never_becomes_shorter() -> None:
    alice, _ = pair()
    assert alice.extend_lease(START) == START + SETTINGS.lease_ns
    assert alice.extend_lease(START - SECOND) == START + SETTINGS.lease_ns
    alice.hold_lease(START + SECOND, START)
    alice.hold_lease(START, START)
    assert alice.lease_held == START + SECOND


def test_a_lease_that_no_engine_gives_shows_that_the_clocks_differ() -> None:
    alice, bob = pair()
    with pytest.raises(RemoteProtocolError, match=r"ends in 86400\.0 s: its clock is not ours"):
        alice.receive(frame(bob, 1, Pong(START + 86_400 * SECOND)), START)
    assert alice.lease_held == 0


def test_a_lease_that_is_over_is_no_error() -> None:
    alice, bob = pair()
    alice.receive(frame(bob, 1, Pong(5)), START)
    assert alice.lease_held == 5


# -- time: contact ----------------------------------------------------------------------------------


def test_a_greeting_is_said_again_until_the_time_for_contact_is_over() -> None:
    alice = session()
    alice.take_frames()
    said = 0
    while alice.phase is Phase.CONTACT:
        now = alice.next_timer()
        assert now is not None
        alice.handle_timer(now)
        said += len(alice.take_frames())
    assert said == 3
    assert isinstance(alice.error, PeerLostError)
    assert (
        str(alice.error) == "no answer from memory://bob within 2 s; it was told to answer to memory://alice"
    )
    assert alice.next_timer() is None


def test_a_timer_that_comes_too_early_does_nothing() -> None:
    alice = session()
    alice.take_frames()
    alice.handle_timer(START + SETTINGS.contact_ns // 4 - 1)
    assert not alice.wants_to_send


@pytest.mark.parametrize("said", [False, True])
def test_a_greeting_has_time_to_be_answered_also_where_this_side_stood_still_for_a_little(said: bool) -> None:
    alice = session()
    if said:
        alice.take_frames()
    pause = SETTINGS.contact_ns // 4
    now = START + SETTINGS.contact_ns + pause // 2  # less than what has everything begin anew
    alice.handle_timer(now)
    assert alice.phase is Phase.CONTACT
    assert len(alice.take_frames()) == 1
    assert alice.next_timer() == now + pause
    alice.handle_timer(now + pause)
    assert alice.phase is Phase.ENDED


def test_time_for_contact_starts_anew_when_this_side_was_late() -> None:
    alice = session()
    now = START + 10 * SECOND
    alice.forgive(now)
    last = 0
    while (due := alice.next_timer()) is not None:
        last = max(due, now)
        alice.handle_timer(last)
    assert alice.phase is Phase.ENDED
    assert last == now + SETTINGS.contact_ns


# -- time: heartbeats -------------------------------------------------------------------------------


def test_peers_that_share_nothing_have_no_timer_and_no_heartbeat() -> None:
    alice, _ = pair()
    assert alice.next_timer() is None
    alice.handle_timer(START + 3600 * SECOND)
    assert alice.phase is Phase.UP
    assert not alice.wants_to_send


def test_heartbeats_flow_while_a_part_is_live() -> None:
    alice, bob = pair()
    alice.add_live(START)
    now = START
    for _ in range(10):
        now = alice.next_timer()
        alice.handle_timer(now)
        (data,) = alice.take_frames()
        assert decode_messages(decode_frame(data)) == [Ping()]
        bob.receive(decode_frame(data), now)
        deliver(bob, alice, now)
    assert now == START + 10 * SETTINGS.heartbeat_ns
    alice.remove_live()
    assert alice.next_timer() is None


def test_the_first_heartbeat_counts_from_the_first_part() -> None:
    alice, _ = pair()
    alice.add_live(START + 50 * SECOND)
    alice.add_live(START + 51 * SECOND)
    assert alice.next_timer() == START + 50 * SECOND + SETTINGS.heartbeat_ns
    alice.remove_live()
    assert alice.next_timer() is not None


def silent_until_suspected(alice: Session) -> int:
    """Let time pass without a word of the peer until its verdict is due; gives that time."""
    due = START + SETTINGS.liveness_ns
    while (now := alice.next_timer()) < due:
        alice.handle_timer(now)
    alice.handle_timer(due)
    assert alice.phase is Phase.UP
    return due


def test_silence_is_a_verdict_after_one_more_look_at_what_lies_unread() -> None:
    alice, _ = pair()
    alice.add_live(START)
    due = silent_until_suspected(alice)
    alice.handle_timer(due + _GRACE_NS - 1)
    assert alice.phase is Phase.UP
    alice.handle_timer(due + _GRACE_NS)
    assert alice.phase is Phase.ENDED
    assert isinstance(alice.error, PeerLostError)
    assert str(alice.error) == "memory://bob has been silent for 3.0 s"


def test_a_timer_is_set_for_the_verdict() -> None:
    alice, _ = pair()
    alice.add_live(START)
    turns = 0
    while alice.phase is Phase.UP:
        alice.handle_timer(alice.next_timer())
        turns += 1
    assert turns < 20


def test_a_word_within_the_grace_saves_the_peer() -> None:
    alice, bob = pair()
    alice.add_live(START)
    due = silent_until_suspected(alice)
    alice.receive(frame(bob, 1, NEWS), due + 1)
    alice.handle_timer(due + _GRACE_NS)
    assert alice.phase is Phase.UP
    alice.handle_timer(due + _GRACE_NS + SECOND)
    assert alice.phase is Phase.UP


def test_a_frame_of_an_earlier_session_is_no_sign_of_life() -> None:
    alice, bob = pair()
    alice.add_live(START)
    due = silent_until_suspected(alice)
    alice.receive(frame(bob, 1, NEWS, yours=99), due + 1)
    alice.handle_timer(due + _GRACE_NS)
    assert alice.phase is Phase.ENDED


def test_after_a_stall_of_this_side_nobody_is_dead_for_it() -> None:
    alice, _ = pair()
    alice.add_live(START)
    now = START + 100 * SECOND
    alice.forgive(now)
    alice.handle_timer(now)
    alice.handle_timer(now + _GRACE_NS)
    assert alice.phase is Phase.UP
    alice.handle_timer(now + SETTINGS.liveness_ns)
    alice.handle_timer(now + SETTINGS.liveness_ns + _GRACE_NS)
    assert alice.phase is Phase.ENDED


def test_silence_before_the_first_part_means_nothing() -> None:
    alice, _ = pair()
    now = START + 1000 * SECOND
    alice.add_live(now)
    alice.handle_timer(now + 1)
    alice.handle_timer(now + _GRACE_NS + 1)
    assert alice.phase is Phase.UP


# -- the end ----------------------------------------------------------------------------------------


def test_what_has_ended_sends_nothing_takes_nothing_and_keeps_its_first_reason() -> None:
    alice, bob = pair()
    alice.send(NEWS)
    first = ClosedError("closed")
    alice.end(first)
    alice.end(PeerLostError("and lost"))
    assert alice.error is first
    alice.send(NEWS)
    assert not alice.wants_to_send
    assert alice.take_frames() == []
    assert alice.receive(frame(bob, 1, NEWS), START) == []
    alice.receive_hello(frame(bob, 0, BOB.hello), BOB.hello, START)
    assert alice.phase is Phase.ENDED
    alice.add_live(START)
    assert alice.next_timer() is None
    alice.handle_timer(START + 100 * SECOND)
    assert alice.error is first


def test_it_says_what_it_is() -> None:
    alice, _ = pair()
    assert repr(alice) == "<Session 1/7 with memory://bob up live=0>"
