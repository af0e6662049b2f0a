"""A device that plays DMA: it copies at once, and its events are done when a bus of some rate would have."""

from __future__ import annotations

import time
from collections.abc import Sequence

from aiokv.device.base import Buffer, Event, Stream
from aiokv.device.host import HostBuffer
from aiokv.errors import DeviceError
from aiokv.proto.plan import Chunk, CopyPlan

__all__ = ["PlayedDevice"]


class _Event:
    __slots__ = ("at",)

    def __init__(self, at: int) -> None:
        self.at = at

    def done(self) -> bool:
        return time.monotonic_ns() >= self.at


class _Stream:
    """Work in order, each part of which takes its time."""

    def __init__(self) -> None:
        self.free_at = 0

    def record(self) -> Event:
        return _Event(self.free_at)

    def wait(self, event: Event) -> None:
        if isinstance(event, _Event):
            self.free_at = max(self.free_at, event.at)


class PlayedDevice:
    """Moves nothing, and takes as long as copies over a bus would.

    Args:
        rate: Of the bus, in bytes a nanosecond.
        start_ns: Of each copy, besides.
    """

    kind = "played"
    budget_s = 0.0005

    def __init__(self, rate: float, start_ns: int = 5_000) -> None:
        self._rate = rate
        self._start_ns = start_ns
        #: When the last copy that was asked for will be over (ns).
        self.over_at = 0
        self._default = _Stream()

    def allocate(self, nbytes: int) -> HostBuffer:
        """Memory of the host."""
        return HostBuffer.allocate(nbytes)

    def stream(self) -> Stream:
        """A side stream."""
        return _Stream()

    def adopt(self, stream: object | None) -> Stream:
        """The default stream, which nothing is on."""
        return self._default

    def copy(
        self, plan: CopyPlan, chunk: Chunk, src: Sequence[Buffer], dst: Sequence[Buffer], *, stream: Stream
    ) -> None:
        """Have the stream be busy for as long as the copy would take."""
        if not isinstance(stream, _Stream):
            raise DeviceError(f"{stream!r} is no stream of this device")
        took = self._start_ns + int(chunk.nbytes / self._rate)
        stream.free_at = max(stream.free_at, time.monotonic_ns()) + took
        self.over_at = stream.free_at
