"""The producer's end of an NCCL link.

A chunk waits here until its bytes are there, and then for a credit: memory and a place at the consumer. With
both it is committed: posted and announced in one turn, and then it is not taken back.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from aiokv.device.base import Buffer, Event, Stream
from aiokv.errors import DeviceError
from aiokv.proto.plan import Chunk, CopyPlan
from aiokv.transports.base import PartId
from aiokv.transports.extents import Extents, addresses
from aiokv.transports.frames import tag_of
from aiokv.transports.nccl_end import NcclEnd
from aiokv.transports.nccl_home import Home
from aiokv.transports.nccl_line import (
    MOST_RUNS,
    Announced,
    Credit,
    Dead,
    Make,
    Nudge,
    Rest,
    Said,
    Wake,
    Yield,
)
from aiokv.transports.nccl_making import PRODUCER
from aiokv.transports.nccl_sent import Sent
from aiokv.transports.nccl_staging import Slot
from aiokv.transports.staging import split

__all__ = ["NcclSender"]

#: Runs of this many bytes are sent as they lie; shorter ones are gathered first, since a message for each
#: takes more than that.
_LONG_RUN = 8 << 20
#: How long the consumer may wait for memory, in seconds: as long as a transfer may take by default.
_MEMORY_S = 30.0
#: Chunks that wait here before the first credit is there, beside which more may be sent.
_AHEAD = 2


@dataclass(eq=False, slots=True)
class _Chunk:
    """One chunk on its way."""

    tag: bytes
    plan: CopyPlan
    chunk: Chunk
    src: Sequence[Buffer]
    sent: Sent
    slot: Slot | None = None
    #: It was posted as the first of its flight, and has to leave the gate.
    posted: bool = False


class NcclSender(NcclEnd[_Chunk]):
    """Sends chunks in the order in which they are committed."""

    def __init__(self, link: bytes, sock: socket.socket, home: Home) -> None:
        super().__init__(link, sock, home, home.outgoing, PRODUCER)
        self._extents = Extents()
        #: Chunks whose bytes are there, oldest first.
        self._ready: deque[_Chunk] = deque()
        #: What waits for its stream, and how many chunks it is.
        self._unready: dict[Sent, int] = {}
        self._waiting = 0
        #: Chunks that the consumer takes now, and those that it can have at a time.
        self._credits = 0
        self._granted = 0
        #: Bytes of the longest message that both ends have memory for.
        self._longest = home.outgoing.nbytes
        self._blocked = False
        self._on_writable: list[Callable[[], None]] = []
        #: A communicator was asked for.
        self._waking = False
        self._nudged = False
        self._idle_timer: asyncio.TimerHandle | None = None
        self._wake()

    # -- what is sent

    def send(
        self, part: PartId, plan: CopyPlan, chunk: Chunk, src: Sequence[Buffer], *, stream: Stream
    ) -> Event:
        """Send one chunk once ``stream`` got to where it is now."""
        if self._dying or self._lost:
            raise self.dying_error()
        tag, sent = tag_of(part), Sent()
        units = [_Chunk(tag, plan, each, src, sent) for each in split(plan, chunk, self._longest)]
        sent.left = len(units)
        after = stream.record()
        if after.done():
            self._ready.extend(units)
            self._pump()
        else:
            self._unready[sent] = len(units)
            self._waiting += len(units)
            self._home.poller.watch(after, stream, lambda error: self._reached(units, error))
        self._blocked = not self.writable
        return sent

    def _reached(self, units: list[_Chunk], error: DeviceError | None) -> None:
        """The stream that these waited for got there."""
        sent = units[0].sent
        self._waiting -= self._unready.pop(sent, 0)
        if sent.failure is None and error is not None:
            sent.fail(error)
        if sent.failure is None:
            self._ready.extend(units)
            self._pump()
        self._quiet()  # it may have been all that a communicator was kept for
        self._tell_writable()

    @property
    def writable(self) -> bool:
        """Whether what waits here is little beside what the consumer takes at a time."""
        return not self._dying and len(self._ready) + self._waiting < max(self._granted, _AHEAD)

    def on_writable(self, callback: Callable[[], None]) -> None:
        """Call this whenever ``writable`` becomes true again."""
        self._on_writable.append(callback)

    def _tell_writable(self) -> None:
        if self._blocked and self.writable:
            self._blocked = False
            for callback in self._on_writable:
                callback()

    def _pump(self) -> None:
        """Commit what can be."""
        if self._dying or self._yielding or not self._ready:
            return
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        comm = self._comm
        if comm is None:
            self._wake()
            return
        if not self._credits or not self._home.gate.enter(self._pump):
            return
        units: list[_Chunk] = []
        ranges: list[tuple[int, int]] = []
        said: list[Said] = []
        # Half of what may be in flight goes as one group, so that while one moves the next is enqueued.
        most = max(1, self._granted // 2)
        while self._ready and self._credits and len(units) < most:
            unit = self._ready[0]
            try:
                where = self._where(unit)
            except DeviceError as error:
                self._ready.popleft()
                unit.sent.flying += 1
                self._drop(unit.sent, error)
                self._fly([unit], 0)  # some of it may have been enqueued, and read its memory
                continue
            if where is None:
                break
            self._ready.popleft()
            self._credits -= 1
            unit.sent.flying += 1
            units.append(unit)
            ranges += where
            said.append(Announced(unit.tag, unit.chunk, tuple(nbytes for _, nbytes in where)))
        if not units or self._comm is not comm:
            self._home.gate.leave()
            if units:  # the stream takes no event: nobody will ever know when their gathers are over
                self._flights.append(units)
            for unit in units:
                unit.sent.fail(self.dying_error())
            return
        units[0].posted = True
        try:
            comm.send(ranges, self._handle)
        except DeviceError as error:
            self._fly(units, 0)  # some may be under way: their end is waited for all the same
            self.kill(str(error))
            return
        self._line.say(*said)
        self._fly(units, sum(unit.chunk.nbytes for unit in units))
        self._pump()

    def _drop(self, sent: Sent, error: DeviceError) -> None:
        """Not all of it can be sent: post nothing more of it, whose memory may soon be somebody else's."""
        sent.fail(error)
        self._ready = deque(unit for unit in self._ready if unit.sent is not sent)

    def _where(self, unit: _Chunk) -> list[tuple[int, int]] | None:
        """The ranges to send a chunk from, gathered first where it lies in small runs; None: not now.

        Raises:
            DeviceError: It can't be gathered.
        """
        chunk = unit.chunk
        copy = unit.plan.copy(chunk)
        where, lengths = self._extents.sources(copy, chunk.lo, chunk.hi, addresses(copy.src, unit.src))
        if 1 < len(lengths) <= MOST_RUNS and chunk.nbytes >= _LONG_RUN * len(lengths):
            return list(zip(where.tolist(), lengths.tolist(), strict=True))
        if bool(np.array_equal(where[1:], where[:-1] + lengths[:-1])):
            return [(int(where[0]), chunk.nbytes)]
        if not self._free:
            return None
        slot = unit.slot = self._free.pop()
        self._home.device.gather(unit.plan, chunk, unit.src, slot.buffer, slot.offset, stream=self._stream)
        return [(slot.address, chunk.nbytes)]

    def _arrived(self, units: list[_Chunk]) -> None:
        for unit in units:
            unit.sent.left -= 1
        self._landed(units)
        self._pump()
        self._tell_writable()

    def _ended(self, units: list[_Chunk]) -> None:
        self._landed(units)

    def _landed(self, units: list[_Chunk]) -> None:
        for unit in units:
            unit.sent.flying -= 1
            if unit.posted:
                self._home.gate.leave()
            if unit.slot is not None:
                self._free.append(unit.slot)

    # -- the communicator

    def _wake(self) -> None:
        if not self._waking:
            self._waking = True
            self._pool.take(self, self._got)

    def _got(self, slots: list[Slot]) -> None:
        self._slots, self._free = slots, slots.copy()
        self._epoch += 1
        self._within(_MEMORY_S, f"the consumer had no memory for it within {_MEMORY_S:g} s")
        self._line.say(Wake(self._epoch))

    def _up(self) -> None:
        self._waking = False
        self._pump()
        self._quiet()
        self._tell_writable()

    def _heard(self, said: Sequence[Said]) -> None:
        for each in said:
            match each:
                case _ if self._dying:
                    return
                case Make(epoch, nonce, longest, name) if self._expects(epoch):
                    self._longest = min(self._pool.nbytes, longest)
                    self._make_within()
                    self._make(name, nonce)
                case Credit(epoch, count) if epoch == self._epoch:
                    self._credits += count
                    self._granted = max(self._granted, self._credits)
                case Nudge():
                    self._nudged = True
                case Yield(epoch) if epoch <= self._epoch:
                    if epoch == self._epoch and self._slots:
                        self._yielding = True
                case Dead():
                    self.kill("the consumer's end is broken, or closed", tell=False)
                case _:
                    self.kill(f"the consumer said what it must not: {type(each).__name__}")
        self._pump()
        self._quiet()
        self._tell_writable()

    def _expects(self, epoch: int) -> bool:
        return epoch == self._epoch and self._waking and self._making is None and bool(self._slots)

    # -- rest

    def relieve(self) -> None:
        """Others lack memory: let go of the communicator as soon as it is idle."""
        self._nudged = True
        self._quiet()

    def _hand_over(self) -> None:
        self._quiet()

    def _quiet(self) -> None:
        """If there is nothing to send and all was received, rest; soon, or at once if others lack memory."""
        if not self._idle:
            return
        if self._nudged or self._yielding or self._pool.short:
            self._rest()
        elif self._idle_timer is None:
            self._idle_timer = self._loop.call_later(self._home.idle_s, self._rest)

    @property
    def _idle(self) -> bool:
        # Credits come back when the bytes are in place there: until then its receives need us.
        if self._comm is None or self._dying or self._flights or not 0 < self._granted == self._credits:
            return False
        return self._yielding or not (self._ready or self._waiting)

    def _rest(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        self._nudged = False
        if self._idle:
            self._yielding = False
            self._line.say(Rest(self._epoch))
            self._credits = self._granted = 0
            self._let_go()
            self._pump()  # what is left of a turn that was cut short waits for the next

    def _give_up(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        for sent in self._unready:
            sent.fail(self.dying_error())
        while self._ready:
            self._ready.popleft().sent.fail(self.dying_error())
        for units in self._flights:
            for unit in units:
                unit.sent.fail(self.dying_error())
