"""Keys and certificates between engines, and peers that pass for others."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import shutil
import ssl
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aiokv import Keys, Tls, TransferEngine
from aiokv.control.access import checked_access
from aiokv.control.zmq import ZmqChannel
from aiokv.device.cache import KVCache
from aiokv.errors import PeerLostError
from aiokv.proto.messages import (
    Abort,
    Bye,
    Frame,
    Grant,
    Hello,
    Message,
    Reset,
    encode_frame,
    encode_message,
)
from aiokv.proto.placement import Placement
from aiokv.proto.settings import SECOND, Settings
from aiokv.testing.conformance.channelkit import Inbox
from aiokv.testing.pairs import LAYOUT, AccessOptions, Engines, check_idle, transfer

CERTIFICATES = Path(__file__).parent.parent / "control" / "certificates"
A, B, C, STRANGER = (Keys.generate() for _ in range(4))
LISTED = (A.public, B.public, C.public)
HERE = "tcp://127.0.0.1:0"
QUICK = Settings(contact_ns=SECOND // 2)


@functools.cache
def tls_of(name: str) -> Tls:
    with tempfile.TemporaryDirectory() as private:  # anybody can read a checkout
        key = Path(shutil.copy(CERTIFICATES / f"{name}.key", private))
        key.chmod(0o600)
        return Tls.load(CERTIFICATES / f"{name}.pem", key, ca=CERTIFICATES / "ca.pem")


for each in ("a", "b"):  # files are not for running loops
    tls_of(each)


def with_keys(keys: Keys, *allow: str) -> AccessOptions:
    return {"keys": keys, "allow": allow or LISTED}


async def refused(consumer: TransferEngine, address: str) -> None:
    """The consumer's fetch from there must end for want of an answer."""
    with pytest.raises(PeerLostError, match="no answer from"):
        async with consumer.fetch("refused", [1], sources=[address]):
            pass


# -- who is let in --------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.asyncio
async def test_transfers_with_keys(transport: str) -> None:
    async with Engines() as engines:
        b = await engines.add("b", transports=[transport], bind=HERE, **with_keys(B))
        c = await engines.add("c", transports=[transport], bind=HERE, **with_keys(C))
        assert b.address.endswith(f"#{B.public}")
        await transfer(b, c, "pull")
        await transfer(c, b, "push", push=True)
        await transfer(b, c, "by another name", address=b.address.replace("127.0.0.1", "localhost"))
        check_idle(b, c)


@pytest.mark.parametrize("bind", ["stream://127.0.0.1:0", "tls://127.0.0.1:0"])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.asyncio
async def test_transfers_over_streams(bind: str, transport: str) -> None:
    async with Engines() as engines:
        pair = []
        for name in ("a", "b"):
            access: AccessOptions = {"tls": tls_of(name)} if bind.startswith("tls") else {}
            pair.append(await engines.add(name, transports=[transport], bind=bind, **access))
        a, b = pair
        await transfer(a, b, "pull")
        await transfer(b, a, "push", push=True)
        await transfer(a, b, "by another name", address=a.address.replace("127.0.0.1", "localhost"))
        check_idle(a, b)


@pytest.mark.asyncio
async def test_without_a_listed_key_nobody_answers_and_others_go_on() -> None:
    async with Engines(settings=QUICK) as engines:
        b = await engines.add("b", transports=["tcp"], bind=HERE, **with_keys(B))
        c = await engines.add("c", transports=["tcp"], bind=HERE, **with_keys(C))
        stranger = await engines.add("s", transports=["tcp"], bind=HERE, **with_keys(STRANGER))
        plain = await engines.add("p", transports=["tcp"], bind=HERE)
        await refused(stranger, b.address)
        with pytest.raises(ValueError, match="names a key"):
            plain.fetch("t", [1], sources=[b.address]).start()
        await refused(plain, b.address.partition("#")[0])
        assert b.statistics().frames_received == 0
        with pytest.raises(ValueError, match="not allowed"):
            b.fetch("t", [1], sources=[stranger.address]).start()
        await transfer(b, c, "good")


@pytest.mark.asyncio
async def test_a_server_that_is_not_who_it_should_be_is_told_nothing() -> None:
    async with Engines(settings=QUICK) as engines:
        b = await engines.add("b", transports=["tcp"], bind=HERE, **with_keys(B))
        c = await engines.add("c", transports=["tcp"], bind=HERE, **with_keys(C))
        await refused(c, b.address.partition("#")[0] + "#" + A.public)
        assert b.statistics().frames_received == 0
        await transfer(b, c, "good")


