"""Makes the pool's segments one after another, while the first are in use."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from aiokv.errors import AiokvError
from aiokv.offload.segments import Segments

__all__ = ["Growth"]

_log = logging.getLogger("aiokv")


class Growth:
    """Belongs to a tier that is open.

    Args:
        pool: The pool, with its first segment.
        more: Told how many places there are more.
        before: What made segments before, and may still be at it; this begins when it is over.
    """

    def __init__(self, pool: Segments, more: Callable[[int], None], *, before: Growth | None = None) -> None:
        self._pool = pool
        self._more = more
        #: Why the pool stays smaller than it was to be; None while it doesn't.
        self._shortfall: AiokvError | None = None
        self._stopping = False
        self._before = before
        self._task = asyncio.get_running_loop().create_task(self._grow())

    async def wait(self) -> None:
        """Wait until it is over.

        Raises:
            CapacityError: There isn't so much memory.
        """
        await asyncio.wait([self._task])
        if self._shortfall is not None:
            raise self._shortfall

    async def stop(self) -> None:
        """Make no more segments than the one that is being made; nothing of it is left then."""
        self._stopping = True
        await asyncio.wait([self._task])

    async def _grow(self) -> None:
        if self._before is not None:
            await self._before.stop()
            self._before = None
        try:
            while not self._stopping and (segment := await self._pool.grow()) is not None:
                self._more(segment.places)
        except AiokvError as error:
            self._shortfall = error
            _log.warning("a host tier has %d of %d places: %s", len(self._pool), self._pool.places, error)
