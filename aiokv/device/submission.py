"""Copies of many chunks, submitted a slice of the loop's time in each turn: loads before stores.

What is submitted can't be taken back, and submitting takes time of the event loop. So a long copy is
submitted for the device's budget in one turn and goes on in the next, and in each turn what somebody
waits for (loads) goes before what nobody does (stores).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from aiokv.device.base import Buffer, Device, Event, Stream
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
    ) -> None:
        self._plan = plan
        self._chunks = chunks
        self._src, self._dst = src, dst
        self._stream = stream
        self._bell = asyncio.Event()
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

    def step(self, device: Device) -> bool:
        """Submit one chunk; whether there may be more. Called by ``Submissions``."""
        if self.over:
            return False
        chunk = next(self._chunks, None)
        if chunk is None:
            self._end(None)
            return False
        try:
            device.copy(self._plan, chunk, self._src, self._dst, stream=self._stream)
        except AiokvError as error:
            self._end(error)
            return False
        except Exception as error:  # noqa: BLE001 - a mistake in one copy stops no other
            failure = DeviceError(f"{chunk} could not be submitted: {error!r}")
            failure.__cause__ = error
            self._end(failure)
            return False
        self.nbytes += chunk.nbytes
        return True

    def close(self) -> None:
        """End it because the whole is closed. Called by ``Submissions``."""
        self._end(ClosedError("closed before all copies were submitted"))

    def _end(self, error: AiokvError | None) -> None:
        if self.over:
            return
        self.error = error
        try:
            self.event = self._stream.record()
        except AiokvError as failure:
            self.error = error or failure
        self._bell.set()


class Submissions:
    """Submits copies to one device. Belongs to its loop's thread, makes no task and never blocks.

    Args:
        device: What copies.
        loop: Whose turns are used.
        clock: The time (ns).
    """

    def __init__(
        self,
        device: Device,
        loop: asyncio.AbstractEventLoop,
        *,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._device = device
        self._loop = loop
        self._clock = clock
        self._loads: deque[Submission] = deque()
        self._stores: deque[Submission] = deque()
        self._turn: asyncio.Handle | None = None

    def __len__(self) -> int:
        """Copies of which something is still to be submitted."""
        return len(self._loads) + len(self._stores)

    def add(
        self,
        plan: CopyPlan,
        chunks: Iterable[Chunk],
        src: Sequence[Buffer],
        dst: Sequence[Buffer],
        *,
        stream: Stream,
        urgent: bool,
    ) -> Submission:
        """Have chunks submitted, from the next turn of the loop on.

        Args:
            plan: The plan.
            chunks: Of the plan; taken one at a time, as they are submitted.
            src: The source's buffers.
            dst: The destination's.
            stream: What orders them.
            urgent: Somebody waits for it (a load): it goes before all that is not.
        """
        made = Submission(plan, iter(chunks), src, dst, stream)
        (self._loads if urgent else self._stores).append(made)
        self._schedule()
        return made

    def close(self) -> None:
        """Submit nothing more; whoever waits gets ClosedError. May be called twice."""
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None
        for queue in (self._loads, self._stores):
            while queue:
                queue.popleft().close()

    def _schedule(self) -> None:
        if self._turn is None and (self._loads or self._stores):
            self._turn = self._loop.call_soon(self._submit)

    def _submit(self) -> None:
        self._turn = None
        until = self._clock() + int(self._device.budget_s * 1e9)
        while queue := self._loads or self._stores:
            if not queue[0].step(self._device):
                queue.popleft()
            if self._clock() >= until:
                break
        self._schedule()
