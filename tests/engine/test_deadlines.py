"""A deadline that passes in each state, and what is not quiet by then; in virtual time."""

from __future__ import annotations

import logging

import pytest

from aiokv.errors import BusyError, DeadlineExceeded, DeviceError, TransferAborted
from aiokv.proto.parts import State
from aiokv.proto.settings import SECOND, Settings

LEASE, DRAIN, CONTACT = (getattr(Settings(), f"{name}_ns") / SECOND for name in ("lease", "drain", "contact"))
#: For rounded timers, and for messages (s).
SLACK = 0.05

soon = lambda when: pytest.approx(when, abs=SLACK)  # noqa: E731

pushed = pytest.mark.parametrize("push", [False, True], ids=["pull", "push"])
#: Whose deadline is the shorter one.
shorter = pytest.mark.parametrize("shorter", ["producer", "consumer"])


# -- in each state --------------------------------------------------------------------------------


def test_offered_and_nobody_comes(world):
    offer = world.producer.offer(deadline=1.0)
    assert world.over(offer) == soon(1.0)
    world.failed(offer, DeadlineExceeded, "at the producer, waiting for GRANT from anybody")
    world.transfer()
    world.assert_quiet()


def test_offered_to_somebody_who_does_not_fetch(world):
    offer = world.producer.offer(to=[world.consumer.address], deadline=1.0)
    world.until(lambda: world.consumer.counts.parked == 1)
    assert world.over(offer) == soon(1.0)
    world.failed(offer, DeadlineExceeded, "at the producer, waiting for GRANT from memory://c")
    world.transfer()
    world.assert_quiet()


def test_waiting_for_an_offer_that_nobody_makes(world):
    fetch = world.consumer.fetch(deadline=1.0)
    assert world.over(fetch) == soon(1.0)
    world.failed(fetch, DeadlineExceeded, "at the consumer, waiting for OFFER from anybody")
    world.transfer()
    world.assert_quiet()


def test_a_path_that_takes_longer_to_open(world):
    world.consumer.transport.mute = True
    fetch = world.consumer.fetch("t", world.producer, deadline=1.0)
    assert world.over(fetch) == soon(1.0)
    world.failed(fetch, DeadlineExceeded, "at the consumer, waiting for a connection to memory://p")
    world.consumer.transport.mute = False
    world.wait(CONTACT)
    world.transfer()
    world.assert_quiet()


def test_one_source_of_two_that_is_not_there(world):
    there, absent = world.producer, world.make("x")
    fetch = world.consumer.fetch("t", there, absent, deadline=1.0)
    assert world.over(fetch) == soon(1.0)
    world.failed(
        fetch, DeadlineExceeded, "at the consumer, waiting for (the other|a connection to memory://x)"
    )
    world.wait(CONTACT)
    world.transfer()
    world.assert_quiet()


def test_asked_for_and_not_offered(world):
    fetch = world.consumer.fetch("t", world.producer, deadline=1.0)
    world.until(lambda: world.producer.counts.parked == 1)
    assert world.over(fetch) == soon(1.0)
    world.failed(
        fetch, DeadlineExceeded, "at the consumer, waiting for ACCEPT .* where it is not offered yet"
    )
    world.transfer()
    world.assert_quiet()


@pushed
@shorter
def test_granted_and_nothing_is_written(world, shorter, push):
    offer, fetch = world.both(push=push, **{shorter: 1.0})
    world.reach(State.GRANTED, offer, fetch)
    assert world.over(offer, fetch) == soon(1.0)
    for handle in (offer, fetch):
        world.failed(handle, DeadlineExceeded, "at the (producer|consumer), waiting for the first layer")
    world.transfer()
    world.assert_quiet()


@pushed
@shorter
def test_moving_and_half_is_there(world, shorter, push):
    offer, fetch = world.moving(push=push, **{shorter: 1.0})
    assert world.over(offer, fetch) == soon(1.0)
    for handle in (offer, fetch):
        world.failed(handle, DeadlineExceeded, "deadline passed at the", "2 of 4 layers (landed|announced)")
    assert fetch.progress.layers == 2
    world.transfer()
    world.assert_quiet()


