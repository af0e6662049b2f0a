"""How many requests are worked on at once, and how many wait for that; first come, first served."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

from aiokv.router.faults import Fault, busy

__all__ = ["Admission"]


class Admission:
    """A bounded number of places, and a bounded queue for them. For the tasks of one loop.

    Args:
        places: Requests at once.
        queue: Requests that wait.

    Attributes:
        inside: Requests that have a place.
    """

    def __init__(self, places: int, queue: int) -> None:
        self._places, self._most_waiting = places, queue
        self._queue: deque[asyncio.Future[None]] = deque()
        self.inside = self._arriving = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def waiting(self) -> int:
        """Requests that wait for a place."""
        return len(self._queue)

    @contextmanager
    def arrive(self) -> Iterator[None]:
        """Read a request within this: no more arrive at once than may be inside and wait.

        Raises:
            Fault: So many do.
        """
        if self._arriving >= self._places + self._most_waiting:
            raise busy(f"{self._arriving} requests are on their way here, which is the most")
        self._arriving += 1
        try:
            yield
        finally:
            self._arriving -= 1

    @asynccontextmanager
    async def enter(self, until: float) -> AsyncIterator[None]:
        """Wait for a place, and have it until the context is left.

        Args:
            until: The loop's time until which it waits.

        Raises:
            Fault: The queue is full, or the time was over.
        """
        if self.inside >= self._places:
            await self._wait(until)
        else:
            self.inside += 1
            self._idle.clear()
        try:
            yield
        finally:
            self._leave()

    async def _wait(self, until: float) -> None:
        if len(self._queue) >= self._most_waiting:
            raise busy(f"{self.inside} requests are answered and {len(self._queue)} wait, which is the most")
        turn = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        try:
            async with asyncio.timeout_at(until):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self._leave()  # it was given a place in the same turn
            else:
                with suppress(ValueError):  # whoever left may have found it cancelled
                    self._queue.remove(turn)
            if isinstance(error, TimeoutError):
                raise Fault(504, "the request waited for its turn until its deadline", "deadline") from None
            raise

    def _leave(self) -> None:
        """Hand the place to whoever waits for longest."""
        while self._queue:
            turn = self._queue.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self.inside -= 1
        if not self.inside:
            self._idle.set()

    async def wait_idle(self) -> None:
        """Until nobody is inside."""
        await self._idle.wait()
