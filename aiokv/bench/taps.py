"""Marks in time along one transfer, from wrappers round what an engine is given: its channel and transports.

They note the clock and forward everything, so they tell where the time goes without a change to the engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, cast

from aiokv.control.base import Channel, Port
from aiokv.device.base import Buffer, Event, Stream
from aiokv.proto.plan import Chunk, CopyPlan
from aiokv.transports.base import Link, PeerInfo, Transport

__all__ = ["Marks", "tapped_channel", "tapped_transport"]


class Marks:
    """What happened when, in order."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def __call__(self, what: str) -> None:
        """It happens now."""
        self.seen.append((what, time.monotonic_ns()))

    def first(self, what: str) -> int:
        """When it first happened.

        Raises:
            StopIteration: It didn't.
        """
        return next(at for name, at in self.seen if name == what)

    def last(self, what: str, before: int) -> int:
        """When it last happened before some time.

        Raises:
            StopIteration: It didn't.
        """
        return next(at for name, at in reversed(self.seen) if name == what and at <= before)


def tapped_channel(channel: Channel, marks: Marks) -> Channel:
    """The channel; ``sent`` and ``heard`` are noted."""
    return cast(Channel, _Channel(channel, marks))


def tapped_transport(transport: Transport, marks: Marks) -> Transport:
    """The transport; ``copying`` and ``copied`` are noted of its reads."""
    return cast(Transport, _Transport(transport, marks))


class _Tap:
    """Whatever isn't wrapped is that of the wrapped."""

    def __init__(self, wrapped: object, marks: Marks) -> None:
        self._wrapped: Any = wrapped
        self._marks = marks

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the wrapped one has
        return getattr(self._wrapped, name)


class _Channel(_Tap):
    async def start(self, receive: Callable[[bytes], None]) -> str:
        def heard(frame: bytes) -> None:
            self._marks("heard")
            receive(frame)

        address: str = await self._wrapped.start(heard)
        return address

    def open(self, address: str) -> Port:
        return cast(Port, _Port(self._wrapped.open(address), self._marks))


class _Port(_Tap):
    def send(self, frame: bytes) -> None:
        self._marks("sent")
        self._wrapped.send(frame)


class _Transport(_Tap):
    async def connect(self, description: bytes, peer: PeerInfo) -> Link:
        return cast(Link, _Link(await self._wrapped.connect(description, peer), self._marks))


class _Link(_Tap):
    def read(self, plan: CopyPlan, chunk: Chunk, dst: Sequence[Buffer], *, stream: Stream) -> Event:
        self._marks("copying")
        return _Event(self._wrapped.read(plan, chunk, dst, stream=stream), self._marks)


class _Event(_Tap):
    def done(self) -> bool:
        done: bool = self._wrapped.done()
        if done:
            self._marks("copied")
        return done
