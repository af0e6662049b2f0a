"""The scheduler's side of a pool that others share: what they stored is asked for when a request comes.

What this instance stored is known from its own workers, and so is what goes from the pool, whoever stored
it. So there is something to ask only where a prompt is longer than what is known to be there. Who has waited
in the queue since is asked for once more: blocks may have come, and gone, meanwhile.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

__all__ = ["Asking", "Pool"]

#: Seconds for which an answer is worth something.
_FRESH_S = 1.0


class Pool(Protocol):
    """Whom to ask; see ``aiokv.offload.sharing.lookout.Lookout``."""

    def ask(self, keys: Sequence[bytes]) -> int:
        """Ask how many blocks of a prefix are there; gives the number of the question."""

    def answer(self, number: int) -> int | None:
        """How many are; None: not known yet."""

    def forget(self, number: int) -> None:
        """Nobody wants to know any more."""

    def close(self) -> None:
        """Nothing is asked any more."""


class _Question(NamedTuple):
    """The pool's number of it, the first block that it is about, and until when an answer is of use."""

    number: int
    first: int
    until: float


class Asking:
    """The questions of one instance.

    Args:
        pool: Whom to ask; closed with this.
        clock: Seconds of a clock that never goes back.
    """

    def __init__(self, pool: Pool, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._pool = pool
        self._clock = clock
        #: Of each request; None once it was answered.
        self._questions: dict[str, _Question | None] = {}

    def begin(self, name: str, hashes: Sequence[bytes], first: int) -> None:
        """Ask for a request's blocks from ``first`` on, if there are any and that was not done before."""
        if first < len(hashes) and name not in self._questions:
            self._questions[name] = _Question(self._pool.ask(hashes[first:]), first, self._clock() + _FRESH_S)

    def found(self, name: str, hashes: Sequence[bytes], first: int) -> range | None:
        """Which of a request's blocks turned out to be there, said once; None: not known yet.

        Args:
            name: The request.
            hashes: Its blocks.
            first: The first that isn't known to be there now.
        """
        question = self._questions.get(name)
        if question is None:
            return range(0)
        count = self._pool.answer(question.number)
        if count is not None and self._clock() > question.until:
            question = self._questions[name] = _Question(self._pool.ask(hashes[first:]), first, math.inf)
            count = self._pool.answer(question.number)
        if count is None:
            return None
        self._questions[name] = None
        return range(question.first, question.first + count)

    def forget(self, name: str) -> None:
        """A request is over."""
        question = self._questions.pop(name, None)
        if question is not None:
            self._pool.forget(question.number)

    def reset(self) -> None:
        """The pool is emptied: what was asked before is not there, whatever is answered."""
        for name, question in self._questions.items():
            if question is not None:
                self._pool.forget(question.number)
                self._questions[name] = None

    def close(self) -> None:
        """Nothing is asked any more."""
        self._pool.close()
