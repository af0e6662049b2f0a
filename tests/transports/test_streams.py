"""Links of several streams: how they come together, who may join them, and what goes over them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio

from aiokv.errors import PeerLostError
from aiokv.proto.layout import CacheLayout
from aiokv.testing.conformance.transportkit import PATIENCE_S, Path, TransportKit
from aiokv.transports import listener, tcp
from aiokv.transports.base import Link, Transport
from aiokv.transports.frames import pack, tag_of
from aiokv.transports.greeting import greet, join
from aiokv.transports.handshake import MAX_STREAMS, WELCOME, Ask, Secret, Welcome, new_token
from aiokv.transports.listener import Listener
from aiokv.transports.tcp import TcpTransport

LAYOUT = CacheLayout.attention(layers=2, blocks=64, block_size=16, heads=8, head_size=64, dtype="float16")


class Door:
    """A listener for links of up to ``streams`` connections, and those that it let in."""

    def __init__(self, streams: int = 4) -> None:
        self.token = new_token()
        self.let_in: dict[bytes, list[socket.socket]] = {}
        self.dialled: list[socket.socket] = []
        sock = socket.socket(socket.AF_UNIX)
        sock.setblocking(False)
        sock.bind("\0aiokv-test-" + os.urandom(8).hex())
        sock.listen(200)
        self.address = sock.getsockname()
        self.listener = Listener(sock, self.token, streams=streams, admit=self.admit)

    def admit(self, socks: list[socket.socket], link: bytes) -> None:
        self.let_in[link] = socks

    def dial(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        sock.setblocking(False)
        sock.connect(self.address)
        self.dialled.append(sock)
        return sock

    async def open(self, streams: int = 4) -> Welcome:
        return await greet(self.dial(), self.token, streams)

    async def ask(self, secret: Secret, ask: Ask) -> bytes:
        """What the producer answers to one connection; nothing if it closes it."""
        loop, sock = asyncio.get_running_loop(), self.dial()
        async with asyncio.timeout(PATIENCE_S):
            theirs = await loop.sock_recv(sock, 16)
            ours = b"c" * 16
            await loop.sock_sendall(sock, ask.pack(ours, secret.of_consumer(theirs, ours, ask)))
            with contextlib.suppress(ConnectionResetError):
                return await loop.sock_recv(sock, WELCOME.size)
        return b""

    def close(self) -> None:
        self.listener.close()
        for sock in [*self.dialled, *(sock for socks in self.let_in.values() for sock in socks)]:
            sock.close()


@pytest_asyncio.fixture
async def door() -> AsyncIterator[Door]:
    made = Door()
    yield made
    made.close()


class StreamsKit(TransportKit):
    """Transports with the numbers of streams that are listed, one after the other."""

    def __init__(self, seed: int, *streams: int) -> None:
        super().__init__(seed)
        self.streams = list(streams)

    def make_transport(self) -> Transport:
        return TcpTransport(streams=self.streams.pop(0) if self.streams else 3)


async def a_path(kit: TransportKit) -> Path:
    return await (await kit.engine(LAYOUT)).read_from(await kit.engine(LAYOUT))


async def lost(*ends: Link) -> None:
    for end in ends:
        bell = asyncio.Event()
        end.on_lost(bell.set)
        async with asyncio.timeout(PATIENCE_S):
            await bell.wait()


# -- coming together


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("consumer", "producer", "agreed"), [(1, 1, 1), (4, 2, 2), (2, 16, 2), (16, 16, 16), (1, 8, 1)]
)
async def test_the_lower_number_is_used(consumer: int, producer: int, agreed: int, seed: int) -> None:
    async with StreamsKit(seed, consumer, producer) as kit:
        reader = await kit.engine(LAYOUT)
        path = await reader.read_from(await kit.engine(LAYOUT))
        assert len(path.end._socks) == len(path.producer_end._socks) == agreed
        names = [sock.getsockname() for sock in path.end._socks]
        assert names == [sock.getpeername() for sock in path.producer_end._socks]


@pytest.mark.parametrize("streams", [0, -1, MAX_STREAMS + 1])
def test_so_many_streams_there_can_not_be(streams: int) -> None:
    with pytest.raises(ValueError, match="1 to 16"):
        TcpTransport(streams=streams)


@pytest.mark.asyncio
async def test_a_link_is_there_when_all_of_its_streams_are(door: Door) -> None:
    welcome = await door.open()
    assert not door.let_in
    socks = [door.dial() for _ in range(3)]
    await join(socks, welcome)
    assert [len(socks) for socks in door.let_in.values()] == [4]
    door.let_in[welcome.link][2].send(b"x")
    assert await asyncio.get_running_loop().sock_recv(socks[1], 1) == b"x"


@pytest.mark.asyncio
async def test_a_link_that_lacks_streams_is_given_up(monkeypatch: pytest.MonkeyPatch, door: Door) -> None:
    monkeypatch.setattr(listener, "_PATIENCE_S", 0.05)
    welcome = await door.open()
    async with asyncio.timeout(PATIENCE_S):
        assert await asyncio.get_running_loop().sock_recv(door.dialled[0], 1) == b""
    with pytest.raises(PeerLostError):
        await join([door.dial()], welcome)
    assert not door.let_in
    assert not door.listener._forming


@pytest.mark.asyncio
async def test_links_that_lack_streams_are_bounded(door: Door) -> None:
    first = await door.open()
    for _ in range(listener._MAX_PENDING):
        last = await door.open()
    assert len(door.listener._forming) == listener._MAX_PENDING
    async with asyncio.timeout(PATIENCE_S):
        assert await asyncio.get_running_loop().sock_recv(door.dialled[0], 1) == b""
    with pytest.raises(PeerLostError):
        await join([door.dial()], first)
    await join([door.dial() for _ in range(3)], last)
    assert list(door.let_in) == [last.link]


@pytest.mark.asyncio
async def test_a_transport_has_so_many_links(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(tcp, "_MAX_LINKS", 2)
    async with StreamsKit(seed) as kit:
        consumer, producer = await kit.engine(LAYOUT), await kit.engine(LAYOUT)
        paths = [await consumer.read_from(producer) for _ in range(2)]
        one_more = await consumer.transport.connect(producer.transport.describe(), producer.info)
        await lost(one_more)
        assert producer.transport.accepted(one_more.id) is None
        paths[0].end.close()
        await lost(paths[0].producer_end)
        await consumer.read_from(producer)


# -- intruders


@pytest.mark.asyncio
async def test_the_token_alone_joins_no_link(door: Door) -> None:
    """Every peer of the producer knows the token, and a link's id is no secret."""
    welcome = await door.open()
    assert not await door.ask(Secret(door.token), Ask(welcome.link, 1, 4))
    await join([door.dial() for _ in range(3)], welcome)
    assert len(door.let_in[welcome.link]) == 4


