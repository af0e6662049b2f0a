"""The consumer's end of a stream: data that comes before it is expected."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import pytest

from aiokv.proto.plan import Chunk
from aiokv.transports.frames import pack, tag_of
from aiokv.transports.receiver import Receiver
from aiokv.transports.vectors import VectorIO


@pytest.mark.asyncio
async def test_a_connection_that_is_reset_is_lost_whatever_is_still_to_be_read(
    cut_off: Callable[[bytes], socket.socket],
) -> None:
    tag = tag_of(("t", 0))
    ours = cut_off(pack(tag, Chunk(0, 1, 0, 0, 1, 1 << 20)) + bytes(100_000))
    receiver = Receiver(b"link", "tcp", [ours], VectorIO(), set())
    receiver._parts.forget(tag)
    lost = asyncio.Event()
    receiver.on_lost(lost.set)
    async with asyncio.timeout(20):
        await lost.wait()
    receiver.close()


@pytest.mark.asyncio
async def test_standing_still_is_not_held_against_data_that_came_early() -> None:
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    receiver = Receiver(b"link", "tcp", [ours], VectorIO(), set())
    (inlet,) = receiver._inlets
    try:
        theirs.sendall(pack(tag_of(("t", 0)), Chunk(0, 1, 0, 0, 1, 8)))
        while inlet._patience is None:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        inlet._patience._timer.cancel()
        # As after SIGCONT: the timer comes late, and what announces the data may lie unread as it did.
        inlet._patience._look(loop.time() - 1)
        assert not receiver.lost
        inlet._patience._timer.cancel()
        inlet._patience._look(loop.time())
        assert receiver.lost
    finally:
        receiver.close()
        theirs.close()
