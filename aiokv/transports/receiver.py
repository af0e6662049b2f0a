"""The consumer's end of a link over one stream socket."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from aiokv.device.base import Buffer
from aiokv.errors import LocalProtocolError
from aiokv.proto.plan import Chunk, CopyPlan
from aiokv.transports.base import PartId
from aiokv.transports.frames import HEADER_BYTES, Ranges, tag_of, unpack
from aiokv.transports.stream import SLICE, StreamEnd
from aiokv.transports.vectors import Vector, VectorIO

__all__ = ["Receiver"]

#: Bytes of a frame that the kernel gathers before it wakes the loop. Python is slow after each turn
#: that filled the cache with other bytes, so turns are to be few.
_WORTH_WAKING = 1 << 20
#: Memory that unwanted bytes are read to, over and over.
_SCRATCH = 64 << 10
#: Forgotten parts that are remembered; data of older ones cuts the link.
_FORGOTTEN = 4096
#: How long data may be ahead of the control message that announces it, in seconds.
_AHEAD_S = 2.0
_NOTHING = np.empty(0, dtype=np.int64)


@dataclass(eq=False, slots=True)
class _Arriving:
    """One part that is expected."""

    plan: CopyPlan
    dst: Sequence[Buffer]
    landed: Callable[[int, int], None]
    #: Pieces that came or are coming, for each layer and copy.
    seen: dict[tuple[int, int], Ranges] = field(default_factory=dict)


class Receiver(StreamEnd):
    """Takes chunks from the socket to the memory of the parts that expect them."""

    def __init__(
        self, link: bytes, name: str, sock: socket.socket, io: VectorIO, table: set[StreamEnd]
    ) -> None:
        self._parts: dict[bytes, _Arriving] = {}
        #: Parts whose data is drained, oldest first.
        self._forgotten: dict[bytes, None] = {}
        self._header = array("B", bytes(HEADER_BYTES))
        self._scratch = array("B", bytes(_SCRATCH))
        #: Part and chunk of the frame that is being read; empty while it is drained, or over.
        self._tag = b""
        self._chunk = Chunk(0, 0, 0, 0, 0)
        #: Bytes of this frame that are drained after those that ``_vector`` is for.
        self._to_drain = 0
        #: Where the next bytes go: what is left of a frame, and then the next header.
        self._vector = Vector(_NOTHING, _NOTHING, after=self._header.buffer_info())
        #: How many bytes of ``_vector`` are the frame's.
        self._payload = 0
        #: Bytes that the kernel gathers at present before it wakes the loop.
        self._gathered = 1
        #: Part of a frame that came before anybody expected it, and the timer that ends the wait.
        self._early = b""
        self._early_timer: asyncio.TimerHandle | None = None
        super().__init__(link, name, sock, io, table)

    def expect(
        self, part: PartId, plan: CopyPlan, dst: Sequence[Buffer], landed: Callable[[int, int], None]
    ) -> None:
        """Chunks of ``part`` may arrive from now on, each once and in any order."""
        if self._lost:
            raise self.lost_error()
        tag = tag_of(part)
        if tag in self._parts or tag in self._forgotten:
            raise LocalProtocolError(f"part {part} was expected before; a new attempt needs a new number")
        self._parts[tag] = _Arriving(plan, dst, landed)
        self._resume(tag)

    def forget(self, part: PartId) -> None:
        """From this call on nothing of ``part`` is written to its memory; what comes is drained."""
        tag = tag_of(part)
        self._parts.pop(tag, None)
        self._forgotten[tag] = None
        if len(self._forgotten) > _FORGOTTEN:
            del self._forgotten[next(iter(self._forgotten))]
        if self._tag == tag:
            self._tag = b""
            self._drain(self._payload - self._vector.done)
        self._resume(tag)

    def _wait_for(self, tag: bytes) -> None:
        """Data overtook the control message that it belongs to: read on once that has come."""
        self._early = tag
        self._loop.remove_reader(self._fd)
        self._be_patient()

    def _be_patient(self) -> None:
        due = self._loop.time() + _AHEAD_S
        self._early_timer = self._loop.call_at(due, self._lose_patience, due)

    def _lose_patience(self, due: float) -> None:
        if self._loop.time() > due + _AHEAD_S / 3:
            self._be_patient()  # this side stood still, and may have that message yet to read
        else:
            self._end("the producer sent data of a part that nobody expects")

    def _resume(self, tag: bytes) -> None:
        if tag == self._early and self._early_timer is not None and not self._lost:
            self._early = b""
            self._early_timer.cancel()
            self._early_timer = None
            self._begin()
            if not self._lost:
                self._loop.add_reader(self._fd, self._readable)

    def _readable(self) -> None:
        try:
            with contextlib.suppress(BlockingIOError, InterruptedError):
                self._read()
        except OSError as error:
            self._end(f"the connection broke: {error}")
        if not self._lost:
            self._gather()

    def _read(self) -> None:
        """Take what the socket has, and at most a slice."""
        budget = SLICE
        while budget and not self._lost and not self._early:
            asked = min(budget, self._vector.left)
            moved = self._io.read(self._fd, self._vector, asked)
            if not moved:
                self._end("the producer closed it, or is dead")
                return
            budget -= moved
            self._advance()
            if moved < asked:  # most likely there is no more, and if there is the loop will say
                return

    def _gather(self) -> None:
        """Tell the kernel for how many bytes to wake the loop: never for more than surely come."""
        left = self._payload - self._vector.done + self._to_drain
        wanted = _WORTH_WAKING if left >= _WORTH_WAKING else 1
        if wanted != self._gathered:
            self._gathered = wanted
            with contextlib.suppress(OSError):
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)

    def _advance(self) -> None:
        """Some bytes came to where ``_vector`` said."""
        if self._tag and self._vector.done >= self._payload:
            part, chunk = self._parts[self._tag], self._chunk
            self._tag = b""
            try:
                part.landed(chunk.layer, chunk.nbytes)
            except Exception as error:  # noqa: BLE001 - one part's mistake stops no other part's bytes
                context = {"message": f"callback for {chunk} failed: {part.landed!r}", "exception": error}
                self._loop.call_exception_handler(context)
        if self._lost or self._vector.left:
            return
        if self._to_drain:
            self._drain(self._to_drain)
        else:
            self._begin()

    def _begin(self) -> None:
        """A header is complete: see where its frame goes."""
        tag, chunk = unpack(self._header.tobytes())
        if tag in self._forgotten:
            self._drain(chunk.nbytes)
            return
        part = self._parts.get(tag)
        if part is None:
            self._wait_for(tag)
            return
        try:
            part.plan.check(chunk)
        except ValueError as error:
            self._end(f"the producer sent what is not in the plan: {error}")
            return
        if not part.seen.setdefault((chunk.layer, chunk.copy), Ranges()).add(chunk.lo, chunk.hi):
            self._end(f"the producer sent {chunk} again")
            return
        copy = part.plan.copies(chunk.layer)[chunk.copy]
        _, offsets, lengths = copy.extents(chunk.lo, chunk.hi)
        self._tag, self._chunk = tag, chunk
        self._payload = chunk.nbytes
        addresses = offsets + part.dst[copy.dst_buffer].address
        self._vector = Vector(addresses, lengths, after=self._header.buffer_info())

    def _drain(self, nbytes: int) -> None:
        """The next so many bytes are the frame's, and nobody wants them."""
        now = min(nbytes, 16 * _SCRATCH)
        self._to_drain = nbytes - now
        self._payload = now
        lengths = np.full(-(-now // _SCRATCH), _SCRATCH, dtype=np.int64)
        if now % _SCRATCH:
            lengths[-1] = now % _SCRATCH
        addresses = np.full(len(lengths), self._scratch.buffer_info()[0], dtype=np.int64)
        self._vector = Vector(addresses, lengths, after=() if self._to_drain else self._header.buffer_info())

    def _end(self, reason: str) -> None:
        super()._end(reason)
        if self._early_timer is not None:
            self._early_timer.cancel()
        self._parts.clear()
        self._tag = b""
