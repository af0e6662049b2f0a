"""The two ends of a ``shm`` link for GPUs: what they tell each other of the slots that they share."""

from __future__ import annotations

import socket
import struct
from abc import abstractmethod
from array import array
from collections.abc import Callable, Sequence

from aiokv.device.base import Buffer, Event, Stream
from aiokv.errors import LocalProtocolError
from aiokv.proto.plan import Chunk, CopyPlan
from aiokv.transports.arriving import Arriving, Parts
from aiokv.transports.base import PartId
from aiokv.transports.frames import HEADER_BYTES, pack, tag_of, unpack
from aiokv.transports.local import LocalEnd
from aiokv.transports.patience import Patience
from aiokv.transports.staging import Ring, Staging
from aiokv.transports.staging_gather import Gatherer, Outgoing
from aiokv.transports.staging_scatter import Scatterer

__all__ = ["ConsumerEnd", "ProducerEnd"]

#: A slot's number, behind a frame's header or alone.
_SLOT = struct.Struct("!I")
#: How long data may be ahead of the control message that announces it, in seconds.
_AHEAD_S = 2.0


class _End(LocalEnd):
    """What both do: read whole messages from the socket, and write short ones, which it always takes."""

    #: Bytes of a message that this end is sent.
    _size: int

    def __init__(self, link: bytes, name: str, sock: socket.socket, table: set[LocalEnd]) -> None:
        super().__init__(link, name, sock, table)
        self._said = b""

    def alive(self) -> bool:
        """Take what the other end said; called when there is something, or it is gone."""
        if self._sock.fileno() < 0:
            return False
        try:
            data = self._sock.recv(1 << 16)
        except (BlockingIOError, InterruptedError):
            return True
        except OSError as error:
            self.cut(f"the connection broke: {error}")
            return False
        if not data:
            self.cut("the peer closed it, or is dead")
            return False
        said = self._said + data
        whole = len(said) - len(said) % self._size
        self._said = said[whole:]
        for start in range(0, whole, self._size):
            if not self.lost:
                self._hear(said[start : start + self._size])
        return not self.lost

    @abstractmethod
    def _hear(self, message: bytes) -> None:
        """Take one whole message."""

    def _say(self, message: bytes, fds: Sequence[int] = ()) -> None:
        """Each slot has at most one message under way, so that a socket's buffer never fills."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
        try:
            sent = self._sock.sendmsg([message], rights)
        except OSError as error:
            self.cut(f"the connection broke: {error}")
            return
        if sent != len(message):
            self.cut("the peer doesn't read what it is told")

    def cut(self, reason: str) -> None:
        """Let go of the socket, and of the ring once no copy is in flight."""
        if not self.lost:
            self._lose(reason)
            self.abandon()

    def close(self) -> None:
        """Give the link up at once."""
        self.cut("closed at this end")


class ProducerEnd(_End):
    """Gathers chunks to slots, and tells the consumer."""

    _size = _SLOT.size

    def __init__(
        self, link: bytes, name: str, sock: socket.socket, table: set[LocalEnd], staging: Staging
    ) -> None:
        super().__init__(link, name, sock, table)
        self._on_writable: list[Callable[[], None]] = []
        self._gatherer = Gatherer(staging, self._gathered, self._tell_writable)
        #: Slots that the consumer was told of and hasn't given back.
        self._out: set[int] = set()

    def begin(self, ring: Ring, message: bytes, fd: int | None) -> None:
        """There is a ring: pass it to the consumer and use it."""
        if fd is not None:
            self._say(message, (fd,))
        if self.lost:
            ring.retire()
        else:
            self._gatherer.start(ring)

    def send(
        self, part: PartId, plan: CopyPlan, chunk: Chunk, src: Sequence[Buffer], *, stream: Stream
    ) -> Event:
        """Send one chunk; the event is done when the device has read all of it."""
        if self.lost:
            raise self.lost_error()
        return self._gatherer.send(part, plan, chunk, src, stream)

    def _gathered(self, piece: Outgoing, slot: int) -> None:
        self._out.add(slot)
        self._say(pack(tag_of(piece.part), piece.chunk) + _SLOT.pack(slot))

    def _hear(self, message: bytes) -> None:
        (slot,) = _SLOT.unpack(message)
        if slot not in self._out:
            self.cut("the consumer gave back a slot that it didn't have")
            return
        self._out.discard(slot)
        self._gatherer.free(slot)

    @property
    def rate(self) -> int:
        """As of PCIe."""
        return 60

    @property
    def writable(self) -> bool:
        """Whether there is a free slot, and nothing that waits for one."""
        return not self.lost and self._gatherer.writable

    def on_writable(self, callback: Callable[[], None]) -> None:
        """Call this whenever ``writable`` becomes true again."""
        self._on_writable.append(callback)

    def _tell_writable(self) -> None:
        for callback in self._on_writable:
            callback()

    def abandon(self) -> None:
        """Let go of the socket and the ring."""
        super().abandon()
        self._gatherer.stop(self.lost_error())


class ConsumerEnd(_End):
    """Scatters the slots that it is told of, and gives them back."""

    _size = HEADER_BYTES + _SLOT.size

    def __init__(
        self,
        link: bytes,
        name: str,
        sock: socket.socket,
        table: set[LocalEnd],
        staging: Staging,
        ring: Ring,
    ) -> None:
        self._ring = ring
        # First, since the device may refuse it streams, and then nothing is to be undone.
        self._scatterer = Scatterer(staging, ring, self._free, self.cut)
        super().__init__(link, name, sock, table)
        self._parts = Parts()
        #: What came of parts that nobody expects yet, by tag, and how long each may wait.
        self._early: dict[bytes, list[tuple[Chunk, int]]] = {}
        self._patience: dict[bytes, Patience] = {}
        #: Slots that are this end's now.
        self._mine: set[int] = set()

    def _hear(self, message: bytes) -> None:
        tag, chunk = unpack(message[:HEADER_BYTES])
        (slot,) = _SLOT.unpack(message[HEADER_BYTES:])
        if slot >= self._ring.slots or slot in self._mine or chunk.nbytes > self._ring.slot_bytes:
            self.cut("the producer told of a slot that it didn't have")
            return
        self._mine.add(slot)
        if self._parts.knows(tag):
            self._take(tag, chunk, slot)
            return
        self._early.setdefault(tag, []).append((chunk, slot))
        if tag not in self._patience:
            self._patience[tag] = Patience(_AHEAD_S, self._lose_patience)

    def _lose_patience(self) -> None:
        self.cut("the producer sent data of a part that nobody expects")

    def _take(self, tag: bytes, chunk: Chunk, slot: int) -> None:
        part = self._parts.expected.get(tag)
        if part is None:
            self._free(slot)
            return
        try:
            part.begin(chunk)
        except ValueError as error:
            self.cut(f"the producer sent what it must not: {error}")
            return
        self._scatterer.scatter(tag, part.plan, chunk, part.dst, slot, part.tell)

    def _free(self, slot: int) -> None:
        if not self.lost:
            self._mine.discard(slot)
            self._say(_SLOT.pack(slot))

    def _take_early(self, tag: bytes) -> None:
        """It was said what becomes of this part."""
        if tag in self._patience:
            self._patience.pop(tag).cancel()
        for chunk, slot in self._early.pop(tag, ()):
            if not self.lost:
                self._take(tag, chunk, slot)

    def expect(
        self, part: PartId, plan: CopyPlan, dst: Sequence[Buffer], landed: Callable[[Chunk], None]
    ) -> None:
        """Chunks of ``part`` may arrive from now on, each once and in any order."""
        if self.lost:
            raise self.lost_error()
        tag = tag_of(part)
        if self._parts.knows(tag):
            raise LocalProtocolError(f"part {part} was expected before; a new attempt needs a new number")
        self._parts.expected[tag] = Arriving(plan, dst, landed)
        self._take_early(tag)

    def forget(self, part: PartId) -> Event | None:
        """From this call on no copy of ``part`` is begun; what is in flight ends with the event."""
        tag = tag_of(part)
        self._parts.forget(tag)
        self._take_early(tag)
        return self._scatterer.quiet(tag)

    def abandon(self) -> None:
        """Let go of the socket and the ring; what is in its slots is not copied any more."""
        super().abandon()
        for patience in self._patience.values():
            patience.cancel()
        self._patience.clear()
        self._parts.drop()
        self._scatterer.stop()
        self._ring.retire()
