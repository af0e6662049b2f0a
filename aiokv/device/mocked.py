"""A device without hardware, whose streams run only when a test steps them.

Everything that a GPU does behind Python's back happens here one step at a time, in an order that
a test chooses or a seed draws: copies that are in flight for a while, kernels that write a layer
late, streams that overtake each other. Whatever nothing orders is found as a ``Hazard``, also
when the bytes happened to come out right.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterable, Sequence
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from aiokv.device.autostep import Autostep
from aiokv.device.base import Buffer, Stream
from aiokv.device.hazards import Access, Hazard
from aiokv.device.mockedbuffer import MockedBuffer, check_range
from aiokv.device.mockedstream import MockedEvent, MockedRead, MockedStream, Operation
from aiokv.errors import DeviceError
from aiokv.proto.plan import Chunk, CopyPlan

__all__ = ["MockedBuffer", "MockedDevice", "MockedEvent", "MockedRead", "MockedStream"]

#: Handles below are names of default streams in CUDA.
FIRST_HANDLE = 0x1000

_Offsets = NDArray[np.int64]
#: Where from and where to: bytes of a buffer, and offsets in it; and lengths.
_Move = tuple[NDArray[np.uint8], _Offsets, NDArray[np.uint8], _Offsets, _Offsets]


class MockedDevice:
    """Streams that a test steps by hand, or that step themselves at random times.

    Args:
        seed: Of the order in which ``step`` picks streams; drawn, and told by ``repr``, if None.
        raises: Raise DeviceError where a hazard is submitted, besides noting it.
        name: For messages.
    """

    kind = "mocked"
    #: How long submitting copies may hold the event loop in one turn, in seconds.
    budget_s = 0.001

    def __init__(self, seed: int | None = None, *, raises: bool = False, name: str = "device") -> None:
        self.seed = random.SystemRandom().getrandbits(32) if seed is None else seed
        self.name = name
        #: What was found so far, in order of submission.
        self.hazards: list[Hazard] = []
        self.lock = threading.RLock()
        self._raises = raises
        self._random = random.Random(self.seed)  # noqa: S311 - an order, not a secret
        self._made = 0
        #: Streams with something queued, in the order in which they came to have it.
        self._busy: dict[MockedStream, None] = {}
        self._handles: WeakValueDictionary[int, MockedStream] = WeakValueDictionary()
        self._autostep: Autostep | None = None
        self._buffers = 0
        self._default = self.stream()

    def __repr__(self) -> str:
        return f"<MockedDevice {self.name}, seed {self.seed}, {len(self._busy)} streams busy>"

    @property
    def idle(self) -> bool:
        """Whether nothing is queued on any stream."""
        return not self._busy

    def allocate(self, nbytes: int) -> MockedBuffer:
        """New zeroed memory. Whoever makes it frees it."""
        self._buffers += 1
        return MockedBuffer(self, f"buffer {self._buffers} of {self.name}", nbytes)

    def stream(self) -> MockedStream:
        """A new side stream."""
        with self.lock:
            stream = MockedStream(self, FIRST_HANDLE + self._made)
            self._made += 1
            self._handles[stream.handle] = stream
            return stream

    def adopt(self, stream: object | None) -> MockedStream:
        """A mocked stream, or what names one by ``__cuda_stream__``; None is the default stream.

        Raises:
            TypeError: It is no stream.
            DeviceError: Its handle is not of a stream of this device.
        """
        if stream is None:
            return self._default
        if isinstance(stream, MockedStream):
            return stream
        protocol = getattr(stream, "__cuda_stream__", None)
        if protocol is None:
            raise TypeError(f"{stream!r} has no __cuda_stream__")
        _, handle = protocol()
        found = self._handles.get(handle)
        if found is None:
            raise DeviceError(f"{self.name} has no stream {handle:#x}")
        return found

    def copy(
        self,
        plan: CopyPlan,
        chunk: Chunk,
        src: Sequence[Buffer],
        dst: Sequence[Buffer],
        *,
        stream: Stream,
    ) -> None:
        """Enqueue the copy of one chunk, in two steps: each extent's first half, then the rest.

        Raises:
            DeviceError: Chunk, buffers or stream don't fit; nothing was enqueued.
        """
        if not isinstance(stream, MockedStream):
            raise DeviceError(f"{stream!r} is no mocked stream")
        try:
            plan.check(chunk)
        except ValueError as error:
            raise DeviceError(f"no such chunk: {error}") from error
        moves = []
        for here, reads, there, writes, lengths in plan.copy(chunk).extents(chunk.lo, chunk.hi):
            source, target = src[here], dst[there]
            for buffer, offsets in ((source, reads), (target, writes)):
                check_range(buffer, int(offsets.min()), 0)
                check_range(buffer, 0, int((offsets + lengths).max()))
            moves.append((source, reads, target, writes, lengths))
        halves = [
            (_bytes_of(source), reads, _bytes_of(target), writes, lengths // 2)
            for source, reads, target, writes, lengths in moves
        ]
        rests = [
            (source, reads + half, target, writes + half, lengths - half)
            for (source, reads, target, writes, half), (*_, lengths) in zip(halves, moves, strict=True)
        ]
        what = f"copy of {chunk} on {stream.timeline.name}"
        with stream.device.lock:
            point = stream.timeline.advance()
            for source, reads, target, writes, lengths in moves:
                for buffer, offsets, written in ((source, reads, False), (target, writes, True)):
                    if isinstance(buffer, MockedBuffer):
                        access = Access(what, offsets, lengths, writes=written, point=point)
                        self.note(buffer.history.add(access))
            stream.push(Operation(lambda: _move(halves), lambda: _move(rests)))

    def step(self, stream: MockedStream | None = None) -> bool:
        """Run one step of ``stream``, or of one that the seed draws; False if nothing can run."""
        with self.lock:
            if stream is None:
                ready = [stream for stream in self._busy if stream.runnable]
                if not ready:
                    return False
                stream = self._random.choice(ready)
            elif not stream.runnable:
                return False
            stream.step()
            if not stream.queued:
                self._busy.pop(stream, None)
            return True

    def run(self) -> None:
        """Step in a drawn order until nothing can run; what waits for events of others stays."""
        while self.step():
            pass

    def fail(self, stream: MockedStream, why: str = "made to fail") -> None:
        """Have the next step of a copy, read or write on ``stream`` fail, and all after it.

        What the step would have moved is not moved. Events recorded later than it raise
        DeviceError when they are reached, and streams that wait for those fail, too.
        """
        stream.fail_next(DeviceError(f"{stream.timeline.name}: {why}"))

    def autostep(self, loop: asyncio.AbstractEventLoop, rng: random.Random, mean_s: float) -> Autostep:
        """Step by itself from now on, at random times ``mean_s`` apart on average.

        Nothing is scheduled on ``loop`` while no step can be taken. Closing what is returned
        goes back to stepping by hand.
        """
        if self._autostep is not None:
            self._autostep.close()
        self._autostep = Autostep(self, loop, rng, mean_s)
        return self._autostep

    def kick(self) -> None:
        """There may be a step to take."""
        if self._autostep is not None:
            self._autostep.kick()

    def take_up(self, stream: MockedStream) -> None:
        """``stream`` has something queued; called by the stream under the lock."""
        self._busy[stream] = None
        self.kick()

    @property
    def steppable(self) -> bool:
        """Whether there is a step to take, or may be one without anybody telling."""
        with self.lock:
            return any(stream.runnable or stream.polling for stream in self._busy)

    def note(self, found: list[Hazard]) -> None:
        """Keep hazards that were found.

        Raises:
            DeviceError: There are some, and the device was made to raise.
        """
        self.hazards += found
        if found and self._raises:
            raise DeviceError(str(found[0]))


def _bytes_of(buffer: Buffer) -> NDArray[np.uint8]:
    """The bytes of a mocked buffer, or of any that has a ``view``, such as staging memory."""
    view = getattr(buffer, "view", None)
    if view is None:
        raise DeviceError(f"a mocked device can't access {buffer!r}")
    return np.frombuffer(view, np.uint8)


def _move(moves: Iterable[_Move]) -> None:
    for source, reads, target, writes, lengths in moves:
        for read, write, length in zip(reads.tolist(), writes.tolist(), lengths.tolist(), strict=True):
            target[write : write + length] = source[read : read + length]
