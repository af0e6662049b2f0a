"""A two-sided transport between simulated processes: the producer sends, as over a socket.

What was sent is read from the producer's cache bit by bit, for as long as the consumer's side has room, and
written to the consumer's cache as it comes. Whoever is frozen neither sends nor receives.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from aiokv.device.base import Buffer, Event, Stream
from aiokv.device.hazards import Access
from aiokv.device.mocked import MockedBuffer
from aiokv.errors import ClosedError, DeviceError, LocalProtocolError, PeerLostError
from aiokv.proto.plan import Chunk, CopyPlan
from aiokv.transports.base import Link, PartId, PeerInfo
from aiokv.transports.ends import LinkEnd
from aiokv.transports.patience import Patience

if TYPE_CHECKING:
    from aiokv.device.cache import KVCache
    from aiokv.testing.simulation.process import Process

__all__ = ["SendingTransport"]

Bytes = NDArray[np.uint8]

#: Chunks that may wait to be sent beside one more.
AHEAD = 2
#: Chunks that the consumer's side takes before it reads them.
ROOM = 3
#: How long data may be ahead of the message that announces it (s).
AHEAD_S = 2.0


class _Sent:
    """Done when a chunk is read no more."""

    def __init__(self) -> None:
        self.over = False
        self.failure: DeviceError | None = None

    def done(self) -> bool:
        """Whether all of it was read, or never will be."""
        if self.failure is not None:
            raise self.failure
        return self.over


@dataclass(eq=False, slots=True)
class _Frame:
    """One chunk on its way."""

    part: PartId
    plan: CopyPlan
    chunk: Chunk
    src: Sequence[Buffer]
    sent: _Sent
    #: What was read of it so far.
    data: list[Bytes]


class _Sender(LinkEnd):
    """The producer's end."""

    def __init__(self, link: bytes, process: Process) -> None:
        super().__init__(link, "sent")
        self._process = process
        self._random = random.Random(f"{process.world.scenario.seed}/{link.hex()}")  # noqa: S311
        self.queue: deque[_Frame] = deque()
        self._callbacks_writable: list[Callable[[], None]] = []
        self._timer: asyncio.TimerHandle | None = None
        #: The other end; set before anybody sees this one.
        self.other: _Receiver

    def send(
        self, part: PartId, plan: CopyPlan, chunk: Chunk, src: Sequence[Buffer], *, stream: Stream
    ) -> Event:
        """Send one chunk after those before it."""
        if self.lost:
            raise self.lost_error()
        frame = _Frame(part, plan, chunk, src, _Sent(), [])
        self.queue.append(frame)
        self.kick()
        return frame.sent

    @property
    def writable(self) -> bool:
        """Whether little enough waits."""
        return not self.lost and len(self.queue) <= AHEAD

    def on_writable(self, callback: Callable[[], None]) -> None:
        """Call this when it becomes writable."""
        self._callbacks_writable.append(callback)

    def kick(self) -> None:
        """There may be something to send, and room for it."""
        room = not self.other.lost and len(self.other.inbox) < ROOM
        if self._timer is None and self.queue and room and not self.lost:
            delay = self._random.expovariate(1 / self._process.rank.step_s)
            self._timer = self._process.world.loop.call_later(delay, self._transmit)

    def _transmit(self) -> None:
        """Read half of a chunk; when that is all of it, it is sent."""
        self._timer = None
        if self.lost or self._process.state == "dead":
            return
        if self._process.loop.frozen:
            self._timer = self._process.world.loop.call_later(0.02, self._transmit)
            return
        frame = self.queue[0]
        frame.data.append(_half_of(frame))
        if len(frame.data) == 2:
            self.queue.popleft()
            frame.sent.over = True
            self._process.loop.call_soon(self._tell)
            self.other.deliver(frame)
        self.kick()

    def _tell(self) -> None:
        if self.writable:
            for callback in self._callbacks_writable:
                callback()

    def end(self, reason: str) -> None:
        """The path is gone: nothing more is read."""
        if self.lost:
            return
        if self._timer is not None:
            self._timer.cancel()
        for frame in self.queue:
            frame.sent.failure = DeviceError(f"not all of the chunk was sent: {reason}")
        self.queue.clear()
        self._lose(reason)

    def close(self) -> None:
        """Give the link up."""
        self.end("closed at this end")
        self.other.hear("the producer closed it")

    def hear(self, reason: str) -> None:
        """The other side is gone; known in a turn of its own."""
        self._process.loop.call_soon(self.end, reason)