@pytest.mark.asyncio
async def test_streams_of_two_links_can_not_be_mixed(door: Door) -> None:
    one, other = await door.open(), await door.open()
    assert not await door.ask(one.secret, Ask(other.link, 1, 4))
    assert await door.ask(one.secret, Ask(one.link, 1, 4))
    assert not door.let_in


@pytest.mark.asyncio
async def test_each_stream_is_let_in_once(door: Door) -> None:
    welcome = await door.open()
    assert await door.ask(welcome.secret, Ask(welcome.link, 1, 4))
    for number in (0, 1, 4, 255):
        assert not await door.ask(welcome.secret, Ask(welcome.link, number, 4))
    for number in (2, 3):
        assert await door.ask(welcome.secret, Ask(welcome.link, number, 4))
    assert len(door.let_in[welcome.link]) == 4
    assert not await door.ask(welcome.secret, Ask(welcome.link, 1, 4))  # now that it is complete


@pytest.mark.asyncio
@pytest.mark.parametrize("ask", [Ask(streams=0), Ask(number=1), Ask(link=b"x" * 16)], ids=repr)
async def test_asks_that_mean_nothing(door: Door, ask: Ask) -> None:
    assert not await door.ask(Secret(door.token), ask)
    assert not door.let_in


@pytest.mark.asyncio
async def test_what_was_said_for_one_stream_can_not_be_said_again(door: Door) -> None:
    """An intruder who heard a whole handshake says the same on a connection of its own."""
    loop = asyncio.get_running_loop()
    welcome = await door.open()
    sock, ours, ask = door.dial(), b"c" * 16, Ask(welcome.link, 1, 4)
    theirs = await loop.sock_recv(sock, 16)
    answer = ask.pack(ours, welcome.secret.of_consumer(theirs, ours, ask))
    intruder = door.dial()
    await loop.sock_recv(intruder, 16)
    await loop.sock_sendall(intruder, answer)
    async with asyncio.timeout(PATIENCE_S):
        assert await loop.sock_recv(intruder, 1) == b""
    await loop.sock_sendall(sock, answer)
    assert await loop.sock_recv(sock, WELCOME.size)


@pytest.mark.asyncio
@pytest.mark.parametrize("changed", [0, 15, 16, 31, 32, 33, 34, 65])
async def test_no_byte_of_an_ask_can_be_changed(door: Door, changed: int) -> None:
    """Neither the number of a stream, nor how many are wanted, nor anything else, by who is in between."""
    loop, sock, ours = asyncio.get_running_loop(), door.dial(), b"c" * 16
    theirs = await loop.sock_recv(sock, 16)
    answer = bytearray(Ask().pack(ours, Secret(door.token).of_consumer(theirs, ours, Ask())))
    answer[changed] ^= 1
    await loop.sock_sendall(sock, answer)
    async with asyncio.timeout(PATIENCE_S):
        assert await loop.sock_recv(sock, 1) == b""
    assert not door.let_in
    assert not door.listener._forming


