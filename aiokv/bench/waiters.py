"""Ways to wait for device events on an event loop: aiokv's poller, and what it is compared with."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

from aiokv.device.base import Event
from aiokv.device.poller import CompletionPoller

__all__ = ["Polling", "Waiter", "waiters"]


class Waiter(Protocol):
    """Tells when events are done."""

    def wait(self, event: Event, stream: object, *, expected_ns: int = 0) -> asyncio.Future[None]:
        """A future that is resolved when ``event`` is done, which was recorded on ``stream``."""

    def close(self) -> None:
        """Wait for nothing more."""


class Polling:
    """One task looks at the oldest event of each stream, again and again, and sleeps in between.

    That is the usual loop at its best: a coroutine for each event, as most code has it, would look at all of
    them each time.

    Args:
        interval: Seconds of ``asyncio.sleep``; 0 lets the loop's other callbacks run, and spins.
    """

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._streams: dict[object, deque[tuple[Event, asyncio.Future[None]]]] = {}
        self._task: asyncio.Task[None] | None = None

    def wait(self, event: Event, stream: object, *, expected_ns: int = 0) -> asyncio.Future[None]:
        """A future that is resolved when ``event`` is done; what is expected is not used."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self._streams.setdefault(stream, deque()).append((event, future))
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._run())
        return future

    async def _run(self) -> None:
        while self._streams:
            for stream, waiting in tuple(self._streams.items()):
                while waiting and waiting[0][0].done():
                    future = waiting.popleft()[1]
                    if not future.done():
                        future.set_result(None)
                if not waiting:
                    del self._streams[stream]
            await asyncio.sleep(self._interval)

    def close(self) -> None:
        """Stop looking."""
        if self._task is not None:
            self._task.cancel()


def waiters() -> dict[str, Waiter]:
    """One of each, on the running loop."""
    return {
        "aiokv": CompletionPoller(asyncio.get_running_loop()),
        "sleep(0)": Polling(0),
        "sleep(1 ms)": Polling(1e-3),
    }
