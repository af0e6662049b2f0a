"""Streams and events of a mocked device."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np

from aiokv.device.base import Event
from aiokv.device.hazards import Hazard, Point, Timeline
from aiokv.device.mockedbuffer import MockedBuffer, access_of, check_range
from aiokv.errors import DeviceError

__all__ = ["MockedEvent", "MockedRead", "MockedStream", "Operation"]


class Owner(Protocol):
    """What a stream needs of its device."""

    lock: threading.RLock
    name: str

    def note(self, found: list[Hazard]) -> None:
        """Keep hazards that were found."""

    def take_up(self, stream: MockedStream) -> None:
        """The stream has something queued."""

    def kick(self) -> None:
        """There may be a step to take."""


class MockedEvent:
    """A point in a mocked stream. Seen done, it orders whatever the host submits afterwards."""

    __slots__ = ("_error", "_point", "_reached", "waiting")

    def __init__(self, point: Point) -> None:
        self._point = point
        self._reached = False
        self._error: DeviceError | None = None
        #: Devices with a stream that waits for this event.
        self.waiting: set[Owner] = set()

    @property
    def point(self) -> Point:
        """Its place in the order of things."""
        return self._point

    @property
    def reached(self) -> bool:
        """Whether its stream got there, failed or not; the host learns nothing by this look."""
        return self._reached

    @property
    def error(self) -> DeviceError | None:
        """Why it failed; None before it is reached, and when it didn't."""
        return self._error

    def done(self) -> bool:
        """Whether everything enqueued before it has completed.

        Raises:
            DeviceError: Something before it on its stream, or on one that this waited for, failed.
        """
        if not self._reached:
            return False
        # After an error, too, nothing before it runs any more.
        self._point.confirm()
        if self._error is not None:
            raise DeviceError(str(self._error)) from self._error
        return True

    def reach(self, error: DeviceError | None) -> None:
        """Its stream got here; called by the stream."""
        self._reached, self._error = True, error
        for device in self.waiting:
            device.kick()
        self.waiting.clear()


class MockedRead:
    """What a kernel that reads has seen; None until its stream has run it."""

    __slots__ = ("data",)

    def __init__(self) -> None:
        self.data: bytes | None = None


class Operation:
    """One entry of a stream's queue: work in steps, or an event to record, or one to wait for."""

    __slots__ = ("records", "steps", "waits_for")

    def __init__(
        self,
        *steps: Callable[[], None],
        records: MockedEvent | None = None,
        waits_for: Event | None = None,
    ) -> None:
        self.steps = deque(steps)
        self.records = records
        self.waits_for = waits_for


class MockedStream:
    """A queue of operations. Made by ``MockedDevice.stream``; submitting is allowed in any thread."""

    def __init__(self, device: Owner, handle: int) -> None:
        self.device = device
        #: What ``__cuda_stream__`` tells.
        self.handle = handle
        self.timeline = Timeline(f"stream {handle:#x} of {device.name}")
        #: Why it failed; from then on it only discards what it is given.
        self.error: DeviceError | None = None
        self._queue: deque[Operation] = deque()
        self._to_fail: DeviceError | None = None

    def __repr__(self) -> str:
        return f"<{self.timeline.name}, {len(self._queue)} queued>"

    def __cuda_stream__(self) -> tuple[int, int]:
        """Version of the protocol, and a handle that ``MockedDevice.adopt`` knows."""
        return 0, self.handle

    @property
    def queued(self) -> int:
        """Operations that have not completed."""
        return len(self._queue)

    def record(self) -> MockedEvent:
        """Mark the point after all that has been enqueued so far."""
        with self.device.lock:
            event = MockedEvent(self.timeline.advance())
            self.push(Operation(records=event))
            return event

    def wait(self, event: Event) -> None:
        """What is enqueued from now on runs after ``event``; when that fails, this stream does."""
        with self.device.lock:
            if isinstance(event, MockedEvent):
                self.timeline.join(event.point)
                if not event.reached:
                    event.waiting.add(self.device)
            self.push(Operation(waits_for=event))

    def write(self, buffer: MockedBuffer, offset: int, data: bytes) -> None:
        """Enqueue a kernel that writes ``data``: a model's layer. Takes effect when it is stepped."""
        array = np.frombuffer(data, np.uint8)
        check_range(buffer, offset, len(array))

        def run() -> None:
            buffer.bytes[offset : offset + len(array)] = array

        what = f"write on {self.timeline.name}"
        with self.device.lock:
            access = access_of(what, offset, len(array), writes=True, point=self.timeline.advance())
            self.device.note(buffer.history.add(access))
            self.push(Operation(run))

    def read(self, buffer: MockedBuffer, offset: int, nbytes: int) -> MockedRead:
        """Enqueue a kernel that reads: attention, say. It sees what is there when it is stepped."""
        check_range(buffer, offset, nbytes)
        result = MockedRead()

        def run() -> None:
            result.data = buffer.bytes[offset : offset + nbytes].tobytes()

        what = f"read on {self.timeline.name}"
        with self.device.lock:
            access = access_of(what, offset, nbytes, writes=False, point=self.timeline.advance())
            self.device.note(buffer.history.add(access))
            self.push(Operation(run))
        return result

    def push(self, operation: Operation) -> None:
        """Enqueue one operation; the device's lock is held."""
        self._queue.append(operation)
        self.device.take_up(self)

    def fail_next(self, error: DeviceError) -> None:
        """Have the next step of a copy, a read or a write fail."""
        self._to_fail = error

    @property
    def polling(self) -> bool:
        """Whether it waits for an event of another kind of device, which tells nobody when it is done."""
        event = self._queue[0].waits_for if self._queue else None
        return event is not None and not isinstance(event, MockedEvent)

    @property
    def runnable(self) -> bool:
        """Whether there is a step to take: something is queued, and it doesn't wait for an event."""
        if not self._queue:
            return False
        event = self._queue[0].waits_for
        return event is None or _reached(event)

    def step(self) -> None:
        """Run one step; it is known to be runnable."""
        operation = self._queue[0]
        if operation.waits_for is not None:
            self.error = self.error or _error_of(operation.waits_for)
        elif operation.records is not None:
            operation.records.reach(self.error)
        else:
            if self._to_fail is not None and self.error is None:
                self.error, self._to_fail = self._to_fail, None
            if self.error is None:
                operation.steps.popleft()()
                if operation.steps:
                    return
        self._queue.popleft()


def _reached(event: Event) -> bool:
    if isinstance(event, MockedEvent):
        return event.reached
    try:
        return event.done()
    except DeviceError:
        return True


def _error_of(event: Event) -> DeviceError | None:
    if isinstance(event, MockedEvent):
        return event.error
    try:
        event.done()
    except DeviceError as error:
        return error
    return None
