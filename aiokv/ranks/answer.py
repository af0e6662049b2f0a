"""The answer to a batch, which is entered by the call and not only once somebody waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from typing import Any

from aiokv.errors import AiokvError
from aiokv.ranks.outcomes import Outcome

__all__ = ["Answer"]

_Entered = asyncio.Future[list[Outcome]]


class Answer(Coroutine[Any, Any, list[Outcome]]):
    """A coroutine that has begun: to be awaited, or made a task of.

    A task may be cancelled before it ran at all, and a plain coroutine would have entered nothing by then,
    while the other ranks wait. Without a loop that runs it is entered once there is one.

    Args:
        enter: Enters the batch. What it raises is kept for whoever waits.
    """

    __slots__ = ("_enter", "_entered", "_waiting")

    def __init__(self, enter: Callable[[], _Entered]) -> None:
        self._enter = enter
        self._entered: _Entered | None = None
        #: Steps of whoever runs this as a task; None before the first.
        self._waiting: Generator[Any, Any, list[Outcome]] | None = None
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return
        self._entered = self._begun(loop)

    def __await__(self) -> Generator[Any, Any, list[Outcome]]:
        if self._entered is None:
            self._entered = self._begun(asyncio.get_running_loop())
        return self._entered.__await__()

    def send(self, value: Any) -> Any:  # noqa: ANN401 - as of any coroutine
        """Go on, as of any coroutine."""
        if self._waiting is None:
            self._waiting = self.__await__()
        return self._waiting.send(value)

    def throw(self, *error: Any) -> Any:  # noqa: ANN401
        """Raise within, as of any coroutine. It may not have run yet; either way nobody waits any more."""
        self._let_go()
        if self._waiting is None:
            self._waiting = self.__await__()
        return self._waiting.throw(*error)

    def close(self) -> None:
        """End it, as of any coroutine; the batch stays entered."""
        self._let_go()
        if self._waiting is not None:
            self._waiting.close()

    def _let_go(self) -> None:
        entered = self._entered
        if entered is not None and not entered.cancel() and not entered.cancelled():
            entered.exception()  # is seen, or asyncio would report it

    def _begun(self, loop: asyncio.AbstractEventLoop) -> _Entered:
        try:
            return self._enter()
        except AiokvError as error:
            refused: _Entered = loop.create_future()
            refused.set_exception(error)
            return refused
