"""The consumer's end of a ``cuda_ipc`` link: copies from memory that stays mapped while any reads it."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Sequence

from aiokv.device.base import Buffer, Device, Event, Stream
from aiokv.errors import DeviceError
from aiokv.proto.plan import Chunk, CopyPlan
from aiokv.transports.cuda_ipc_mappings import Mapped, Mappings
from aiokv.transports.local import LocalEnd

__all__ = ["ConsumerEnd", "ended", "process_of"]

#: How many times faster than host memory a copy on a GPU is: so much at a time is submitted as one kernel, in
#: about the time that the GPU takes for it.
_PACE = 128
#: Bytes a nanosecond within one GPU's memory.
_RATE = 2000
#: struct ucred: process, user and group id.
_CREDENTIALS = struct.Struct("3i")


def process_of(sock: socket.socket) -> int:
    """The process that listens at the other end, as the kernel says, not as that process does."""
    process, _, _ = _CREDENTIALS.unpack(
        sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return int(process)


def _held(process: int) -> int:
    """A descriptor of another process, which stands for it also when its number is another's; or -1."""
    if process in (0, os.getpid()):
        return -1
    try:
        return os.pidfd_open(process)
    except (AttributeError, OSError):
        return -1


def ended(reads: Sequence[_Read], seconds: float) -> None:
    """Return when none of these is in flight, or so long has passed. Blocks."""
    until = time.monotonic() + seconds
    while any(read.pending() for read in reads) and time.monotonic() < until:
        time.sleep(0.001)


class _Read:
    """The event of one copy, which counts only if the producer was there until its end."""

    __slots__ = ("_end", "_event", "_failure", "_over")

    def __init__(self, end: ConsumerEnd, event: Event, failure: DeviceError | None = None) -> None:
        self._end = end
        self._event = event
        self._over = False
        #: Why the bytes will not be in place, or are not.
        self._failure = failure

    def pending(self) -> bool:
        """Whether the copy is in flight; from any thread."""
        try:
            return not self._event.done()
        except DeviceError:
            return False

    def done(self) -> bool:
        """Whether the bytes are in place.

        Raises:
            DeviceError: The copy failed, or the producer was gone when it ended.
        """
        if not self._over:
            try:
                if not self._event.done():
                    return False
            except DeviceError as error:
                self._failure = self._failure or error
            self._over = True
            if self._failure is None and (self._end.lost or not self._end.alive()):
                self._failure = DeviceError("the producer was gone before its memory was read")
                self._failure.__cause__ = self._end.lost_error()
            self._end.finished(self)
        if self._failure is not None:
            raise self._failure
        return True


class ConsumerEnd(LocalEnd):
    """Copies from the producer's memory, which stays mapped, and the socket open, while any copy does.

    Args:
        link: Its id.
        sock: Its connection.
        table: Where it is kept until it is lost and nothing is read.
        mappings: Where the memory is from, and goes back to.
        device: This engine's.
        theirs: The producer's buffers, as this device copies from them.
        mapped: What they lie in.
    """

    def __init__(
        self,
        link: bytes,
        sock: socket.socket,
        table: set[LocalEnd],
        mappings: Mappings,
        device: Device,
        theirs: Sequence[Buffer],
        mapped: Sequence[Mapped],
    ) -> None:
        super().__init__(link, "cuda_ipc", sock, table)
        self._mappings = mappings
        self._device = device
        self._theirs = theirs
        self._mapped = mapped
        #: Copies that were not seen to have ended.
        self.reading: set[_Read] = set()
        #: Readable once the producer's process has ended; -1 where that can't be told, or no more.
        self._process = _held(process_of(sock))
        if self._process >= 0:
            # A child that the producer forked may hold the socket open, but has not its memory.
            self.watch(self._process)

    @property
    def pace(self) -> int:
        """As of a GPU's memory."""
        return _PACE

    @property
    def rate(self) -> int:
        """As of a GPU's memory."""
        return _RATE

    def read(self, plan: CopyPlan, chunk: Chunk, dst: Sequence[Buffer], *, stream: Stream) -> Event:
        """Enqueue the copy on this engine's own device and ``stream``."""
        if self.lost:
            raise self.lost_error()
        failure: DeviceError | None = None
        try:
            self._device.copy(plan, chunk, self._theirs, dst, stream=stream)
        except DeviceError as error:  # a part of it may have been enqueued, and reads their memory
            failure = error
        read = _Read(self, stream.record(), failure)
        self.reading.add(read)
        return read

    def finished(self, read: _Read) -> None:
        """A copy was seen to have ended."""
        self.reading.discard(read)
        if self.lost and not self.reading:
            self.abandon()

    def look(self) -> None:
        """Ask those copies that nobody asked whether they have ended."""
        for read in [read for read in self.reading if not read.pending()]:
            self.finished(read)

    def close(self) -> None:
        """Read no more, and tell the producer as soon as nothing is being read."""
        self._end("closed at this end")

    def abandon(self) -> None:
        """Let go of the socket and the memory, as soon as no copy is in flight."""
        if self._process >= 0:
            self._loop.remove_reader(self._process)
            self._poll.unregister(self._process)
            os.close(self._process)
            self._process = -1
        if self.reading:
            self._loop.remove_reader(self._sock.fileno())
            return
        if self._mapped:
            self._mappings.release(self._mapped)
            self._mapped = ()
        super().abandon()