@pytest.mark.asyncio
async def test_a_certificate_that_is_not_listed() -> None:
    async with Engines(settings=QUICK) as engines:
        tls = tls_of("a")
        bind = "tls://127.0.0.1:0"
        a = await engines.add("a", transports=["tcp"], bind=bind, tls=tls, allow=[tls.fingerprint()])
        b = await engines.add("b", transports=["tcp"], bind=bind, tls=tls_of("b"))
        await refused(b, a.address)
        assert a.statistics().frames_received == 0


# -- who passes for another -----------------------------------------------------------------------


class Intruder:
    """Has a listed key, and says what a test makes up."""

    def __init__(self, channel: ZmqChannel, address: str, inbox: Inbox, victim: TransferEngine) -> None:
        self.address = address
        self.inbox = inbox
        self._port = channel.open(victim.address)

    def say(self, message: Message, **changes: Any) -> None:
        frame = Frame(
            src=b"intruder........", dst=b"", reply=self.address, mine=1, yours=0, seq=0, ack=1,
            body=[msgspec.Raw(encode_message(message))],
        )  # fmt: skip
        self._port.send(encode_frame(msgspec.structs.replace(frame, **changes)))


@asynccontextmanager
async def intrusion(engines: Engines) -> AsyncIterator[tuple[TransferEngine, TransferEngine, Intruder]]:
    """``b`` and ``c``, which have a session, and an intruder with the key A that talks to ``c``."""
    b = await engines.add("b", transports=["tcp"], bind=HERE, **with_keys(B))
    c = await engines.add("c", transports=["tcp"], bind=HERE, **with_keys(C))
    await transfer(b, c, "before")
    channel, inbox = ZmqChannel(HERE, keys=A, allow=LISTED), Inbox()
    try:
        yield b, c, Intruder(channel, await channel.start(inbox), inbox, c)
    finally:
        await channel.aclose()


async def strays(engine: TransferEngine, count: int) -> None:
    """Wait until it dropped so many frames."""
    async with asyncio.timeout(20):
        while engine.statistics().frames_stray < count:  # noqa: ASYNC110 (a count has no event)
            await asyncio.sleep(0.001)


def hello_of(engine: TransferEngine, address: str) -> Hello:
    return Hello((1, 1), address, LAYOUT, Placement.dense(LAYOUT), {}, engine.address)


@pytest.mark.asyncio
async def test_a_stolen_address_or_incarnation_is_dropped_and_counted() -> None:
    async with Engines() as engines, intrusion(engines) as (b, c, intruder):
        core = c._core
        assert core is not None
        (session,) = core.peers.sessions
        ours = session.me.incarnation
        within = {"src": session.incarnation, "dst": ours, "mine": session.theirs, "yours": session.mine}
        greeting = hello_of(c, b.address)
        lies: list[tuple[Message, dict[str, Any]]] = [
            # HELLO from B's address, in a life of its own or in B's.
            (greeting, {}),
            (greeting, {"reply": b.address}),
            (greeting, {"reply": b.address, "src": session.incarnation, "mine": 99}),
            # In B's session, as its next frame.
            (Bye("gone"), {**within, "seq": session.next_receive, "reply": b.address}),
            (Bye("gone"), {**within, "seq": session.next_receive}),
            (Abort("t", 0, "producer", "aborted", ""), {**within, "seq": session.next_receive}),
            # RESET of C's stream with B.
            (Reset(session.mine, "session", "gone"), {**within, "mine": 0, "yours": 0, "reply": b.address}),
            (Reset(session.mine, "session", "gone"), {**within, "mine": 0, "yours": 0}),
            (Reset(session.mine, "incarnation", "gone"), {"dst": ours, "mine": 0}),
            # HELLO that answers C's to B.
            (hello_of(c, intruder.address), {"yours": session.mine, "dst": ours}),
            # No address of anybody's.
            (greeting, {"reply": "memory://b"}),
            (greeting, {"reply": b.address.partition("#")[0]}),
        ]
        before = c.statistics().frames_stray
        for count, (message, changes) in enumerate(lies, 1):
            intruder.say(message, **changes)
            await strays(c, before + count)
        assert core.peers.sessions == [session]
        async with asyncio.timeout(10):
            await transfer(b, c, "after")
        assert c.statistics().sessions == b.statistics().sessions == 1


@pytest.mark.asyncio
async def test_who_claims_an_incarnation_first_does_not_keep_its_owner_out() -> None:
    async with Engines() as engines, intrusion(engines) as (b, c, intruder):
        late = await engines.add("late", transports=["tcp"], bind=HERE, **with_keys(B))
        assert late._core is not None
        incarnation = late._core.demultiplexer._me.incarnation
        intruder.say(hello_of(c, intruder.address), src=incarnation)
        await intruder.inbox.until(1)  # it has a session now, under its own name
        await transfer(late, c, "there")
        await transfer(c, late, "back")
        check_idle(b, late)


