"""Calls that begin with the call, and are left properly also by who is cancelled before any of it ran."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from typing import Any, TypeVar

__all__ = ["Begun", "BegunSteps"]

T = TypeVar("T")


class Begun(Coroutine[Any, Any, T]):
    """A coroutine over something that is going on already: to be awaited, or made a task of.

    A plain coroutine that is thrown into before its first step just ends. What it was to wait for, and to
    give back, would go on with nobody there: copies into blocks that the canceller takes for free. So here it
    goes to its first wait before anything is raised in it.

    Args:
        going: Waits for what goes on, and leaves it however it is left.
    """

    __slots__ = ("_going", "_ran")

    def __init__(self, going: Coroutine[Any, Any, T]) -> None:
        self._going = going
        self._ran = False

    def __await__(self) -> Generator[Any, Any, T]:
        self._ran = True
        return self._going.__await__()

    def send(self, value: Any) -> Any:  # noqa: ANN401 - as of any coroutine
        """Go on, as of any coroutine."""
        self._ran = True
        return self._going.send(value)

    def throw(self, *error: Any) -> Any:  # noqa: ANN401
        """Raise within, as of any coroutine, behind its beginning."""
        if not self._ran:
            try:
                self.send(None)
            except StopIteration:  # nothing was to be waited for
                raise error[0] from None
        return self._going.throw(*error)

    def close(self) -> None:
        """End it, as of any coroutine; what goes on ends by itself."""
        self._going.close()


class BegunSteps(AsyncGenerator[T, None]):
    """An asynchronous generator over something that is going on already.

    A plain one that is closed before its first step has nothing to leave.

    Args:
        going: Waits for what goes on, and leaves it however it is left.
        leave: Leaves it where that was never run.
    """

    __slots__ = ("_going", "_leave", "_ran")

    def __init__(self, going: AsyncGenerator[T, None], leave: Callable[[], Awaitable[None]]) -> None:
        self._going = going
        self._leave = leave
        self._ran = False

    async def asend(self, value: None) -> T:
        """Go on, as of any asynchronous generator."""
        self._ran = True
        return await self._going.asend(value)

    async def athrow(self, *error: Any) -> T:  # noqa: ANN401
        """Raise within, as of any asynchronous generator."""
        await self._begin()
        return await self._going.athrow(*error)

    async def aclose(self) -> None:
        """End it, as of any asynchronous generator."""
        await self._begin()
        await self._going.aclose()

    async def _begin(self) -> None:
        if not self._ran:
            self._ran = True
            await self._leave()
