"""The faults of aiozmq 1.0.0 and of ZeroMQ that the channel must not have."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import select
import selectors
import signal
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


def test_an_interrupt_in_the_callback_leaves_the_channel_hearing():
    def receive(frame):
        inbox(frame)
        if frame == b"interrupt":
            raise SystemExit

    async def begin():
        ends.extend([(await started(kit())).channel, ZmqChannel(HERE)])
        port = ends[0].open(await ends[1].start(receive))
        port.send(b"interrupt")
        port.send(b"next")
        await asyncio.Event().wait()

    async def end():
        assert await inbox.until(2) == [b"interrupt", b"next"]
        for channel in ends:
            await channel.aclose()

    ends, inbox = [], Inbox()
    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        beginning = runner.get_loop().create_task(begin())
        with pytest.raises(SystemExit):
            runner.get_loop().run_until_complete(beginning)
        runner.run(end())


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


@pytest.mark.asyncio
async def test_no_python_thread_while_it_runs():
    before = set(threading.enumerate())
    async with opened(kit) as (a, b):
        a.channel.open(b.address).send(b"x")
        await b.inbox.until(1)
        assert set(threading.enumerate()) == before


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
async def test_a_stopped_process_gets_all_frames_when_it_goes_on(another_process):
    async with opened(lambda queue: kit(queue=100)) as (a, b), another_process(HERE) as peer:
        port = a.channel.open(peer.address)
        port.send(b"first")
        assert await peer.line() == "first"
        peer.process.send_signal(signal.SIGSTOP)
        # libzmq and the kernel take some, then the port fills up.
        sent = 0
        async with asyncio.timeout(20):
            while True:
                await asyncio.sleep(0)
                try:
                    port.send(b"%d" % sent + b" " * 100_000)
                except CapacityError:
                    break
                sent += 1
        a.channel.open(b.address).send(b"x")
        assert await b.inbox.until(1) == [b"x"]
        peer.process.send_signal(signal.SIGCONT)
        assert [await peer.line() for _ in range(sent)] == [str(i) for i in range(sent)]


@pytest.mark.asyncio
async def test_a_killed_process_disturbs_nobody_and_the_next_at_its_port_is_reached(another_process):
    async with opened(kit) as (a, b):
        async with another_process(HERE, a.address) as first:
            assert await a.inbox.until(1) == [b"hello"]
            port, other = a.channel.open(first.address), a.channel.open(b.address)
            port.send(b"first")
            assert await first.line() == "first"
            await first.kill()
            for _ in range(10):
                port.send(b"lost or late")
                other.send(b"x")
            assert await b.inbox.until(10) == [b"x"] * 10
        async with another_process(first.address, a.address) as second:
            assert await a.inbox.until(2) == [b"hello"] * 2
            port.send(b"second")
            while (line := await second.line()) != "second":
                assert line == "lost or late"


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
async def test_an_address_of_another_host_is_told():
    with pytest.raises(OSError, match=r"tcp://192\.0\.2\.1:5555") as caught:
        await ZmqChannel("tcp://192.0.2.1:5555").start(Inbox())
    assert caught.value.errno == errno.EADDRNOTAVAIL


@pytest.mark.asyncio
async def test_a_start_cancelled_at_the_lookup_leaves_nothing():
    for turns in range(5):
        channel = ZmqChannel("tcp://localhost:0")
        task = asyncio.create_task(channel.start(Inbox()))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        await channel.aclose()


@pytest.mark.asyncio
async def test_a_channel_closed_during_the_lookup_does_not_start():
    channel = ZmqChannel("tcp://localhost:0")
    task = asyncio.create_task(channel.start(Inbox()))
    await asyncio.sleep(0)
    await channel.aclose()
    with pytest.raises(ClosedError):
        await task


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
async def test_names_are_looked_up():
    make = kit()
    a, b = await started(make, "tcp://localhost:0"), await started(make)
    assert a.address.startswith("tcp://127.0.0.1:")
    port = b.channel.open(a.address.replace("127.0.0.1", "localhost"))
    for i in range(10):
        port.send(b"%d" % i)
    assert await a.inbox.until(10) == [b"%d" % i for i in range(10)]
    await a.channel.aclose()
    await b.channel.aclose()


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
