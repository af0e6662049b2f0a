"""A call that begins with the call, and is left properly also by a task that is cancelled before it ran."""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

__all__ = ["Begun"]

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
