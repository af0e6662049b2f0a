"""Peers that speak another version, or nonsense: they cost their own transfers at most."""

from __future__ import annotations

import dataclasses
import random
from typing import Self

import msgspec
import pytest

from aiokv.control.memory import MemoryChannel, MemoryNetwork
from aiokv.engine.engine import TransferEngine
from aiokv.errors import AiokvError, PeerLostError, Refused
from aiokv.proto.messages import (
    OLDEST_VERSION,
    VERSION,
    Abort,
    Accept,
    Frame,
    Grant,
    Hello,
    Landed,
    Message,
    Ready,
    Refuse,
    Reset,
    decode_frame,
    decode_messages,
    encode_frame,
    encode_message,
)
from aiokv.proto.placement import Placement
from aiokv.proto.session import Identity, Session
from aiokv.proto.settings import Settings
from aiokv.testing.pairs import LAYOUT, Engines, check_idle, settle, transfer

ADDRESS = "memory://stranger"
SPOKEN = f"{OLDEST_VERSION}..{VERSION}"
HEADS = ((0, 4),)
INCARNATION = b"s" * 16
#: Whoever closes doesn't wait for a stranger to acknowledge anything.
IMPATIENT = Settings(close_ns=1)


class Stranger:
    """Somebody at the control network who is no engine, and says what a test wants.

    Args:
        network: The engines'.
        versions: Lowest and highest version of the protocol that it speaks.
        answers: Greets whoever greets it.
    """

    def __init__(
        self, network: MemoryNetwork, *, versions: tuple[int, int] = (1, 1), answers: bool = True
    ) -> None:
        self.channel: MemoryChannel = network.channel(ADDRESS)
        self.hello = Hello(versions, ADDRESS, LAYOUT, Placement.dense(LAYOUT), {"memory": b"nowhere"})
        self.answers = answers
        #: The session with whom it met last; None before that.
        self.session: Session | None = None
        #: What it was told, outside and inside of sessions.
        self.heard: list[Message] = []

    async def __aenter__(self) -> Self:
        await self.channel.start(self._receive)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.aclose()

    def raw(self, engine: TransferEngine, data: bytes) -> None:
        port = self.channel.open(engine.address)
        port.send(data)

    def frame(self, *messages: Message, mine: int, yours: int = 0, seq: int = 0) -> bytes:
        body = [msgspec.Raw(encode_message(message)) for message in messages]
        return encode_frame(Frame(INCARNATION, b"", ADDRESS, mine, yours, seq, 0, body))

    def greet(self, engine: TransferEngine) -> None:
        self.session = Session(Identity(INCARNATION, self.hello), 1, engine.address, Settings(), 0)
        self.flush()

    def say(self, *messages: Message) -> None:
        assert self.session is not None
        for message in messages:
            self.session.send(message)
        self.flush()

    def say_raw(self, *bodies: bytes) -> None:
        """A frame of the session with any bytes as its messages."""
        session = self.session
        assert session is not None
        body = [msgspec.Raw(each) for each in bodies]
        frame = Frame(
            INCARNATION,
            session.incarnation,
            ADDRESS,
            session.mine,
            session.theirs,
            session.next_send,
            0,
            body,
        )
        self.channel.open(session.address).send(encode_frame(frame))

    def flush(self) -> None:
        assert self.session is not None
        port = self.channel.open(self.session.address)
        for data in self.session.take_frames():
            port.send(data)

    def _receive(self, data: bytes) -> None:
        frame = decode_frame(data)
        if frame.seq:
            assert self.session is not None
            self.heard += self.session.receive(frame, 0)
            return
        (message,) = decode_messages(frame)
        self.heard.append(message)
        if isinstance(message, Hello) and self.session is not None:
            self.session.receive_hello(frame, message, 0)
        elif isinstance(message, Hello) and self.answers:
            self.session = Session(Identity(INCARNATION, self.hello), 1, frame.reply, Settings(), 0)
            self.flush()
            self.session.receive_hello(frame, message, 0)


