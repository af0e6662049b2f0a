"""The consumer's end of an NCCL link.

Receives are posted in the order of the announcements, whatever becomes of the bytes: they go to their part's
blocks, or to staging memory first where the blocks are in small runs, or to staging memory only where nobody
wants them any more.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from aiokv.device.base import Buffer, Event
from aiokv.device.offloop import off_loop
from aiokv.errors import AiokvError, DeviceError, LocalProtocolError
from aiokv.proto.plan import Chunk, CopyPlan
from aiokv.transports.arriving import Arriving, Parts
from aiokv.transports.base import PartId
from aiokv.transports.frames import tag_of
from aiokv.transports.nccl_end import NcclEnd
from aiokv.transports.nccl_home import Home
from aiokv.transports.nccl_line import Announced, Credit, Dead, Make, Nudge, Rest, Said, Wake, Yield
from aiokv.transports.nccl_making import CONSUMER, NONCE
from aiokv.transports.nccl_staging import Slot
from aiokv.transports.patience import Patience

__all__ = ["NcclReceiver"]

#: How long an announcement may be ahead of the control message that its part is known by, in seconds.
_AHEAD_S = 2.0
#: How long what is in flight to a part that was forgotten may take, before the communicator is aborted.
_DRAIN_S = 1.0
#: What a producer may have said beside its chunks, and not been heard yet: REST, WAKE and DEAD.
_BESIDE = 3


class _Quiet:
    """Done when nothing writes to a forgotten part's memory."""

    __slots__ = ("over",)

    def __init__(self) -> None:
        self.over = False

    def done(self) -> bool:
        """Whether it is so."""
        return self.over


@dataclass(eq=False, slots=True)
class _Chunk:
    """One chunk that is being received."""

    tag: bytes
    chunk: Chunk
    #: Each range, as it is received.
    ranges: list[tuple[int, int]]
    #: None where nobody wants it.
    part: Arriving | None
    #: Where it goes first; None where it goes to its blocks.
    slot: Slot | None = None
    #: Rung when it is over.
    quiet: list[_Quiet] | None = None


