"""Cancel a task at any one of its awaits, to see that it leaves nothing behind there.

What is tested is run again and again, each time cancelled one await later, until it ends before that::

    for at in itertools.count(1):
        cancelling = Cancelling(at)
        task = asyncio.create_task(cancelling(work()))
        await asyncio.wait([task])
        ...  # whatever it held is given back
        if not cancelling.hit:
            break
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Literal, TypeVar

__all__ = ["MANNERS", "Cancelling", "Manner"]

T = TypeVar("T")

#: How to cancel: "asleep" does it as the task falls asleep at its n-th await, "awake" in the turn in which it
#: wakes from that, when what it waited for has come; "again" as it falls asleep there and once more at the
#: await after it.
Manner = Literal["asleep", "awake", "again"]
MANNERS: tuple[Manner, ...] = ("asleep", "awake", "again")


class Cancelling:
    """Runs a coroutine and cancels the task that it runs in, once or twice.

    Args:
        at: At which of its awaits, from 1; only those count at which it really falls asleep.
        manner: How.

    Attributes:
        awaits: At how many it fell asleep so far.
        hit: It came to be cancelled.
    """

    def __init__(self, at: int, manner: Manner = "asleep") -> None:
        self.awaits = 0
        self.hit = False
        self._manner = manner
        self._at = (at, at + 1) if manner == "again" else (at,)

    async def __call__(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` in the current task."""
        return await _watched(work, self._sleeps)

    def _sleeps(self, future: asyncio.Future[object] | None) -> None:
        self.awaits += 1
        task = asyncio.current_task()
        if self.awaits not in self._at or task is None:
            return
        self.hit = True
        if self._manner == "awake" and future is not None:
            # Called before the task's own callback, which wakes it.
            future.add_done_callback(lambda _: task.cancel())
        else:
            task.cancel()


@types.coroutine
def _watched(
    work: Coroutine[Any, Any, T], sleeps: Callable[[asyncio.Future[object] | None], None]
) -> Generator[Any, Any, T]:
    """Await ``work``, and tell each time what the task is about to sleep on (None: for one turn)."""
    step, value = work.send, None
    while True:
        try:
            future = step(value)
        except StopIteration as result:
            found: T = result.value
            return found
        sleeps(future)
        try:
            step, value = work.send, (yield future)
        except BaseException as error:  # noqa: BLE001 - the work's, to deal with as it likes
            step, value = work.throw, error
