"""What callers of a tier wait in: until their copies are over, or they have had enough.

A caller that leaves takes what only it waited for with it; it leaves once that is quiet. Copies go on, and
give back what they hold, whether or not anybody waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial

from aiokv.errors import AiokvError
from aiokv.offload.batch import Batch
from aiokv.offload.begun import BegunSteps
from aiokv.offload.calls import Stored, Wanted
from aiokv.offload.progress import Progress

__all__ = ["Followers"]


class Followers:
    """The callers of one tier.

    Args:
        clock: The time (ns).
        drain_s: How long to wait for quiet at most.
        retries: How often to store again what failed.
        ratios: Blocks of each group in one of the tier.
        stop: Begins and submits nothing more of a batch.
        store: Begins a store.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], int],
        drain_s: float,
        retries: int,
        ratios: Sequence[int],
        stop: Callable[[Batch], None],
        store: Callable[[Stored, Wanted], Progress],
    ) -> None:
        self._clock = clock
        self._drain_s = drain_s
        self._retries = retries
        self._ratios = ratios
        self._stop = stop
        self._store = store

    async def over(self, progress: Progress, until: int | None) -> int:
        """Wait until a call's copies are over; how much of the prefix is there."""
        try:
            if until is None:
                await progress.over()
            else:
                async with asyncio.timeout(self._left(until)):
                    await progress.over()
        except TimeoutError:
            pass
        finally:
            await self._leave(progress)
        return progress.count

    def steps(self, progress: Progress, until: int | None) -> AsyncGenerator[int, None]:
        """Each time that more of the prefix is there: how much."""
        return BegunSteps(self._steps(progress, until), partial(self._leave, progress))

    async def _steps(self, progress: Progress, until: int | None) -> AsyncGenerator[int, None]:
        seen = 0
        try:
            while True:
                async with asyncio.timeout(self._left(until)):
                    count = await progress.more(seen)
                if count <= seen:
                    break
                seen = count
                yield count
        except TimeoutError:
            pass
        finally:
            await self._leave(progress)

    async def kept(self, progress: Progress, call: Stored, wanted: Wanted, until: int | None) -> int:
        """Wait for a store, and store again what failed; how much of the prefix is kept."""
        total = 0
        for left in range(self._retries, -1, -1):
            kept = await self.over(progress, until)
            late = until is not None and self._clock() >= until
            if progress.stale:
                return 0
            total += kept
            if not left or late or not progress.failed or kept >= progress.wanted:
                break
            call, wanted = call.rest(kept), wanted.rest(kept, self._ratios)
            try:
                progress = self._store(call, wanted)
            except AiokvError:  # the blocks are somebody else's by now, or the tier is closed
                break
        return total

    async def drained(self, batches: Sequence[Batch]) -> asyncio.CancelledError | None:
        """Wait until batches are over, for the drain bound at most; cancelled meanwhile, it says so."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._drain_s
        cancelled: asyncio.CancelledError | None = None
        for batch in batches:
            while not batch.ended and loop.time() < until:
                try:
                    async with asyncio.timeout_at(until):
                        await batch.bell.wait()
                except TimeoutError:
                    break
                except asyncio.CancelledError as error:
                    cancelled = error
        return cancelled

    async def _leave(self, progress: Progress) -> None:
        """Wait no longer for copies, but until they can't touch the caller's blocks any more."""
        alone = progress.leave()
        for batch in alone:
            if not batch.ended:
                self._stop(batch)
        # What others have joined goes on; but while it does, it touches this caller's blocks.
        left = [batch for batch in (*progress.own, *alone) if not batch.ended]
        if left and (cancelled := await self.drained(left)) is not None:
            raise cancelled

    def _left(self, until: int | None) -> float | None:
        return None if until is None else max(0.0, (until - self._clock()) / 1e9)
