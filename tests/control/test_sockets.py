"""What both channels between processes do alike, over ZeroMQ and over streams."""

from __future__ import annotations

import asyncio
import errno
import signal
import threading

import pytest

from aiokv.control.streams import StreamChannel
from aiokv.control.zmq import ZmqChannel
from aiokv.errors import CapacityError, ClosedError
from aiokv.testing.conformance.channelkit import Inbox, opened, started


@pytest.fixture(params=[("tcp", ZmqChannel), ("stream", StreamChannel)], ids=["zmq", "stream"])
def kind(request):
    """The scheme of a channel's addresses, and its class."""
    return request.param


@pytest.fixture
def scheme(kind):
    return kind[0]


@pytest.fixture
def channel(kind):
    return kind[1]


@pytest.fixture
def here(scheme):
    return f"{scheme}://127.0.0.1:0"


@pytest.fixture
def kit(channel, here):
    return lambda *, queue=4096: lambda address: channel(address or here, queue=queue)


# -- other processes ------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_stopped_process_gets_all_frames_when_it_goes_on(kit, here, another_process):
    async with opened(lambda queue: kit(queue=100)) as (a, b), another_process(here) as peer:
        port = a.channel.open(peer.address)
        port.send(b"first")
        assert await peer.line() == "first"
        peer.process.send_signal(signal.SIGSTOP)
        # The kernel takes some, and libzmq, then the port fills up.
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
async def test_a_killed_process_disturbs_nobody_and_the_next_at_its_port_is_reached(
    kit, here, another_process
):
    async with opened(kit) as (a, b):
        async with another_process(here, a.address) as first:
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


# -- the loop -------------------------------------------------------------------------------------


def test_an_interrupt_in_the_callback_leaves_the_channel_hearing(kit, channel, here):
    def receive(frame, *_):
        inbox(frame)
        if frame == b"interrupt":
            raise SystemExit

    async def begin():
        ends.extend([(await started(kit())).channel, channel(here)])
        port = ends[0].open(await ends[1].start(receive))
        port.send(b"interrupt")
        port.send(b"next")
        await asyncio.Event().wait()

    async def end():
        assert await inbox.until(2) == [b"interrupt", b"next"]
        for each in ends:
            await each.aclose()

    ends, inbox = [], Inbox()
    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        beginning = runner.get_loop().create_task(begin())
        with pytest.raises(SystemExit):
            runner.get_loop().run_until_complete(beginning)
        runner.run(end())


@pytest.mark.asyncio
async def test_no_python_thread_while_it_runs(kit):
    before = set(threading.enumerate())
    async with opened(kit) as (a, b):
        a.channel.open(b.address).send(b"x")
        await b.inbox.until(1)
        assert set(threading.enumerate()) == before


# -- beginning ------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_start_cancelled_at_the_lookup_leaves_nothing(channel, scheme):
    for turns in range(5):
        end = channel(f"{scheme}://localhost:0")
        task = asyncio.create_task(end.start(Inbox()))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        await end.aclose()


@pytest.mark.asyncio
async def test_a_channel_closed_during_the_lookup_does_not_start(channel, scheme):
    end = channel(f"{scheme}://localhost:0")
    task = asyncio.create_task(end.start(Inbox()))
    await asyncio.sleep(0)
    await end.aclose()
    with pytest.raises(ClosedError):
        await task


@pytest.mark.asyncio
async def test_an_address_of_another_host_is_told(channel, scheme):
    with pytest.raises(OSError, match=rf"{scheme}://192\.0\.2\.1:5555") as caught:
        await channel(f"{scheme}://192.0.2.1:5555").start(Inbox())
    assert caught.value.errno == errno.EADDRNOTAVAIL


@pytest.mark.asyncio
async def test_names_are_looked_up(kit, scheme):
    make = kit()
    a, b = await started(make, f"{scheme}://localhost:0"), await started(make)
    assert a.address.startswith(f"{scheme}://127.0.0.1:")
    port = b.channel.open(a.address.replace("127.0.0.1", "localhost"))
    for i in range(10):
        port.send(b"%d" % i)
    assert await a.inbox.until(10) == [b"%d" % i for i in range(10)]
    await a.channel.aclose()
    await b.channel.aclose()