@pushed
@shorter
def test_copies_under_way_are_waited_for(world, shorter, push):
    offer, fetch = world.copying(push=push, **{shorter: 1.0})
    world.wait(1.0 + DRAIN / 2)
    assert not fetch.done()
    assert world.consumer.counts.blocks_held == world.producer.counts.blocks_held == 2
    world.consumer.device.run()
    assert world.over(offer, fetch) < 1.0 + DRAIN
    for handle in (offer, fetch):
        world.failed(
            handle, DeadlineExceeded, "deadline passed at the", "[04] of 4 layers (landed|announced)"
        )
    world.transfer()
    world.assert_quiet()


@pushed
@shorter
def test_while_draining_it_changes_nothing(world, shorter, push):
    offer, fetch = world.copying(push=push, **{shorter: 1.0})
    world.consumer.loop.within(fetch.cancel)
    world.reach(State.DRAINING, offer, fetch)
    world.wait(1.0 + SLACK)
    assert not fetch.done()
    assert not offer.done()
    world.consumer.device.run()
    world.over(offer, fetch)
    for handle in (offer, fetch):
        world.failed(handle, TransferAborted, "cancelled")
    world.assert_quiet()


@pushed
def test_over_in_time_it_means_nothing(world, push):
    offer, fetch = world.moving(push=push, producer=1.0, consumer=1.0)
    world.landed(offer, fetch)
    world.wait(2.0)
    world.assert_quiet()


# -- what is told, and when -----------------------------------------------------------------------


def test_who_awaits_a_layer_is_told_at_once_and_has_the_blocks_later(world):
    offer, fetch = world.copying(consumer=1.0)
    with pytest.raises(DeadlineExceeded):
        world.consumer.run(fetch.layer(3))
    assert world.now == soon(1.0)
    assert not fetch.done()
    world.consumer.device.run()
    world.over(offer, fetch)
    world.failed(offer, DeadlineExceeded)
    world.assert_quiet()


def test_one_reader_that_is_late_leaves_the_others_going(world):
    other = world.add("d")
    offer = world.producer.offer(readers=2)
    late = world.consumer.fetch("t", world.producer, deadline=1.0)
    fine = other.fetch("t", world.producer)
    assert world.over(late) == soon(1.0)
    assert not offer.done()
    world.producer.ready(offer, 0, 1, 2, 3)
    world.producer.device.run()
    world.until(lambda: other.device.run() or (offer.done() and fine.done()))
    assert fine.error is None
    world.failed(late, DeadlineExceeded)
    world.failed(offer, DeadlineExceeded, "memory://c")
    world.assert_quiet()


def test_a_peer_that_can_not_be_told_does_not_keep_the_blocks(world):
    offer, fetch = world.moving(producer=1.0)
    world.network.cut(world.producer.address, world.consumer.address)
    world.over(offer)
    assert 1.0 < world.now <= 1.0 + LEASE + SLACK
    world.failed(offer, DeadlineExceeded, "2 of 4 layers announced")
    assert world.producer.counts.blocks_held == 0
    world.over(fetch)
    fetch._course.observed = True


def test_what_was_said_in_time_and_is_read_late_counts(world):
    offer, fetch = world.copying(producer=1.0)
    world.producer.loop.frozen = True
    world.wait(0.5)
    world.consumer.device.run()
    world.over(fetch)
    world.wait(1.0)
    world.producer.loop.frozen = False
    world.over(offer)
    assert offer.error is fetch.error is None
    world.assert_quiet()


def test_what_completed_in_time_and_is_seen_late_counts(world):
    offer, fetch = world.copying(consumer=1.0)
    world.consumer.loop.frozen = True
    world.wait(0.5)
    world.consumer.device.run()
    world.wait(0.7)
    world.consumer.loop.frozen = False
    world.over(offer, fetch)
    assert fetch.error is None
    world.failed(offer, DeadlineExceeded)  # it could not know
    world.assert_quiet()


# -- what never becomes quiet ---------------------------------------------------------------------