class NcclReceiver(NcclEnd[_Chunk]):
    """Receives what is announced, in that order."""

    def __init__(self, link: bytes, sock: socket.socket, home: Home) -> None:
        super().__init__(link, sock, home, home.incoming, CONSUMER)
        self._parts = Parts()
        #: What was said and not acted on, oldest first.
        self._inbox: deque[Said] = deque()
        #: Chunks that may be announced still.
        self._credits = 0
        #: A part of which something was announced before anybody expected it, and the end of the wait.
        self._early = b""
        self._early_until: Patience | None = None
        self._drained_by: Patience | None = None
        self._nonce = secrets.token_bytes(NONCE)
        #: Resolved when the first communicator is proven.
        self.proven: asyncio.Future[None] = self._loop.create_future()

    # -- parts

    def expect(
        self, part: PartId, plan: CopyPlan, dst: Sequence[Buffer], landed: Callable[[Chunk], None]
    ) -> None:
        """Chunks of ``part`` may arrive from now on, each once and in any order."""
        if self._dying or self._lost:
            raise self.dying_error()
        tag = tag_of(part)
        if self._parts.knows(tag):
            raise LocalProtocolError(f"part {part} was expected before; a new attempt needs a new number")
        self._parts.expected[tag] = Arriving(plan, dst, landed)
        self._resume(tag)

    def forget(self, part: PartId) -> Event | None:
        """Receive what comes of ``part`` to memory of nobody's.

        Returns:
            None, or an event that is done when what was posted before is over, which the end of the
            communicator brings about if the producer doesn't.
        """
        tag = tag_of(part)
        self._parts.forget(tag)
        quiet = _Quiet()
        last: _Chunk | None = None
        for units in self._flights:
            for unit in units:
                if unit.tag == tag:
                    unit.part, last = None, unit
        if last is not None:
            last.quiet = [*(last.quiet or ()), quiet]
            if self._drained_by is None and not self._dying:
                self._drained_by = Patience(_DRAIN_S, self._undrained)
        self._resume(tag)
        return None if last is None else quiet

    def _undrained(self) -> None:
        self._drained_by = None
        if any(unit.quiet for units in self._flights for unit in units):
            self.kill(f"what was under way did not end within {_DRAIN_S:g} s")

    def _resume(self, tag: bytes) -> None:
        if tag == self._early and self._early_until is not None:
            self._early_until.cancel()
            self._early, self._early_until = b"", None
            self._work()

    # -- what is said

    def _heard(self, said: Sequence[Said]) -> None:
        self._inbox.extend(said)
        if not self._early:
            self._work()
        if len(self._inbox) > self._credits + _BESIDE:
            self.kill("the producer said more than there is memory for")

    def _work(self) -> None:
        """Act on what was said, in order, as far as that can be done now."""
        units: list[_Chunk] = []
        while self._inbox and not self._dying:
            said = self._inbox[0]
            if isinstance(said, Announced):
                try:
                    unit = self._place(said)
                except ValueError as error:
                    self.kill(f"the producer announced what it must not: {error}")
                    return
                if unit is None:  # early; all after it waits, too
                    break
                units.append(unit)
            else:
                units = self._post(units)
                if self._dying or (isinstance(said, Rest) and self._flights):
                    return
                self._do(said)
            if self._inbox:
                self._inbox.popleft()
        self._post(units)

    def _do(self, said: Said) -> None:
        match said:
            case Wake(epoch) if epoch == self._epoch + 1 and self._comm is None and not self._slots:
                self._epoch = epoch
                self._pool.take(self, self._got)
            case Rest(epoch) if epoch == self._epoch and self._credits == len(self._slots) > 0:
                self._credits = 0
                self._let_go()
            case Dead():
                self.kill("the producer's end is broken, or closed", tell=False)
            case _:
                self.kill(f"the producer said what it must not: {type(said).__name__}")

    def _place(self, said: Announced) -> _Chunk | None:
        """Where an announced chunk goes; None: nobody knows yet."""
        tag, chunk, lengths = said
        if not self._credits or self._comm is None:
            raise ValueError("more than there is memory for")
        if max(lengths) > self._pool.nbytes or sum(lengths) != chunk.nbytes or not min(lengths):
            raise ValueError(f"{chunk} in messages of {lengths}")
        if tag in self._parts.forgotten:
            slot = self._free.pop()
            self._credits -= 1
            return _Chunk(tag, chunk, [(slot.address, nbytes) for nbytes in lengths], None, slot)
        part = self._parts.expected.get(tag)
        if part is None:
            self._early = tag
            self._early_until = Patience(_AHEAD_S, self._unexpected)
            return None
        part.begin(chunk)
        addresses, sizes = part.place(chunk, self._parts.extents)
        self._credits -= 1
        if len(lengths) > 1:
            if tuple(sizes.tolist()) != lengths:
                raise ValueError(f"{chunk} in messages of {lengths}")
            return _Chunk(tag, chunk, list(zip(addresses.tolist(), lengths, strict=True)), part)
        if bool(np.array_equal(addresses[1:], addresses[:-1] + sizes[:-1])):
            return _Chunk(tag, chunk, [(int(addresses[0]), chunk.nbytes)], part)
        slot = self._free.pop()
        return _Chunk(tag, chunk, [(slot.address, chunk.nbytes)], part, slot)

    def _unexpected(self) -> None:
        self.kill("the producer sent data of a part that nobody expects")

    # -- what is received

    def _post(self, units: list[_Chunk]) -> list[_Chunk]:
        """Receive these; returns an empty list."""
        if units and self._comm is not None:
            try:
                self._comm.recv([each for unit in units for each in unit.ranges], self._handle)
                for unit in units:
                    if unit.part is not None and unit.slot is not None:
                        self._home.device.scatter(
                            unit.part.plan,
                            unit.chunk,
                            unit.slot.buffer,
                            unit.slot.offset,
                            unit.part.dst,
                            stream=self._stream,
                        )
            except DeviceError as error:
                # Some may be under way: their end is waited for all the same.
                self._fly(units, 0)
                self.kill(str(error))
            else:
                self._fly(units, sum(unit.chunk.nbytes for unit in units))
        return []

    def _arrived(self, units: list[_Chunk]) -> None:
        self._ended(units)
        self._credits += len(units)
        self._line.say(Credit(self._epoch, len(units)))
        for unit in units:
            if unit.part is not None and not self._dying:
                try:
                    unit.part.landed(unit.chunk)
                except Exception as error:  # noqa: BLE001 - one part's mistake stops no other part's bytes
                    context = {"message": f"callback for {unit.chunk} failed", "exception": error}
                    self._loop.call_exception_handler(context)

    def _ended(self, units: list[_Chunk]) -> None:
        for unit in units:
            if unit.slot is not None:
                self._free.append(unit.slot)
            for quiet in unit.quiet or ():
                quiet.over = True
        if self._drained_by is not None and not any(unit.quiet for each in self._flights for unit in each):
            self._drained_by.cancel()
            self._drained_by = None

    def _quiet(self) -> None:
        if not self._early:
            self._work()  # REST may have waited for this

    # -- the communicator

    def _got(self, slots: list[Slot]) -> None:
        self._slots, self._free = slots, slots.copy()
        self._make_within()
        names, calls = self._home.names, self._home.calls
        if names:
            self._meet(names.pop())
        else:
            off_loop(
                partial(calls.unique_id, self._home.device.ordinal), "aiokv-nccl-name"
            ).add_done_callback(self._named)

    def _named(self, future: asyncio.Future[bytes]) -> None:
        error = future.exception()
        if error is not None:
            self.kill(str(error))
        elif self._dying:
            self._home.names.append(future.result())
        else:
            self._meet(future.result())

    def _meet(self, name: bytes) -> None:
        """Make a communicator under this name."""
        self._line.say(Make(self._epoch, self._nonce, self._pool.nbytes, name))
        self._make(name, self._nonce)

    def _up(self) -> None:
        self._credits = len(self._slots)
        self._line.say(Credit(self._epoch, self._credits))
        if not self.proven.done():
            self.proven.set_result(None)
        self._work()

    def relieve(self) -> None:
        """Others lack memory: ask the producer to rest when it can."""
        if self._comm is not None:
            self._line.say(Nudge())

    def _hand_over(self) -> None:
        self._line.say(Yield(self._epoch))

    def _give_up(self) -> None:
        self._inbox.clear()
        self._parts.drop()
        for patience in (self._early_until, self._drained_by):
            if patience is not None:
                patience.cancel()
        if not self.proven.done():
            self.proven.set_exception(self._unproven())
            self.proven.exception()  # seen, if nobody waits for it any more

    def _unproven(self) -> AiokvError:
        return self.dying_error()
