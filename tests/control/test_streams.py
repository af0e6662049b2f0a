"""The channel over plain TCP: strangers, peers that misbehave, addresses where nobody is."""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import socket
import struct

import pytest

from aiokv.control import accepted, connection, streamport
from aiokv.control.base import MAX_FRAME
from aiokv.control.streams import StreamChannel
from aiokv.control.wire import GREETING, pack
from aiokv.errors import CapacityError, ClosedError
from aiokv.testing.conformance.channelkit import Inbox, opened

HERE = "stream://127.0.0.1:0"


def kit(*, queue=4096, **bounds):
    return lambda address: StreamChannel(address or HERE, queue=queue, **bounds)


def fill(port, size=8):
    """Send until the port takes no more, and say how many it took."""
    for count in range(1_000_000):
        try:
            port.send(count.to_bytes(8, "big").ljust(size))
        except CapacityError:
            return count
    raise AssertionError("no bound")


async def until(condition):
    """Wait until it holds."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 (what is looked at has no event)
            await asyncio.sleep(0.001)


def where(address):
    host, _, port = address.removeprefix("stream://").rpartition(":")
    return host, int(port)


@contextlib.asynccontextmanager
async def raw(address, *said):
    """A connection that isn't aiokv's, as reader and writer."""
    reader, writer = await asyncio.open_connection(*where(address))
    try:
        for data in said:
            writer.write(data)
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def ended(reader):
    """Wait until the other side has closed the connection; says what it had sent."""
    async with asyncio.timeout(20):
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""


@contextlib.asynccontextmanager
async def listening(serve):
    """A server that isn't aiokv's; its address."""
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"stream://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


# -- strangers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("said", [b"", GREETING[:-1]])
@pytest.mark.asyncio
async def test_who_does_not_greet_in_time_is_cut_and_told_nothing(said, monkeypatch):
    monkeypatch.setattr(accepted, "CONTACT", 0.01)
    async with opened(kit) as (a, b), raw(a.address, said) as (reader, _):
        assert await ended(reader) == b""
        b.channel.open(a.address).send(b"x")
        assert await a.inbox.until(1) == [b"x"]


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\n\r\n", b"\0" * 10, b"\xff\0\0\0\0\0\0\0\x01\x7f", b"aiokv/2\n"]
)
@pytest.mark.asyncio
async def test_who_speaks_something_else_is_cut_at_once(said):
    async with opened(kit, 1) as (a,), raw(a.address, said) as (reader, _):
        assert await ended(reader) == b""


@pytest.mark.asyncio
async def test_strangers_are_bounded_and_the_oldest_gives_way(monkeypatch):
    monkeypatch.setattr(accepted, "_MAX_STRANGERS", 3)
    async with opened(kit) as (a, b), contextlib.AsyncExitStack() as stack:
        b.channel.open(a.address).send(b"x")
        await a.inbox.until(1)
        readers = [(await stack.enter_async_context(raw(a.address)))[0] for _ in range(6)]
        for reader in readers[:3]:
            assert await ended(reader) == b""
        assert not any(reader.at_eof() for reader in readers[3:])
        # Who has greeted is none of them.
        b.channel.open(a.address).send(b"another connection")
        assert await a.inbox.until(2) == [b"x", b"another connection"]


@pytest.mark.asyncio
async def test_connections_are_bounded(monkeypatch):
    monkeypatch.setattr(accepted, "MAX_MEMBERS", 2)
    async with (
        opened(kit, 1) as (a,),
        raw(a.address, GREETING) as (first, _),
        raw(a.address, GREETING) as (second, _),
    ):
        assert await first.readexactly(8) == await second.readexactly(8) == GREETING
        async with raw(a.address, GREETING) as (third, _):
            assert await ended(third) == b""


# -- peers that misbehave -------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_frame_that_dribbles_in_holds_up_nobody():
    async with opened(kit) as (a, b), raw(a.address) as (reader, writer):
        port = b.channel.open(a.address)
        for count, byte in enumerate(GREETING + pack(b"slow") + pack(b"") + pack(b"ly")):
            writer.write(bytes([byte]))
            port.send(b"%d" % count)
            await a.inbox.until(count + 1)
        await a.inbox.until(count + 1 + 3)
        assert [frame for frame in a.inbox.frames if not frame.isdigit()] == [b"slow", b"", b"ly"]
        assert await reader.readexactly(8) == GREETING


@pytest.mark.asyncio
async def test_too_large_a_frame_ends_its_connection_and_no_other():
    async with opened(kit) as (a, b):
        port = b.channel.open(a.address)
        port.send(b"before")
        await a.inbox.until(1)
        frames = pack(b"good") + (MAX_FRAME + 1).to_bytes(4, "big") + b"more"
        async with raw(a.address, GREETING, frames) as (reader, _):
            assert await ended(reader) in (GREETING, b"")
        port.send(b"after")
        assert await a.inbox.until(3) == [b"before", b"good", b"after"]


@pytest.mark.asyncio
async def test_half_a_frame_is_forgotten_with_its_connection():
    async with opened(kit, 1) as (a,):
        async with raw(a.address, GREETING, pack(b"whole") + pack(b"half")[:-1]):
            await a.inbox.until(1)
        async with raw(a.address, GREETING, pack(b"next")):
            assert await a.inbox.until(2) == [b"whole", b"next"]


@pytest.mark.asyncio
async def test_a_peer_that_writes_back_is_cut():
    async def serve(reader, writer):
        got.append(await reader.readexactly(8))
        writer.write(GREETING + pack(b"unasked"))
        got.append(await ended(reader))
        writer.close()

    got = []
    async with listening(serve) as address, opened(kit, 1) as (a,):
        a.channel.open(address).send(b"x")
        await until(lambda: len(got) >= 2)
        assert got[0] == GREETING
    await until(lambda: len(got) % 2 == 0)


@pytest.mark.asyncio
async def test_nothing_is_said_to_who_does_not_greet_and_it_is_kept(monkeypatch):
    async def serve(reader, writer):
        heard = b""
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            heard = await reader.readexactly(8)
            if len(got) >= 2:
                writer.write(GREETING)
                heard += await reader.readexactly(2 * 5)
            else:
                heard += await ended(reader)
        got.append(heard)
        writer.close()

    monkeypatch.setattr(streamport, "CONTACT", 0.1)
    got = []
    async with listening(serve) as address, opened(kit, 1) as (a,):
        port = a.channel.open(address)
        port.send(b"1")
        port.send(b"2")
        await until(lambda: any(len(heard) > 8 for heard in got))
        assert set(got[:-1]) <= {b"", GREETING}
        assert got[-1] == GREETING + pack(b"1") + pack(b"2")


@pytest.mark.asyncio
async def test_a_listener_that_never_accepts_holds_up_nobody(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with opened(lambda queue: kit(queue=1000)) as (a, b):
            stuck = a.channel.open(f"stream://127.0.0.1:{listener.getsockname()[1]}")
            well = a.channel.open(b.address)
            assert fill(stuck) == 1000
            for i in range(500):
                well.send(b"%d" % i)
                await asyncio.sleep(0)
            assert await b.inbox.until(500) == [b"%d" % i for i in range(500)]


@pytest.mark.asyncio
async def test_a_peer_that_stops_reading_is_told_by_bytes_and_by_frames():
    async def serve(reader, writer):
        await reader.readexactly(8)
        writer.write(GREETING)
        await release.wait()
        while len(got) < len(sent):
            size = int.from_bytes(await reader.readexactly(4), "big")
            got.append(int.from_bytes((await reader.readexactly(size))[:8], "big"))
        writer.close()

    release, got, sent = asyncio.Event(), [], []
    async with (
        listening(serve) as address,
        opened(lambda queue: kit(queue=1000, queue_bytes=1 << 20), 2) as (a, b),
    ):
        port = a.channel.open(address)
        size, longest = 1 << 16, 0
        for _ in range(10_000):
            try:
                port.send(len(sent).to_bytes(8, "big").ljust(size))
            except CapacityError:
                break
            sent.append(len(sent))
            longest = max(longest, len(port._queue))
            await asyncio.sleep(0)
        assert longest <= (1 << 20) / size
        a.channel.open(b.address).send(b"another's")
        assert await b.inbox.until(1) == [b"another's"]
        # The bound on frames holds just so for small ones.
        small = a.channel.open(address)
        assert fill(small) == 1000
        small.close()
        release.set()
        await until(lambda: len(got) == len(sent))
        assert got == sent
        port.send(bytes(8))


@pytest.mark.asyncio
async def test_a_reset_connection_is_made_again_with_the_next_frame():
    async def serve(reader, writer):
        await reader.readexactly(8)
        writer.write(GREETING)
        got.append(await reader.readexactly(5))
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close() resets
        writer.close()

    got = []
    async with listening(serve) as address, opened(kit, 1) as (a,):
        port = a.channel.open(address)
        for count in range(5):
            port.send(b"%d" % count)
            await until(lambda count=count: len(got) == count + 1)
            await until(lambda: port._connection is None)
            assert port._again is None  # nothing waits, so nothing is tried
            assert port._attempt is None
        assert got == [pack(b"%d" % count) for count in range(5)]


# -- the loop's time ------------------------------------------------------------------------------


def test_an_idle_pair_never_wakes_the_loop():
    class Selector(selectors.DefaultSelector):
        wakings = 0

        def select(self, timeout=None):
            self.wakings += 1
            return super().select(timeout)

    async def main():
        async with opened(kit) as (a, b), raw(a.address, GREETING, pack(b"x")[:-1]):
            to_b, to_a = a.channel.open(b.address), b.channel.open(a.address)
            gone = a.channel.open("stream://127.0.0.1:1")
            gone.send(b"x")
            for _ in range(300):
                to_b.send(b"x")
                to_a.send(b"x")
            await b.inbox.until(300)
            await a.inbox.until(300)
            gone.close()
            await asyncio.sleep(0.1)
            before = selector.wakings
            await asyncio.sleep(0.3)
            return selector.wakings - before

    selector = Selector()
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
        assert runner.run(main()) <= 2  # the sleep's own


@pytest.mark.asyncio
async def test_a_dead_address_is_tried_ever_less_until_somebody_sends_again(monkeypatch):
    monkeypatch.setattr(streamport, "_AGAIN_FIRST", 0.0001)
    monkeypatch.setattr(streamport, "_AGAIN_PATIENT", 0.001)
    async with opened(kit, 1) as (a,):
        port = a.channel.open("stream://127.0.0.1:1")
        assert port._attempt is None  # nothing to send
        port.send(b"x")
        delays = []
        while not delays or delays[-1] < 0.1:
            await until(lambda: port._again is not None and port._delay not in delays)
            delays.append(port._delay)
        assert delays == sorted(delays)
        port.send(b"y")
        assert port._again is None
        assert port._attempt is not None


@pytest.mark.asyncio
async def test_a_turn_has_an_end(monkeypatch):
    monkeypatch.setattr(accepted, "_TURN_FRAMES", 10)
    async with opened(kit, 1) as (a,):
        turns, take = [], accepted.Accepted._take

        def counted(self):
            before = len(a.inbox.frames)
            take(self)
            turns.append(len(a.inbox.frames) - before)

        monkeypatch.setattr(accepted.Accepted, "_take", counted)
        async with raw(a.address, GREETING, b"".join(pack(b"%d" % i) for i in range(995))):
            assert await a.inbox.until(995) == [b"%d" % i for i in range(995)]
        assert max(turns) == 10


@pytest.mark.asyncio
async def test_small_frames_are_not_held_back_and_vanished_hosts_are_found():
    async with opened(kit) as (a, b):
        port = a.channel.open(b.address)
        port.send(b"x")
        await b.inbox.until(1)
        ends = [
            port._connection,
            *(each for each in b.channel._members if isinstance(each, accepted.Accepted)),
        ]
        assert len(ends) == 2
        for end in ends:
            sock = end._transport.get_extra_info("socket")
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


# -- beginning and end ----------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_what_was_sent_goes_out_before_the_port_closes():
    async with opened(kit) as (a, b):
        port = a.channel.open(b.address)
        port.send(b"first")
        await b.inbox.until(1)
        frames = [b"%d" % i for i in range(100)]
        for frame in frames:
            port.send(frame)
        port.close()
        assert await b.inbox.until(101) == [b"first", *frames]
        port = a.channel.open(b.address)
        port.send(b"again")
        await b.inbox.until(102)
        port.send(b"bye")
        await a.channel.aclose()
        assert (await b.inbox.until(103))[-1] == b"bye"


@pytest.mark.asyncio
async def test_a_peer_that_does_not_read_does_not_keep_the_channel_from_closing(monkeypatch):
    async def serve(reader, writer):
        await reader.readexactly(8)
        writer.write(GREETING)
        writer.transport.pause_reading()
        writers.append(writer)

    monkeypatch.setattr(connection, "_LINGER", 0.001)
    writers = []
    async with listening(serve) as address, opened(kit, 1) as (a,):
        port = a.channel.open(address)
        while True:
            try:
                port.send(bytes(50_000))  # also where the transport holds some and isn't full
            except CapacityError:
                break
            await asyncio.sleep(0)
        async with asyncio.timeout(20):
            await a.channel.aclose()
        writers[0].transport.abort()


@pytest.mark.parametrize("turns", range(6))
@pytest.mark.asyncio
async def test_closing_while_it_connects_leaves_nothing(turns):
    async with opened(kit) as (a, b):
        port = a.channel.open(b.address)
        port.send(b"x")
        for _ in range(turns):
            await asyncio.sleep(0)
        port.close()
        with pytest.raises(ClosedError):
            port.send(b"x")
        await a.channel.aclose()
        assert a.channel._members == set()


@pytest.mark.asyncio
async def test_whom_the_loop_had_accepted_when_the_channel_closed_is_let_in_no_more():
    loop, channel, inbox = asyncio.get_running_loop(), StreamChannel(HERE), Inbox()
    await channel.start(inbox)
    door = channel._door
    await channel.aclose()
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as peer,
    ):
        peer.sendall(GREETING + pack(b"late"))
        peer.setblocking(False)
        await loop.connect_accepted_socket(door.accept, server.accept()[0])  # as it does in such a case
        with contextlib.suppress(ConnectionError):
            while await loop.sock_recv(peer, 100):
                pass
        await until(lambda: not channel._members)
        assert inbox.frames == []


@pytest.mark.asyncio
async def test_no_room_for_another_port(monkeypatch):
    monkeypatch.setattr("aiokv.control.streams.MAX_MEMBERS", 4)
    async with opened(kit, 1) as (a,):
        with pytest.raises(CapacityError, match="4 ports"):
            for _ in range(10):
                a.channel.open(a.address)


# -- addresses ------------------------------------------------------------------------------------


@pytest.mark.parametrize("bind", ["stream://[::1]:0", "stream://[::]:0"])
@pytest.mark.asyncio
async def test_ipv6(bind):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6")
    a, b = StreamChannel("stream://[::1]:0"), StreamChannel(bind, advertise="stream://[::1]")
    inbox = Inbox()
    await a.start(Inbox())
    address = await b.start(inbox)
    assert address.startswith("stream://[::1]:")
    a.open(address).send(b"x")
    assert await inbox.until(1) == [b"x"]
    if bind == "stream://[::]:0":  # it stands for all of a host's addresses
        a.open(address.replace("[::1]", "127.0.0.1")).send(b"y")
        assert await inbox.until(2) == [b"x", b"y"]
    await a.aclose()
    await b.aclose()


@pytest.mark.parametrize(
    ("advertise", "told"),
    [
        ("stream://prefill-0", "stream://prefill-0:{port}"),
        ("stream://prefill-0:0", "stream://prefill-0:{port}"),
        ("stream://198.51.100.7:80", "stream://198.51.100.7:80"),
    ],
)
@pytest.mark.asyncio
async def test_what_peers_are_told(advertise, told):
    channel = StreamChannel("stream://0.0.0.0:0", advertise=advertise)
    address = await channel.start(Inbox())
    assert address == told.format(port=channel._server.sockets[0].getsockname()[1])
    await channel.aclose()


@pytest.mark.parametrize(
    "bind", ["stream://0.0.0.0:0", "stream://127.0.0.1", "tcp://127.0.0.1:0", "127.0.0.1:0"]
)
def test_what_can_not_be_bound(bind):
    with pytest.raises(ValueError, match=r"advertise=|no port|stream://"):
        StreamChannel(bind)


def test_tls_needs_certificates():
    with pytest.raises(ValueError, match="tls="):
        StreamChannel("tls://127.0.0.1:0")


@pytest.mark.parametrize(
    "address", ["stream://0.0.0.0:5", "stream://a", "stream://a:0", "tcp://a:1", "tls://a:1"]
)
@pytest.mark.asyncio
async def test_what_can_not_be_connected_to(address):
    async with opened(kit, 1) as (a,):
        with pytest.raises(ValueError, match=r"connect|stream://"):
            a.channel.open(address)
        with pytest.raises(ValueError, match="names a certificate"):
            a.channel.open("stream://127.0.0.1:1#" + "0" * 64)


@pytest.mark.asyncio
async def test_a_lookup_that_takes_long_holds_up_nobody_and_is_abandoned(monkeypatch):
    async def getaddrinfo(*_, **__):
        asked.set()
        await asyncio.Event().wait()

    loop, asked = asyncio.get_running_loop(), asyncio.Event()

    async def create_connection(factory, host, port):
        if host == "decode":
            await getaddrinfo()
        return await create(factory, host, port)

    create = loop.create_connection
    async with opened(lambda queue: kit(queue=10)) as (a, b):
        with monkeypatch.context() as patched:
            patched.setattr(type(loop), "create_connection", lambda _, *args: create_connection(*args))
            port = a.channel.open(b.address.replace("127.0.0.1", "decode"))
            assert fill(port) == 10
            await asked.wait()
            a.channel.open(b.address).send(b"not held up")
            assert await b.inbox.until(1) == [b"not held up"]
            await a.channel.aclose()
