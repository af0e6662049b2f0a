"""The contract of stream-ordered memory: the seam between aiokv and a GPU.

Everything above this layer speaks of four things only. A ``Buffer`` is registered memory. A
``Stream`` is a queue that its device works off in order. An ``Event`` marks a point in a stream
and tells, without blocking, whether that point was reached. A ``Device`` makes streams and
copies between buffers on them. CUDA, the host and the mocked device implement the same contract
and pass the same conformance suite.

None of these calls may block: no synchronize, no allocation of pinned memory, no first-use
initialization. What would block is done when the device is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from aiokv.proto.plan import Chunk, CopyPlan

__all__ = ["Buffer", "Device", "Event", "StagingDevice", "Stream"]


@runtime_checkable
class Buffer(Protocol):
    """A contiguous range of registered memory, kept alive by this object."""

    @property
    def address(self) -> int:
        """Address of the first byte, in the address space of this process."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""


class Event(Protocol):
    """A point in a stream."""

    def done(self) -> bool:
        """Whether everything enqueued before this event was recorded has completed. Never blocks.

        Raises:
            DeviceError: A copy or kernel before it failed; then it never becomes done.
        """


class Stream(Protocol):
    """Work in order. Different streams are unordered but for the events they wait for."""

    def record(self) -> Event:
        """Mark the point after all that has been enqueued so far. May be called from any thread."""

    def wait(self, event: Event) -> None:
        """What is enqueued from now on runs after ``event``. Does not block the caller."""


class Device(Protocol):
    """Where a cache lives."""

    @property
    def kind(self) -> str:
        """``"host"``, ``"cuda"`` or ``"mocked"``."""

    @property
    def budget_s(self) -> float:
        """How long submitting copies may hold the event loop in one turn, in seconds."""

    def stream(self) -> Stream:
        """A new side stream, never the device's default stream."""

    def adopt(self, stream: object | None) -> Stream:
        """The caller's stream: anything with ``__cuda_stream__``; None is the current one.

        May be called from any thread; None then means that thread's current stream.
        """

    def copy(
        self,
        plan: CopyPlan,
        chunk: Chunk,
        src: Sequence[Buffer],
        dst: Sequence[Buffer],
        *,
        stream: Stream,
    ) -> None:
        """Enqueue the copy of one chunk of a plan, from ``src`` to ``dst``, on ``stream``.

        Both sequences are indexed by the buffer numbers of the plan's placements. The caller
        keeps the buffers alive until an event recorded afterwards is done.

        Raises:
            DeviceError: It could not be submitted, or not all of it: what was is over when an event
                recorded afterwards is done.
        """


class StagingDevice(Device, Protocol):
    """A device that packs chunks into staging memory, and unpacks them."""

    @property
    def ordinal(self) -> int:
        """CUDA's number of the device."""

    def gather(
        self,
        plan: CopyPlan,
        chunk: Chunk,
        src: Sequence[Buffer],
        staging: Buffer,
        offset: int,
        *,
        stream: Stream,
    ) -> None:
        """Enqueue the packing of a chunk, in plan order, to ``staging`` from ``offset`` on."""

    def scatter(
        self,
        plan: CopyPlan,
        chunk: Chunk,
        staging: Buffer,
        offset: int,
        dst: Sequence[Buffer],
        *,
        stream: Stream,
    ) -> None:
        """Enqueue the mirror image of ``gather``."""
