"""What every ``Channel`` must do, as cases to run against any of them.

Run each of ``CASES`` with a ``channelkit.ChannelKit`` of your channel, on each loop that it shall work on::

    @pytest.mark.parametrize("case", channels.CASES)
    @pytest.mark.asyncio
    async def test_my_channel(case):
        await case(my_kit)

A case raises AssertionError, or TimeoutError where something never came.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Awaitable, Callable

from aiokv.control.base import MAX_FRAME
from aiokv.errors import CapacityError, ClosedError, LocalProtocolError
from aiokv.testing.conformance.channelkit import (
    PATIENCE,
    ChannelKit,
    Inbox,
    descriptors,
    nowhere,
    opened,
    raises,
    start_fails,
    started,
)

__all__ = ["CASES"]

# -- frames ---------------------------------------------------------------------------------------


async def order_is_kept_both_ways(kit: ChannelKit) -> None:
    """Two ends that send at the same time each get the other's frames, all, once and in order."""
    async with opened(kit) as (a, b):
        numbers = [b"%d" % i for i in range(3000)]
        await asyncio.gather(
            a.sends(a.channel.open(b.address), numbers), b.sends(b.channel.open(a.address), numbers)
        )
        assert await a.inbox.until(len(numbers)) == numbers
        assert await b.inbox.until(len(numbers)) == numbers


async def many_peers_meet_at_one(kit: ChannelKit) -> None:
    """Each of 20 peers gets its frames through in its own order, and is answered."""
    async with opened(kit, 21) as (hub, *spokes):
        for name, spoke in enumerate(spokes):
            port = spoke.channel.open(hub.address)
            for i in range(50):
                port.send(b"%d %d" % (name, i))
        got = await hub.inbox.until(20 * 50)
        for name in range(20):
            mine = [frame for frame in got if frame.startswith(b"%d " % name)]
            assert mine == [b"%d %d" % (name, i) for i in range(50)]
        for spoke in spokes:
            hub.channel.open(spoke.address).send(spoke.address.encode())
        for spoke in spokes:
            assert await spoke.inbox.until(1) == [spoke.address.encode()]


async def frames_arrive_as_they_were(kit: ChannelKit) -> None:
    """Empty, of one zero byte, and of every size up to the largest."""
    async with opened(kit) as (a, b):
        port = a.channel.open(b.address)
        frames = [b"", b"\0", b"", bytes(range(256)), os.urandom(1 << 16), os.urandom(MAX_FRAME - 1)]
        frames += [os.urandom(MAX_FRAME), b"last"]
        for frame in frames:
            port.send(frame)
        assert await b.inbox.until(len(frames)) == frames
        assert {type(frame) for frame in b.inbox.frames} == {bytes}


async def oversize_is_refused(kit: ChannelKit) -> None:
    """By the sender, and the port goes on."""
    async with opened(kit) as (a, b):
        port = a.channel.open(b.address)
        raises(ValueError, lambda: port.send(bytes(MAX_FRAME + 1)))
        port.send(b"next")
        assert await b.inbox.until(1) == [b"next"]


async def burst_is_taken(kit: ChannelKit) -> None:
    """10,000 frames sent in one go."""
    async with opened(kit, queue=10_000) as (a, b):
        port = a.channel.open(b.address)
        frames = [b"%d" % i for i in range(10_000)]
        for frame in frames:
            port.send(frame)
        assert await b.inbox.until(len(frames)) == frames


async def flood_leaves_the_loop_its_turns(kit: ChannelKit) -> None:
    """While thousands of frames are delivered, other callbacks of the loop run."""
    async with opened(kit, queue=10_000) as (a, b):
        port = a.channel.open(b.address)
        for i in range(10_000):
            port.send(b"%d" % i)
        seen_at_turns = set()
        async with asyncio.timeout(PATIENCE):
            while len(b.inbox.frames) < 10_000:
                seen_at_turns.add(len(b.inbox.frames))
                await b.inbox.until(len(b.inbox.frames) + 1)
        assert len(seen_at_turns) >= 10


async def sender_need_not_wait_for_the_receiver(kit: ChannelKit) -> None:
    """Frames to an address that is bound only later arrive there."""
    make = kit(queue=4096)
    address, a = await nowhere(make), await started(make)
    port = a.channel.open(address)
    port.send(b"early")
    await asyncio.sleep(0)
    b = await started(make, address)
    port.send(b"late")
    assert await b.inbox.until(2) == [b"early", b"late"]
    await a.channel.aclose()
    await b.channel.aclose()


