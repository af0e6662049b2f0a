"""Streams and events of CUDA, without timing, and the pools that they come from."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from types import TracebackType

from aiokv.device.base import Event
from aiokv.device.cudalibrary import Cuda, pending, sticky
from aiokv.errors import DeviceError

__all__ = ["CudaContext", "CudaEvent", "CudaStream", "Current", "adopted"]

_NON_BLOCKING = 1  # cudaStreamNonBlocking: never waits for the default stream
_CAPTURED = 907  # cudaErrorCapturedEvent
_WITHOUT_TIMING = 2  # cudaEventDisableTiming

#: Events remembered by a stream before it looks which of them are done.
_MOST_WAITS = 16

#: Handles that mean a default stream; the last of them another one in each thread.
_NULL, _LEGACY, _PER_THREAD = 0, 1, 2


class CudaContext:
    """One GPU's primary context: makes it current, and keeps pools of its events and streams.

    Everything here may be called from any thread.

    Args:
        cuda: The libraries.
        ordinal: CUDA's number of the device.
        events: How many events are made at once; more are made when those are in use.

    Raises:
        DeviceError: There is no such device, or it can't be used.
    """

    def __init__(self, cuda: Cuda, ordinal: int, *, events: int = 64) -> None:
        self.cuda = cuda
        self.ordinal = ordinal
        #: Why nothing works on this device any more; None while it does.
        self.lost: DeviceError | None = None
        #: Who is told of it.
        self._told: dict[Callable[[DeviceError], None], None] = {}
        runtime, driver = cuda.runtime, cuda.driver
        self._events: deque[int] = deque()
        self._streams: deque[int] = deque()
        self._closed = False
        #: Events and streams that were made.
        self.events_made = self.streams_made = 0
        before = 0
        try:
            before = driver.ctxGetCurrent()
            with cuda.quiet:
                runtime.setDevice(ordinal)
                runtime.memGetInfo()  # makes the context, if nobody did yet
            self.handle: int = driver.ctxGetCurrent()
            self._events.extend(self._make_event() for _ in range(events))
        except cuda.errors as error:
            raise cuda.translated(error, f"CUDA device {ordinal} can't be used") from error
        finally:
            driver.ctxSetCurrent(before)

    def current(self) -> Current:
        """A context manager: within it, this GPU is the calling thread's; afterwards what was before."""
        return Current(self)

    def failed(self, error: Exception | int, what: str) -> DeviceError:
        """An error of CUDA's as ours; if nothing works after it, that is remembered."""
        found = self.cuda.translated(error, what)
        if not isinstance(found, DeviceError):
            return DeviceError(str(found))
        if sticky(error) and self.lost is None:
            self.lost = DeviceError(f"CUDA device {self.ordinal} is lost to this process: {found}")
            self.lost.__cause__ = found
            for callback in list(self._told):
                callback(self.lost)
        return found

    def on_lost(self, callback: Callable[[DeviceError], None]) -> Callable[[], None]:
        """See ``CudaDevice.on_lost``."""
        self._told[callback] = None
        return lambda: self._told.pop(callback, None)

    def check(self) -> None:
        """Raise DeviceError if nothing works on this device any more."""
        if self.lost is not None:
            raise DeviceError(str(self.lost)) from self.lost

    def event(self) -> int:
        """An event that nobody uses: one of the pool, or a new one."""
        try:
            return self._events.popleft()
        except IndexError:
            with self.current():
                return self._make_event()

    def give_event(self, handle: int) -> None:
        """An event is used no more. It may be pending: to record it again replaces what it stood for."""
        self._events.append(handle)
        if self._closed:
            self.close()

    def stream(self) -> int:
        """A stream with nothing on it: one of the pool, or a new one."""
        for _ in range(len(self._streams)):
            try:
                handle = self._streams.popleft()
            except IndexError:
                break
            with self.cuda.quiet:
                status = self.cuda.runtime.streamQuery(handle)
            if status == 0:
                return handle
            self._streams.append(handle)
        try:
            with self.current(), self.cuda.quiet:
                made: int = self.cuda.runtime.streamCreateWithFlags(_NON_BLOCKING)
        except self.cuda.errors as error:
            raise self.failed(error, "a stream can't be made") from error
        self.streams_made += 1
        return made

    def give_stream(self, handle: int) -> None:
        """A stream is used no more, once what is on it is done."""
        self._streams.append(handle)
        if self._closed:
            self.close()

    def close(self) -> None:
        """Destroy what is in the pools, and from now on what comes back to them."""
        self._closed = True
        runtime = self.cuda.runtime
        with contextlib.suppress(*self.cuda.errors), self.current():  # the device may be lost
            for pool, destroy in (
                (self._events, runtime.eventDestroy),
                (self._streams, runtime.streamDestroy),
            ):
                while pool:
                    # Another thread may have taken the last.
                    with contextlib.suppress(IndexError, *self.cuda.errors):
                        destroy(pool.popleft())

    def _make_event(self) -> int:
        try:
            with self.cuda.quiet:
                made: int = self.cuda.runtime.eventCreateWithFlags(_WITHOUT_TIMING)
        except self.cuda.errors as error:
            raise self.failed(error, "an event can't be made") from error
        self.events_made += 1
        return made


