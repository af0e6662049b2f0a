"""A time-out that a process which stood still holds against nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["Patience"]


class Patience:
    """Calls back once, when so much time has passed; time in which this process stood still doesn't count.

    Args:
        seconds: So much.
        over: What to call.
    """

    def __init__(self, seconds: float, over: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._seconds = seconds
        self._over = over
        self._timer = self._begin()

    def _begin(self) -> asyncio.TimerHandle:
        due = self._loop.time() + self._seconds
        return self._loop.call_at(due, self._look, due)

    def _look(self, due: float) -> None:
        if self._loop.time() > due + self._seconds / 3:
            self._timer = self._begin()
        else:
            self._over()

    def cancel(self) -> None:
        """Don't call."""
        self._timer.cancel()
