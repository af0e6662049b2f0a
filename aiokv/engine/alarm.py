"""The timer of an engine: comes no earlier than it is needed, and knows when it came late."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiokv.engine.histogram import Histogram

__all__ = ["Alarm"]

#: A timer that comes this late may have kept input waiting; that is read before any verdict.
_LATE_NS = 20_000_000
#: How long the input then gets to be read.
_READ_INPUT_NS = 5_000_000


class Alarm:
    """One timer, set anew at the end of each turn. Nothing is scheduled while nothing is due.

    Args:
        loop: The loop to call back on.
        clock: The time (ns).
        patience_ns: Lateness beyond which this side's own standing still explains what it did not hear.
        late: Called, before anything else, when the timer came later than that.
        due: Called when the time has come, with what it is now (ns), and once the input was read.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], int],
        *,
        patience_ns: int,
        late: Callable[[int], None],
        due: Callable[[int], None],
    ) -> None:
        self._loop = loop
        self._clock = clock
        self._patience_ns = patience_ns
        self._late = late
        self._due = due
        #: None while nothing is due.
        self._timer: asyncio.TimerHandle | None = None
        #: What the timer is set for (ns).
        self._at = 0
        #: Until when input is read after a timer that came late; 0 where none did (ns).
        self._reading_until = 0
        #: How late it came at worst (ns), and each time.
        self.lag = 0
        self.lags = Histogram()

    def set(self, wanted: int | None) -> None:
        """Call ``due`` at ``wanted`` (ns), and not when it was set for before; None: not at all."""
        now = self._clock()
        if self._timer is not None:
            if wanted is not None and (wanted == self._at or self._at <= now):
                return  # it is set for then, or due already and sees to all that is
            self.cancel()
        if wanted is not None:
            # 0 is as soon as possible: due now, and not late.
            self._at = wanted or now
            # Rounded up to whole milliseconds: a timer that fires early would only be set again.
            delay = max(0, -(-(self._at - now) // 1_000_000)) / 1000
            self._timer = self._loop.call_later(delay, self._on_timer)

    def cancel(self) -> None:
        """Nothing is due any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer, self._reading_until = None, 0

    def _on_timer(self) -> None:
        now, first = self._clock(), not self._reading_until
        lateness, self._timer = now - (self._reading_until or self._at), None
        self.lag = max(self.lag, lateness)
        self.lags.add(max(0, lateness))
        if lateness > self._patience_ns:
            self._late(now)
        if lateness > _LATE_NS and first:
            # The loop was held, or the process stopped. What peers said meanwhile lies unread; it
            # is read before anybody is judged by the clock.
            self._reading_until = now + _READ_INPUT_NS
            self._timer = self._loop.call_later(_READ_INPUT_NS / 1e9, self._on_timer)
            return
        self._reading_until = 0
        self._due(now)