async def callback_may_raise(kit: ChannelKit) -> None:
    """What comes out of the callback goes to the loop's exception handler, and stops nothing."""
    loop = asyncio.get_running_loop()
    errors: list[object] = []
    before = loop.get_exception_handler()
    make = kit(queue=4096)
    inbox = Inbox()

    def receive(frame: bytes) -> None:
        inbox(frame)
        if frame != b"good":
            raise LookupError(frame)

    channel, a = make(None), await started(make)
    address = await channel.start(receive)
    loop.set_exception_handler(lambda _, context: errors.append(context["exception"]))
    try:
        port = a.channel.open(address)
        for frame in [b"1", b"2", b"good", b"3", b"good"]:
            port.send(frame)
        assert await inbox.until(5) == [b"1", b"2", b"good", b"3", b"good"]
        # One that comes alone, so that nothing after it could wake the channel.
        port.send(b"4")
        await inbox.until(6)
        port.send(b"good")
        await inbox.until(7)
    finally:
        loop.set_exception_handler(before)
        await channel.aclose()
        await a.channel.aclose()
    assert [repr(error) for error in errors] == [repr(LookupError(b"%d" % i)) for i in (1, 2, 3, 4)]


# -- limits ---------------------------------------------------------------------------------------


async def queue_is_bounded(kit: ChannelKit) -> None:
    """A dead address takes ``queue`` frames and no more; other ports don't notice."""
    make = kit(queue=64)
    dead, a, b = await nowhere(make), await started(make), await started(make)
    stuck, well = a.channel.open(dead), a.channel.open(b.address)
    for i in range(64):
        stuck.send(b"%d" % i)
    for _ in range(3):
        error = raises(CapacityError, lambda: stuck.send(b"one too many"))
        assert dead in str(error)
        well.send(b"goes on")
    assert await b.inbox.until(3) == [b"goes on"] * 3
    stuck.close()
    await a.channel.aclose()
    await b.channel.aclose()


async def bound_moves_on_with_the_reader(kit: ChannelKit) -> None:
    """After CapacityError, a peer that reads again makes room, and nothing taken was lost."""
    make = kit(queue=64)
    address, a = await nowhere(make), await started(make)
    port = a.channel.open(address)
    for i in range(64):
        port.send(b"%d" % i)
    raises(CapacityError, lambda: port.send(b""))
    b = await started(make, address)
    await b.inbox.until(64)
    port.send(b"64")
    assert await b.inbox.until(65) == [b"%d" % i for i in range(65)]
    await a.channel.aclose()
    await b.channel.aclose()


# -- beginning and end ----------------------------------------------------------------------------


async def closed_is_closed(kit: ChannelKit) -> None:
    """Closing twice is fine; using what is closed is ClosedError."""
    async with opened(kit) as (a, b):
        port, other = a.channel.open(b.address), a.channel.open(b.address)
        port.close()
        port.close()
        raises(ClosedError, lambda: port.send(b"x"))
        other.send(b"x")
        assert await b.inbox.until(1) == [b"x"]
        await a.channel.aclose()
        await a.channel.aclose()
        other.close()
        raises(ClosedError, lambda: other.send(b"x"))
        raises(ClosedError, lambda: a.channel.open(b.address))
        await b.channel.aclose()
        await start_fails(ClosedError, b.channel)


async def misuse_is_told(kit: ChannelKit) -> None:
    """A second start, a port before the first, an address that is none."""
    make = kit(queue=4096)
    new = make(None)
    async with opened(kit) as (a, b):
        for address in ("", "nonsense", "tcp://", "memory://", b.address + "/", "tcp://127.0.0.1:0"):
            raises(ValueError, lambda address=address: a.channel.open(address))  # type: ignore[misc]
        await start_fails(LocalProtocolError, a.channel)
        raises(LocalProtocolError, lambda: new.open(b.address))
    await new.aclose()


async def callback_may_close(kit: ChannelKit) -> None:
    """A port in the callback, and the channel from a task that it starts; nothing is delivered after that."""
    make = kit(queue=4096)
    channel, peer = make(None), await started(make)
    inbox = Inbox()
    closing: list[asyncio.Task[None]] = []

    def receive(frame: bytes) -> None:
        inbox(frame)
        back.close()
        if not closing:
            closing.append(asyncio.get_running_loop().create_task(channel.aclose()))

    address = await channel.start(receive)
    back = channel.open(peer.address)
    port = peer.channel.open(address)
    for _ in range(1000):
        port.send(b"x")
    await inbox.until(1)
    await closing[0]
    count = len(inbox.frames)
    port.send(b"x")
    await asyncio.sleep(0.01)
    assert len(inbox.frames) == count
    await peer.channel.aclose()


