"""A bell: wakes everybody who waits, and carries nothing."""

from __future__ import annotations

import asyncio

__all__ = ["Bell"]


class Bell:
    """Wakes all tasks that wait for it.

    What it announces stands in a table, which each waiter reads when it wakes: a value handed
    over in a future is lost when its waiter is cancelled in the same turn. Each waiter has a
    future of its own, so that cancelling one leaves the others waiting.
    """

    __slots__ = ("_waiters",)

    def __init__(self) -> None:
        self._waiters: dict[asyncio.Future[None], None] = {}

    async def wait(self) -> None:
        """Wait until the bell is rung next."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = None
        try:
            await waiter
        finally:
            self._waiters.pop(waiter, None)

    def ring(self) -> None:
        """Wake everybody who waits now, in the order in which they came."""
        waiters, self._waiters = self._waiters, {}
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
