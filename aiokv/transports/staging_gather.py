"""From a GPU's memory to slots: what a producer's end does with chunks, whatever takes them on from there."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from aiokv.device.base import Buffer, Stream
from aiokv.errors import DeviceError, PeerLostError
from aiokv.proto.plan import Chunk, CopyPlan
from aiokv.transports.base import PartId
from aiokv.transports.staging import Pending, Ring, Staging, split

__all__ = ["Gatherer", "Outgoing"]


@dataclass(frozen=True, eq=False, slots=True)
class Outgoing:
    """A chunk, or a part of one, that fits into a slot."""

    part: PartId
    plan: CopyPlan
    chunk: Chunk
    src: Sequence[Buffer]
    stream: Stream
    #: What the mover was given for the whole chunk.
    event: Pending


class Gatherer:
    """Gathers chunks to slots of one link's ring, as these become free, and hands each on when it is full.

    Args:
        staging: The transport's.
        gathered: Called with what is in a slot, and the slot, which is to be freed some time.
        writable: Called when there is a free slot again, and nothing waits for one.
    """

    def __init__(
        self,
        staging: Staging,
        gathered: Callable[[Outgoing, int], None],
        writable: Callable[[], None],
    ) -> None:
        #: None until ``start``; the chunks of before wait for it.
        self.ring: Ring | None = None
        self._staging = staging
        self._gathered = gathered
        self._tell_writable = writable
        #: What waits for a slot.
        self._pieces: deque[Outgoing] = deque()
        self._stopped = False

    def start(self, ring: Ring) -> None:
        """Use this ring, and retire it in the end."""
        self.ring = ring
        self._go()
        if self.writable:
            self._tell_writable()

    def send(
        self, part: PartId, plan: CopyPlan, chunk: Chunk, src: Sequence[Buffer], stream: Stream
    ) -> Pending:
        """Gather a chunk.

        Returns:
            An event that is done when the device has read all of it.

        Raises:
            DeviceError: It has pieces that no slot holds.
        """
        chunks = list(split(plan, chunk, self._staging.slot_bytes))
        event = Pending(len(chunks))
        self._pieces.extend(Outgoing(part, plan, each, src, stream, event) for each in chunks)
        self._go()
        return event

    @property
    def writable(self) -> bool:
        """Whether there is a free slot, and nothing that waits for one."""
        return self.ring is not None and self.ring.free > 0 and not self._pieces and not self._stopped

    def _go(self) -> None:
        ring = self.ring
        while ring is not None and ring.free and self._pieces:
            piece = self._pieces.popleft()
            if piece.event.failed:
                continue
            self._submit(ring, piece, ring.take())

    def _submit(self, ring: Ring, piece: Outgoing, slot: int) -> None:
        failure: DeviceError | None = None
        try:
            self._staging.device.gather(
                piece.plan, piece.chunk, piece.src, ring.memory, ring.offset(slot), stream=piece.stream
            )
        except DeviceError as error:  # a part of it may have been enqueued, and write to the slot still
            failure = error
            piece.event.fail(error)
        try:
            event = piece.stream.record()
        except DeviceError as error:  # then nothing runs on the device any more
            piece.event.fail(error)
            ring.give(slot)
            return
        piece.event.add(event)
        ring.watch(event, piece.stream, partial(self._gone, piece, slot, failure))

    def _gone(
        self, piece: Outgoing, slot: int, failure: DeviceError | None, error: DeviceError | None
    ) -> None:
        """Nothing writes to a slot any more."""
        if self._stopped:
            return
        failure = failure or error
        if failure is None:
            self._gathered(piece, slot)
        else:
            piece.event.fail(failure)
            self.free(slot)

    def free(self, slot: int) -> None:
        """What was in a slot has gone where it should."""
        if self.ring is None or self._stopped:
            return
        was_writable = self.writable
        self.ring.give(slot)
        self._go()
        if not was_writable and self.writable:
            self._tell_writable()

    def stop(self, reason: PeerLostError) -> None:
        """Gather nothing more; the ring is retired, and what waits for a slot fails."""
        self._stopped = True
        for piece in self._pieces:
            failure = DeviceError("not all of the chunk was sent")
            failure.__cause__ = reason
            piece.event.fail(failure)
        self._pieces.clear()
        if self.ring is not None:
            self.ring.retire()