class Current:
    """Makes a GPU's context the calling thread's own, and puts back what was there.

    Whatever allocates, enqueues or records is within it, also where CUDA would take it from any thread:
    in one that has no context, the runtime makes one on the first GPU first. Queries are not, which are
    made most often, and by threads that enqueued something.

    By the context and not by ``cudaSetDevice``, which would make a context on the device that it goes
    back to, where there was none: some hundred megabytes of that GPU's memory.
    """

    __slots__ = ("_before", "_context")

    def __init__(self, context: CudaContext) -> None:
        self._context = context
        self._before = 0

    def __enter__(self) -> None:
        driver = self._context.cuda.driver
        self._before = driver.ctxGetCurrent()
        if self._before != self._context.handle:
            driver.ctxSetCurrent(self._context.handle)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before != self._context.handle:
            self._context.cuda.driver.ctxSetCurrent(self._before)


class CudaEvent:
    """A point in a stream. Its CUDA event goes back to the pool with it."""

    __slots__ = ("_context", "_done", "handle")

    def __init__(self, context: CudaContext, handle: int) -> None:
        self._context = context
        self._done = False
        #: cudaEvent_t, for as long as this object lives.
        self.handle = handle

    def __repr__(self) -> str:
        return f"<CudaEvent {self.handle:#x}{' done' if self._done else ''}>"

    def __del__(self) -> None:
        self._context.give_event(self.handle)

    def done(self) -> bool:
        """Whether everything enqueued before it has completed. From any thread.

        Raises:
            DeviceError: The device failed.
        """
        if self._done:
            return True
        cuda = self._context.cuda
        with cuda.quiet:
            status: int = cuda.runtime.eventQuery(self.handle)
        if status == 0:
            self._done = True
            return True
        if pending(status):
            return False
        if status == _CAPTURED:
            raise DeviceError(
                "the event was recorded while a CUDA graph was captured: it is a part of that graph"
            )
        raise self._context.failed(status, "what was enqueued before an event failed")


