"""The faults of aiozmq 1.0.0 and of ZeroMQ that the channel must not have."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import select
import selectors
import socket
import threading
import time

import pytest
import zmq

import aiokv.control.zmq as module
from aiokv.control import draining
from aiokv.control.base import MAX_FRAME
from aiokv.control.zmq import ZmqChannel
from aiokv.errors import CapacityError, ClosedError
from aiokv.testing.conformance.channelkit import Inbox, opened, started

HERE = "tcp://127.0.0.1:0"


def kit(*, queue=4096):
    return lambda address: ZmqChannel(address or HERE, queue=queue)


def fill(port):
    """Send until the port takes no more, and say how many it took."""
    for count in range(1_000_000):
        try:
            port.send(b"%d" % count)
        except CapacityError:
            return count
    raise AssertionError("no bound")


def count_turns(transport, monkeypatch):
    """A list that grows by one with each turn that the transport takes."""
    turns, serve = [], transport._serve
    monkeypatch.setattr(transport, "_serve", lambda: turns.append(1) or serve())
    return turns


@contextlib.contextmanager
def raw_socket(kind, address):
    """A ZeroMQ socket that isn't aiokv's."""
    with zmq.Context() as context, context.socket(kind) as sock:
        sock.linger = 0
        sock.connect(address) if address else sock.bind(HERE)
        yield sock


# -- deafness -------------------------------------------------------------------------------------


@pytest.mark.parametrize("look", ["repr", "EVENTS"])
@pytest.mark.asyncio
async def test_a_look_at_the_socket_swallows_no_message(look):
    async with opened(kit) as (a, b):
        port = a.channel.open(b.address)
        port.send(b"first")
        await b.inbox.until(1)
        await asyncio.sleep(0.01)
        receiver = b.channel._receiver
        port.send(b"second")
        # No turn of the loop until the message is there.
        select.select([receiver._fd], [], [], 20)
        if look == "repr":
            assert "ROUTER" in repr(receiver)
        else:
            while not receiver.getsockopt(zmq.EVENTS) & zmq.POLLIN:
                pass
        assert await b.inbox.until(2) == [b"first", b"second"]


@pytest.mark.asyncio
async def test_sending_swallows_no_message():
    """One socket that does both, as no channel has it: the transport is safe by itself."""
    loop = asyncio.get_running_loop()

    class Protocol(module.ZmqProtocol):
        def msg_received(self, data):
            inbox(data[0])

    inbox = Inbox()
    context = zmq.Context()
    ours, theirs = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    port = ours.bind_to_random_port("tcp://127.0.0.1")
    transport = module.DrainingTransport(loop, zmq.PAIR, ours, Protocol(), name="pair", bound=10)
    theirs.connect(f"tcp://127.0.0.1:{port}")
    theirs.send(b"0")
    await inbox.until(1)
    for count in range(1, 100):
        theirs.send(b"%d" % count)
        select.select([transport._fd], [], [], 20)
        transport.write([b"two", b"parts"])
        assert theirs.recv_multipart() == [b"two", b"parts"]
        await inbox.until(count + 1)
    transport.close()
    theirs.close(linger=0)
    await module._terminate(context).wait()


@pytest.mark.asyncio
async def test_a_socket_that_fails_is_reported_and_closed(monkeypatch):
    errors = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context["exception"]))
    async with opened(kit) as (a, b):
        stuck, well = a.channel.open(b.address), a.channel.open(b.address)

        def fail():
            raise zmq.ZMQError(errno.ENOTSUP)

        monkeypatch.setattr(stuck._transport, "_serve", fail)
        stuck._transport._look_soon()
        await asyncio.sleep(0.01)
        with pytest.raises(ClosedError):
            stuck.send(b"x")
        well.send(b"x")
        assert await b.inbox.until(1) == [b"x"]
    assert [error.errno for error in errors] == [errno.ENOTSUP]


# -- idleness -------------------------------------------------------------------------------------


def test_an_idle_pair_never_wakes_the_loop():
    class Selector(selectors.DefaultSelector):
        wakings = 0

        def select(self, timeout=None):
            self.wakings += 1
            return super().select(timeout)

    async def main():
        async with opened(kit) as (a, b):
            to_b, to_a = a.channel.open(b.address), b.channel.open(a.address)
            to_nowhere = a.channel.open("tcp://127.0.0.1:1")
            to_nowhere.send(b"x")
            for _ in range(300):
                to_b.send(b"x")
                to_a.send(b"x")
            await b.inbox.until(300)
            await a.inbox.until(300)
            await asyncio.sleep(0.1)
            before = selector.wakings
            await asyncio.sleep(0.3)
            return selector.wakings - before

    selector = Selector()
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
        assert runner.run(main()) <= 2  # the sleep's own


@pytest.mark.parametrize(("limit", "size", "most"), [("TURN_FRAMES", 10, 10), ("TURN_BYTES", 1000, 2)])
@pytest.mark.asyncio
async def test_a_turn_has_an_end(limit, size, most, monkeypatch):
    monkeypatch.setattr(draining, limit, size)
    async with opened(kit) as (a, b):
        port, receiver = a.channel.open(b.address), b.channel._receiver
        counts, serve = [0], receiver._serve

        def counted():
            idle = serve()
            counts.append(len(b.inbox.frames))
            return idle

        monkeypatch.setattr(receiver, "_serve", counted)
        for _ in range(200):
            port.send(bytes(600))
        time.sleep(0.1)  # noqa: ASYNC251 (so that many have arrived before the first turn)
        await b.inbox.until(200)
        await asyncio.sleep(0)
        assert max(after - before for before, after in itertools.pairwise(counts)) == most


# -- peers that misbehave -------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_peer_that_never_reads_costs_no_turns_and_holds_up_nobody(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with opened(lambda queue: kit(queue=1000)) as (a, b):
            stuck = a.channel.open(f"tcp://127.0.0.1:{listener.getsockname()[1]}")
            well = a.channel.open(b.address)
            assert fill(stuck) == 1000
            await asyncio.sleep(0.05)
            turns = count_turns(stuck._transport, monkeypatch)
            for i in range(500):
                well.send(b"%d" % i)
                await asyncio.sleep(0)
            assert await b.inbox.until(500) == [b"%d" % i for i in range(500)]
            assert turns == []


@pytest.mark.asyncio
async def test_oversize_and_multipart_messages_are_dropped():
    async with opened(kit) as (a, b):
        with raw_socket(zmq.DEALER, b.address) as peer:
            peer.send(b"before")
            await b.inbox.until(1)
            peer.send_multipart([b"two", b"parts"])
            peer.send_multipart([b""] * 1000)
            peer.send(b"between")
            await b.inbox.until(2)
            peer.send(bytes(MAX_FRAME + 1))  # libzmq ends the connection for that, and peer connects again
            a.channel.open(b.address).send(b"another's")
            await b.inbox.until(3)
            while len(b.inbox.frames) < 4:
                peer.send(b"after")
                await asyncio.sleep(0.01)
            assert b.inbox.frames[:4] == [b"before", b"between", b"another's", b"after"]


@pytest.mark.asyncio
async def test_what_a_peer_writes_back_is_not_read(monkeypatch):
    async with opened(kit, 1) as (a,):
        with raw_socket(zmq.ROUTER, None) as peer:
            port = a.channel.open(peer.last_endpoint.decode())
            turns = count_turns(port._transport, monkeypatch)
            port.send(b"first")
            identity, frame = peer.recv_multipart()
            assert frame == b"first"
            for _ in range(5000):
                peer.send_multipart([identity, b"unasked"], zmq.NOBLOCK)
            await asyncio.sleep(0.05)
            assert len(turns) <= 5
            port.send(b"second")
            assert peer.recv_multipart() == [identity, b"second"]


@pytest.mark.asyncio
async def test_a_peer_that_comes_back_under_its_identity_is_heard():
    async with opened(kit, 1) as (a,):
        for count in (1, 2):
            with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
                peer.linger = 0
                peer.routing_id = b"the same"
                peer.connect(a.address)
                peer.send(b"x")
                await a.inbox.until(count)


# -- beginning and end ----------------------------------------------------------------------------


@pytest.mark.parametrize("holder", ["channel", "socket"])
@pytest.mark.asyncio
async def test_a_failed_bind_leaves_nothing_at_its_descriptor(holder):
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with opened(kit, 1) as (a,):
            name = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
            for _ in range(5):
                with pytest.raises(OSError, match=a.address if holder == "channel" else name) as caught:
                    await ZmqChannel(a.address if holder == "channel" else name).start(Inbox())
                assert caught.value.errno == errno.EADDRINUSE
            # Whoever gets the descriptors next can use them.
            pipes = [os.pipe() for _ in range(20)]
            for i, (reader, writer) in enumerate(pipes):
                heard = asyncio.Event()
                loop.add_reader(reader, heard.set)
                os.write(writer, b"%d" % i)
                await heard.wait()
                loop.remove_reader(reader)
                os.close(reader)
                os.close(writer)


@pytest.mark.asyncio
async def test_no_socket_for_another_port(monkeypatch):
    monkeypatch.setattr(module, "_MAX_PORTS", 4)
    async with opened(kit, 1) as (a,):
        with pytest.raises(CapacityError, match="no socket"):
            for _ in range(10):
                a.channel.open(a.address)


# -- addresses ------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6")
    make = kit()
    a, b = await started(make, "tcp://[::1]:0"), await started(make, "tcp://[::1]:0")
    assert b.address.startswith("tcp://[::1]:")
    a.channel.open(b.address).send(b"x")
    assert await b.inbox.until(1) == [b"x"]
    await a.channel.aclose()
    await b.channel.aclose()


@pytest.mark.parametrize(
    ("advertise", "told"),
    [
        ("tcp://prefill-0", "tcp://prefill-0:{port}"),
        ("tcp://prefill-0:0", "tcp://prefill-0:{port}"),
        ("tcp://198.51.100.7:80", "tcp://198.51.100.7:80"),
    ],
)
@pytest.mark.parametrize("bind", ["tcp://0.0.0.0:0", "tcp://*:0", "tcp://127.0.0.1:0"])
@pytest.mark.asyncio
async def test_what_peers_are_told(bind, advertise, told):
    channel = ZmqChannel(bind, advertise=advertise)
    address = await channel.start(Inbox())
    port = channel._receiver._name.rpartition(":")[2]
    assert int(port) > 0
    assert address == told.format(port=port)
    await channel.aclose()


@pytest.mark.parametrize("bind", ["tcp://0.0.0.0:0", "tcp://*:5555", "tcp://[::]:0"])
def test_a_wildcard_needs_advertise(bind):
    with pytest.raises(ValueError, match="advertise="):
        ZmqChannel(bind)
    with pytest.raises(ValueError, match="advertise="):
        ZmqChannel("tcp://127.0.0.1:0", advertise=bind)


@pytest.mark.parametrize("bind", ["tcp://127.0.0.1", "127.0.0.1:0", "tcp://host:99999"])
def test_what_can_not_be_bound(bind):
    with pytest.raises(ValueError, match=r"port|tcp://"):
        ZmqChannel(bind)


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:5", "tcp://*:5", "tcp://host", "tcp://host:0", "ipc://x"])
@pytest.mark.asyncio
async def test_what_can_not_be_connected_to(address):
    async with opened(kit, 1) as (a,):
        with pytest.raises(ValueError, match=r"connect|tcp://"):
            a.channel.open(address)


@pytest.mark.asyncio
async def test_a_name_that_is_not_known_yet(monkeypatch):
    asked = []

    def getaddrinfo(host, port, **_):
        asked.append(host)
        if len(asked) < 3:
            raise socket.gaierror(socket.EAI_NONAME, "not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(module, "_LOOKUP_AGAIN", 0.001)
    async with opened(kit) as (a, b):
        port = a.channel.open(b.address.replace("127.0.0.1", "decode"))
        port.send(b"x")
        assert await b.inbox.until(1) == [b"x"]
        assert asked == ["decode"] * 3


@pytest.mark.asyncio
async def test_closing_during_the_lookup_ends_it(monkeypatch):
    def getaddrinfo(*_, **__):
        release.wait(20)
        raise socket.gaierror(socket.EAI_NONAME, "not known")

    release = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    async with opened(lambda queue: kit(queue=10)) as (a, b):
        port = a.channel.open(b.address.replace("127.0.0.1", "decode"))
        assert fill(port) <= 10
        other = a.channel.open(b.address)
        other.send(b"not held up")
        assert await b.inbox.until(1) == [b"not held up"]
        port.close()
        release.set()
        await asyncio.sleep(0.01)
        assert port._again is None