@dataclass(eq=False, slots=True)
class _Expected:
    plan: CopyPlan
    dst: Sequence[Buffer]
    landed: Callable[[Chunk], None]
    seen: set[Chunk]


class _Receiver(LinkEnd):
    """The consumer's end."""

    def __init__(self, link: bytes, process: Process, other: _Sender) -> None:
        super().__init__(link, "sent")
        self._process = process
        self.other = other
        #: Frames that came and were not read.
        self.inbox: deque[_Frame] = deque()
        self._expected: dict[PartId, _Expected] = {}
        self._forgotten: set[PartId] = set()
        self._patience: Patience | None = None

    def deliver(self, frame: _Frame) -> None:
        """A frame came to this side."""
        self.inbox.append(frame)
        if self._process.state != "dead":
            self._process.loop.call_soon(self._read)

    def expect(
        self, part: PartId, plan: CopyPlan, dst: Sequence[Buffer], landed: Callable[[Chunk], None]
    ) -> None:
        """Chunks of a part may come."""
        if self.lost:
            raise self.lost_error()
        if part in self._expected or part in self._forgotten:
            raise LocalProtocolError(f"part {part} was expected before")
        self._expected[part] = _Expected(plan, dst, landed, set())
        self._loop.call_soon(self._read)

    def forget(self, part: PartId) -> None:
        """Nothing of a part is written any more."""
        self._expected.pop(part, None)
        self._forgotten.add(part)
        self._loop.call_soon(self._read)

    def _read(self) -> None:
        while self.inbox and not self.lost:
            frame = self.inbox[0]
            if frame.part not in self._forgotten:
                expected = self._expected.get(frame.part)
                if expected is None:
                    if self._patience is None:
                        self._patience = Patience(AHEAD_S, self._lose_patience)
                    return
                self._take(frame, expected)
            if self._patience is not None:
                self._patience.cancel()
                self._patience = None
            if self.inbox:
                self.inbox.popleft()
            self.other.kick()

    def _take(self, frame: _Frame, expected: _Expected) -> None:
        chunk, world = frame.chunk, self._process.world
        try:
            expected.plan.check(chunk)
        except ValueError as error:
            world.fail(f"{self._process.name} was sent what is not in its plan: {error}")
            return
        if chunk in expected.seen:
            world.fail(f"{self._process.name} was sent {chunk} of {frame.part} twice")
        expected.seen.add(chunk)
        data, at = np.concatenate(frame.data), 0
        for _, _, number, offsets, lengths in expected.plan.copy(chunk).extents(chunk.lo, chunk.hi):
            buffer = _mocked(expected.dst[number])
            access = Access(f"receipt of {chunk}", offsets, lengths, writes=True, point=None)
            buffer.device.note(buffer.history.add(access))
            where = _expanded(offsets, lengths)
            buffer.bytes[where] = data[at : at + len(where)]
            at += len(where)
        expected.landed(chunk)

    def _lose_patience(self) -> None:
        self._patience = None
        self.end("data came of a part that nobody expects")
        self.other.hear("the consumer closed it")

    def end(self, reason: str) -> None:
        """The path is gone: nothing more is written."""
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
        self._expected.clear()
        self.inbox.clear()
        self._lose(reason)

    def close(self) -> None:
        """Give the link up."""
        self.end("closed at this end")
        self.other.hear("the consumer closed it")

    def hear(self, reason: str) -> None:
        """The other side is gone; known in a turn of its own, after what came before."""
        self._process.loop.call_soon(self.end, reason)