@pytest.mark.asyncio
async def test_who_sends_slowly_is_given_up(monkeypatch: pytest.MonkeyPatch, door: Door) -> None:
    monkeypatch.setattr(listener, "_PATIENCE_S", 0.1)
    sock = door.dial()
    loop = asyncio.get_running_loop()
    await loop.sock_recv(sock, 16)
    with contextlib.suppress(ConnectionError):
        for _ in range(Ask.SIZE - 1):
            await loop.sock_sendall(sock, b"x")
            await asyncio.sleep(0.005)
    with contextlib.suppress(ConnectionError):
        assert await loop.sock_recv(sock, 1) == b""
    assert not door.listener._pending


@pytest.mark.asyncio
async def test_a_producer_that_wants_more_streams_than_were_offered(door: Door) -> None:
    a, b = socket.socketpair()
    door.dialled += [a, b]
    for sock in (a, b):
        sock.setblocking(False)
    loop, token = asyncio.get_running_loop(), new_token()
    greeting = asyncio.ensure_future(greet(a, token, 2))
    await loop.sock_sendall(b, b"p" * 16)
    ours, ask, _ = Ask.unpack(await loop.sock_recv(b, Ask.SIZE))
    proof = Secret(token).of_producer(b"p" * 16, ours, ask, b"l" * 16, 3)
    await loop.sock_sendall(b, WELCOME.pack(b"l" * 16, proof, 3, 0))
    with pytest.raises(PeerLostError, match="3 streams"):
        await greeting


# -- data


@pytest.mark.asyncio
async def test_chunks_are_spread_and_may_land_in_any_order(seed: int) -> None:
    async with StreamsKit(seed, 4, 4) as kit:
        path = await a_path(kit)
        part = path.part(kit, 1, tokens=1000)
        part.expect()
        expected = path.consumer.copy_of_memory()
        part.apply(path.producer.copy_of_memory(), expected)
        loop, end = asyncio.get_running_loop(), path.end
        for sock in end._socks:
            loop.remove_reader(sock.fileno())  # nothing is taken yet
        chunks, stream = part.chunks(1 << 18), path.producer.cache.device.stream()
        for chunk in chunks:
            path.producer_end.send(part.id, part.plan, chunk, path.producer.cache.buffers, stream=stream)
        for inlet in reversed(end._inlets):  # the last stream's first
            before = part.arrived
            while part.arrived == before:
                inlet._readable()
                await asyncio.sleep(0)
            loop.add_reader(inlet._fd, inlet._readable)
        await part.until(part.plan.total)
        for found, wanted in zip(path.consumer.copy_of_memory(), expected, strict=True):
            np.testing.assert_array_equal(found, wanted)


@pytest.mark.asyncio
@pytest.mark.parametrize("number", [0, 2])
@pytest.mark.parametrize("side", ["end", "producer_end"])
async def test_the_loss_of_any_stream_is_the_loss_of_the_link(number: int, side: str, seed: int) -> None:
    async with StreamsKit(seed, 3, 3) as kit:
        path = await a_path(kit)
        getattr(path, side)._socks[number].shutdown(socket.SHUT_RDWR)
        await lost(path.end, path.producer_end)
        for end in (path.end, path.producer_end):
            assert all(sock.fileno() < 0 for sock in end._socks)


@pytest.mark.asyncio
async def test_the_same_chunk_by_two_streams_cuts_the_link(seed: int) -> None:
    async with StreamsKit(seed, 2, 2) as kit:
        path = await a_path(kit)
        part = path.part(kit, 1)
        part.expect()
        header = pack(tag_of(part.id), part.chunks(1 << 12)[0])
        for sock in path.producer_end._socks:
            sock.send(header)  # before a byte of it is there
        await lost(path.end, path.producer_end)
        assert part.arrived == 0


@pytest.mark.asyncio
async def test_a_part_is_waited_for_on_each_stream_and_forgotten_on_all(seed: int) -> None:
    async with StreamsKit(seed, 3, 3) as kit:
        path = await a_path(kit)
        early, other = path.part(kit, 1, tokens=64), path.part(kit, 2, tokens=16)
        before = path.consumer.copy_of_memory()
        for sock, chunk in zip(path.producer_end._socks, early.chunks(1 << 13), strict=False):
            sock.send(pack(tag_of(early.id), chunk) + b"x" * (chunk.nbytes // 2))
        while not all(inlet._early for inlet in path.end._inlets):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        early.expect()
        while not all(inlet._payload for inlet in path.end._inlets):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        path.end.forget(early.id)
        written = path.consumer.copy_of_memory()
        for sock, chunk in zip(path.producer_end._socks, early.chunks(1 << 13), strict=False):
            sock.send(b"y" * (chunk.nbytes - chunk.nbytes // 2))
        other.expect()
        other.apply(path.producer.copy_of_memory(), written)
        for chunk in other.chunks(1 << 13):
            await other.move(kit, chunk)
        await other.until(other.plan.total)
        assert early.arrived == 0
        assert before
        for found, wanted in zip(path.consumer.copy_of_memory(), written, strict=True):
            np.testing.assert_array_equal(found, wanted)
