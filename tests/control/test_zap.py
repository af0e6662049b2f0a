"""CURVE on the channel over ZeroMQ, and those whom it keeps out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from types import SimpleNamespace

import pytest
import zmq

from aiokv.control import told, zap
from aiokv.control.base import MAX_FRAME
from aiokv.control.keys import Keys
from aiokv.control.zmq import ZmqChannel
from aiokv.testing.conformance import channels as suite
from aiokv.testing.conformance.channelkit import Inbox

HERE = "tcp://127.0.0.1:0"
A, B, STRANGER = Keys.generate(), Keys.generate(), Keys.generate()


@contextlib.asynccontextmanager
async def channels(*keys, allow=(A.public, B.public)):
    """A started channel for each pair of keys, with its address and what it gets."""
    ends = []
    try:
        for each in keys:
            channel, inbox = ZmqChannel(HERE, keys=each, allow=allow), Inbox()
            ends.append((channel, await channel.start(inbox), inbox))
        yield ends
    finally:
        for channel, _, _ in ends:
            await channel.aclose()


@contextlib.contextmanager
def raw_socket(address, *, keys=None, server="", **options):
    """A ZeroMQ socket that isn't aiokv's."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as sock:
        sock.linger = 0
        if keys is not None:
            zap.secure_client(sock, keys.public, keys.secret, server)
        for name, value in options.items():
            sock.setsockopt(getattr(zmq, name), value)
        sock.connect(address.partition("#")[0])
        yield sock


async def logged(caplog, text):
    async with asyncio.timeout(20):
        while text not in caplog.text:  # noqa: ASYNC110 (a log has no event)
            await asyncio.sleep(0.001)


@pytest.fixture(autouse=True)
def log(caplog):
    caplog.set_level(logging.INFO, "aiokv")


def kit(*, queue):
    return lambda address: ZmqChannel(
        (address or HERE).partition("#")[0], keys=A, allow=[A.public], queue=queue
    )


@pytest.mark.parametrize("case", suite.CASES, ids=lambda case: case.__name__)
@pytest.mark.asyncio
async def test_conformance_with_keys(case):
    await case(kit)


@pytest.mark.asyncio
async def test_addresses_name_keys_and_frames_come_under_them():
    senders = []
    async with channels(A, B) as ((a, at_a, _), (b, at_b, _)):
        third = ZmqChannel(HERE, keys=A, allow=[A.public, B.public])
        inbox = Inbox()
        address = await third.start(lambda frame: (inbox(frame), senders.append(third.sender)))
        assert [each.partition("#")[2] for each in (at_a, at_b, address)] == [A.public, B.public, A.public]
        for count, channel in enumerate([a, b, a, b], 1):
            channel.open(address).send(b"x")
            await inbox.until(count)
        assert senders == [A.public, B.public] * 2
        assert third.sender == ""
        await third.aclose()


@pytest.mark.asyncio
async def test_no_python_thread_answers():
    before = set(threading.enumerate())
    async with channels(A, B) as ((_, at_a, got), (b, _, _)):
        b.open(at_a).send(bytes(MAX_FRAME))
        assert await got.until(1) == [bytes(MAX_FRAME)]
        assert set(threading.enumerate()) == before


# -- intruders ------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_without_a_key():
    async with channels(A, B) as ((_, at_a, got), (b, _, _)):
        with raw_socket(at_a) as sock:
            sock.send(b"let me in")
            b.open(at_a).send(b"x")
            assert await got.until(1) == [b"x"]
            await asyncio.sleep(0.05)
            assert got.frames == [b"x"]


@pytest.mark.asyncio
async def test_with_a_key_that_is_not_listed(caplog):
    async with channels(A, B) as ((_, at_a, got), (b, _, _)), channels(STRANGER) as ((stranger, _, _),):
        port = stranger.open(at_a)
        port.send(b"let me in")
        await logged(caplog, f"refused: key {STRANGER.public} is not allowed")
        b.open(at_a).send(b"x")
        assert await got.until(1) == [b"x"]
        assert caplog.text.count(STRANGER.public) == 1  # though it comes back again and again


def test_who_makes_up_keys_fills_no_log(caplog, monkeypatch):
    monkeypatch.setattr(told, "_MOST", 3)
    gate, answers = zap.Gate(frozenset()), []
    gate.connection_made(SimpleNamespace(write=answers.append))
    for key in range(10):
        asked = [b"asker", b"", b"1.0", b"1", b"aiokv", b"192.0.2.1", b"", b"CURVE", bytes([key]) * 32]
        gate.msg_received(asked)
    assert [answer[4] for answer in answers] == [b"300"] * 10
    assert caplog.text.count("not allowed") == 3