class SendingTransport:
    """One simulated engine's end of the paths that are sent over."""

    name = "sent"
    one_sided = False

    def __init__(self, process: Process) -> None:
        self._process = process
        self._token = b""
        self._cache: KVCache | None = None
        self._senders: dict[bytes, _Sender] = {}
        self._receivers: dict[bytes, _Receiver] = {}

    async def start(self, cache: KVCache, host: str) -> None:
        """Be found."""
        await asyncio.sleep(0)
        self._cache = cache
        self._token = self._process.world.issue()
        self._process.world.senders[self._token] = self

    def describe(self) -> bytes:
        """The name it is found under."""
        if not self._token:
            raise ClosedError("not started, or closed")
        return self._token

    async def connect(self, description: bytes, peer: PeerInfo) -> Link:
        """A path from the engine that sent ``description``; not while that is frozen."""
        world = self._process.world
        await asyncio.sleep(world.rng.choice((0.0, 0.0001, 0.01)))
        # Nothing tells when a process is thawed.
        while (found := world.senders.get(description)) is not None and found._process.loop.frozen:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        if found is None or not self._token:
            raise PeerLostError(f"{peer.address} is not there")
        link = world.issue()
        sender = found._process.loop.within(_Sender, link, found._process)
        sender.other = receiver = _Receiver(link, self._process, sender)
        found._senders[link] = sender
        self._receivers[link] = receiver
        return receiver

    def accepted(self, link: bytes) -> Link | None:
        """The producer's end of a link, until it is lost."""
        sender = self._senders.get(link)
        return sender if sender is not None and not sender.lost else None

    def pending(self, part: PartId) -> int:
        """Chunks of a part that may still be read."""
        return sum(frame.part == part for sender in self._senders.values() for frame in sender.queue)

    def cut(self) -> bool:
        """Lose one link that this engine receives by; False if there is none."""
        for receiver in self._receivers.values():
            if not receiver.lost:
                receiver.end("cut by the simulation")
                receiver.other.hear("cut by the simulation")
                return True
        return False

    @property
    def links(self) -> int:
        """Links that are not lost."""
        return sum(not end.lost for end in (*self._senders.values(), *self._receivers.values()))

    async def aclose(self) -> None:
        """Close all links."""
        self._leave()
        for end in (*self._senders.values(), *self._receivers.values()):
            end.close()

    def die(self) -> None:
        """The process was killed: others see their ends lost."""
        self._leave()
        for sender in self._senders.values():
            sender.other.hear("the producer died")
        for receiver in self._receivers.values():
            receiver.other.hear("the consumer died")

    def _leave(self) -> None:
        self._process.world.senders.pop(self._token, None)
        self._token = b""


def _half_of(frame: _Frame) -> Bytes:
    """The first half of a chunk's bytes, or the second if that was read."""
    chunk, found = frame.chunk, []
    for number, offsets, _, _, lengths in frame.plan.copy(chunk).extents(chunk.lo, chunk.hi):
        buffer = _mocked(frame.src[number])
        access = Access(f"sending of {chunk}", offsets, lengths, writes=False, point=None)
        buffer.device.note(buffer.history.add(access))
        found.append(buffer.bytes[_expanded(offsets, lengths)])
    data: Bytes = np.concatenate(found)
    half = len(data) // 2
    return data[half:] if frame.data else data[:half]


def _mocked(buffer: Buffer) -> MockedBuffer:
    if not isinstance(buffer, MockedBuffer):
        raise DeviceError(f"{buffer!r} is no mocked buffer")
    return buffer


def _expanded(offsets: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Every offset of ranges."""
    return np.concatenate(
        [np.arange(at, at + n) for at, n in zip(offsets.tolist(), lengths.tolist(), strict=True)]
    )
