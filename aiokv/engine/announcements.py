"""Layers that the model said are written: from its thread to the loop, once their streams got there."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from aiokv.device.base import Device, Event, Stream
from aiokv.device.poller import CompletionPoller
from aiokv.engine.course import Course
from aiokv.errors import DeviceError

__all__ = ["Announcements"]


class Announcements:
    """Layers said to be ready that are not known to be. Belongs to its loop's thread, but for ``add``.

    Args:
        loop: Its loop.
        device: What the streams belong to.
        poller: Turns events into calls.
        ready: Called on the loop for an offer, with the layers (a bit mask) that are written now.
        failed: Called on the loop for an offer with a layer that will never be written.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        device: Device,
        poller: CompletionPoller,
        *,
        ready: Callable[[Course, int], None],
        failed: Callable[[Course, DeviceError], None],
    ) -> None:
        self._loop = loop
        self._device = device
        self._poller = poller
        self._ready = ready
        self._failed = failed
        self._added: deque[tuple[Course, int, Stream, Event]] = deque()
        #: The loop was asked to look.
        self._woke = False
        self._closed = False

    def __len__(self) -> int:
        """Layers that the loop has not looked at yet."""
        return len(self._added)

    def add(self, course: Course, layer: int, stream: object | None) -> None:
        """From any thread: note a layer, and wake the loop once for all that are noted by then.

        Args:
            course: The offer whose layer it is.
            layer: Model-wide index of the layer.
            stream: What writes it; the calling thread's current stream if None.

        Raises:
            DeviceError: The stream belongs to another device.
        """
        adopted = self._device.adopt(stream)
        self._added.append((course, layer, adopted, adopted.record()))
        if not self._woke:
            self._woke = True
            try:
                self._loop.call_soon_threadsafe(self._look)
            except RuntimeError:  # the loop is closed, and the transfer with it
                return

    def close(self) -> None:
        """Nothing is called any more."""
        self._closed = True

    def _look(self) -> None:
        # The flag falls first: what is noted after this line wakes the loop again.
        self._woke = False
        ready: dict[Course, int] = {}
        while self._added:
            course, layer, stream, event = self._added.popleft()
            if self._closed or course.over:
                continue
            try:
                done = event.done()
            except DeviceError as error:
                self._failed(course, error)
                continue
            if done:
                ready[course] = ready.get(course, 0) | 1 << layer
            else:
                self._watch(course, layer, stream, event)
        for course, mask in ready.items():
            self._ready(course, mask)

    def _watch(self, course: Course, layer: int, stream: Stream, event: Event) -> None:
        def done(error: DeviceError | None) -> None:
            if error is not None:
                self._failed(course, error)
            else:
                self._ready(course, 1 << layer)

        self._poller.watch(event, stream, done)
