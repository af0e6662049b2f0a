"""The consumer's end of a link over stream sockets, for a GPU's memory: received in slots, then scattered."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from aiokv.device.base import Buffer, Event
from aiokv.errors import DeviceError
from aiokv.proto.plan import Chunk, CopyPlan
from aiokv.transports.arriving import Arriving, NoRoom
from aiokv.transports.base import PartId
from aiokv.transports.extents import Extents
from aiokv.transports.frames import tag_of
from aiokv.transports.receiver import Receiver
from aiokv.transports.staging import Ring, Staging, split
from aiokv.transports.staging_scatter import Scatterer
from aiokv.transports.stream import StreamEnd
from aiokv.transports.vectors import VectorIO

__all__ = ["StagedReceiver"]


class _StagedArriving(Arriving):
    """A part whose frames come to slots."""

    def __init__(
        self,
        tag: bytes,
        plan: CopyPlan,
        dst: Sequence[Buffer],
        landed: Callable[[Chunk], None],
        scatterer: Scatterer,
    ) -> None:
        super().__init__(plan, dst, landed)
        self._tag = tag
        self._scatterer = scatterer
        #: Slots that are being read to, by what goes there.
        self._reading: dict[Chunk, int] = {}

    def begin(self, chunk: Chunk) -> Sequence[Chunk]:
        """A frame, of whatever size, in parts that fit into a slot each."""
        super().begin(chunk)
        try:
            return list(split(self.plan, chunk, self._scatterer.ring.slot_bytes))
        except DeviceError as error:
            raise ValueError(str(error)) from error

    def place(self, chunk: Chunk, extents: Extents) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """A slot for one of them: whoever waits for one has none, so that they come back."""
        ring = self._scatterer.ring
        if not ring.free:
            raise NoRoom
        slot = self._reading[chunk] = ring.take()
        return np.array([ring.address(slot)]), np.array([chunk.nbytes])

    def complete(self, chunk: Chunk) -> None:
        """All of a part is in its slot."""
        slot = self._reading.pop(chunk)
        self._scatterer.scatter(self._tag, self.plan, chunk, self.dst, slot, self.tell)

    def take_back(self) -> list[int]:
        """The slots that were being read to, and are no more."""
        reading, self._reading = self._reading, {}
        return list(reading.values())


class StagedReceiver(Receiver):
    """Takes chunks from the sockets to its ring, and from there to the memory of the parts that expect them.

    Args:
        link: Its id.
        name: Of the transport.
        socks: Its connections.
        io: The calls that read.
        table: Where it is kept.
        staging: The transport's.
        ring: Its own, which it retires.

    Raises:
        DeviceError: There are no streams to be had. The sockets and the ring are the caller's still.
    """

    def __init__(
        self,
        link: bytes,
        name: str,
        socks: Sequence[socket.socket],
        io: VectorIO,
        table: set[StreamEnd],
        staging: Staging,
        ring: Ring,
    ) -> None:
        self._ring = ring
        # First, since the device may refuse it streams, and then nothing is to be undone.
        self._scatterer = Scatterer(staging, ring, self._freed, self.cut)
        super().__init__(link, name, socks, io, table)

    def _arriving(
        self, tag: bytes, plan: CopyPlan, dst: Sequence[Buffer], landed: Callable[[Chunk], None]
    ) -> Arriving:
        return _StagedArriving(tag, plan, dst, landed, self._scatterer)

    def _freed(self, *slots: int) -> None:
        for slot in slots:
            self._ring.give(slot)
        for inlet in self._inlets:
            inlet.retry()

    def forget(self, part: PartId) -> Event | None:
        """From this call on no copy of ``part`` is begun; what is in flight ends with the event."""
        tag = tag_of(part)
        arriving = self._parts.expected.get(tag)
        super().forget(part)
        if isinstance(arriving, _StagedArriving):
            self._freed(*arriving.take_back())
        return self._scatterer.quiet(tag)

    def cut(self, reason: str) -> None:
        """Let go of the sockets; what is in the slots is not copied any more, and what is in flight ends."""
        if self._lost:
            return
        super().cut(reason)
        self._scatterer.stop()
        self._ring.retire()
