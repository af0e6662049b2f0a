"""Event loops in virtual time: what takes a minute happens in a millisecond, and the same way each time.

A ``VirtualTime`` is a clock and the loops that live by it, one for each process that a test plays. A loop
runs its callbacks in the order in which they were scheduled, as asyncio does. When no loop has anything to
run, the clock jumps to the next timer. When there is no timer either, nothing will ever happen any more, and
whoever waits is told so, with what each task waits for.

A loop alone works as any other::

    loop = VirtualLoop()
    loop.run_until_complete(main())

Several share one time, and running one of them runs them all. They can be frozen, as SIGSTOP does it, and
killed. There are no descriptors and no threads: a function given to an executor runs at once.
"""

from __future__ import annotations

import asyncio
import heapq
import random
import sys
import threading
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import Any, TypeVar

__all__ = ["Deadlock", "Livelock", "VirtualLoop", "VirtualTime", "describe_tasks"]

T = TypeVar("T")

#: Where virtual time starts, in nanoseconds: not at zero, which code might take for "none".
START_NS = 1_000_000_000_000

#: Timers that are due within this time (s) are due: a clock of nanoseconds meets timers in floating point.
RESOLUTION_S = 1e-9

NEVER = float("inf")


class Deadlock(RuntimeError):
    """Somebody waits, and nothing is scheduled that could wake them."""


class Livelock(RuntimeError):
    """The loops go round and round without coming to an end."""


