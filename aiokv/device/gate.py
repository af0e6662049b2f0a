"""Keeps calls that wait for a whole GPU apart from operations on it that wait for another process.

A send of NCCL's is a kernel that spins until the other process receives. What allocates, frees, maps, pins or
unpins memory of the GPU may wait for all kernels, and hold the driver meanwhile, so that the loop's next call
waits, too. Where that is so at both ends, neither loop ever comes to receive. So such calls are made while no
send is in flight, and no send is posted while one is made.

Receives don't count: each is posted when its send is under way, and ends by itself. If they did, two
processes that are about to make a call could wait for each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

__all__ = ["Gate", "gated"]

#: How long a call holds back sends at most, in seconds: some wait for a process that may not come.
_CALL_S = 1.0
#: For how long sends are held back for a call that waits, and for how long they are let go on if those that
#: are in flight don't end meanwhile: their process may be stuck, and that is no matter of the others'.
_WAIT_S = 0.25

_T = TypeVar("_T")


class Gate:
    """Of one GPU. Sends are posted on loops, calls are made in other threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._flying = 0
        #: Until when each call that is made, or about to be, holds back sends.
        self._held: dict[object, float] = {}
        #: Whom to tell that they may go on, and on which loop.
        self._bells: dict[Callable[[], None], asyncio.AbstractEventLoop] = {}

    @property
    def flying(self) -> int:
        """How many operations are in flight."""
        return self._flying

    def enter(self, bell: Callable[[], None]) -> bool:
        """Before an operation that waits for another process is posted; on a loop, and never blocks.

        Args:
            bell: Called on this loop when it may be tried again, if now it may not.

        Returns:
            Whether it may be. Then ``leave`` is to be called when it is over.
        """
        with self._changed:
            wait = max(self._held.values(), default=0.0) - time.monotonic()
            if wait <= 0:
                self._flying += 1
                return True
            if bell not in self._bells:
                loop = self._bells[bell] = asyncio.get_running_loop()
                loop.call_later(wait, self._try_again)
            return False

    def leave(self) -> None:
        """One is over."""
        with self._changed:
            self._flying -= 1
            self._changed.notify_all()

    @contextlib.contextmanager
    def call(self, *, waits: bool = True) -> Iterator[None]:
        """Within it a call may be made that waits for the GPU; in a thread that may wait.

        Args:
            waits: Until nothing is in flight. What ends something that is in flight can't.
        """
        me = object()
        with self._changed:
            while waits and self._flying:
                self._held[me] = time.monotonic() + _WAIT_S
                if not self._changed.wait_for(self._quiet, _WAIT_S):
                    del self._held[me]
                    self._ring()
                    self._changed.wait_for(self._quiet, _WAIT_S)
            self._held[me] = time.monotonic() + _CALL_S
        try:
            yield
        finally:
            with self._changed:
                del self._held[me]
                if not self._held:
                    self._ring()

    def _quiet(self) -> bool:
        return not self._flying

    def _try_again(self) -> None:
        with self._changed:
            self._ring()

    def _ring(self) -> None:
        bells, self._bells = self._bells, {}
        for bell, loop in bells.items():
            with contextlib.suppress(RuntimeError):  # it was closed meanwhile
                loop.call_soon_threadsafe(bell)


def gated(device: object, work: Callable[[], _T], *, waits: bool = True) -> Callable[[], _T]:
    """``work`` as a call in the gate of a device, if that has one; for a thread that may wait."""
    gate: Gate | None = getattr(device, "gate", None)

    def run() -> _T:
        with contextlib.nullcontext() if gate is None else gate.call(waits=waits):
            return work()

    return run
