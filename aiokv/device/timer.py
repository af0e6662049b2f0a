"""A one-shot timer for an event loop, fine enough for waits of a few microseconds.

The loops' own timers are not: asyncio rounds a wait up to the next millisecond, and uvloop
rounds it to the nearest one, so that ``call_later`` of less than half a millisecond fires at
once. On Linux a timerfd, watched like any other descriptor, fires within about ten microseconds.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import time
from collections.abc import Callable
from typing import Protocol

from aiokv.errors import ClosedError

__all__ = ["MicroTimer", "Timer"]

#: The least that loop timers are asked for: below half a millisecond uvloop doesn't wait at all,
#: and a caller that looks, finds it too early and arms again would spin.
LOOP_TIMER_FLOOR_NS = 501_000

SetTime = Callable[[int, int], None]


class Timer(Protocol):
    """What the completion poller needs of a timer."""

    def arm(self, delay_ns: int) -> None:
        """Fire once, ``delay_ns`` nanoseconds from now, in place of what was armed before."""

    def disarm(self) -> None:
        """Don't fire. Does nothing when not armed."""

    def close(self) -> None:
        """Disarm and give the descriptor back. May be called twice."""


class MicroTimer:
    """Calls back once, on the loop, some nanoseconds from now.

    Nothing exists until it is first armed. From then on it holds one descriptor, which costs
    nothing while disarmed, until ``close``. Every method belongs to the loop's thread.

    Args:
        loop: Loop that ``callback`` is called on.
        callback: Called without arguments each time the timer fires; it may arm it again.
        precise: Use a timerfd where there is one. With False, on systems other than Linux and
            with loops that can't watch descriptors, the loop's timers are used, whose waits are
            a millisecond or so long; a loop with a clock of its own (in a simulation) needs False.
    """

    __slots__ = ("_callback", "_closed", "_fd", "_handle", "_loop", "_precise", "_set_time")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None], *, precise: bool = True
    ) -> None:
        self._loop = loop
        self._callback = callback
        self._precise = precise and sys.platform == "linux"
        self._closed = False
        #: The timerfd; -1 until first armed, and with loop timers.
        self._fd = -1
        self._set_time: SetTime | None = None
        #: The loop timer that is armed; None with a timerfd.
        self._handle: asyncio.TimerHandle | None = None

    def arm(self, delay_ns: int) -> None:
        """Fire once, ``delay_ns`` nanoseconds from now, in place of what was armed before.

        Raises:
            ClosedError: The timer was closed.
        """
        if self._closed:
            raise ClosedError("the timer was closed")
        if self._precise and self._set_time is None:
            self._open()
        if self._set_time is not None:
            # Zero would disarm it.
            self._set_time(self._fd, max(delay_ns, 1))
            return
        if self._handle is not None:
            self._handle.cancel()
        self._handle = self._loop.call_later(max(delay_ns, LOOP_TIMER_FLOOR_NS) * 1e-9, self._on_loop_timer)

    def disarm(self) -> None:
        """Don't fire, also when due in this very turn. Does nothing when not armed."""
        if self._set_time is not None:
            self._set_time(self._fd, 0)
        elif self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def close(self) -> None:
        """Disarm and give the descriptor back. May be called twice."""
        self._closed = True
        self.disarm()
        if self._set_time is not None:
            self._set_time = None
            if not self._loop.is_closed():
                self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> None:
        """Make the timerfd and let the loop watch it, or fall back to loop timers for good."""
        self._precise = False
        try:
            fd, set_time = open_timerfd()
        except OSError:
            # Out of descriptors: later wake-ups are better than none.
            return
        try:
            self._loop.add_reader(fd, self._on_readable)
        except NotImplementedError:
            os.close(fd)
            return
        self._fd, self._set_time = fd, set_time

    def _on_readable(self) -> None:
        # Setting the time again, or disarming, in the turn in which it was due empties it: then
        # there is nothing to read, and nothing is due.
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return
        self._callback()

    def _on_loop_timer(self) -> None:
        self._handle = None
        self._callback()


def open_timerfd() -> tuple[int, SetTime]:
    """A non-blocking timerfd, and the function ``(fd, delay_ns)`` that sets it (0 disarms).

    Raises:
        OSError: There is none to be had.
    """
    if sys.version_info >= (3, 13):
        fd = os.timerfd_create(time.CLOCK_MONOTONIC, flags=os.TFD_NONBLOCK | os.TFD_CLOEXEC)
        return fd, lambda fd, delay_ns: _discard(os.timerfd_settime_ns(fd, initial=delay_ns))
    return _open_by_libc()


def _discard(_: object) -> None:
    """Turn a result into None."""


def _open_by_libc() -> tuple[int, SetTime]:
    """What Python 3.13 has in ``os``, by libc."""
    # PyDLL keeps the GIL: the calls take less than a microsecond, and whoever gives the GIL up
    # beside a busy thread may get it back 5 ms later.
    libc = ctypes.PyDLL(None, use_errno=True)
    spec = (ctypes.c_long * 4)()  # interval and value, seconds and nanoseconds each

    def check(result: int) -> int:
        if result < 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        return result

    def set_time(fd: int, delay_ns: int) -> None:
        spec[2], spec[3] = divmod(delay_ns, 1_000_000_000)
        check(libc.timerfd_settime(fd, 0, spec, None))

    # The flags of timerfd_create are by definition those of open.
    return check(libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)), set_time
