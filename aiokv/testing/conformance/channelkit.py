"""What the cases for channels are written with: networks of channels, and what they got."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from aiokv.control.base import Channel, Port
from aiokv.errors import CapacityError

__all__ = [
    "PATIENCE",
    "ChannelKit",
    "End",
    "Inbox",
    "descriptors",
    "nowhere",
    "opened",
    "raises",
    "start_fails",
    "started",
]

# Seconds until a frame that doesn't come is given up. Passing cases don't wait for it.
PATIENCE = 20


class ChannelKit(Protocol):
    """Makes a network of its own at each call."""

    def __call__(self, *, queue: int) -> Callable[[str | None], Channel]:
        """What makes the network's channels, for an address, or for a free one where that is None.

        Args:
            queue: Frames that may wait for one peer.
        """


@dataclass
class Inbox:
    """A callback for a channel, that keeps the frames and can be awaited."""

    frames: list[bytes] = field(default_factory=list)
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)

    def __call__(self, frame: bytes) -> None:
        """Take a frame in."""
        self.frames.append(frame)
        self._arrived.set()

    async def until(self, count: int) -> list[bytes]:
        """All frames so far, once there are ``count`` of them."""
        async with asyncio.timeout(PATIENCE):
            while len(self.frames) < count:
                self._arrived.clear()
                await self._arrived.wait()
        return self.frames


@dataclass
class End:
    """A started channel."""

    channel: Channel
    address: str
    inbox: Inbox

    async def sends(self, port: Port, frames: list[bytes]) -> None:
        """Send all, waiting for a turn of the loop whenever the queue is full."""
        for frame in frames:
            while True:
                try:
                    port.send(frame)
                    break
                except CapacityError:
                    await asyncio.sleep(0.001)


@asynccontextmanager
async def opened(kit: ChannelKit, count: int = 2, *, queue: int = 4096) -> AsyncIterator[list[End]]:
    """So many channels that can reach each other, started, and closed in the end."""
    make = kit(queue=queue)
    ends: list[End] = []
    try:
        while len(ends) < count:
            ends.append(await started(make))
        yield ends
    finally:
        for end in ends:
            await end.channel.aclose()


async def started(make: Callable[[str | None], Channel], address: str | None = None) -> End:
    """A channel of the network, started at the address."""
    channel, inbox = make(address), Inbox()
    return End(channel, await channel.start(inbox), inbox)


async def nowhere(make: Callable[[str | None], Channel]) -> str:
    """An address where nobody listens."""
    end = await started(make)
    await end.channel.aclose()
    return end.address


async def descriptors() -> int:
    """How many the process has open."""
    return len(await asyncio.to_thread(os.listdir, "/proc/self/fd"))


def raises(kind: type[BaseException], call: Callable[[], object]) -> BaseException:
    """The error that ``call`` must raise."""
    try:
        call()
    except kind as exc:
        return exc
    raise AssertionError(f"no {kind.__name__}")


async def start_fails(kind: type[BaseException], channel: Channel) -> BaseException:
    """The error that starting the channel must raise."""
    try:
        await channel.start(Inbox())
    except kind as exc:
        return exc
    raise AssertionError(f"no {kind.__name__}")
