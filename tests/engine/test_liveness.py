"""Silence, first contact, and time in which this side or all stood still; in virtual time."""

from __future__ import annotations

import pytest

from aiokv.errors import PeerLostError, TransferAborted
from aiokv.proto.parts import State
from aiokv.proto.settings import SECOND, Settings

CONTACT, HEARTBEAT, LEASE, LIVENESS, DRAIN = (
    getattr(Settings(), f"{name}_ns") / SECOND
    for name in ("contact", "heartbeat", "lease", "liveness", "drain")
)
#: For rounded timers, messages and a second look before a verdict (s).
SLACK = 0.05

pushed = pytest.mark.parametrize("push", [False, True], ids=["pull", "push"])
#: Whose loop stands still.
who = pytest.mark.parametrize("who", ["producer", "consumer"])


def until_granted(world, push):
    offer, fetch = world.both(push=push)
    world.until(lambda: fetch._transfer.parts[0].accepted)
    world.reach(State.GRANTED, offer, fetch)
    return offer, fetch


def until_moving(world, push):
    return world.moving(push=push)


def until_copying(world, push):
    return world.copying(push=push)


reached = pytest.mark.parametrize("reach", [until_granted, until_moving, until_copying])


# -- silence --------------------------------------------------------------------------------------


@pushed
@reached
def test_a_silent_peer_is_given_up_within_the_bound(world, reach, push):
    offer, fetch = reach(world, push)
    cut = world.now
    world.network.cut(world.producer.address, world.consumer.address)
    world.until(lambda: fetch.error is not None)
    assert cut + LIVENESS - HEARTBEAT - SLACK <= world.now <= cut + LIVENESS + SLACK
    world.consumer.device.run()
    world.over(offer, fetch)
    assert world.now <= cut + LIVENESS + LEASE + SLACK
    for handle, name in ((offer, "c"), (fetch, "p")):
        world.failed(handle, PeerLostError, f"memory://{name} has been silent for 3.0 s|is lost|reset")
    assert world.consumer.counts.sessions_lost == world.producer.counts.sessions_lost == 1
    world.network.heal()
    world.transfer()
    world.assert_quiet()


@pushed
def test_one_way_is_enough_to_be_silent(world, push):
    offer, fetch = world.moving(push=push)
    cut = world.now
    world.network.cut(world.consumer.address, world.producer.address, both_ways=False)
    world.over(offer, fetch)
    assert world.now <= cut + LIVENESS + LEASE + SLACK
    for handle in (offer, fetch):
        world.failed(handle, PeerLostError)
    world.network.heal()
    world.transfer()
    world.assert_quiet()


def test_a_silent_peer_takes_down_its_own_parts_alone(world):
    other = world.add("d")
    offer = world.producer.offer(readers=2, deadline=60.0)
    lost, fine = world.consumer.fetch("t", world.producer), other.fetch("t", world.producer, deadline=60.0)
    world.reach(State.GRANTED, offer, lost, fine)
    world.network.cut(world.consumer.address, world.producer.address)
    world.over(lost)
    world.wait(2 * LIVENESS)
    world.producer.ready(offer, 0, 1, 2, 3)
    world.producer.device.run()
    world.until(lambda: other.device.run() or (offer.done() and fine.done()))
    assert fine.error is None
    for handle in (offer, lost):
        world.failed(handle, PeerLostError)
    world.network.heal()
    world.assert_quiet()


def test_silence_without_a_part_means_nothing_and_is_not_looked_for(world):
    world.transfer()
    world.network.cut(world.producer.address, world.consumer.address)
    assert world.time.settle(SECOND)
    world.wait(100.0)
    world.network.heal()
    world.transfer(2)
    assert world.consumer.counts.sessions_lost == world.producer.counts.sessions_lost == 0
    world.assert_quiet()


