"""The pending events of one stream, and when to look at them: decisions without a clock or a loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from aiokv.device.base import Event
from aiokv.device.expectation import Outlook, interval_ns
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
    #: What the caller expected it to take; 0 when nothing, or when nothing can be learnt from it.
    expected_ns: int
    started: int


class Finding(NamedTuple):
    """How a completion was found."""

    #: How long after the first look it came; None when that look, or an earlier one, found it.
    polled_ns: int | None
    #: It was over before the first look was due: the sleep was too long.
    overslept: bool
    #: Time between the look that found it and the one before: the most that it was seen late by.
    gap_ns: int


class Lane:
    """Watches of one stream, oldest first. Only the oldest is looked at: they complete in order.

    The stream comes to each when it is through with the one before it. So what each is expected to take
    counts from there, and errors don't add up over what is queued.
    """

    __slots__ = (
        "_begun",
        "_ended",
        "_looks",
        "_outlook",
        "_pending_at",
        "_polling_since",
        "_wake_at",
        "look_at",
        "stream",
        "watches",
    )

    def __init__(self, stream: object) -> None:
        self.stream = stream
        self.watches: deque[Watch] = deque()
        #: When to look next.
        self.look_at = 0
        #: When the oldest was last seen pending; what came after it was pending then, too.
        self._pending_at = 0
        #: When the one before the oldest ended, as well as that is known.
        self._ended = 0
        #: When it was found that the oldest is the oldest, what to do about it, and when to look at it first.
        self._begun = 0
        self._outlook = Outlook(0, 0)
        self._wake_at = 0
        #: Looks at the oldest, since it was due, that saw it pending; and when the first of them was.
        self._looks = 0
        self._polling_since = 0

    def add(self, watch: Watch) -> bool:
        """Take up a watch; whether it is the oldest now. Then ``begin`` is to be called."""
        self.watches.append(watch)
        if len(self.watches) > 1:
            return False
        self._pending_at = self._ended = watch.started
        return True

    def begin(self, now: int, outlook: Outlook) -> None:
        """There is another oldest, which the stream works at now: plan the first look.

        Args:
            now: When that is.
            outlook: When to look at what is expected to take as long as it is.
        """
        self._begun, self._outlook, self._looks = now, outlook, 0
        self.look_at = self._wake_at = max(self.watches[0].started, self._ended) + outlook.sleep_ns

    def pending(self, now: int, *, spin_ns: int, patience_ns: int) -> None:
        """The oldest was just seen pending: plan the next look.

        Args:
            now: When it was looked at.
            spin_ns: How long it may be looked at in each turn.
            patience_ns: The least time to the next look, since the loop is late; 0 when it isn't.
        """
        self._pending_at = now
        if now < self._wake_at:
            self.look_at = self._wake_at
            return
        if not self._looks:
            self._polling_since = now
        self._looks += 1
        polled_ns, pace_ns = now - self._polling_since, self._outlook.pace_ns
        spent = polled_ns >= spin_ns or self._looks > MOST_TURNS
        if spent or pace_ns or patience_ns:
            self.look_at = now + max(interval_ns(polled_ns, pace_ns), patience_ns)
        else:
            self.look_at = now

    def over(self, now: int) -> tuple[Watch, Finding]:
        """The oldest was just seen done or failed: take it off. For the next, ``begin`` is to be called."""
        watch = self.watches.popleft()
        gap = now - self._pending_at
        polled, overslept = None, False
        if self._looks:
            polled = self._pending_at + gap // 2 - self._polling_since
        elif self._begun == now:
            # It came with the one before it, so it took this long at most; how long is not known.
            overslept = now - max(watch.started, self._pending_at) < self._outlook.sleep_ns
        else:
            overslept = True
        self._ended = self._pending_at + gap // 2
        return watch, Finding(polled, overslept, gap)
