"""What takes long, in a daemon thread: bring-up and tear-down, never the data path."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

__all__ = ["off_loop"]

_T = TypeVar("_T")
_V = TypeVar("_V")


def off_loop(work: Callable[[], _T], name: str) -> asyncio.Future[_T]:
    """Run ``work`` in a daemon thread of its own; for bring-up and tear-down only.

    Returns:
        A future of what ``work`` returns or raises. Cancelling it changes nothing for the
        thread, and neither does the end of the loop.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_T] = loop.create_future()

    def run() -> None:
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - handed to whoever awaits the future
            finish = partial(_ring, future, future.set_exception, error)
        else:
            finish = partial(_ring, future, future.set_result, result)
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(finish)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def _ring(future: asyncio.Future[_T], resolve: Callable[[_V], object], value: _V) -> None:
    if not future.done():
        resolve(value)
