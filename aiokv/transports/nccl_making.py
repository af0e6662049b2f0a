"""The making of a communicator, on a thread that can be abandoned."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from aiokv.device.base import Event, Stream
from aiokv.device.gate import Gate
from aiokv.device.offloop import off_loop
from aiokv.errors import DeviceError, PeerLostError
from aiokv.transports.nccl_calls import Calls, Communicator, Current
from aiokv.transports.nccl_staging import Slot

__all__ = ["CONSUMER", "NONCE", "PRODUCER", "Making"]

#: Ranks of the two ends.
PRODUCER, CONSUMER = 0, 1
#: Bytes that prove a communicator.
NONCE = 16
#: How often the thread looks whether they came.
_STEP_S = 0.0005
#: How long one that is abandoned may go on waiting for the other end, before something is done about it.
_LAST_S = 1.0


class Making:
    """One end of one communicator, from its name until the first bytes came through it.

    The first send to a peer connects, for tens of milliseconds; so that is done here, too, at both ends at
    once.

    Args:
        calls: NCCL.
        gate: Of the GPU.
        ordinal: The GPU.
        current: Makes it current where the communicator is used.
        stream: The link's, with nothing on it.
        handle: The same, as CUDA knows it.
        slots: The link's memory; the first is used.
        rank: PRODUCER or CONSUMER.
        name: NCCL's unique id.
        nonce: What the producer sends.
    """

    def __init__(
        self,
        calls: Calls,
        gate: Gate,
        ordinal: int,
        current: Current,
        stream: Stream,
        handle: int,
        slots: Sequence[Slot],
        rank: int,
        name: bytes,
        nonce: bytes,
    ) -> None:
        self._calls = calls
        self._gate = gate
        self._ordinal = ordinal
        self._current = current
        self._stream = stream
        self._handle = handle
        self.slots = slots
        self._rank = rank
        self._name = name
        self._nonce = nonce
        self._abandoned = False
        #: The constructor was called; and it has returned, or raised.
        self._begun = False
        self._met = False

    def begin(self) -> asyncio.Future[Communicator]:
        """Start the thread; the future is of a communicator that works, which its owner aborts.

        Raises (the future): DeviceError, PeerLostError.
        """
        return off_loop(self._run, "aiokv-nccl-make")

    def abandon(self) -> None:
        """Nobody waits for it any more. Its memory is in use until the thread has ended."""
        self._abandoned = True
        if self._rank == CONSUMER and not self._met:
            off_loop(self._stand_in, "aiokv-nccl-end").add_done_callback(_seen)

    def _stand_in(self) -> None:
        """Come to the meeting as the producer.

        Nothing else ends the wait for one who will never come, and it would keep its thread and sockets. What
        is made of two ends in one place, if NCCL lets that be, is let go of.
        """
        until = time.monotonic() + _LAST_S
        while not self._met and time.monotonic() < until:
            time.sleep(_LAST_S / 20)
        if self._begun and not self._met:
            self._calls.use(self._ordinal)
            with self._gate.call(waits=False):
                self._calls.communicator(self._name, PRODUCER).abort()

    def _run(self) -> Communicator:
        with self._gate.call():
            return self._make()

    def _make(self) -> Communicator:
        self._calls.use(self._ordinal)
        if self._abandoned:
            raise PeerLostError("given up before it was begun")
        self._begun = True
        try:
            made = self._calls.communicator(self._name, self._rank, current=self._current)
        finally:
            self._met = True
        try:
            if self._abandoned:
                raise PeerLostError("given up before it was made")
            self._prove(made)
        except BaseException:
            try:
                made.abort()
            finally:
                self._wait_for(self._stream.record())  # only then is the slot anybody's
            raise
        return made

    def _wait_for(self, event: Event) -> None:
        while not event.done():
            time.sleep(_STEP_S)

    def _prove(self, made: Communicator) -> None:
        at = self.slots[0].address
        if self._rank == PRODUCER:
            self._calls.put(at, self._nonce, self._handle)
            made.send([(at, NONCE)], self._handle)
            self._wait(made, self._stream.record())
            return
        self._calls.put(at, bytes(NONCE), self._handle)
        made.recv([(at, NONCE)], self._handle)
        self._wait(made, self._stream.record())
        came = self._calls.get(at, NONCE, self._handle)
        self._wait(made, self._stream.record(), last=True)
        if came.tobytes() != self._nonce:
            raise PeerLostError("what came through it is not what was sent")

    def _wait(self, made: Communicator, event: Event, *, last: bool = False) -> None:
        """Wait for the stream; where nothing on it waits for the peer (``last``), whatever happens."""
        while not event.done():
            if self._abandoned and not last:
                raise PeerLostError("given up before anything came through")
            if not last and (error := made.error()):
                raise DeviceError(error)
            time.sleep(_STEP_S)
        if error := made.error():
            raise DeviceError(error)


def _seen(future: asyncio.Future[None]) -> None:
    """Whether it was needed, and worked, is nobody's business."""
    future.exception()
