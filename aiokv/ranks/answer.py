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

    def __init__(self, enter: Callable[[], _Entered]) -> None:
        self._enter = enter
        self._entered: _Entered | None = None
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            pass
        else:
            self._entered = self._begun(loop)
        self._waiting = self._wait()

    def __await__(self) -> Generator[Any, None, list[Outcome]]:
        return self._waiting.__await__()

    def send(self, value: Any) -> Any:  # noqa: ANN401 - as of any coroutine
        """Go on, as of any coroutine."""
        return self._waiting.send(value)

    def throw(self, *error: Any) -> Any:  # noqa: ANN401
        """Raise within, as of any coroutine. It may not have run yet; either way nobody waits any more."""
        self._let_go()
        return self._waiting.throw(*error)

    def close(self) -> None:
        """End it, as of any coroutine; the batch stays entered."""
        self._let_go()
        self._waiting.close()

    def _let_go(self) -> None:
        if self._entered is not None and not self._entered.cancel() and not self._entered.cancelled():
            self._entered.exception()  # is seen, or asyncio would report it

    async def _wait(self) -> list[Outcome]:
        if self._entered is None:
            self._entered = self._begun(asyncio.get_running_loop())
        return await self._entered

    def _begun(self, loop: asyncio.AbstractEventLoop) -> _Entered:
        try:
            return self._enter()
        except AiokvError as error:
            refused: _Entered = loop.create_future()
            refused.set_exception(error)
            return refused
