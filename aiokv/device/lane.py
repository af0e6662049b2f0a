"""The pending events of one stream, and when to look at them: decisions without a clock or a loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from aiokv.device.base import Event
from aiokv.device.expectation import interval_ns
from aiokv.errors import DeviceError

__all__ = ["Callback", "Finding", "Lane", "Watch"]

Callback = Callable[[DeviceError | None], None]

#: Looks at one event in consecutive turns, at most: where a simulation's clock stands still while
#: there are turns to run, time alone would never end them.
MOST_TURNS = 128


@dataclass(slots=True, eq=False)
class Watch:
    """One event that somebody waits for. Times are of the poller's clock, in nanoseconds."""

    event: Event
    callback: Callback
    #: What the caller expected; 0 when nothing, or when nothing can be learnt from it.
    expected_ns: int
    started: int
    #: When the first look is due, and how far apart looks are then; 0 is each turn.
    wake_at: int
    pace_ns: int


class Finding(NamedTuple):
    """How a completion was found."""

    #: How long after the first look it came; None when that look, or an earlier one, found it.
    polled_ns: int | None
    #: Time between the look that found it and the one before: the most that it was seen late by.
    gap_ns: int


class Lane:
    """Watches of one stream, oldest first. Only the oldest is looked at: they complete in order."""

    __slots__ = ("_looks", "_pending_at", "_polling_since", "look_at", "stream", "watches")

    def __init__(self, stream: object) -> None:
        self.stream = stream
        self.watches: deque[Watch] = deque()
        #: When to look next.
        self.look_at = 0
        #: When the oldest was last seen pending; what came after it was pending then, too.
        self._pending_at = 0
        #: Looks at the oldest, since it was due, that saw it pending; and when the first of them was.
        self._looks = 0
        self._polling_since = 0

    def add(self, watch: Watch) -> bool:
        """Take up a watch; whether it is the oldest now, and so to be looked at."""
        self.watches.append(watch)
        if len(self.watches) > 1:
            return False
        self._pending_at, self._looks, self.look_at = watch.started, 0, watch.wake_at
        return True

    def pending(self, now: int, *, spin_ns: int, patience_ns: int) -> None:
        """The oldest was just seen pending: plan the next look.

        Args:
            now: When it was looked at.
            spin_ns: How long it may be looked at in each turn.
            patience_ns: The least time to the next look, since the loop is late; 0 when it isn't.
        """
        watch = self.watches[0]
        self._pending_at = now
        if now < watch.wake_at:
            self.look_at = watch.wake_at
            return
        if not self._looks:
            self._polling_since = now
        self._looks += 1
        polled_ns = now - self._polling_since
        spent = polled_ns >= spin_ns or self._looks > MOST_TURNS
        if spent or watch.pace_ns or patience_ns:
            self.look_at = now + max(interval_ns(polled_ns, watch.pace_ns), patience_ns)
        else:
            self.look_at = now

    def over(self, now: int) -> tuple[Watch, Finding]:
        """The oldest was just seen done or failed: take it off, and have the next looked at."""
        watch = self.watches.popleft()
        gap = now - self._pending_at
        since: int | None = self._polling_since
        if not self._looks:
            # It came with the one before it. If that was seen pending when this was due, so was this.
            since = watch.wake_at if self._pending_at >= max(watch.wake_at, watch.started + 1) else None
        polled = None if since is None else self._pending_at + gap // 2 - since
        self._looks = 0
        self.look_at = now
        return watch, Finding(polled, gap)