@pytest.mark.asyncio
async def test_who_claims_an_incarnation_has_no_part_in_its_transfers() -> None:
    async with Engines() as engines, intrusion(engines) as (b, c, intruder):
        core = c._core
        assert core is not None
        (session,) = core.peers.sessions
        async with c.offer("t", [1], to=[b.address]) as offer:
            life = {"src": session.incarnation, "mine": 99}
            intruder.say(hello_of(c, intruder.address), **life)
            await intruder.inbox.until(1)  # it has a session now, in B's incarnation and under its own name
            lies: tuple[Message, ...] = (
                Abort("t", 0, "consumer", "aborted", ""),
                Grant("t", 0, 10**6, "", b"", 0, -1, ((0, 4),)),
            )
            before = c.statistics().frames_received
            for seq, message in enumerate(lies, 1):
                intruder.say(message, **life, seq=seq)
            async with asyncio.timeout(20):
                while c.statistics().frames_received < before + len(lies):  # noqa: ASYNC110 (as above)
                    await asyncio.sleep(0.001)
            assert offer.error is None
            assert offer.progress.parts == {"offered": 1}
            for layer in range(LAYOUT.layers):
                offer.layer_ready(layer)
            async with b.fetch("t", [2]):
                pass


# -- what is refused before anything is bound -----------------------------------------------------


@pytest.mark.parametrize(
    "bind", ["tcp://0.0.0.0:0", "tcp://*:0", "tcp://[::]:0", "tcp://192.0.2.1:0", "stream://prefill-0:0"]
)
def test_other_hosts_need_keys_or_a_word(bind: str) -> None:
    scheme = bind.partition("://")[0]
    with KVCache.allocate(LAYOUT) as cache:
        with pytest.raises(ValueError, match=r"from other hosts.*keygen.*insecure=True"):
            TransferEngine(cache, bind=bind, advertise=f"{scheme}://prefill-0")
        TransferEngine(cache, bind=bind, advertise=f"{scheme}://prefill-0", insecure=True)
        if scheme == "tcp":
            TransferEngine(cache, bind=bind, advertise="tcp://prefill-0", keys=A, allow=[B.public])


def test_certificates_open_a_port_to_other_hosts_if_they_are_asked_for() -> None:
    tls = tls_of("a")
    assert not checked_access("tls://192.0.2.1:0", None, None, tls, insecure=False).strangers
    server = tls_of.__wrapped__("a").server  # to be changed
    server.verify_mode = ssl.CERT_NONE
    anybody = dataclasses.replace(tls, server=server)
    with pytest.raises(ValueError, match="from other hosts"):
        checked_access("tls://192.0.2.1:0", None, None, anybody, insecure=False)
    assert checked_access("tls://127.0.0.1:0", None, None, anybody, insecure=False).strangers


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ({"keys": A}, ValueError, "one needs the other"),
        ({"allow": [A.public]}, ValueError, "one needs the other"),
        ({"keys": A, "allow": [A.secret]}, ValueError, "allow= lists this engine's secret key"),
        ({"bind": "tcp://*:0"}, ValueError, "from other hosts.*keygen.*; and it is no address.*advertise="),
        ({"bind": "tcp://*:0", "insecure": True}, ValueError, "is no address.*advertise="),
        ({"transports": ["nccl"]}, ValueError, "can't serve a cache in host memory"),
        ({"keys": A, "allow": []}, ValueError, "one needs the other"),
        ({"keys": A, "allow": ["nobody"]}, ValueError, "64 hexadecimal digits"),
        ({"keys": A, "allow": A.public}, TypeError, "allow is a list of keys"),
        ({"keys": A.secret, "allow": [A.public]}, TypeError, "keys is a pair of Keys, not str"),
        ({"tls": "a.pem"}, TypeError, "tls is a Tls"),
        ({"bind": "tls://127.0.0.1:0"}, ValueError, "pass tls="),
        ({"bind": "stream://127.0.0.1:0", "keys": A, "allow": LISTED}, ValueError, "keys= are for tcp://"),
        ({"tls": tls_of("a")}, ValueError, "tls= is for tls://"),
        ({"bind": "tls://127.0.0.1:0", "tls": tls_of("a"), "keys": A}, ValueError, "keys= are for tcp://"),
        ({"bind": f"tcp://127.0.0.1:0#{A.public}"}, ValueError, "keys="),
    ],
    ids=lambda each: each if isinstance(each, str) else type(each).__name__,
)
def test_what_does_not_go_together(given: dict[str, Any], kind: type[Exception], text: str) -> None:
    with KVCache.allocate(LAYOUT) as cache, pytest.raises(kind, match=text) as caught:
        TransferEngine(cache, **given)
    assert A.secret not in str(caught.value)