async def address_in_use_is_told(kit: ChannelKit) -> None:
    """With EADDRINUSE and the address; the holder isn't disturbed, and the other can have it later."""
    make = kit(queue=4096)
    a, b = await started(make), await started(make)
    second, inbox = make(b.address), Inbox()
    before = await descriptors()
    error = await start_fails(OSError, second)
    assert getattr(error, "errno", None) == errno.EADDRINUSE
    assert b.address.partition("#")[0] in str(error)  # without the key, if it names one
    assert await descriptors() <= before
    port = a.channel.open(b.address)
    port.send(b"to the first")
    assert await b.inbox.until(1) == [b"to the first"]
    await b.channel.aclose()
    assert await second.start(inbox) == b.address
    await second.aclose()
    await a.channel.aclose()


async def address_is_free_after_aclose(kit: ChannelKit) -> None:
    """For another channel at once, and a port that was open before reaches that."""
    make = kit(queue=4096)
    a, b = await started(make), await started(make)
    port = a.channel.open(b.address)
    port.send(b"first")
    await b.inbox.until(1)
    for _ in range(5):
        await b.channel.aclose()
        b = await started(make, b.address)
    # What is sent while the connection is being lost may vanish, so send until something comes.
    async with asyncio.timeout(PATIENCE):
        while not b.inbox.frames:
            port.send(b"second")
            await asyncio.sleep(0.01)
    assert set(b.inbox.frames) == {b"second"}
    await a.channel.aclose()
    await b.channel.aclose()


async def aclose_drops_what_nobody_takes(kit: ChannelKit) -> None:
    """Frames queued for a dead address don't keep the channel from closing, and don't come out later."""
    make = kit(queue=4096)
    dead, a = await nowhere(make), await started(make)
    port = a.channel.open(dead)
    for i in range(2000):
        port.send(b"%d" % i)
    async with asyncio.timeout(PATIENCE):
        await a.channel.aclose()
    b = await started(make, dead)
    await asyncio.sleep(0.05)
    assert b.inbox.frames == []
    await b.channel.aclose()


async def restarts_leak_nothing(kit: ChannelKit) -> None:
    """Fifty lives of a pair leave no descriptor."""
    counts = []
    for _ in range(50):
        async with opened(kit) as (a, b):
            a.channel.open(b.address).send(b"x")
            await b.inbox.until(1)
        counts.append(await descriptors())
    assert counts[-1] <= counts[0]


async def cancelled_start_leaves_nothing(kit: ChannelKit) -> None:
    """However far it got, the address is free and no descriptor is left."""
    make = kit(queue=4096)
    address = await nowhere(make)
    before = await descriptors()
    for turns in range(4):
        channel = make(address)
        task = asyncio.get_running_loop().create_task(channel.start(Inbox()))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        await channel.aclose()
        assert await descriptors() <= before
        await (await started(make, address)).channel.aclose()


async def cancelled_aclose_still_closes(kit: ChannelKit) -> None:
    """And a second aclose waits until it has."""
    make = kit(queue=4096)
    await nowhere(make)  # libuv keeps a descriptor in reserve from a loop's first listener on
    before = await descriptors()
    a = await started(make)
    task = asyncio.get_running_loop().create_task(a.channel.aclose())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    await a.channel.aclose()
    assert await descriptors() <= before
    await (await started(make, a.address)).channel.aclose()


CASES: tuple[Callable[[ChannelKit], Awaitable[None]], ...] = (
    order_is_kept_both_ways,
    many_peers_meet_at_one,
    frames_arrive_as_they_were,
    oversize_is_refused,
    burst_is_taken,
    flood_leaves_the_loop_its_turns,
    sender_need_not_wait_for_the_receiver,
    callback_may_raise,
    queue_is_bounded,
    bound_moves_on_with_the_reader,
    closed_is_closed,
    misuse_is_told,
    callback_may_close,
    address_in_use_is_told,
    address_is_free_after_aclose,
    aclose_drops_what_nobody_takes,
    restarts_leak_nothing,
    cancelled_start_leaves_nothing,
    cancelled_aclose_still_closes,
)
