"""The network with faults: what is asked of it happens, and the same again from the same seed."""

from __future__ import annotations

import asyncio
import collections

import pytest

from aiokv.errors import CapacityError
from aiokv.testing.conformance.channelkit import Inbox
from aiokv.testing.faultynetwork import Faults, FaultyNetwork

A, B, C = "memory://a", "memory://b", "memory://c"


class Ends:
    """Channels at some addresses of a network, and a port from each to each."""

    def __init__(self, network, *addresses):
        self.network = network
        self.addresses = addresses
        self.inboxes = {address: Inbox() for address in addresses}

    async def __aenter__(self):
        self.channels = {address: self.network.channel(address) for address in self.addresses}
        for address, channel in self.channels.items():
            await channel.start(self.inboxes[address])
        self.ports = {(x, y): self.channels[x].open(y) for x in self.addresses for y in self.addresses}
        return self

    async def __aexit__(self, *_):
        for channel in self.channels.values():
            await channel.aclose()

    def send(self, source, target, *frames):
        for frame in frames:
            self.ports[source, target].send(frame)

    async def got(self, address, *, held=0):
        """What is there once everything was delivered or lost, but for what is held."""
        async with asyncio.timeout(20):
            while sum(port.pending for port in self.ports.values()) > held:  # noqa: ASYNC110 (nothing tells of a loss)
                await asyncio.sleep(0.001)
        return self.inboxes[address].frames


def numbers(count):
    return [b"%d" % i for i in range(count)]


# -- by command -----------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_script_decides_for_the_next_frames():
    async with Ends(FaultyNetwork(0), A, B) as ends:
        ends.network.script(A, B, "pass", "drop", "duplicate", "reorder")
        ends.send(A, B, *numbers(6))
        assert await ends.got(B) == [b"0", b"2", b"2", b"4", b"3", b"5"]
        ends.send(B, A, *numbers(2))
        assert await ends.got(A) == numbers(2)
        assert [(e.what, e.number) for e in ends.network.trace if e.source == A] == [
            ("arrive", 1),
            ("drop", 2),
            ("duplicate", 3),
            ("arrive", 3),
            ("arrive", 3),
            ("reorder", 4),
            ("arrive", 5),
            ("arrive", 4),
            ("arrive", 6),
        ]
        assert ends.ports[A, B].pending == 0


@pytest.mark.asyncio
async def test_a_reordered_frame_that_nothing_follows_arrives():
    async with Ends(FaultyNetwork(0), A, B) as ends:
        ends.network.script(A, B, "reorder", "reorder")
        ends.send(A, B, b"0", b"1")
        assert ends.inboxes[B].frames == []
        assert await ends.inboxes[B].until(2) == [b"0", b"1"]


@pytest.mark.asyncio
async def test_a_delay_holds_up_what_follows_on_the_link_and_nothing_else():
    async with Ends(FaultyNetwork(0), A, B, C) as ends:
        ends.network.script(A, B, 0.01)
        ends.send(A, B, b"late", b"behind it")
        ends.send(C, B, b"first")
        assert await ends.inboxes[B].until(3) == [b"first", b"late", b"behind it"]


@pytest.mark.parametrize("both_ways", [True, False])
@pytest.mark.asyncio
async def test_a_cut_loses_frames_until_healed(both_ways):
    async with Ends(FaultyNetwork(0), A, B, C) as ends:
        ends.network.cut(A, B, both_ways=both_ways)
        ends.send(A, B, b"lost")
        ends.send(B, A, b"back")
        ends.send(C, B, b"c")
        ends.send(A, C, b"a")
        assert await ends.got(B) == [b"c"]
        assert await ends.got(A) == ([] if both_ways else [b"back"])
        assert await ends.got(C) == [b"a"]
        assert ends.ports[A, B].pending == 0
        ends.network.heal(A, B)
        ends.send(A, B, b"through")
        assert await ends.got(B) == [b"c", b"through"]


@pytest.mark.asyncio
async def test_a_cut_that_holds_gives_the_frames_up_in_order_and_is_bounded():
    async with Ends(FaultyNetwork(0, queue=3), A, B) as ends:
        ends.network.cut(A, None, hold=True)
        ends.send(A, B, *numbers(3))
        with pytest.raises(CapacityError):
            ends.send(A, B, b"too many")
        assert await ends.got(B, held=3) == []
        ends.network.heal()
        assert await ends.got(B) == numbers(3)