async def others_are_well(*engines: TransferEngine) -> None:
    """Nothing is left, and transfers between the others go well."""
    await settle(*engines)
    check_idle(*engines)
    await transfer(engines[0], engines[1], "afterwards")


# -- versions -------------------------------------------------------------------------------------


@pytest.mark.parametrize("push", [False, True], ids=["pull", "push"])
@pytest.mark.asyncio
async def test_a_peer_that_is_asked_and_speaks_another_version(push: bool) -> None:
    async with Engines(settings=IMPATIENT) as engines:
        a, b = await engines.add("a"), await engines.add("b")
        async with Stranger(engines.network, versions=(5, 5)) as stranger:
            with pytest.raises(Refused, match=f"{ADDRESS} speaks protocol 5..5, memory://a speaks {SPOKEN}"):
                if push:
                    async with a.offer("t", [1], to=[ADDRESS]):
                        pass
                else:
                    async with a.fetch("t", [1], sources=[ADDRESS]):
                        pass
            await settle(a)
            (reset,) = [message for message in stranger.heard if isinstance(message, Reset)]
            assert (reset.reason, reset.stream) == ("version", 1)
            assert "speaks protocol 5..5" in reset.text
            assert a.statistics().sessions == 0
            await others_are_well(a, b)


# -- nonsense -------------------------------------------------------------------------------------


def nonsense(stranger: Stranger, seed: int) -> list[bytes]:
    """Frames that mean nothing, and some that nearly do."""
    rng = random.Random(seed)
    hello = stranger.frame(stranger.hello, mine=1)
    beyond = msgspec.structs.replace(
        stranger.hello, placement=Placement((1,), stranger.hello.placement.groups)
    )
    found = [
        b"",
        b"\x00",
        b"\xc1" * 50,
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x91" * 100_000,
        hello[:-1],
        hello + b"x",
    ]
    found += [rng.randbytes(rng.randrange(1, 200)) for _ in range(50)]
    for _ in range(50):  # with one byte changed; what still decodes is another greeting
        damaged = bytearray(hello)
        damaged[rng.randrange(40, len(damaged))] = rng.randrange(256)
        found.append(bytes(damaged))
    found += [
        stranger.frame(mine=1),
        stranger.frame(Landed("t", 0), mine=1),
        stranger.frame(stranger.hello, stranger.hello, mine=1),
        stranger.frame(beyond, mine=1),
        stranger.frame(Landed("t", 0), mine=1, seq=1),
        stranger.frame(Landed("t", 0), mine=7, yours=1, seq=2**40),
        stranger.frame(Reset(1, "protocol", "of a session that isn't mine"), mine=0),
        stranger.frame(Reset(2**40, "version", ""), mine=0),
    ]
    return found


@pytest.mark.asyncio
async def test_nonsense_disturbs_nobody(seed: int) -> None:
    async with Engines(settings=IMPATIENT) as engines:
        a, b = await engines.add("a"), await engines.add("b")
        async with Stranger(engines.network, answers=False) as stranger:
            offer, fetch = a.offer("t", [1, 2]), b.fetch("t", [1, 2], sources=[a.address])
            offer.start()
            fetch.start()
            await settle(a, b)
            for data in nonsense(stranger, seed):
                stranger.raw(a, data)
                stranger.raw(b, data)
                await settle(a, b)
            for layer in range(4):
                offer.layer_ready(layer)
            await offer.wait()
            await fetch.wait()
            assert min(a.statistics().frames_stray, b.statistics().frames_stray) >= 50
            await others_are_well(a, b)


MISBEHAVIOUR = {
    "no message": [b"\xc0"],
    "an unknown message": [msgspec.msgpack.encode([99, "t", 0])],
    "a number out of bounds": [msgspec.msgpack.encode([14, "t", -1])],
    "an id that is too long": [encode_message(Landed("x" * 257, 0))],
    "RESET in mid-stream": [encode_message(Reset(1, "x", "x"))],
    "LANDED of what was not granted": [encode_message(Landed("mine", 0))],
}


