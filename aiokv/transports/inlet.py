"""One socket of a receiver: frames in, bytes to where their parts want them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from array import array
from collections import deque
from collections.abc import Callable

import numpy as np

from aiokv.proto.plan import Chunk
from aiokv.transports.arriving import NoRoom, Parts
from aiokv.transports.broken import Broken
from aiokv.transports.frames import HEADER_BYTES, unpack
from aiokv.transports.patience import Patience
from aiokv.transports.vectors import Vector, VectorIO

__all__ = ["Inlet"]

#: Bytes of a frame that the kernel gathers before it wakes the loop. Python is slow after each turn
#: that filled the cache with other bytes, so turns are to be few.
_WORTH_WAKING = 1 << 20
#: Memory that unwanted bytes are read to, over and over.
_SCRATCH = 64 << 10
#: How long data may be ahead of the control message that announces it, in seconds.
_AHEAD_S = 2.0
_NOTHING = np.empty(0, dtype=np.int64)


class Inlet:
    """Reads frames from one socket until it is stopped.

    Args:
        sock: Connected and non-blocking; its owner closes it, after ``stop``.
        io: The calls that read.
        parts: What is expected, shared by all inlets of one link.
        cut: Ends the link, and calls ``stop``; told why.
        loop: The loop that it is made on.
        slice_bytes: What one turn of the loop reads at most.
    """

    def __init__(
        self,
        sock: socket.socket,
        io: VectorIO,
        parts: Parts,
        cut: Callable[[str], None],
        loop: asyncio.AbstractEventLoop,
        slice_bytes: int,
    ) -> None:
        self._sock = sock
        self._fd = sock.fileno()
        self._io = io
        self._parts = parts
        self._cut = cut
        self._loop = loop
        self._slice = slice_bytes
        self._stopped = False
        self._header = array("B", bytes(HEADER_BYTES))
        self._scratch = array("B", bytes(_SCRATCH))
        #: Part of the frame that is being read; empty while it is drained, or over.
        self._tag = b""
        #: What of the frame is being read, what comes after that, and how many bytes that is.
        self._chunk = Chunk(0, 0, 0, 0, 0, 0)
        self._later: deque[Chunk] = deque()
        self._later_bytes = 0
        #: Bytes of this frame that are drained after those that ``_vector`` is for.
        self._to_drain = 0
        #: Where the next bytes go: what is left of a frame, and then the next header.
        self._vector = Vector(_NOTHING, _NOTHING, after=self._header.buffer_info())
        #: How many bytes of ``_vector`` are the frame's.
        self._payload = 0
        #: Bytes that the kernel gathers at present before it wakes the loop.
        self._gathered = 1
        #: Part of a frame that came before anybody expected it, and for how long that is waited for.
        self._early = b""
        self._patience: Patience | None = None
        #: There was no room for what comes next.
        self._full = False
        self._broken = Broken(self._fd)
        #: Reads on, where the loop won't say that there is more.
        self._again: asyncio.Handle | None = None
        loop.add_reader(self._fd, self._readable)

    def stop(self) -> None:
        """Write nothing more to any memory, and call nobody back."""
        self._stopped = True
        if self._again is not None:
            self._again.cancel()
        if self._patience is not None:
            self._patience.cancel()
        self._tag = b""

    def turn_away(self, tag: bytes) -> None:
        """Write nothing more of this part: drain what is left of it, if that is what is being read."""
        if self._tag == tag:
            self._tag = b""
            left = self._payload - self._vector.done + self._later_bytes
            self._later.clear()
            self._later_bytes = 0
            self._drain(left)
            if self._full:
                self._full = False
                self._loop.add_reader(self._fd, self._readable)

    # -- data that overtook the control message that it belongs to

    def _wait_for(self, tag: bytes) -> None:
        """Read on once that has come."""
        self._early = tag
        self._loop.remove_reader(self._fd)
        self._patience = Patience(_AHEAD_S, self._lose_patience)

    def _lose_patience(self) -> None:
        self._cut("the producer sent data of a part that nobody expects")

    def resume(self, tag: bytes) -> None:
        """It was said what becomes of this part: go on, if that is what is waited for."""
        if tag == self._early and self._patience is not None and not self._stopped:
            self._early = b""
            self._patience.cancel()
            self._patience = None
            self._go_on()

    def retry(self) -> None:
        """There may be room for what there was none for."""
        if self._full and not self._stopped:
            self._full = False
            self._go_on()

    def _go_on(self) -> None:
        """Take up reading again, where it was left."""
        if self._later:
            self._place()
        else:
            self._begin()
        if not (self._stopped or self._early or self._full):
            self._loop.add_reader(self._fd, self._readable)

    # -- reading

    def _readable(self) -> None:
        try:
            with contextlib.suppress(BlockingIOError, InterruptedError):
                self._read()
        except OSError as error:
            self._cut(f"a connection broke: {error}")
        if self._stopped:
            return
        self._gather()
        if self._again is None and not (self._early or self._full) and self._broken:
            self._again = self._loop.call_soon(self._read_on)

    def _read_on(self) -> None:
        self._again = None
        if not (self._stopped or self._early or self._full):
            self._readable()

    def _read(self) -> None:
        """Take what the socket has, and at most a slice."""
        budget = self._slice
        while budget and not (self._stopped or self._early or self._full):
            asked = min(budget, self._vector.left)
            moved = self._io.read(self._fd, self._vector, asked)
            if not moved:
                self._cut("the producer closed it, or is dead")
                return
            budget -= moved
            self._advance()
            if moved < asked:  # most likely there is no more, and if there is the loop will say
                return

    def _gather(self) -> None:
        """Tell the kernel for how many bytes to wake the loop: never for more than surely come."""
        left = self._payload - self._vector.done + self._later_bytes + self._to_drain
        wanted = _WORTH_WAKING if left >= _WORTH_WAKING else 1
        if wanted != self._gathered:
            self._gathered = wanted
            with contextlib.suppress(OSError):
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)

    def _advance(self) -> None:
        """Some bytes came to where ``_vector`` said."""
        if self._tag and self._vector.done >= self._payload:
            part, chunk = self._parts.expected[self._tag], self._chunk
            if not self._later:
                self._tag = b""
            try:
                part.complete(chunk)
            except Exception as error:  # noqa: BLE001 - one part's mistake stops no other part's bytes
                context = {"message": f"callback for {chunk} failed: {part.landed!r}", "exception": error}
                self._loop.call_exception_handler(context)
        if self._stopped or self._vector.left:
            return
        if self._to_drain:
            self._drain(self._to_drain)
        elif self._later:
            self._place()
        else:
            self._begin()

    def _begin(self) -> None:
        """A header is complete: see where its frame goes."""
        tag, chunk = unpack(self._header.tobytes())
        if tag in self._parts.forgotten:
            self._drain(chunk.nbytes)
            return
        part = self._parts.expected.get(tag)
        if part is None:
            self._wait_for(tag)
            return
        try:
            self._later.extend(part.begin(chunk))
        except ValueError as error:
            self._cut(f"the producer sent what it must not: {error}")
            return
        self._tag, self._later_bytes = tag, chunk.nbytes
        self._payload = self._vector.done
        self._place()

    def _place(self) -> None:
        """See where the next bytes of a frame go."""
        part, chunk = self._parts.expected[self._tag], self._later[0]
        try:
            addresses, lengths = part.place(chunk, self._parts.extents)
        except NoRoom:
            self._full = True
            self._loop.remove_reader(self._fd)
            return
        self._later.popleft()
        self._later_bytes -= chunk.nbytes
        self._chunk, self._payload = chunk, chunk.nbytes
        self._vector = Vector(addresses, lengths, after=() if self._later else self._header.buffer_info())

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