class VirtualTime:
    """A clock, and the loops that live by it.

    Args:
        order: Draws which loop has the next turn where several could; without it they take turns.
        turn_ns: Nanoseconds that a turn of a loop takes.
        most_turns: Turns after which it is a livelock.

    Attributes:
        now: The time (ns).
        turns: Turns that were run so far, of all loops.
        loops: Those that are neither closed nor killed.
    """

    def __init__(
        self, *, order: random.Random | None = None, turn_ns: int = 0, most_turns: int = 1_000_000
    ) -> None:
        self.now = START_NS
        self.turns = 0
        self.loops: list[VirtualLoop] = []
        self._order = order
        self._turn_ns = turn_ns
        self._most_turns = most_turns

    def clock(self) -> int:
        """The time in nanoseconds; stands for ``time.monotonic_ns``."""
        return self.now

    def advance(self, ns: int) -> None:
        """Let time pass in which nobody runs, as when the machine was suspended."""
        self.now += ns

    def step(self) -> bool:
        """Run one turn of one loop, after a jump in time if there is nothing to run now.

        Returns:
            False if nothing is scheduled on any loop that isn't frozen.

        Raises:
            Livelock: There were too many turns.
        """
        ready, first = [], NEVER
        now = self.now * 1e-9 + RESOLUTION_S
        for loop in self.loops:
            when = loop.next_at()
            if when < now:
                ready.append(loop)
            elif when < first:
                first = when
        if not ready:
            if first == NEVER:
                return False
            # Rounded up, so that the timer is due when that time has come.
            self.now = -int(-first * 1e9 // 1)
            return True
        if len(ready) == 1:
            loop = ready[0]
        else:
            loop = self._order.choice(ready) if self._order else ready[self.turns % len(ready)]
        self.turns += 1
        if self.turns > self._most_turns:
            raise Livelock(f"{self.turns} turns; {self._describe()}")
        loop.turn()
        self.now += self._turn_ns
        return True

    def run(self, until: Callable[[], bool]) -> None:
        """Step until ``until()``.

        Raises:
            Deadlock: Nothing is left to run before that.
            Livelock: There were too many turns.
        """
        with _outside_loops():
            while not until():
                if not self.step():
                    raise Deadlock(f"nothing is scheduled any more; {self._describe()}")

    def settle(self, limit_ns: int, stop: Callable[[], bool] = lambda: False) -> bool:
        """Step until nothing is scheduled on any loop.

        Returns:
            Whether it came to that within ``limit_ns`` of time, and before ``stop()``.
        """
        end = self.now + limit_ns
        with _outside_loops():
            while not stop() and self.step():
                if self.now > end:
                    return False
        return not stop()

    def _describe(self) -> str:
        return "\n".join(["the tasks are:", *(line for loop in self.loops for line in describe_tasks(loop))])


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop in virtual time. Running it runs all loops that share its time.

    Args:
        virtual: The time that it lives by; its own by default.
        name: For messages.

    Attributes:
        frozen: Nothing of it runs while this is set; what becomes due is kept.
    """

    # What asyncio's own loop keeps, which its types leave out.
    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]
    _timer_cancelled_count: int
    _thread_id: int | None
    _stopping: bool

    def __init__(self, virtual: VirtualTime | None = None, name: str = "loop") -> None:
        super().__init__()
        self.virtual = virtual or VirtualTime()
        self.name = name
        self.frozen = False
        self._hooks = (self._asyncgen_firstiter_hook, self._asyncgen_finalizer_hook)  # type: ignore[attr-defined]
        self.virtual.loops.append(self)

    def __repr__(self) -> str:
        return f"<VirtualLoop {self.name} at {self.time():.6f}{' frozen' if self.frozen else ''}>"

    # -- time

    def time(self) -> float:
        """The virtual time, in seconds."""
        return self.virtual.now * 1e-9

    def next_at(self) -> float:
        """When it has something to run, in its seconds: 0 for now, infinity for never."""
        if self.frozen:
            return NEVER
        if self._ready:
            return 0.0
        scheduled = self._scheduled
        while scheduled:
            if not scheduled[0].cancelled():
                return scheduled[0].when()
            self._timer_cancelled_count -= 1
            heapq.heappop(scheduled)._scheduled = False  # type: ignore[attr-defined]
        return NEVER

    @property
    def idle(self) -> bool:
        """Whether nothing at all is scheduled, frozen or not."""
        ready, scheduled = self._ready, self._scheduled
        return all(handle.cancelled() for handle in (*ready, *scheduled))

    def scheduled(self) -> list[str]:
        """What is scheduled, a line for each callback and timer."""
        ready, scheduled = self._ready, self._scheduled
        return [f"{self.name}: {handle!r}" for handle in (*ready, *scheduled) if not handle.cancelled()]

    # -- running

    def turn(self) -> None:
        """Run what is ready now, in order; what that schedules is for the next turn.

        Leaves itself as the running loop.
        """
        ready, scheduled = self._ready, self._scheduled
        end = self.virtual.now * 1e-9 + RESOLUTION_S
        while scheduled and scheduled[0].when() < end:
            timer = heapq.heappop(scheduled)
            timer._scheduled = False  # type: ignore[attr-defined]
            if timer.cancelled():
                self._timer_cancelled_count -= 1
            else:
                ready.append(timer)
        events._set_running_loop(self)
        sys.set_asyncgen_hooks(*self._hooks)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle.cancelled():
                handle._run()

    def within(self, call: Callable[..., T], *args: object) -> T:
        """Call something as if from a callback of this loop, whichever loop runs now."""
        outer = events._get_running_loop()
        events._set_running_loop(self)
        try:
            return call(*args)
        finally:
            events._set_running_loop(outer)

    def run_forever(self) -> None:
        """Run, with all loops of its time, until ``stop``.

        Raises:
            Deadlock: Nothing is scheduled any more on any of them.
            Livelock: They made too many turns.
        """
        self._check_closed()  # type: ignore[attr-defined]
        self._check_running()  # type: ignore[attr-defined]
        self._thread_id = threading.get_ident()
        try:
            self.virtual.run(lambda: self._stopping)
        finally:
            self._stopping = False
            self._thread_id = None

    def run_in_executor(
        self, executor: Executor | None, func: Callable[..., T], *args: object
    ) -> asyncio.Future[T]:
        """Call ``func`` at once: there are no threads in virtual time."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - it belongs to whoever awaits
            future.set_exception(error)
        return future

    def _write_to_self(self) -> None:
        """A loop that is run doesn't sleep, so nothing is needed to wake it."""

    # -- the end

    def kill(self) -> None:
        """Run nothing of it ever again, as if its process was killed. It still has to be closed."""
        if self in self.virtual.loops:
            self.virtual.loops.remove(self)

    def close(self) -> None:
        """Close the loop. Its tasks do nothing any more but what they do on their way out."""
        self.kill()
        for _ in range(100):  # what ends may begin something
            abandoned = asyncio.all_tasks(self)
            if not abandoned:
                break
            for task in abandoned:
                self.within(_abandon, task)
        super().close()


@contextmanager
def _outside_loops() -> Iterator[None]:
    """What turns of loops leave behind is put back."""
    outer, hooks = events._get_running_loop(), sys.get_asyncgen_hooks()
    try:
        yield
    finally:
        sys.set_asyncgen_hooks(*hooks)
        events._set_running_loop(outer)


def _abandon(task: asyncio.Task[Any]) -> None:
    """End the coroutine of a task that will never be run again."""
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    asyncio.tasks._unregister_task(task)
    coro = task.get_coro()
    for _ in range(100):
        try:
            if isinstance(coro, Coroutine):
                coro.close()
            return
        except RuntimeError:
            continue  # it awaits something on its way out: closed again, there
        except BaseException:  # noqa: BLE001 - whatever it raises, nobody is left to be told
            return


def describe_tasks(loop: VirtualLoop) -> list[str]:
    """A line for each task of a loop that isn't done: its name, and where it waits."""
    lines = []
    for task in asyncio.all_tasks(loop):
        stack = task.get_stack(limit=1)
        coro: Any = task.get_coro()
        while getattr(coro, "cr_await", None) is not None and getattr(coro.cr_await, "cr_frame", None):
            coro = coro.cr_await
        frame = getattr(coro, "cr_frame", None) or (stack[0] if stack else None)
        where = f"{frame.f_code.co_qualname}, line {frame.f_lineno}" if frame else "nowhere"
        lines.append(f"  {loop.name}: {task.get_name()} in {where}")
    return sorted(lines)
