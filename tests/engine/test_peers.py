"""Peers: greetings, sessions that end, other versions, restarts, aliases, and one that doesn't read."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest

from aiokv.control.memory import MemoryNetwork
from aiokv.engine.engine import TransferEngine
from aiokv.engine.transfer import Offer
from aiokv.errors import CapacityError, LayoutMismatch, PeerLostError, Refused
from aiokv.proto.messages import (
    Frame,
    Grant,
    Hello,
    Landed,
    Message,
    Reset,
    decode_frame,
    decode_messages,
    encode_frame,
    encode_message,
)
from aiokv.proto.placement import Placement
from aiokv.proto.settings import Settings
from aiokv.testing.faultynetwork import Faults, FaultyNetwork
from aiokv.testing.pairs import LAYOUT, Engines, check_idle, kv_of, settle, transfer, virtual_time

VERSION_1 = Hello((1, 1), "memory://raw", LAYOUT, Placement.dense(LAYOUT), {})


class RawPeer:
    """An end of the control plane that says what a test makes up. Answers each HELLO with its own."""

    def __init__(self, network: MemoryNetwork, hello: Hello = VERSION_1, *, answers: bool = True) -> None:
        self.hello = hello
        self.heard: list[tuple[Frame, Message]] = []
        self.stream = 1
        self.incarnation = b"raw............."
        self._answers = answers
        self._channel = network.channel(hello.address)

    async def open(self, engine: TransferEngine) -> RawPeer:
        await self._channel.start(self._receive)
        self._port = self._channel.open(engine.address)
        return self

    async def close(self) -> None:
        await self._channel.aclose()

    def _receive(self, data: bytes) -> None:
        frame = decode_frame(data)
        for message in decode_messages(frame):
            self.heard.append((frame, message))
            if isinstance(message, Hello) and self._answers:
                self.say(self.hello, yours=frame.mine, dst=frame.src)

    def say(self, *messages: Message, seq: int = 0, **changes: object) -> None:
        body = [msgspec.Raw(encode_message(message)) for message in messages]
        frame = Frame(self.incarnation, b"", self.hello.address, self.stream, 0, seq, 1, body)
        self._port.send(encode_frame(msgspec.structs.replace(frame, **changes)))

    def of(self, kind: type[Message]) -> list[Message]:
        return [message for _, message in self.heard if isinstance(message, kind)]


async def failure(handle: object) -> Exception:
    """Begin a transfer and wait for the error that it ends with."""
    handle.start()
    with pytest.raises(Exception) as caught:
        await handle.wait()
    return caught.value


# -- greetings --------------------------------------------------------------------------------------


@virtual_time
async def test_both_sides_may_greet_at_once() -> None:
    async with Engines() as engines:
        a, b = await engines.add("a"), await engines.add("b")
        async with asyncio.TaskGroup() as group:
            group.create_task(transfer(a, b, "there"))
            group.create_task(transfer(b, a, "back", source=(5, 6), target=(7, 8)))
        assert a.statistics().sessions == b.statistics().sessions == 1
        check_idle(a, b)


@virtual_time
@pytest.mark.parametrize("lost", ["a to b", "b to a", "both"])
async def test_a_lost_greeting_is_said_again(lost: str) -> None:
    network = FaultyNetwork(seed=1)
    async with Engines(network=network) as engines:
        a, b = await engines.add("a"), await engines.add("b")
        if lost in ("a to b", "both"):
            network.script(a.address, b.address, "drop")
        if lost in ("b to a", "both"):
            network.script(b.address, a.address, "drop")
        await transfer(a, b, "t")
        check_idle(a, b)


@virtual_time
async def test_nobody_there_is_an_error_that_says_so() -> None:
    async with Engines() as engines:
        a, b = await engines.add("a"), await engines.add("b")
        error = await failure(a.fetch("t", [1], sources=["memory://nobody"]))
        assert isinstance(error, PeerLostError)
        told = f"it was told to answer to {a.address}"
        assert str(error) == f"transfer 't': no answer from memory://nobody within 2 s; {told}"
        await transfer(a, b, "good")
        check_idle(a, b)


@virtual_time
async def test_a_peer_that_comes_within_the_time_for_contact_is_in_time() -> None:
    async with Engines() as engines:
        a = await engines.add("a")
        async with a.fetch("t", [1], sources=["memory://b"]):
            await asyncio.sleep(1.5)
            b = await engines.add("b")
            async with b.offer("t", [1]):
                pass
        check_idle(a, b)


@virtual_time
async def test_an_engine_does_not_talk_to_itself() -> None:
    async with Engines() as engines:
        a = await engines.add("a")
        for handle in (a.fetch("t", [1], sources=[a.address]), a.offer("t", [1], to=[a.address])):
            with pytest.raises(ValueError, match="memory://a is this engine itself"):
                handle.start()
        check_idle(a)


# -- other versions ---------------------------------------------------------------------------------


@virtual_time
async def test_a_peer_of_another_version_is_refused_and_told() -> None:
    async with Engines() as engines:
        a, b = await engines.add("a"), await engines.add("b")
        raw = await RawPeer(engines.network, msgspec.structs.replace(VERSION_1, versions=(5, 5))).open(a)
        for begin in (
            lambda: a.fetch("t", [1], sources=["memory://raw"]),
            lambda: a.offer("t", [1], to=["memory://raw"]),
        ):
            raw.stream += 1
            error = await failure(begin())
            assert type(error) is Refused
            assert "memory://raw speaks protocol 5..5, memory://a speaks 1..2" in str(error)
        assert {message.reason for message in raw.of(Reset)} == {"version"}
        await transfer(a, b, "good")
        check_idle(a, b)
        await raw.close()


@virtual_time
async def test_a_peer_of_another_version_that_greets_first_is_told() -> None:
    async with Engines() as engines:
        a, b = await engines.add("a"), await engines.add("b")
        raw = RawPeer(engines.network, msgspec.structs.replace(VERSION_1, versions=(5, 7)), answers=False)
        await raw.open(a)
        raw.say(raw.hello)
        await settle(a)
        (reset,) = raw.of(Reset)
        assert (reset.stream, reset.reason) == (1, "version")
        assert "speaks protocol 5..7" in reset.text
        assert a.statistics().sessions == 0
        await transfer(a, b, "good")
        await raw.close()


@virtual_time
async def test_being_told_of_another_version_is_a_refusal() -> None:
    async with Engines() as engines:
        a = await engines.add("a")
        raw = await RawPeer(engines.network, answers=False).open(a)
        fetch = a.fetch("t", [1], sources=["memory://raw"])
        fetch.start()
        await settle(a)
        ((frame, _),) = raw.heard
        raw.say(Reset(frame.mine, "version", "this side speaks 5..5"), mine=0, dst=frame.src)
        with pytest.raises(Refused, match="this side speaks 5..5"):
            await fetch.wait()
        check_idle(a)
        await raw.close()


@virtual_time
async def test_a_peer_that_speaks_this_version_and_later_ones_is_understood() -> None:
    async with Engines() as engines:
        a = await engines.add("a")
        raw = await RawPeer(engines.network, msgspec.structs.replace(VERSION_1, versions=(1, 9))).open(a)
        offer = a.offer("t", [1], to=["memory://raw"], deadline=1)
        offer.start()
        await settle(a)
        assert a.statistics().sessions == 1
        assert offer.explain().startswith("waiting for GRANT from memory://raw")
        offer.cancel()
        with pytest.raises(Exception, match="cancelled"):
            await offer.wait()
        await raw.close()


# -- what is not meant for a session ----------------------------------------------------------------


@virtual_time
async def test_noise_is_counted_and_changes_nothing() -> None:
    async with Engines() as engines:
        a, b = await engines.add("a"), await engines.add("b")
        await transfer(a, b, "before")
        raw = await RawPeer(engines.network).open(a)
        group = msgspec.structs.replace(Placement.dense(LAYOUT).groups[0], strides=(2**40, 0, 0, 0))
        wild = msgspec.structs.replace(Placement.dense(LAYOUT), groups=(group,))
        noise = [b"", b"noise", bytes(range(256)), b"\xdc\xff\xff" * 100, b"\x91" * 5000]
        for data in noise:
            raw._port.send(data)
        raw.say(Landed("t", 0))  # outside a stream
        raw.say(VERSION_1, VERSION_1)
        raw.say(msgspec.structs.replace(VERSION_1, placement=wild))
        raw.say(msgspec.structs.replace(VERSION_1, address="tcp://not.of.this.network:1"))
        await settle(a, b)
        assert a.statistics().frames_stray == len(noise) + 4
        assert a.statistics().sessions == 1
        await transfer(a, b, "after")
        check_idle(a, b)
        await raw.close()


@virtual_time
async def test_a_frame_of_an_unknown_session_is_answered_by_a_reset() -> None:
    async with Engines() as engines:
        a = await engines.add("a")
        raw = await RawPeer(engines.network).open(a)
        raw.say(Landed("t", 0), seq=7)
        raw.say(Landed("t", 0), seq=1, dst=b"somebody else...")
        await settle(a)
        assert [(reset.stream, reset.reason) for reset in raw.of(Reset)] == [
            (1, "session"),
            (1, "incarnation"),
        ]
        await raw.close()


@virtual_time
async def test_a_reset_of_another_stream_or_by_somebody_else_changes_nothing() -> None:
    async with Engines() as engines:
        a, b = await engines.add("a"), await engines.add("b")
        raw = await RawPeer(engines.network).open(a)
        async with b.fetch("t", [1], sources=[a.address]), a.offer("t", [1]):
            await settle(a, b)
            for stream in range(5):
                raw.say(Reset(stream, "session", "not yours to reset"), mine=0)
            await settle(a, b)
            assert a.statistics().sessions == 1
        check_idle(a, b)
        await raw.close()


@virtual_time
@pytest.mark.parametrize("way", ["a to b", "b to a"])
async def test_lost_frames_end_the_session_and_the_next_transfer_makes_another(way: str) -> None:
    network = FaultyNetwork(seed=1)
    async with Engines(network=network) as engines:
        a, b = await engines.add("a"), await engines.add("b")
        await transfer(a, b, "before")
        offer = a.offer("t", [1])
        fetch = b.fetch("t", [1], sources=[a.address])
        for handle in (offer, fetch):
            handle.start()
        await settle(a, b)
        ends = (a, b) if way == "a to b" else (b, a)
        network.script(ends[0].address, ends[1].address, "drop")
        offer.layer_ready(0)
        (b if way == "b to a" else a)._core.peers.sessions[0].ask()
        (b if way == "b to a" else a)._core.wake()
        for handle in (offer, fetch):
            with pytest.raises(PeerLostError, match="'t'"):
                await handle.wait()
        await transfer(a, b, "after")
        check_idle(a, b)
        assert a.statistics().sessions == b.statistics().sessions == 1


# -- the end of a peer, and its return --------------------------------------------------------------


@virtual_time
async def test_a_peer_that_closes_ends_what_goes_on_with_it_at_once() -> None:
    async with Engines() as engines:
        a, b, c = [await engines.add(name) for name in "abc"]
        fetch = b.fetch("t", [1], sources=[a.address])
        fetch.start()
        await settle(a, b)
        began = asyncio.get_running_loop().time()
        await engines.close(a)
        with pytest.raises(PeerLostError, match="'t'.*memory://a closed"):
            await fetch.wait()
        assert asyncio.get_running_loop().time() == began
        await transfer(c, b, "good")
        check_idle(b, c)


@virtual_time
async def test_an_engine_that_was_closed_can_be_followed_by_another_at_its_address() -> None:
    async with Engines() as engines:
        a, b = await engines.add("a"), await engines.add("b")
        await transfer(a, b, "t")
        await engines.close(a)
        again = await engines.add("a")
        await transfer(again, b, "t2")
        await transfer(b, again, "t3")
        check_idle(again, b)


def kill(engines: Engines, engine: TransferEngine) -> None:
    """As SIGKILL would: it says nothing more, and the kernel tells who read from it."""
    engines.network.kill(engine.address)
    engines.hub.kill(engine._transports[0])


@virtual_time
@pytest.mark.parametrize("dead", ["producer", "consumer"])
async def test_a_killed_peer_is_told_by_its_link_and_another_can_take_its_place(dead: str) -> None:
    async with Engines(network=FaultyNetwork(seed=1)) as engines:
        a, b = await engines.add("a"), await engines.add("b")
        offer, fetch = a.offer("t", [1]), b.fetch("t", [1], sources=[a.address])
        for handle in (offer, fetch):
            handle.start()
        offer.layer_ready(0)
        await fetch.layer(0)
        victim, handle = (a, fetch) if dead == "producer" else (b, offer)
        kill(engines, victim)
        began = asyncio.get_running_loop().time()
        with pytest.raises(PeerLostError, match="'t'.*link.*is lost"):
            await handle.wait()
        assert asyncio.get_running_loop().time() == began
        again = await engines.add(victim.address.removeprefix("memory://"))
        await (transfer(again, b, "good") if dead == "producer" else transfer(a, again, "good"))
        check_idle(again, b if dead == "producer" else a)


@virtual_time
async def test_a_peer_that_comes_back_with_another_layout_is_refused_until_it_fits() -> None:
    async with Engines(network=FaultyNetwork(seed=1)) as engines:
        a, b = await engines.add("a"), await engines.add("b")
        await transfer(a, b, "before")
        kill(engines, a)
        await settle(b)
        other = await engines.add("a", msgspec.structs.replace(LAYOUT, model=b"other"))
        error = await failure(b.fetch("t", [1], sources=[other.address]))
        assert isinstance(error, LayoutMismatch)
        assert "model fingerprint 6d against 6f74686572" in str(error)
        kill(engines, other)
        await settle(b)
        # More blocks and another block size: that can be bridged, and what was known of it is old.
        group = msgspec.structs.replace(LAYOUT.groups[0], block_size=8, blocks=5, axes="bhtsd")
        wider = await engines.add("a", msgspec.structs.replace(LAYOUT, groups=(group,)))
        async with b.fetch("u", [9, 7, 8, 3], sources=[wider.address]), wider.offer("u", [4, 2], tokens=13):
            pass
        there, here = kv_of(wider.cache, [4, 2]), kv_of(b.cache, [9, 7, 8, 3])
        assert np.array_equal(there[:, :, :13], here[:, :, :13])
        check_idle(wider, b)


@virtual_time
async def test_what_was_meant_for_a_dead_engine_does_not_reach_the_next() -> None:
    network = FaultyNetwork(seed=1)
    async with Engines(network=network) as engines:
        a, b = await engines.add("a"), await engines.add("b")
        await transfer(a, b, "before")
        network.kill(a.address, keep=True)  # and its link is not known to be gone
        fetch = b.fetch("t", [1], sources=[a.address])
        fetch.start()
        await settle(b)
        again = await engines.add("a")
        offer = again.offer("t", [1], deadline=1)
        offer.start()
        with pytest.raises(PeerLostError, match="reset the session .incarnation."):
            await fetch.wait()
        assert again.statistics().parked == 0
        offer.cancel()
        await offer._course.quiet()
        await transfer(again, b, "good")
        check_idle(again, b)


# -- bounds -----------------------------------------------------------------------------------------


@virtual_time
async def test_who_begins_ever_new_sessions_has_but_a_few() -> None:
    async with Engines() as engines:
        a, b = await engines.add("a"), await engines.add("b")
        raw = await RawPeer(engines.network, answers=False).open(a)
        for stream in range(1, 100):
            raw.stream = stream
            raw.say(VERSION_1)
            await settle(a)
            if stream == 1:
                raw.say(Grant("early", 0, 30_000_000, "memory", b"link", 0, -1, ()), seq=1, yours=1)
                await settle(a)
        assert a.statistics().sessions <= 9
        assert a.statistics().parked == 1, "idle sessions end first"
        raw.incarnation = b"another life...."
        raw.say(VERSION_1)
        await settle(a)
        assert a.statistics().sessions == 1  # the life before is over, with all its sessions
        await transfer(a, b, "good")
        check_idle(a, b)
        await raw.close()


@virtual_time
async def test_an_idle_peer_gives_way_to_another_and_may_come_back() -> None:
    async with Engines() as engines:
        a = await engines.add("a", settings=Settings(peers=2))
        others = [await engines.add(name) for name in "bcd"]
        for round_ in range(2):
            for other in others:
                await transfer(a, other, f"{round_} to {other.address}", source=(1, 2))
                assert a.statistics().sessions <= 2
        check_idle(a, *others)


@virtual_time
async def test_a_peer_whose_request_waits_is_not_idle() -> None:
    async with Engines() as engines:
        a = await engines.add("a", settings=Settings(peers=2))
        b, c, d = [await engines.add(name) for name in "bcd"]
        async with b.fetch("early", [3], sources=[a.address]) as early:
            await settle(a)
            assert a.statistics().parked == 1
            for other in (c, d):
                await transfer(a, other, f"to {other.address}", source=(1, 2))
            async with a.offer("early", [4]) as offer:
                for layer in range(a.cache.layout.layers):
                    offer.layer_ready(layer)
                await early.wait()
        assert a.statistics().parked == 0
        check_idle(a, b, c, d)


@virtual_time
async def test_more_peers_with_live_transfers_than_allowed_are_refused() -> None:
    async with Engines() as engines:
        a = await engines.add("a", settings=Settings(peers=2))
        offers = [a.offer(name, [1], to=[f"memory://{name}"]) for name in "bcd"]
        for offer in offers[:2]:
            offer.start()
        with pytest.raises(CapacityError, match="2 peers with live transfers, as many as allowed"):
            offers[2].start()
        assert a.statistics().leases == 2
        for offer in offers[:2]:
            offer.cancel()
            await offer._course.quiet()
        b = await engines.add("e")
        await transfer(a, b, "good")
        check_idle(a, b)


@virtual_time
async def test_a_peer_that_does_not_read_costs_its_own_transfers_only() -> None:
    network = FaultyNetwork(seed=1, queue=16)
    async with Engines(network=network) as engines:
        a, b, c = [await engines.add(name) for name in "abc"]
        await transfer(a, b, "before")
        network.cut(a.address, b.address, hold=True)
        offers = [a.offer(f"t{number}", [1], to=[b.address], deadline=20) for number in range(30)]
        for offer in offers:
            offer.start()
            await settle(a)  # a frame each
        for offer in offers:
            with pytest.raises(PeerLostError):
                await offer.wait()
        assert any("does not read its control messages" in str(offer.error) for offer in offers)
        await transfer(a, c, "good")
        network.heal()
        await asyncio.sleep(10)
        await transfer(a, b, "healed")
        check_idle(a, b, c)


# -- real addresses ---------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_an_engine_may_be_called_by_another_name_than_its_own() -> None:
    async with Engines() as engines, asyncio.timeout(30):
        a, b = [await engines.add(name, transports=["shm"], bind="tcp://127.0.0.1:0") for name in "ab"]
        alias = a.address.replace("127.0.0.1", "localhost")
        for number in range(2):
            await transfer(a, b, f"t{number}", address=alias)
        await transfer(a, b, "by its own")
        assert a.statistics().sessions == b.statistics().sessions == 1
        check_idle(a, b)


@pytest.mark.asyncio
async def test_another_name_used_later_disturbs_nothing_that_goes_on() -> None:
    async with Engines() as engines, asyncio.timeout(30):
        a, b = [await engines.add(name, transports=["shm"], bind="tcp://127.0.0.1:0") for name in "ab"]
        alias = a.address.replace("127.0.0.1", "localhost")
        async with b.fetch("live", [5], sources=[a.address]) as fetch, a.offer("live", [5]) as live:
            live.layer_ready(0)
            await fetch.layer(0)
            await transfer(a, b, "other", address=alias)
        check_idle(a, b)


@virtual_time
@pytest.mark.parametrize("first", ["own name", "other name"])
@pytest.mark.parametrize("delay", [0.01, 0.8])
async def test_two_names_may_be_used_at_once_whichever_greeting_comes_first(first: str, delay: float) -> None:
    network = FaultyNetwork(seed=1)
    network.alias("memory://alias", "memory://a")
    async with Engines(network=network) as engines:
        a, b = await engines.add("a"), await engines.add("b")
        network.script(b.address, "memory://alias" if first == "own name" else "memory://a", delay)
        async with asyncio.TaskGroup() as group:
            for number, name in enumerate(("memory://alias", "memory://a")):
                blocks = [2 * number, 2 * number + 1]
                group.create_task(
                    transfer(a, b, f"t{number}", source=blocks, target=blocks, address=name, others=False)
                )
        check_idle(a, b)


@virtual_time
async def test_who_waits_for_a_place_is_told_when_it_is_known_that_there_is_none() -> None:
    async with Engines() as engines:
        a, b, c = [await engines.add(name) for name in "abc"]
        offer = a.offer("t", [1], readers=2, to=["memory://nobody"], deadline=20)
        first = b.fetch("t", [1], sources=[a.address], deadline=20)
        offer.start()
        first.start()
        offer.layer_ready(0)
        await asyncio.sleep(0.1)
        loop = asyncio.get_running_loop()
        began = loop.time()
        # It might be the one that was named, by a name that isn't its own.
        error = await failure(c.fetch("t", [1], sources=[a.address], deadline=20))
        assert isinstance(error, Refused)
        assert "the offer has no reader left for this engine" in str(error)
        assert loop.time() - began < 3
        for layer in range(1, 4):
            offer.layer_ready(layer)
        await first.wait()
        assert isinstance((await asyncio.gather(offer.wait(), return_exceptions=True))[0], PeerLostError)
        check_idle(a, b, c)


@virtual_time
async def test_one_session_that_is_over_has_the_others_asked() -> None:
    network = FaultyNetwork(seed=1)
    for number in range(4):
        network.alias(f"memory://a{number}", "memory://a")
    async with Engines(network=network) as engines:
        a, b = await engines.add("a"), await engines.add("b")
        for number in range(4):
            await transfer(a, b, f"t{number}", address=f"memory://a{number}")
        assert b.statistics().sessions == 4
        for session in list(a._core.peers.sessions):  # and b doesn't hear of it
            a._core.peers.end(session, PeerLostError("forgotten"))
        error = await failure(b.fetch("finds out", [1], sources=["memory://a0"]))
        assert isinstance(error, PeerLostError)
        await settle()
        for number in range(4):
            await transfer(a, b, f"again {number}", address=f"memory://a{number}")
        check_idle(a, b)


@virtual_time
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("source", ["memory://a", "memory://other-a"])
@pytest.mark.parametrize("reader", ["memory://b", "memory://other-b"])
async def test_both_sides_may_name_each_other_by_any_names(seed: int, source: str, reader: str) -> None:
    network = FaultyNetwork(seed=seed, faults=Faults(delay=(0.0, 0.02)))
    network.alias("memory://other-a", "memory://a")
    network.alias("memory://other-b", "memory://b")
    async with Engines(network=network) as engines:
        a, b = await engines.add("a"), await engines.add("b")
        for number in range(3):
            handles = [
                a.offer(f"t{number}", [1], to=[reader], deadline=5),
                b.fetch(f"t{number}", [1], sources=[source], deadline=5),
            ]
            for handle in handles[:: 1 if seed % 2 else -1]:
                handle.start()
            for layer in range(4):
                handles[0].layer_ready(layer)
            assert await asyncio.gather(*(h.wait() for h in handles), return_exceptions=True) == [None] * 2
        check_idle(a, b)


@virtual_time
@pytest.mark.parametrize("gives_up", ["offer", "fetch"])
@pytest.mark.parametrize("after", [0.0, 0.01, 0.03, 0.1])
async def test_who_gives_up_is_heard_whatever_the_names(gives_up: str, after: float) -> None:
    network = FaultyNetwork(seed=1, faults=Faults(delay=(0.0, 0.02)))
    network.alias("memory://other-a", "memory://a")
    async with Engines(network=network) as engines:
        a, b = await engines.add("a"), await engines.add("b")
        handles = {
            "offer": a.offer("t", [1], to=["memory://b"], deadline=20),
            "fetch": b.fetch("t", [1], sources=["memory://other-a"], deadline=20),
        }
        for handle in handles.values():
            handle.start()
        await asyncio.sleep(after)
        began = asyncio.get_running_loop().time()
        handles[gives_up].cancel()
        await asyncio.gather(*(handle.wait() for handle in handles.values()), return_exceptions=True)
        assert asyncio.get_running_loop().time() - began < 5
        check_idle(a, b)


@virtual_time
@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("others", [False, True])
async def test_greetings_that_cross_by_other_names_are_sorted_out(seed: int, others: bool) -> None:
    network = FaultyNetwork(seed=seed, faults=Faults(delay=(0.0, 0.02)))
    network.alias("memory://other-a", "memory://a")
    network.alias("memory://other-b", "memory://b")
    async with Engines(network=network) as engines:
        a, b = await engines.add("a"), await engines.add("b")
        handles = [
            a.fetch("to a", [1], sources=["memory://other-b"], deadline=5),
            b.offer("to a", [1], deadline=5),
            b.fetch("to b", [3], sources=["memory://other-a" if others else "memory://a"], deadline=5),
            a.offer("to b", [3], deadline=5),
            a.offer("push", [5], to=["memory://other-b" if others else "memory://b"], deadline=5),
            b.fetch("push", [5], deadline=5),
        ]
        for handle in handles:
            handle.start()
        for handle in handles:
            if isinstance(handle, Offer):
                for layer in range(4):
                    handle.layer_ready(layer)
        outcomes = await asyncio.gather(*(handle.wait() for handle in handles), return_exceptions=True)
        assert outcomes == [None] * 6
        check_idle(a, b)


@pytest.mark.asyncio
async def test_several_names_may_be_used_at_once_from_the_first_contact_on() -> None:
    async with Engines() as engines, asyncio.timeout(30):
        a, b = [await engines.add(name, transports=["shm"], bind="tcp://127.0.0.1:0") for name in "ab"]
        alias = a.address.replace("127.0.0.1", "localhost")
        async with asyncio.TaskGroup() as group:
            for number in range(6):
                blocks = [2 * number, 2 * number + 1]
                address = alias if number % 2 else a.address
                group.create_task(
                    transfer(a, b, f"t{number}", source=blocks, target=blocks, address=address, others=False)
                )
        check_idle(a, b)