class CudaStream:
    """A stream: one of this device's own, or the caller's, which is only borrowed.

    Args:
        context: The GPU.
        handle: cudaStream_t.
        own: It belongs to this object, and nothing is on it.
        kept: What keeps a borrowed one alive.

    Attributes:
        ptr: The handle, for whoever enqueues nothing that this object isn't told of; by cupy's name for it.
    """

    __slots__ = ("_context", "_kept", "_own", "_private", "_waits", "companion", "gate", "ptr")

    def __init__(self, context: CudaContext, handle: int, *, own: bool, kept: object = None) -> None:
        self._context = context
        self._kept = kept
        self._own = own
        #: All that is on it was enqueued through this object.
        self._private = own
        self.ptr = handle
        #: Events that it was told to wait for and that were not yet seen done.
        self._waits: list[Event] = []
        #: For the copy engine: the kind of copies that were enqueued last.
        self.gate: object = None
        #: For the copy engine: the stream that runs ahead of this one.
        self.companion: CudaStream | None = None

    def __repr__(self) -> str:
        return f"<CudaStream {self.ptr:#x} of device {self._context.ordinal}>"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CudaStream):
            return NotImplemented
        return self.ptr == other.ptr and self._context is other._context

    def __hash__(self) -> int:
        return hash(self.ptr)

    def __del__(self) -> None:
        if self._own:
            self._context.give_stream(self.ptr)

    @property
    def handle(self) -> int:
        """cudaStream_t, to enqueue on. From now on this object doesn't know what is there."""
        self._private = False
        self.gate = None
        return self.ptr

    def __cuda_stream__(self) -> tuple[int, int]:
        """Version of the protocol, and the handle."""
        return 0, self.handle

    @property
    def ordinal(self) -> int:
        """Number of the device that it belongs to."""
        return self._context.ordinal

    @property
    def held(self) -> bool:
        """Whether it may be waiting for something that others enqueued; True where nobody knows."""
        if not self._private:
            return True
        while self._waits:
            if not self._waits[-1].done():
                return True
            self._waits.pop()
        return False

    def record(self) -> CudaEvent:
        """Mark the point after all that has been enqueued so far. From any thread.

        Raises:
            DeviceError: The device failed.
        """
        context = self._context
        context.check()
        event = CudaEvent(context, context.event())
        try:
            with context.current():
                context.cuda.runtime.eventRecord(event.handle, self.ptr)
        except context.cuda.errors as error:
            raise context.failed(error, f"an event can't be recorded on {self!r}") from error
        return event

    def wait(self, event: Event) -> None:
        """What is enqueued from now on runs after ``event``, which may be of another GPU.

        Raises:
            DeviceError: The event, or the device, failed; or it is of no GPU and not done.
        """
        if event.done():
            return
        if not isinstance(event, CudaEvent):
            raise DeviceError(f"a CUDA stream can't wait for {event!r} before it is done; await it first")
        self.follow(event)
        self.gate = None
        if self._private:
            if len(self._waits) >= _MOST_WAITS:
                self._waits = [earlier for earlier in self._waits if not earlier.done()]
            self._waits.append(event)

    def follow(self, event: CudaEvent) -> None:
        """Wait for an event that comes by itself: nobody has to enqueue anything for it any more.

        Raises:
            DeviceError: The device failed.
        """
        context = self._context
        context.check()
        try:
            with context.current():
                context.cuda.runtime.streamWaitEvent(self.ptr, event.handle)
        except context.cuda.errors as error:
            raise context.failed(error, f"{self!r} can't wait for an event") from error


def adopted(context: CudaContext, stream: object | None) -> CudaStream:
    """The caller's stream; see ``CudaDevice.adopt``.

    Raises:
        TypeError: It is no stream.
        DeviceError: It is one of another device, or names no stream outside its thread.
    """
    if isinstance(stream, CudaStream):
        if stream.ordinal != context.ordinal:
            raise DeviceError(f"{stream!r} is not of device {context.ordinal}")
        return stream
    if stream is None:
        stream = context.cuda.torch.cuda.current_stream(context.ordinal)
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is None:
        raise TypeError(f"{stream!r} has no __cuda_stream__")
    _, handle = protocol()
    if handle == _PER_THREAD:
        raise DeviceError("the per-thread default stream is another one in each thread; make a stream")
    _check_device(context, stream, handle)
    return CudaStream(context, handle, own=False, kept=stream)


def _check_device(context: CudaContext, stream: object, handle: int) -> None:
    number = getattr(stream, "device_index", None)
    if number is None:
        number = getattr(stream, "device_id", None)
    if isinstance(number, int) and number not in (-1, context.ordinal):
        raise DeviceError(f"{stream!r} is a stream of device {number}, the cache is on {context.ordinal}")
    if handle in (_NULL, _LEGACY):
        return
    try:
        of = context.cuda.driver.streamGetCtx(handle)
    except context.cuda.errors as error:
        raise context.failed(error, f"{stream!r} is no stream") from error
    if of != context.handle:
        raise DeviceError(f"{stream!r} is a stream of another device than {context.ordinal}, the cache's")