def stuck(world):
    """A fetch whose copies never complete, after the bound of draining."""
    offer, fetch = world.copying(consumer=1.0)
    assert world.over(fetch) == soon(1.0 + DRAIN)
    world.failed(fetch, DeviceError, "blocks not quiet 2 s after it ended; they stay leased")
    world.over(offer)
    world.failed(offer, DeadlineExceeded)
    return fetch


def test_blocks_that_never_become_quiet_are_leased_for_life(world):
    fetch = stuck(world)
    counts = world.consumer.counts
    assert (counts.quarantined, counts.leases, counts.blocks_held) == (1, 1, 2)
    with pytest.raises(DeviceError, match="stay leased"):
        world.consumer.run(fetch.wait())
    with pytest.raises(BusyError, match="block 2 is being written"):
        world.consumer.loop.within(world.consumer.engine.offer("u", [2]).start)
    assert world.producer.counts.blocks_held == 0


def test_what_comes_after_all_changes_nothing(world):
    stuck(world)
    world.consumer.device.run()
    world.wait(10.0)
    counts = world.consumer.counts
    assert (counts.quarantined, counts.leases, counts.blocks_held) == (1, 1, 2)
    assert counts.in_flight == 0
    assert counts.parts_ended == {"landed": 0, "failed": 1, "aborted": 0}


def test_other_blocks_can_be_used(world):
    stuck(world)
    fetch = world.consumer.engine.fetch("u", [4, 5], sources=[world.producer.address])
    offer = world.producer.offer("u", ready=4)
    world.consumer.loop.within(fetch.start)
    world.until(lambda: world.consumer.device.run() or fetch.done())
    world.over(offer)
    assert fetch.error is offer.error is None


def test_an_engine_with_blocks_in_quarantine_can_be_closed_but_not_its_cache(world, caplog):
    stuck(world)
    begun = world.now
    with caplog.at_level(logging.ERROR, "aiokv"):
        world.consumer.run(world.consumer.engine.aclose())
    assert world.now <= begun + 1.0 + SLACK
    assert "copies of 2 blocks" in caplog.text
    with pytest.raises(BusyError, match="in use"):
        world.consumer.cache.close()
    world.producer.run(world.producer.engine.aclose())
    world.producer.cache.close()


def test_an_engine_with_copies_that_never_complete_can_be_closed(world):
    offer, fetch = world.copying()
    begun = world.now
    world.consumer.run(world.consumer.engine.aclose())
    assert world.now <= begun + DRAIN + 1.0 + SLACK
    world.failed(fetch, DeviceError, "stay leased")
    world.over(offer)
    world.failed(offer, TransferAborted, "its engine was closed")
    assert world.producer.counts.blocks_held == 0


# -- held for a while, and for longer -------------------------------------------------------------


def test_an_offer_is_held_for_who_says_that_he_will_come(world):
    offer = world.producer.offer(deadline=10.0, hold=1.0)
    unwanted = world.producer.offer("u", deadline=10.0, hold=1.0)
    renew = lambda: world.consumer.engine.renew("t", sources=[world.producer.address])  # noqa: E731
    for _ in range(5):
        world.consumer.loop.within(renew)
        world.wait(0.5)
    world.failed(unwanted, DeadlineExceeded, "hold of 1 s passed at the producer, waiting for GRANT")
    world.landed(offer, world.consumer.fetch("t", world.producer))
    world.assert_quiet()


def test_nobody_is_held_up_by_who_cannot_be_told(world):
    world.consumer.loop.within(lambda: world.consumer.engine.renew("t", sources=["memory://nobody"]))
    world.wait(2 * CONTACT)
    world.assert_quiet()


@pytest.mark.parametrize("wrong", [{"sources": "memory://p"}, {"attempt": -1}, {"attempt": 0.5}])
def test_what_cannot_be_renewed(world, wrong):
    with pytest.raises((TypeError, ValueError)):
        world.consumer.engine.renew("t", **wrong)
    with pytest.raises(ValueError, match="hold lies between 0 s and a day"):
        world.producer.engine.offer("t", [0], hold=-1)