@pytest.mark.asyncio
async def test_who_is_listed_later_is_let_in_with_the_port_that_it_has(caplog):
    async with channels(A, allow=[STRANGER.public]) as ((first, at_a, _),), channels(B) as ((b, _, _),):
        port = b.open(at_a)
        port.send(b"early")
        await logged(caplog, "not allowed")
        await first.aclose()
        second, inbox = ZmqChannel(at_a.partition("#")[0], keys=A, allow=[B.public]), Inbox()
        await second.start(inbox)
        assert await inbox.until(1) == [b"early"]
        await second.aclose()


@pytest.mark.asyncio
async def test_with_somebody_elses_public_key(caplog):
    """What is public proves nothing: the secret that belongs to it is another."""
    async with channels(A, B) as ((_, at_a, got), (b, _, _)):
        # libzmq takes any two halves for a pair.
        liar = Keys.generate()
        object.__setattr__(liar, "public", B.public)
        with raw_socket(at_a, keys=liar, server=A.public) as sock:
            sock.send(b"let me in")
            b.open(at_a).send(b"x")
            assert await got.until(1) == [b"x"]
            await asyncio.sleep(0.05)
            assert got.frames == [b"x"]


@pytest.mark.asyncio
async def test_a_name_that_a_peer_gives_itself_is_not_taken():
    async with channels(A) as ((a, at_a, got),):
        senders = []
        a._inbox._receive = lambda frame: (got(frame), senders.append(a.sender))
        with raw_socket(
            at_a,
            keys=B,
            server=A.public,
            METADATA=f"X-User-Id:{A.public}".encode(),
            ROUTING_ID=A.public.encode(),
        ) as sock:
            sock.send(b"x")
            await got.until(1)
        assert senders == [B.public]


@pytest.mark.asyncio
async def test_the_largest_frame_is_as_large_as_without_keys():
    async with channels(A) as ((_, at_a, got),):
        with raw_socket(at_a, keys=B, server=A.public) as sock:
            sock.send(bytes(MAX_FRAME))
            await got.until(1)
            sock.send(bytes(MAX_FRAME + 1))  # libzmq ends the connection for that, and it connects again
            while len(got.frames) < 2:
                sock.send(b"after")
                await asyncio.sleep(0.01)
        assert set(got.frames[1:]) == {b"after"}


@pytest.mark.asyncio
async def test_a_server_that_is_not_who_the_address_names_gets_nothing():
    async with channels(A, B, B) as ((a, _, _), (b, at_b, got), (_, other, _)):
        port = a.open(at_b.partition("#")[0] + "#" + A.public)
        port.send(b"secret")
        a.open(other).send(b"x")
        b.open(other).send(b"x")
        await asyncio.sleep(0.1)
        assert got.frames == []


@pytest.mark.asyncio
async def test_a_server_without_keys_gets_nothing():
    plain, inbox = ZmqChannel(HERE), Inbox()
    address = await plain.start(inbox)
    async with channels(A) as ((a, _, _),):
        a.open(f"{address}#{B.public}").send(b"secret")
        await asyncio.sleep(0.1)
        assert inbox.frames == []
    await plain.aclose()


@pytest.mark.asyncio
async def test_nobody_gets_in_once_nobody_answers_for_the_gate():
    async with channels(A, B) as ((a, at_a, got), (b, _, _)):
        b.open(at_a).send(b"x")
        await got.until(1)
        a._gate.close()
        b.open(at_a).send(b"y")
        await asyncio.sleep(0.1)
        assert got.frames == [b"x"]


# -- what can't be meant --------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_addresses_that_name_no_key_or_one_that_is_not_allowed():
    async with channels(A) as ((a, _, _),):
        with pytest.raises(ValueError, match="names no key"):
            a.open("tcp://127.0.0.1:1")
        with pytest.raises(ValueError, match="not allowed"):
            a.open(f"tcp://127.0.0.1:1#{STRANGER.public}")
    plain = ZmqChannel(HERE)
    await plain.start(Inbox())
    with pytest.raises(ValueError, match="names a key"):
        plain.open(f"tcp://127.0.0.1:1#{A.public}")
    await plain.aclose()


@pytest.mark.parametrize(
    "given", [{"keys": A}, {"allow": [A.public]}, {"keys": A, "allow": []}, {"keys": A, "allow": ["x"]}]
)
def test_keys_and_a_list_go_together(given):
    with pytest.raises(ValueError, match="one needs the other|64 hexadecimal"):
        ZmqChannel(HERE, **given)
