"""The producer's end of a link over stream sockets, for a GPU's memory: gathered to slots, then sent."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from aiokv.device.base import Buffer, Event, Stream
from aiokv.errors import DeviceError
from aiokv.proto.plan import Chunk, CopyPlan
from aiokv.transports.base import PartId
from aiokv.transports.sender import Sender
from aiokv.transports.staging import Pending, Ring, Staging, split
from aiokv.transports.stream import StreamEnd
from aiokv.transports.vectors import VectorIO

__all__ = ["Outgoing", "StagedSender", "gather"]


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


def gather(staging: Staging, ring: Ring, piece: Outgoing, slot: int) -> Event | None:
    """Enqueue the copy of a piece to a slot; None, and its event fails, when that can't be."""
    try:
        staging.device.gather(
            piece.plan, piece.chunk, piece.src, ring.memory, ring.offset(slot), stream=piece.stream
        )
        event = piece.stream.record()
    except DeviceError as error:
        piece.event.fail(error)
        return None
    piece.event.add(event)
    piece.event.left -= 1
    return event


class StagedSender(Sender):
    """Gathers chunks to its ring as slots become free, and sends each from there when its copy is done."""

    def __init__(
        self,
        link: bytes,
        name: str,
        socks: Sequence[socket.socket],
        io: VectorIO,
        table: set[StreamEnd],
        staging: Staging,
    ) -> None:
        super().__init__(link, name, socks, io, table)
        self._staging = staging
        #: None until it is made, which takes some milliseconds off the loop.
        self._ring: Ring | None = None
        #: What waits for a slot.
        self._pieces: deque[Outgoing] = deque()
        staging.request(self._made)

    def _made(self, ring: Ring | None, error: BaseException | None) -> None:
        if ring is None:
            self.cut(f"it has no staging memory: {error}")
        elif self._lost:
            ring.retire()
        else:
            self._ring = ring
            self._go()
            if self.writable:
                self.tell_writable()

    def send(
        self, part: PartId, plan: CopyPlan, chunk: Chunk, src: Sequence[Buffer], *, stream: Stream
    ) -> Event:
        """Send one chunk; the event is done when the device has read all of it."""
        if self._lost:
            raise self.lost_error()
        chunks = list(split(plan, chunk, self._staging.slot_bytes))
        event = Pending(len(chunks))
        self._pieces.extend(Outgoing(part, plan, each, src, stream, event) for each in chunks)
        self._go()
        return event

    def _go(self) -> None:
        ring = self._ring
        while ring is not None and ring.free and self._pieces:
            piece = self._pieces.popleft()
            if piece.event.failed:
                continue
            slot = ring.take()
            event = gather(self._staging, ring, piece, slot)
            if event is None:
                ring.give(slot)
            else:
                ring.watch(event, piece.stream, partial(self._gathered, ring, piece, slot))

    def _gathered(self, ring: Ring, piece: Outgoing, slot: int, error: DeviceError | None) -> None:
        if self._lost:
            return
        if error is not None:
            piece.event.fail(error)
            self.sent(ring, slot)
            return
        chunk = piece.chunk
        lengths = np.array([chunk.nbytes], dtype=np.int64)
        self.put(piece.part, chunk, np.array([ring.address(slot)]), lengths, _Slot(self, ring, slot))

    def sent(self, ring: Ring, slot: int) -> None:
        """A slot is free again."""
        was_writable = self.writable
        ring.give(slot)
        self._go()
        if not was_writable and self.writable:
            self.tell_writable()

    @property
    def writable(self) -> bool:
        """Whether there is a free slot, and nothing that waits for one."""
        return not self._lost and self._ring is not None and not self._pieces and self._ring.free > 0

    def cut(self, reason: str) -> None:
        """Let go of the sockets, and of the staging memory once no copy to it is in flight."""
        if self._lost:
            return
        super().cut(reason)
        for piece in self._pieces:
            failure = DeviceError("not all of the chunk was sent")
            failure.__cause__ = self.lost_error()
            piece.event.fail(failure)
        self._pieces.clear()
        if self._ring is not None:
            self._ring.retire()


class _Slot:
    """What a socket tells of a slot that it was given."""

    __slots__ = ("_ring", "_sender", "_slot", "failure")

    def __init__(self, sender: StagedSender, ring: Ring, slot: int) -> None:
        self._sender = sender
        self._ring = ring
        self._slot = slot
        self.failure: DeviceError | None = None

    @property
    def over(self) -> bool:
        return False

    @over.setter
    def over(self, value: bool) -> None:
        self._sender.sent(self._ring, self._slot)