@pytest.mark.parametrize("bodies", MISBEHAVIOUR.values(), ids=MISBEHAVIOUR)
@pytest.mark.asyncio
async def test_what_a_peer_must_not_say_ends_its_session_alone(bodies: list[bytes]) -> None:
    async with Engines(settings=IMPATIENT) as engines:
        a, b = await engines.add("a"), await engines.add("b")
        async with Stranger(engines.network) as stranger:
            offer, fetch = a.offer("t", [1, 2]), b.fetch("t", [1, 2], sources=[a.address])
            offer.start()
            fetch.start()
            mine = a.offer("mine", [3], to=[ADDRESS])
            mine.start()
            await settle(a, b)
            stranger.say_raw(*bodies)
            with pytest.raises(PeerLostError) as caught:
                await mine.wait()
            assert "memory://stranger" in str(caught.value) or "malformed" in str(caught.value)
            (reset,) = [message for message in stranger.heard if isinstance(message, Reset)]
            assert reset.reason == "protocol"
            for layer in range(4):
                offer.layer_ready(layer)
            await offer.wait()
            await fetch.wait()
            assert a.statistics().sessions == 1
            await others_are_well(a, b)


@pytest.mark.asyncio
async def test_who_greets_from_many_addresses_drives_nobody_out() -> None:
    async with Engines(settings=dataclasses.replace(IMPATIENT, peers=4)) as engines:
        a, b = await engines.add("a"), await engines.add("b")
        await transfer(a, b, "before")
        core = a._core
        assert core is not None
        (session,) = core.peers.sessions
        async with Stranger(engines.network) as stranger:
            for number in range(50):
                address = f"memory://stranger{number}"
                hello = msgspec.structs.replace(stranger.hello, address=address)
                for stream in range(1, 4):  # each of them has a session and a port of its own
                    body = [msgspec.Raw(encode_message(hello))]
                    frame = Frame(b"%16d" % number, b"", address, stream, 0, 0, 0, body)
                    stranger.raw(a, encode_frame(frame))
                await settle(a)
            assert session in core.peers.sessions
            assert len(core.peers.sessions) == 1 + 3 * 3
            assert len(engines.network._bound["memory://a"].ports) == 1 + 3 * 3
            await others_are_well(a, b)


@pytest.mark.asyncio
async def test_a_grant_that_names_no_link_fails_its_part() -> None:
    async with Engines(settings=IMPATIENT) as engines:
        a, b = await engines.add("a"), await engines.add("b")
        async with Stranger(engines.network) as stranger:
            offer = a.offer("mine", [3], readers=2)
            offer.start()
            stranger.greet(a)
            await settle(a)
            stranger.say(Grant("mine", 0, 10**6, "memory", b"none", 0, -1, HEADS))
            await settle(a)
            (abort,) = [message for message in stranger.heard if isinstance(message, Abort)]
            assert "there is no such memory link" in abort.text
            # The other reader doesn't mind; the offer's error comes at the end.
            fetch = b.fetch("mine", [3], sources=[a.address])
            fetch.start()
            for layer in range(4):
                offer.layer_ready(layer)
            await fetch.wait()
            with pytest.raises(AiokvError, match="there is no such memory link"):
                await offer.wait()
            await others_are_well(a, b)


@pytest.mark.asyncio
async def test_answers_to_nobody_s_question_change_nothing() -> None:
    async with Engines(settings=IMPATIENT) as engines:
        a, b = await engines.add("a"), await engines.add("b")
        async with Stranger(engines.network) as stranger:
            stranger.greet(a)
            await settle(a)
            stranger.say(
                Accept("t", 0, 4, (), b"", 0),
                Ready("t", 0, b"\x0f"),
                Landed("t", 0),
                Refuse("t", 0, "producer", "x", "x"),
                Abort("t", 0, "consumer", "x", "x"),
                Abort("t", 0, "producer", "x", "x"),
            )
            await settle(a)
            assert a.statistics().sessions == 1
            await others_are_well(a, b)
