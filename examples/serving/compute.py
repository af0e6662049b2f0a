"""Where the model runs: a worker thread, one forward at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

__all__ = ["Compute"]

Result = TypeVar("Result")


class Compute:
    """Runs the model for the tasks of one event loop, first come, first served."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def run(self, function: Callable[..., Result], *args: object) -> Result:
        """``function(*args)`` in a worker thread, when its turn has come.

        A thread can't be called back. When the caller is cancelled, this ends only once the
        thread has, since until then it writes into the request's blocks.
        """
        async with self._turn:
            thread = asyncio.ensure_future(asyncio.to_thread(function, *args))
            cancelled: asyncio.CancelledError | None = None
            while not thread.done():
                try:
                    await asyncio.wait([thread])
                except asyncio.CancelledError as error:
                    cancelled = error
            if cancelled is not None:
                raise cancelled
            return thread.result()
