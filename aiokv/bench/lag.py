"""How late an event loop comes to what is due: a timer that fires each millisecond, and what it finds."""

from __future__ import annotations

import asyncio
import time

from aiokv.device.timer import MicroTimer

__all__ = ["Ticker"]

_PERIOD_NS = 1_000_000


class Ticker:
    """Fires each millisecond on the running loop, from ``start`` to ``stop``."""

    def __init__(self) -> None:
        self._timer = MicroTimer(asyncio.get_running_loop(), self._on_timer)
        self._due = 0
        self._found: list[int] = []

    def start(self) -> None:
        """Begin anew."""
        self._found = []
        self._arm()

    def stop(self) -> list[int]:
        """How late the loop was, in nanoseconds, sorted: once for each millisecond.

        A loop that was held for 5 ms was late for five of them, by 5, 4, 3, 2 and 1 ms, though the timer
        fired once: else the longest holds would count the least.
        """
        late = time.monotonic_ns() - self._due
        if late > 0:
            self._note(late)
        self._timer.disarm()
        return sorted(self._found)

    def close(self) -> None:
        """Give the timer back."""
        self._timer.close()

    def _arm(self) -> None:
        self._due = time.monotonic_ns() + _PERIOD_NS
        self._timer.arm(_PERIOD_NS)

    def _on_timer(self) -> None:
        self._note(max(0, time.monotonic_ns() - self._due))
        self._arm()

    def _note(self, late: int) -> None:
        self._found.append(late)
        while late > _PERIOD_NS:
            late -= _PERIOD_NS
            self._found.append(late)