@pushed
@reached
def test_a_stall_of_the_network_within_the_bound_fails_nothing(world, reach, push):
    offer, fetch = reach(world, push)
    world.network.cut(world.producer.address, world.consumer.address, hold=True)
    world.wait(LIVENESS - HEARTBEAT - SLACK)
    world.network.heal()
    world.wait(2 * LIVENESS)
    world.landed(offer, fetch)
    world.assert_quiet()


@pushed
@reached
def test_waiting_for_long_is_no_silence(world, reach, push):
    offer, fetch = reach(world, push)
    world.wait(25.0)
    world.landed(offer, fetch)
    world.assert_quiet()


# -- time in which somebody stood still -----------------------------------------------------------


@pushed
@reached
def test_time_in_which_nobody_ran_is_held_against_nobody(world, reach, push):
    offer, fetch = reach(world, push)
    for _ in range(3):
        world.stall(5 * LIVENESS / 3)
        world.wait(HEARTBEAT / 3)
    world.wait(2 * LIVENESS)
    world.landed(offer, fetch)
    world.assert_quiet()


@pushed
@reached
@who
def test_a_callback_that_takes_long_makes_nobody_dead(world, who, reach, push):
    offer, fetch = reach(world, push)
    loop = getattr(world, who).loop
    for delay in (0.0, HEARTBEAT, HEARTBEAT / 3):
        world.wait(delay)
        loop.call_soon(world.stall, 2 * LIVENESS)
    world.wait(2 * LIVENESS)
    world.landed(offer, fetch)
    world.assert_quiet()


@pushed
@reached
@who
def test_who_stood_still_for_less_than_the_bound_fails_nothing(world, who, reach, push):
    offer, fetch = reach(world, push)
    for _ in range(3):
        side = getattr(world, who)
        side.loop.frozen = True
        world.wait(LIVENESS - HEARTBEAT - SLACK)
        side.loop.frozen = False
        world.wait(HEARTBEAT)
    world.landed(offer, fetch)
    world.assert_quiet()


@pushed
@reached
@who
def test_who_stood_still_for_longer_is_given_up_and_learns_it(world, who, reach, push):
    offer, fetch = reach(world, push)
    stopped = getattr(world, who)
    stopped.loop.frozen = True
    there, away = (fetch, offer) if who == "producer" else (offer, fetch)
    world.until(lambda: there.error is not None)
    world.consumer.device.run()
    world.over(there)
    world.failed(there, PeerLostError, "has been silent")
    world.wait(LIVENESS)
    assert not away.done()
    stopped.loop.frozen = False
    begun = world.now
    world.over(away)
    assert world.now <= begun + 2 * HEARTBEAT
    world.failed(away, PeerLostError, "reset the session|is lost")
    world.transfer()
    world.assert_quiet()


def test_who_runs_again_judges_nobody_by_the_time_it_stood_still(world):
    offer, fetch = world.moving()
    world.producer.loop.frozen = world.consumer.loop.frozen = True
    world.sides.append(world.make("clock"))
    world.wait(5 * LIVENESS)
    world.sides.pop()
    world.producer.loop.frozen = False
    world.wait(LIVENESS / 2)
    world.consumer.loop.frozen = False
    world.wait(LIVENESS)
    world.landed(offer, fetch)
    world.assert_quiet()


def test_copies_that_completed_while_we_stood_still_are_seen_before_the_verdict(world):
    offer, fetch = world.copying()
    world.consumer.loop.within(fetch.cancel)
    world.reach(State.DRAINING, fetch)
    world.wait(DRAIN / 2)
    world.consumer.device.run()
    world.stall(DRAIN)
    world.over(offer, fetch)
    for handle in (offer, fetch):
        world.failed(handle, TransferAborted)
    world.assert_quiet()


# -- first contact --------------------------------------------------------------------------------


def test_a_producer_that_is_not_there(world):
    fetch = world.consumer.fetch("t", world.make("x"))
    assert world.over(fetch) == pytest.approx(CONTACT, abs=SLACK)
    world.failed(fetch, PeerLostError, "no answer from memory://x within 2 s")
    world.assert_quiet()


