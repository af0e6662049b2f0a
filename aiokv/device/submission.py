"""Copies of many chunks, submitted a slice of the loop's time in each turn: loads before stores.

What is submitted can't be taken back, and submitting takes time of the event loop. So a long copy is
submitted for the device's budget in one turn and goes on in the next, and in each turn what somebody
waits for (loads) goes before what nobody does (stores). Where a window is given, no more bytes of a
kind are in flight, so that what is urgent, or given up, doesn't come after all that was asked for before.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush

from aiokv.device.base import Buffer, Device, Event, Stream
from aiokv.device.poller import CompletionPoller
from aiokv.errors import AiokvError, ClosedError, DeviceError
from aiokv.proto.plan import Chunk, CopyPlan

__all__ = ["Submission", "Submissions"]


class Submission:
    """Chunks of one plan on their way to the device. Made by ``Submissions.add``."""

    def __init__(
        self,
        plan: CopyPlan,
        chunks: Iterator[Chunk],
        src: Sequence[Buffer],
        dst: Sequence[Buffer],
        stream: Stream,
        *,
        urgent: bool,
        after: Event | None,
        then: Callable[[Submission], None] | None,
    ) -> None:
        self._plan = plan
        self._chunks = chunks
        self._chunk: Chunk | None = next(chunks, None)
        self._src, self._dst = src, dst
        self._then = then
        self._bell = asyncio.Event()
        self._last: Event | None = None
        self.stream = stream
        self.urgent = urgent
        #: What the stream waits for, which isn't of our doing; None if nothing.
        self.after = after
        #: Covers all that was submitted; None until nothing more will be.
        self.event: Event | None = None
        #: Why it ended early; None while it didn't.
        self.error: AiokvError | None = None
        #: Bytes submitted so far.
        self.nbytes = 0

    @property
    def over(self) -> bool:
        """Whether nothing more will be submitted."""
        return self._bell.is_set()

    @property
    def held_up(self) -> bool:
        """Whether what is submitted waits for what is not of our doing."""
        if self.after is None:
            return False
        try:
            if not self.after.done():
                return True
        except DeviceError:  # its own event tells
            pass
        self.after = None
        return False

    def cancel(self) -> None:
        """Submit nothing more. What was submitted is in flight until ``event`` is done."""
        self._end(None)

    async def submitted(self) -> Event:
        """Wait until nothing more will be submitted.

        Returns:
            An event that covers all that was: only after it are the buffers the caller's again.

        Raises:
            DeviceError: A chunk could not be submitted; ``event`` covers those before it.
            ClosedError: It was closed before all was submitted; the same.
        """
        await self._bell.wait()
        if self.error is not None:
            raise self.error
        if self.event is None:
            raise DeviceError("nothing tells when the copies are over")
        return self.event

    def step(self, device: Device) -> tuple[Event, int] | None:
        """Submit one chunk; the point behind it, and its bytes. Called by ``Submissions``."""
        chunk = self._chunk
        if self.over or chunk is None:
            self._end(None)
            return None
        try:
            device.copy(self._plan, chunk, self._src, self._dst, stream=self.stream)
            self._last = self.stream.record()
        except AiokvError as error:
            self._last = None  # a part may have been enqueued
            self._end(error)
            return None
        except Exception as error:  # noqa: BLE001 - a mistake in one copy stops no other
            failure = DeviceError(f"{chunk} could not be submitted: {error!r}")
            failure.__cause__ = error
            self._last = None
            self._end(failure)
            return None
        self.nbytes += chunk.nbytes
        self._chunk = next(self._chunks, None)
        made = self._last, chunk.nbytes
        if self._chunk is None:
            self._end(None)
        return made

    def close(self) -> None:
        """End it because the whole is closed. Called by ``Submissions``."""
        self._end(ClosedError("closed before all copies were submitted"))

    def _end(self, error: AiokvError | None) -> None:
        if self.over:
            return
        self.error = error
        try:
            self.event = self._last or self.stream.record()
        except AiokvError as failure:
            self.error = error or failure
        self._bell.set()
        if self._then is not None:
            self._then(self)


class Submissions:
    """Submits copies to one device. Belongs to its loop's thread, makes no task and never blocks.

    Args:
        device: What copies.
        loop: Whose turns are used.
        poller: Tells when copies are over, where there is a window.
        window_bytes: How much may be in flight of what is urgent, and as much of what is not; None: no limit.
            What waits for a stream of the caller's doesn't count.
        rate: Bytes a nanosecond that copies are expected to go at, for the poller; 0: nobody knows.
        clock: The time (ns).
    """

    def __init__(
        self,
        device: Device,
        loop: asyncio.AbstractEventLoop,
        *,
        poller: CompletionPoller | None = None,
        window_bytes: int | None = None,
        rate: float = 0.0,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._device = device
        self._loop = loop
        self._poller = poller
        self._window = window_bytes if poller is not None else None
        self._rate = rate
        self._clock = clock
        #: By whether they are urgent: those with something to submit, the first to be served first.
        self._queues: dict[bool, list[tuple[int, int, Submission]]] = {True: [], False: []}
        self._in_flight = {True: 0, False: 0}
        self._made = 0
        self._turn: asyncio.Handle | None = None
        self._submitting = False

    def __len__(self) -> int:
        """Copies of which something is still to be submitted."""
        return self.queued(urgent=True) + self.queued(urgent=False)

    def queued(self, *, urgent: bool) -> int:
        """Those of one kind."""
        return sum(not submission.over for _, _, submission in self._queues[urgent])

    def in_flight(self, *, urgent: bool) -> int:
        """Bytes of one kind that were submitted and are not over, as they count in the window."""
        return self._in_flight[urgent]

    def add(
        self,
        plan: CopyPlan,
        chunks: Iterable[Chunk],
        src: Sequence[Buffer],
        dst: Sequence[Buffer],
        *,
        stream: Stream,
        urgent: bool,
        priority: int = 0,
        after: Event | None = None,
        then: Callable[[Submission], None] | None = None,
    ) -> Submission:
        """Have chunks submitted: on a GPU at once while the window has room, else in later turns of the loop.

        ``then`` may be called before this returns.

        Args:
            plan: The plan.
            chunks: Of the plan; taken one at a time, as they are submitted.
            src: The source's buffers.
            dst: The destination's.
            stream: What orders them.
            urgent: Somebody waits for it (a load): it goes before all that is not.
            priority: Of those alike the higher goes first, and then the one that came first.
            after: What the stream was made to wait for.
            then: Called once, when nothing more will be submitted.
        """
        made = Submission(plan, iter(chunks), src, dst, stream, urgent=urgent, after=after, then=then)
        self._made += 1
        heappush(self._queues[urgent], (-priority, self._made, made))
        # Others that run in this turn, perhaps for the same bytes or with more to copy, go on beside the
        # copies, and the device doesn't wait until they are through. The host would copy first.
        bounded = self._window is not None and not made.held_up
        if self._device.kind != "host" and not self._submitting and (bounded or (urgent and not self._turn)):
            self._submit()
        else:
            self._schedule()
        return made

    def go_on(self) -> None:
        """Submit what there is room for now, and not in a later turn: others hold the loop in this one."""
        if self._turn is not None and not self._submitting and self._device.kind != "host":
            self._submit()

    def promote(self, submission: Submission) -> None:
        """Somebody waits for it now."""
        if submission.urgent or submission.over:
            return
        calm = self._queues[False]
        for entry in calm:
            if entry[2] is submission:
                calm.remove(entry)
                heapify(calm)
                submission.urgent = True
                heappush(self._queues[True], entry)
                self._schedule()
                return

    def close(self) -> None:
        """Submit nothing more; whoever waits gets ClosedError. May be called twice."""
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None
        for queue in self._queues.values():
            while queue:
                heappop(queue)[2].close()

    def _schedule(self) -> None:
        if self._turn is None and not self._submitting and self._first() is not None:
            self._turn = self._loop.call_soon(self._submit)

    def _first(self) -> Submission | None:
        """The next to be served; None while there is none, or the window is full."""
        for urgent, queue in self._queues.items():
            while queue and queue[0][2].over:
                heappop(queue)
            if queue and (self._window is None or self._in_flight[urgent] < self._window):
                return queue[0][2]
        return None

    def _submit(self) -> None:
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None
        self._submitting = True
        try:
            until = self._clock() + int(self._device.budget_s * 1e9)
            while (submission := self._first()) is not None:
                made = submission.step(self._device)
                if made is not None:
                    self._count(submission, *made)
                if self._clock() >= until:
                    break
        finally:
            self._submitting = False
        self._schedule()

    def _count(self, submission: Submission, event: Event, nbytes: int) -> None:
        """So many bytes are in flight until ``event``."""
        poller, urgent = self._poller, submission.urgent
        if poller is None or self._window is None or submission.held_up:
            return
        try:
            if event.done():
                return
        except DeviceError:  # whoever watches the whole hears of it
            return

        def over(_: AiokvError | None) -> None:
            self._in_flight[urgent] -= nbytes
            self._schedule()

        self._in_flight[urgent] += nbytes
        try:
            expected = int(nbytes / self._rate) if self._rate else 0
            poller.watch(event, submission.stream, over, expected_ns=expected)
        except ClosedError:
            self._in_flight[urgent] -= nbytes
