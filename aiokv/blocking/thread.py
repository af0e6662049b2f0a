"""An event loop in a thread of its own, for callers that have none."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import uvloop

__all__ = ["LoopThread"]

T = TypeVar("T")


class LoopThread:
    """A thread that runs an event loop until it is closed; it sleeps as long as nothing happens.

    A daemon: it does not keep a process alive whose main thread is through.

    Args:
        name: Of the thread.
    """

    def __init__(self, name: str) -> None:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Have the loop do something, and wait for it.

        Raises:
            RuntimeError: The loop is closed.
            Exception: What the work raised.
        """
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:
            work.close()
            raise
        return future.result()

    def post(self, call: Callable[..., object], *args: object) -> None:
        """Have the loop call something soon. Never blocks.

        Raises:
            RuntimeError: The loop is closed.
        """
        self._loop.call_soon_threadsafe(call, *args)

    def close(self) -> None:
        """Stop the loop and wait for the thread. May be called twice."""
        with suppress(RuntimeError):  # closed before
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
