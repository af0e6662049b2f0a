"""NCCL played on a mocked device: what ``NcclTransport`` needs of ``cupy.cuda``, for tests without a GPU.

What is enqueued runs when the device is stepped, and a message moves when both ends have come to it::

    device = StagingMockedDevice(seed)
    fake = FakeNccl(device)
    transport = NcclTransport(calls=Calls(fake, kind="mocked"))

It misbehaves as NCCL does: making a communicator blocks until the other end comes, an aborted one completes
what is in flight as if the bytes had come, and the end of a communicator whose peer is gone waits for ever
unless somebody asks for its error.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from aiokv.device.base import Buffer, Stream
from aiokv.device.gate import Gate
from aiokv.device.hazards import Access
from aiokv.device.mocked import MockedDevice, MockedStream
from aiokv.device.mockedbuffer import MockedBuffer
from aiokv.device.mockedstream import Operation
from aiokv.errors import DeviceError
from aiokv.proto.plan import Chunk, CopyPlan

__all__ = ["FakeNccl", "FakeNcclError", "StagingMockedDevice"]

_STEP_S = 0.0005
_TO_DEVICE, _TO_HOST = 1, 2


class FakeNcclError(RuntimeError):
    """What cupy raises when NCCL fails."""


class StagingMockedDevice(MockedDevice):
    """A mocked device that packs and unpacks chunks, and finds its memory by address."""

    ordinal = 0

    def __init__(self, seed: int | None = None, *, raises: bool = False, name: str = "device") -> None:
        super().__init__(seed, raises=raises, name=name)
        self.gate = Gate()
        self._allocated: list[MockedBuffer] = []

    def allocate(self, nbytes: int) -> MockedBuffer:
        """New zeroed memory. Whoever makes it frees it."""
        self._allocated.append(super().allocate(nbytes))
        return self._allocated[-1]

    def at(self, address: int, nbytes: int) -> tuple[MockedBuffer, int]:
        """The buffer that so many bytes at an address are in, and their offset.

        Raises:
            DeviceError: There is none.
        """
        for buffer in self._allocated:
            if 0 <= (offset := address - buffer.address) <= buffer.nbytes - nbytes:
                return buffer, offset
        raise DeviceError(f"no memory of {self.name} is at {address:#x}")

    def stream_of(self, handle: int) -> MockedStream:
        """The stream that a handle names."""
        return self.adopt(SimpleNamespace(__cuda_stream__=lambda: (0, handle)))

    def gather(
        self,
        plan: CopyPlan,
        chunk: Chunk,
        src: Sequence[Buffer],
        staging: Buffer,
        offset: int,
        *,
        stream: Stream,
    ) -> None:
        """Enqueue the packing of a chunk, in plan order, to ``staging`` from ``offset`` on."""
        for source, reads, _, _, lengths in plan.copy(chunk).extents(chunk.lo, chunk.hi):
            packed = offset + np.cumsum(lengths) - lengths
            self._pieces("gather", src[source], reads, staging, packed, lengths, stream)
            offset += int(lengths.sum())

    def scatter(
        self,
        plan: CopyPlan,
        chunk: Chunk,
        staging: Buffer,
        offset: int,
        dst: Sequence[Buffer],
        *,
        stream: Stream,
    ) -> None:
        """Enqueue the mirror image of ``gather``."""
        for _, _, target, writes, lengths in plan.copy(chunk).extents(chunk.lo, chunk.hi):
            packed = offset + np.cumsum(lengths) - lengths
            self._pieces("scatter", staging, packed, dst[target], writes, lengths, stream)
            offset += int(lengths.sum())

    def _pieces(
        self,
        what: str,
        source: Buffer,
        reads: NDArray[np.int64],
        target: Buffer,
        writes: NDArray[np.int64],
        lengths: NDArray[np.int64],
        stream: Stream,
    ) -> None:
        here, there = cast(MockedBuffer, source), cast(MockedBuffer, target)

        def run() -> None:
            for read, write, length in zip(reads.tolist(), writes.tolist(), lengths.tolist(), strict=True):
                there.bytes[write : write + length] = here.bytes[read : read + length]

        self.enqueue(
            what,
            cast(MockedStream, stream),
            [(here, reads, lengths, False), (there, writes, lengths, True)],
            run,
        )

    def enqueue(
        self,
        what: str,
        stream: MockedStream,
        accesses: Sequence[tuple[MockedBuffer, NDArray[np.int64], NDArray[np.int64], bool]],
        *steps: Callable[[], None],
        before: Sequence[Operation] = (),
    ) -> None:
        """Enqueue work with what it reads and writes: buffer, offsets, lengths, whether it writes."""
        with self.lock:
            point = stream.timeline.advance()
            for buffer, offsets, lengths, writes in accesses:
                access = Access(
                    f"{what} on {stream.timeline.name}", offsets, lengths, writes=writes, point=point
                )
                self.note(buffer.history.add(access))
            for each in (*before, Operation(*steps)):
                stream.push(each)


class _Until:
    """An event that is done when a condition holds."""

    def __init__(self, condition: Callable[[], bool]) -> None:
        self._condition = condition

    def done(self) -> bool:
        return self._condition()


class _Message:
    """What one end sends and the other receives, each whenever it comes to that."""

    def __init__(self) -> None:
        self.data: NDArray[np.uint8] | None = None
        self.sender: _Communicator | None = None
        self.received = False


class _Communicator:
    """One end; made as cupy's is."""

    def __init__(self, fake: FakeNccl, ranks: int, name: bytes, rank: int) -> None:
        self._fake = fake
        self._rank = rank
        self.aborted = False
        #: Why ``check_async_error`` raises.
        self.failure = ""
        self._sent = self._received = 0
        self.messages = fake.meet(self, name, rank, ranks)

    def send(self, address: int, nbytes: int, kind: int, peer: int, stream: int) -> None:
        self._fake.grouped(lambda: self._send(address, nbytes, peer, stream))

    def recv(self, address: int, nbytes: int, kind: int, peer: int, stream: int) -> None:
        self._fake.grouped(lambda: self._recv(address, nbytes, peer, stream))

    def _send(self, address: int, nbytes: int, peer: int, handle: int) -> None:
        device = self._fake.device
        buffer, offset = device.at(address, nbytes)
        message = self.messages(self._rank, peer, self._sent)
        self._sent += 1

        def offer() -> None:
            message.data, message.sender = buffer.bytes[offset : offset + nbytes], self

        # What is sent to itself is received by the same group, on the same stream.
        taken = Operation(waits_for=_Until(lambda: peer == self._rank or message.received or self.aborted))
        device.enqueue(
            "NCCL send", device.stream_of(handle), [_range(buffer, offset, nbytes, writes=False)], _nothing,
            before=(Operation(offer), taken),
        )  # fmt: skip

    def _recv(self, address: int, nbytes: int, peer: int, handle: int) -> None:
        device = self._fake.device
        buffer, offset = device.at(address, nbytes)
        message = self.messages(peer, self._rank, self._received)
        self._received += 1
        half = nbytes // 2

        def came() -> bool:
            return message.sender is not None and not message.sender.aborted and not self._fake.stalled

        def take(start: int, end: int) -> None:
            if self.aborted or message.data is None:
                return
            if len(message.data) != nbytes:
                self._fake.faults.append(f"{nbytes} bytes received of a message of {len(message.data)}")
                return
            buffer.bytes[offset + start : offset + end] = message.data[start:end]
            message.received = end == nbytes

        device.enqueue(
            "NCCL receive", device.stream_of(handle), [_range(buffer, offset, nbytes, writes=True)],
            lambda: take(0, half), lambda: take(half, nbytes),
            before=(Operation(waits_for=_Until(lambda: came() or self.aborted)),),
        )  # fmt: skip

    def check_async_error(self) -> None:
        if self.aborted:
            self._fake.faults.append("an aborted communicator was used")
        if self.failure:
            raise FakeNcclError(self.failure)

    def destroy(self) -> None:
        self.aborted = True

    def abort(self) -> None:
        while self._fake.hang_in_abort:
            time.sleep(_STEP_S)
        self.aborted = True
        self._fake.left(self)


