"""The consumer's end of a link over stream sockets."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence

from aiokv.device.base import Buffer, Event
from aiokv.errors import LocalProtocolError
from aiokv.proto.plan import Chunk, CopyPlan
from aiokv.transports.arriving import Arriving, Parts
from aiokv.transports.base import PartId
from aiokv.transports.frames import tag_of
from aiokv.transports.inlet import Inlet
from aiokv.transports.stream import StreamEnd, slice_of
from aiokv.transports.vectors import VectorIO

__all__ = ["Receiver"]


class Receiver(StreamEnd):
    """Takes chunks from the sockets to the memory of the parts that expect them."""

    def __init__(
        self,
        link: bytes,
        name: str,
        socks: Sequence[socket.socket],
        io: VectorIO,
        table: set[StreamEnd],
    ) -> None:
        super().__init__(link, name, socks, table)
        self._parts = Parts()
        self._inlets = [
            Inlet(sock, io, self._parts, self.cut, self._loop, slice_of(len(socks))) for sock in socks
        ]

    def expect(
        self, part: PartId, plan: CopyPlan, dst: Sequence[Buffer], landed: Callable[[Chunk], None]
    ) -> None:
        """Chunks of ``part`` may arrive from now on, each once and in any order."""
        if self._lost:
            raise self.lost_error()
        tag = tag_of(part)
        if self._parts.knows(tag):
            raise LocalProtocolError(f"part {part} was expected before; a new attempt needs a new number")
        self._parts.expected[tag] = self._arriving(tag, plan, dst, landed)
        for inlet in self._inlets:
            inlet.resume(tag)

    def _arriving(
        self, tag: bytes, plan: CopyPlan, dst: Sequence[Buffer], landed: Callable[[Chunk], None]
    ) -> Arriving:
        return Arriving(plan, dst, landed)

    def forget(self, part: PartId) -> Event | None:
        """From this call on nothing of ``part`` is written to its memory; what comes is drained."""
        tag = tag_of(part)
        self._parts.forget(tag)
        for inlet in self._inlets:
            inlet.turn_away(tag)
            inlet.resume(tag)
        return None

    def cut(self, reason: str) -> None:
        """Let go of the sockets: nothing more is written to any part's memory."""
        super().cut(reason)
        for inlet in self._inlets:
            inlet.stop()
        self._parts.drop()
