"""What a part's bytes are while they move: what is still missing, and what is in flight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from aiokv.device.base import Buffer, Event, Stream
from aiokv.proto.plan import Chunk, CopyPlan
from aiokv.proto.transfers import Fetching, Part
from aiokv.transports.base import Link, PartId

__all__ = ["Flow", "Movement"]


@dataclass(eq=False, slots=True)
class Flow:
    """What goes over one link."""

    link: Link
    #: Submitted chunks that have not completed.
    in_flight: int = 0
    #: Parts that use it.
    parts: int = 0
    #: We hear of it when it becomes writable.
    listening: bool = False
    #: To be closed once nothing is in flight.
    retired: bool = False


@dataclass(eq=False, slots=True)
class Movement:
    """One part's bytes."""

    part: Part
    flow: Flow
    plan: CopyPlan
    stream: Stream
    #: Point on the caller's stream that ``stream`` waits for; None where it is past.
    after: Event | None
    #: Bytes of each layer that are not in place yet.
    missing: list[int]
    #: Bytes of each layer that were never submitted yet.
    unsubmitted: list[int]
    #: Submitted chunks that have not completed.
    in_flight: int = 0
    #: Nothing more is submitted, and what completes changes nothing.
    stopped: bool = False
    #: Chunks that are not read before the lease is confirmed.
    held_back: list[Chunk] = field(default_factory=list)
    #: Chunks that were read when the lease was over, and when that was seen (ns).
    unconfirmed: list[tuple[int, Chunk]] = field(default_factory=list)

    @property
    def id(self) -> PartId:
        """What the part is called on its link."""
        return self.part.transfer.key

    @property
    def link(self) -> Link:
        """The path that the bytes take."""
        return self.flow.link

    def count(self, left: list[int], chunk: Chunk) -> int:
        """Take a chunk off what is left of each layer; a mask of the layers of which nothing is left then."""
        nbytes, done = chunk.nbytes // chunk.layers, 0
        for layer in self.plan.layers_of(chunk):
            left[layer] -= nbytes
            if not left[layer]:
                done |= 1 << layer
        return done

    def held_up(self) -> bool:
        """Whether what is submitted now waits on the device for what the caller enqueued before.

        Raises:
            DeviceError: That failed.
        """
        if self.after is not None and self.after.done():
            self.after = None
        return self.after is not None

    @property
    def priority(self) -> int:
        """Of a fetch; a producer serves all alike."""
        return self.part.transfer.priority if isinstance(self.part.transfer, Fetching) else 0

    def submit(self, chunk: Chunk, buffers: Sequence[Buffer]) -> Event:
        """Read a chunk into this engine's buffers (consumer), or send it from them (producer).

        Returns:
            An event that is done when nothing of the chunk is in flight any more at this end.

        Raises:
            PeerLostError: The link is lost.
            DeviceError: It could not be submitted.
        """
        if self.part.role == "consumer":
            return self.link.read(self.plan, chunk, buffers, stream=self.stream)
        return self.link.send(self.id, self.plan, chunk, buffers, stream=self.stream)