class FakeNccl:
    """All of NCCL that the engines of one process have.

    Args:
        device: Whose memory is sent.
        tells: Whether the end of a communicator hears of it, by its error, when the other is aborted.
    """

    #: Names that cupy has for things.
    NCCL_UINT8 = 1
    memcpyHostToDevice = _TO_DEVICE  # noqa: N815
    memcpyDeviceToHost = _TO_HOST  # noqa: N815

    def __init__(self, device: StagingMockedDevice, *, tells: bool = True) -> None:
        self.device = device
        self.tells = tells
        self.nccl = self.runtime = self
        #: What ``get_version`` says.
        self.version = 22809
        #: Rules that were broken.
        self.faults: list[str] = []
        #: Messages that are not received from now on.
        self.stalled = False
        #: Calls that don't return, or raise.
        self.hang_in_abort = self.hang_in_init = False
        self.refuse_groups = False
        #: Communicators with more than one rank, in the order in which they were made.
        self.communicators: list[_Communicator] = []
        self._made = itertools.count(1)
        self._closed = False
        self._meeting = threading.Condition()
        self._ends: dict[bytes, dict[int, _Communicator]] = {}
        self._messages: dict[tuple[bytes, int, int, int], _Message] = {}
        self._group = threading.local()

    def close(self) -> None:
        """Let whoever waits for ever go."""
        self._closed = True
        self.hang_in_abort = self.hang_in_init = False
        with self._meeting:
            self._meeting.notify_all()

    def alive(self) -> list[_Communicator]:
        """Communicators that were not aborted."""
        return [each for each in self.communicators if not each.aborted]

    # -- cupy.cuda.nccl

    def get_version(self) -> int:
        """As NCCL numbers itself."""
        return self.version

    def get_unique_id(self) -> bytes:
        """128 bytes."""
        return next(self._made).to_bytes(128, "big")

    def NcclCommunicator(self, ranks: int, name: bytes, rank: int) -> _Communicator:  # noqa: N802
        """Blocks until all ranks have come."""
        return _Communicator(self, ranks, name, rank)

    def groupStart(self) -> None:  # noqa: N802
        """From now on this thread's operations are only noted."""
        if getattr(self._group, "noted", None) is not None:
            self.faults.append("a group within a group")
        self._group.noted = []

    def groupEnd(self) -> None:  # noqa: N802
        """Enqueue them."""
        noted, self._group.noted = self._group.noted, None
        if self.refuse_groups:
            raise FakeNcclError("NCCL_ERROR_SYSTEM_ERROR: made up")
        for each in noted:
            each()

    def grouped(self, operation: Callable[[], None]) -> None:
        """Of a communicator: an operation of the group."""
        if getattr(self._group, "noted", None) is None:
            self.faults.append("an operation outside of a group")
            return
        self._group.noted.append(operation)

    def meet(
        self, end: _Communicator, name: bytes, rank: int, ranks: int
    ) -> Callable[[int, int, int], _Message]:
        """Of a communicator: wait for the other ends."""
        with self._meeting:
            ends = self._ends.setdefault(name, {})
            if rank in ends:
                raise FakeNcclError(f"NCCL_ERROR_SYSTEM_ERROR: rank {rank} came twice")
            ends[rank] = end
            self._meeting.notify_all()
            while (len(ends) < ranks or self.hang_in_init) and not self._closed:
                self._meeting.wait(0.01)
            if len(ends) < ranks:
                raise FakeNcclError("NCCL_ERROR_SYSTEM_ERROR: nobody came")
            if ranks > 1:
                self.communicators.append(end)

        def message(source: int, target: int, number: int) -> _Message:
            return self._messages.setdefault((name, source, target, number), _Message())

        return message

    def left(self, end: _Communicator) -> None:
        """Of a communicator: it was aborted."""
        for ends in list(self._ends.values()):
            if end in ends.values():
                for other in ends.values():
                    if other is not end and self.tells:
                        other.failure = "NCCL_ERROR_REMOTE_ERROR: the peer is gone"

    # -- cupy.cuda.runtime

    def setDevice(self, ordinal: int) -> None:  # noqa: N802
        """One device is all there is."""

    def streamSynchronize(self, handle: int) -> None:  # noqa: N802
        """Wait; blocks."""
        event = self.device.stream_of(handle).record()
        while not event.done() and not self._closed:
            time.sleep(_STEP_S)

    def memcpyAsync(self, target: int, source: int, nbytes: int, kind: int, handle: int) -> None:  # noqa: N802
        """Between pageable memory of the host and the device."""
        stream = self.device.stream_of(handle)
        if kind == _TO_DEVICE:
            data = np.frombuffer(ctypes.string_at(source, nbytes), np.uint8)
            buffer, offset = self.device.at(target, nbytes)

            def write() -> None:
                buffer.bytes[offset : offset + nbytes] = data

            self.device.enqueue("copy in", stream, [_range(buffer, offset, nbytes, writes=True)], write)
            return
        buffer, offset = self.device.at(source, nbytes)

        def read() -> None:
            ctypes.memmove(target, source, nbytes)

        self.device.enqueue(
            "copy out", stream, [_range(buffer, offset, nbytes, writes=False)],
            read,
        )  # fmt: skip


def _range(
    buffer: MockedBuffer, offset: int, nbytes: int, *, writes: bool
) -> tuple[MockedBuffer, NDArray[np.int64], NDArray[np.int64], bool]:
    return buffer, np.array([offset]), np.array([nbytes]), writes


def _nothing() -> None:
    """A step that does nothing."""
