"""A time-out that a process which stood still holds against nobody."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Set
from typing import Any

__all__ = ["Patience", "ended_within"]

_log = logging.getLogger(__name__)


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


async def ended_within(seconds: float, threads: Set[asyncio.Future[Any]], what: str) -> bool:
    """Wait until these threads, and those that are added meanwhile, have ended, but no longer than this.

    A call of a driver may never return. Then its thread is left alone with it, and with the memory it is for.

    Args:
        seconds: So long.
        threads: Futures of their ends, whose owner takes those out that are done.
        what: What they do, for the log.

    Returns:
        Whether they have.
    """
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    while pending := {each for each in threads if not each.done()}:
        _, pending = await asyncio.wait(pending, timeout=max(0.0, until - loop.time()))
        if pending and loop.time() >= until:
            _log.warning("%s: %d calls don't return; they are left to their threads", what, len(pending))
            return False
        await asyncio.sleep(0)  # for what their ends begin
    return True
