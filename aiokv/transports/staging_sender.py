"""The producer's end of a link over stream sockets, for a GPU's memory: gathered to slots, then sent."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import numpy as np

from aiokv.device.base import Buffer, Event, Stream
from aiokv.errors import DeviceError
from aiokv.proto.plan import Chunk, CopyPlan
from aiokv.transports.base import PartId
from aiokv.transports.sender import Sender
from aiokv.transports.staging import Ring, Staging
from aiokv.transports.staging_gather import Gatherer, Outgoing
from aiokv.transports.stream import StreamEnd
from aiokv.transports.vectors import VectorIO

__all__ = ["StagedSender"]


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
        self._gatherer = Gatherer(staging, self._gathered, self.tell_writable)
        staging.request(self._made)

    def _made(self, ring: Ring | None, error: BaseException | None) -> None:
        if ring is None:
            self.cut(f"it has no staging memory: {error}")
        elif self._lost:
            ring.retire()
        else:
            self._gatherer.start(ring)

    def send(
        self, part: PartId, plan: CopyPlan, chunk: Chunk, src: Sequence[Buffer], *, stream: Stream
    ) -> Event:
        """Send one chunk; the event is done when the device has read all of it."""
        if self._lost:
            raise self.lost_error()
        return self._gatherer.send(part, plan, chunk, src, stream)

    def _gathered(self, piece: Outgoing, slot: int) -> None:
        ring = self._gatherer.ring
        if ring is not None:
            address = np.array([ring.address(slot)], dtype=np.int64)
            nbytes = np.array([piece.chunk.nbytes], dtype=np.int64)
            self.put(piece.part, piece.chunk, address, nbytes, _Slot(self._gatherer, slot))

    @property
    def rate(self) -> int:
        """As of PCIe."""
        return 60

    @property
    def writable(self) -> bool:
        """Whether there is a free slot, and nothing that waits for one."""
        return not self._lost and self._gatherer.writable

    def cut(self, reason: str) -> None:
        """Let go of the sockets, and of the staging memory once no copy to it is in flight."""
        if not self._lost:
            super().cut(reason)
            self._gatherer.stop(self.lost_error())


class _Slot:
    """What a socket tells of a slot that it was given."""

    __slots__ = ("_gatherer", "_slot", "failure")

    def __init__(self, gatherer: Gatherer, slot: int) -> None:
        self._gatherer = gatherer
        self._slot = slot
        self.failure: DeviceError | None = None

    @property
    def over(self) -> bool:
        """Never asked for."""
        return False

    @over.setter
    def over(self, value: bool) -> None:
        self._gatherer.free(self._slot)