def test_a_consumer_that_is_not_there(world):
    offer = world.producer.offer(to=["memory://x"])
    assert world.over(offer) == pytest.approx(CONTACT, abs=SLACK)
    world.failed(offer, PeerLostError, "no answer from memory://x within 2 s")
    world.assert_quiet()


def test_a_peer_that_comes_in_time(world):
    late = world.make("x")
    fetch = world.consumer.fetch("t", late)
    world.wait(CONTACT - 2 * SLACK)
    world.enter(late)
    offer = late.offer(ready=4)
    world.until(lambda: world.consumer.device.run() or (offer.done() and fetch.done()))
    assert offer.error is fetch.error is None
    world.assert_quiet()


def test_a_peer_that_comes_later_is_found_by_the_next_attempt(world):
    late = world.make("x")
    fetch = world.consumer.fetch("t", late)
    world.over(fetch)
    world.failed(fetch, PeerLostError)
    world.enter(late)
    offer = late.offer(ready=4, attempt=1)
    again = world.consumer.fetch("t", late, attempt=1)
    world.until(lambda: world.consumer.device.run() or (offer.done() and again.done()))
    assert offer.error is again.error is None
    world.assert_quiet()


def test_greetings_that_are_lost_are_said_again(world):
    here, there = world.consumer.address, world.producer.address
    world.network.script(here, there, "drop", "drop")
    world.network.script(there, here, "drop")
    world.transfer()
    assert world.now < CONTACT
    world.assert_quiet()


def test_standing_still_in_the_first_contact_is_held_against_nobody(world):
    fetch = world.consumer.fetch("t", world.producer)
    world.producer.loop.frozen = True
    world.wait(CONTACT / 2)
    world.stall(5 * CONTACT)
    world.producer.loop.frozen = False
    world.landed(world.producer.offer(), fetch)
    world.assert_quiet()


def test_a_path_that_never_opens(world):
    world.consumer.transport.mute = True
    fetch = world.consumer.fetch("t", world.producer)
    assert world.over(fetch) == pytest.approx(CONTACT, abs=SLACK)
    world.failed(fetch, PeerLostError, "no data path to memory://p: memory: no answer within 2 s")
    world.consumer.transport.mute = False
    world.transfer()
    world.assert_quiet()


def test_who_can_not_be_reached_is_asked_who_it_is_by_the_next_attempt(world):
    old = world.producer
    offer = world.consumer.offer("for nothing", to=[old.address])  # a session, and no path
    world.until(lambda: old.counts.parked == 1)
    world.consumer.loop.within(offer.cancel)
    world.over(offer)
    world.failed(offer, TransferAborted)
    old.transport.die()
    world.network.cut(old.address, world.consumer.address, hold=True)  # it takes a while to hear of it
    first = world.consumer.fetch("t", old)
    world.over(first)
    world.failed(first, PeerLostError, "no data path to memory://p")
    assert world.consumer.counts.sessions == 0
    world.sides.remove(old)
    old.loop.kill()
    world.network.kill(old.address)
    world.producer = world.add("p")
    world.network.heal()
    world.transfer()
    world.assert_quiet()


def test_others_of_the_peer_go_on_where_a_path_can_not_be_opened(world):
    offer, fetch = world.moving()
    world.producer.transport.mute = True
    failed = world.producer.fetch("other way", world.consumer)
    world.over(failed)
    world.failed(failed, PeerLostError, "no data path to memory://c")
    world.landed(offer, fetch)
    parked = world.consumer.fetch("later", world.producer)
    world.until(lambda: world.producer.counts.parked == 1)
    failed = world.producer.fetch("other way", world.consumer, attempt=1)
    world.over(failed)
    world.failed(failed, PeerLostError, "no data path to memory://c")
    world.landed(world.producer.offer("later"), parked)
    world.assert_quiet()