@pytest.mark.asyncio
async def test_a_cut_takes_what_is_under_way():
    async with Ends(FaultyNetwork(0, Faults(delay=(0.005, 0.005))), A, B) as ends:
        ends.send(A, B, b"lost")
        ends.network.cut(None, B)
        assert await ends.got(B) == []
        ends.network.heal(None, B)
        ends.send(A, B, b"through")
        assert await ends.got(B) == [b"through"]


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.asyncio
async def test_a_killed_channel_is_silent_and_another_takes_its_place(keep):
    network = FaultyNetwork(0)
    async with Ends(network, A, B) as ends:
        network.script(A, B, "pass", 0.005)
        ends.send(A, B, b"in the inbox", b"under way")
        network.kill(B, keep=keep)
        ends.send(A, B, b"after")
        ends.send(B, A, b"from the dead")
        ends.channels[B].open(A).send(b"also")
        second, inbox = network.channel(B), Inbox()
        await second.start(inbox)
        ends.send(A, B, b"last")
        kept = [b"in the inbox", b"under way"] if keep else []
        assert await inbox.until(len(kept) + 2) == [*kept, b"after", b"last"]
        assert await ends.got(A) == []
        assert await ends.got(B) == []
        # The dead one's owner may still close it, and that takes nothing from the new one.
        await ends.channels[B].aclose()
        ends.send(A, B, b"still there")
        assert await inbox.until(len(kept) + 3) == [*kept, b"after", b"last", b"still there"]
        assert ends.ports[A, B].pending == 0
        await second.aclose()


@pytest.mark.asyncio
async def test_nobody_to_kill():
    with pytest.raises(ValueError, match=A):
        FaultyNetwork(0).kill(A)


def test_links_may_be_cut_before_anything_runs():
    network = FaultyNetwork(0)
    network.cut(A, B)
    network.heal()
    assert [event.what for event in network.trace] == ["cut", "cut", "heal", "heal"]


@pytest.mark.asyncio
async def test_what_was_held_comes_before_what_is_still_on_its_way():
    async with Ends(FaultyNetwork(0), A, B) as ends:
        ends.network.cut(A, B, hold=True)
        ends.send(A, B, b"0", b"1")
        ends.network.script(A, B, 0.01)
        ends.send(A, B, b"2")
        ends.network.heal(A, B)
        assert await ends.got(B) == [b"0", b"1", b"2"]


# -- by chance ------------------------------------------------------------------------------------


async def run(seed, faults, *, others=False):
    network = FaultyNetwork(seed)
    network.set_faults(faults, A, B)
    async with Ends(network, A, B, C) as ends:
        for frame in numbers(500):
            ends.send(A, B, frame)
            if others:
                ends.send(C, B, b"other")
        await ends.got(B)
        return [frame for frame in ends.inboxes[B].frames if frame != b"other"]


@pytest.mark.asyncio
async def test_the_seed_decides_whatever_other_links_do(seed):
    faults = Faults(drop=0.1, duplicate=0.1, reorder=0.1)
    got = await run(seed, faults)
    assert got == await run(seed, faults, others=True)
    assert got != await run(seed + 1, faults)


@pytest.mark.asyncio
async def test_each_fault_does_what_it_says(seed):
    sent = numbers(500)
    dropped = await run(seed, Faults(drop=0.2))
    assert 0 < len(dropped) < 500
    assert dropped == [frame for frame in sent if frame in set(dropped)]
    doubled = await run(seed, Faults(duplicate=0.2))
    assert set(collections.Counter(doubled).values()) == {1, 2}
    assert sorted(set(doubled), key=int) == sent
    reordered = await run(seed, Faults(reorder=0.2))
    assert reordered != sent
    assert sorted(reordered, key=int) == sent
    assert await run(seed, Faults(delay=(0.0, 0.01))) == sent


@pytest.mark.asyncio
async def test_what_else_happens_stays_when_one_probability_changes(seed):
    fewer = await run(seed, Faults(drop=0.1))
    with_duplicates = await run(seed, Faults(drop=0.1, duplicate=0.5))
    assert list(dict.fromkeys(with_duplicates)) == fewer


@pytest.mark.asyncio
async def test_the_most_particular_setting_counts():
    network = FaultyNetwork(0, Faults(drop=1.0))
    network.set_faults(Faults(), target=B)
    network.set_faults(Faults(drop=1.0), A, B)
    async with Ends(network, A, B, C) as ends:
        for target in (A, B, C):
            ends.send(A, target, b"from a")
            ends.send(C, target, b"from c")
        assert await ends.got(B) == [b"from c"]
        assert ends.inboxes[A].frames == ends.inboxes[C].frames == []
