"""Channels inside one process, beyond what the conformance suite asks of all."""

from __future__ import annotations

import asyncio

import pytest

from aiokv.control.memory import MemoryNetwork
from aiokv.errors import CapacityError
from aiokv.testing.conformance.channelkit import Inbox


@pytest.mark.parametrize(
    "address", ["", "a", "memory:/a", "memory://", "memory://a b", "memory://a\n", "tcp://a"]
)
@pytest.mark.asyncio
async def test_malformed_addresses(address):
    network = MemoryNetwork()
    with pytest.raises(ValueError, match="memory://name"):
        network.channel(address)
    channel = network.channel("memory://a")
    await channel.start(Inbox())
    with pytest.raises(ValueError, match="memory://name"):
        channel.open(address)
    await channel.aclose()


def test_at_least_one_frame_must_fit():
    with pytest.raises(ValueError, match="queue=0"):
        MemoryNetwork(queue=0)


@pytest.mark.asyncio
async def test_networks_are_apart():
    a, b = MemoryNetwork().channel("memory://a"), MemoryNetwork().channel("memory://a")
    assert await a.start(Inbox()) == await b.start(Inbox())
    await a.aclose()
    await b.aclose()


@pytest.mark.asyncio
async def test_delivery_is_in_a_later_turn_and_in_order_of_sending():
    network, inbox = MemoryNetwork(), Inbox()
    hub = network.channel("memory://hub")
    await hub.start(inbox)
    senders = [network.channel(f"memory://{i}") for i in range(3)]
    for sender in senders:
        await sender.start(Inbox())
    ports = [sender.open("memory://hub") for sender in senders]
    for i in range(30):
        ports[i % 3].send(b"%d" % i)
    assert inbox.frames == []
    assert await inbox.until(30) == [b"%d" % i for i in range(30)]
    for channel in [hub, *senders]:
        await channel.aclose()


@pytest.mark.asyncio
async def test_frames_on_their_way_are_lost_with_the_channel_and_later_ones_wait():
    network = MemoryNetwork(queue=2)
    a, b = network.channel("memory://a"), network.channel("memory://b")
    await a.start(Inbox())
    await b.start(Inbox())
    port = a.open("memory://b")
    port.send(b"lost")
    port.send(b"lost")
    await b.aclose()
    port.send(b"kept")
    port.send(b"kept")
    with pytest.raises(CapacityError, match="memory://b"):
        port.send(b"too many")
    b, inbox = network.channel("memory://b"), Inbox()
    await b.start(inbox)
    assert await inbox.until(2) == [b"kept"] * 2
    assert port.pending == 0
    await a.aclose()
    await b.aclose()


@pytest.mark.asyncio
async def test_a_port_takes_what_waits_with_it_and_nothing_else():
    network = MemoryNetwork()
    a = network.channel("memory://a")
    await a.start(Inbox())
    first, second = a.open("memory://b"), a.open("memory://b")
    first.send(b"dropped")
    second.send(b"kept")
    first.close()
    b, inbox = network.channel("memory://b"), Inbox()
    await b.start(inbox)
    assert await inbox.until(1) == [b"kept"]
    await a.aclose()
    await b.aclose()


@pytest.mark.asyncio
async def test_a_callback_that_answers_itself_starves_nobody():
    network = MemoryNetwork()
    a = network.channel("memory://a")
    count = 0

    def receive(frame):
        nonlocal count
        count += 1
        port.send(frame)

    await a.start(receive)
    port = a.open("memory://a")
    port.send(b"round and round")
    for _ in range(100):
        await asyncio.sleep(0)
    assert 40 < count <= 101
    await a.aclose()
    seen = count
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert count == seen
