"""The scheduler's side of a pool that others share: what they stored is asked for, once for each request.

What this instance stored is known from its own workers, and so is what goes from the pool, whoever stored
it. So there is something to ask only where a prompt is longer than what is known to be there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

__all__ = ["Asking", "Pool"]


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


class Asking:
    """The questions of one instance.

    Args:
        pool: Whom to ask; closed with this.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        #: Of each request: the number of its question, and its first block; None once it was answered.
        self._questions: dict[str, tuple[int, int] | None] = {}

    def begin(self, name: str, hashes: Sequence[bytes], first: int) -> None:
        """Ask for a request's blocks from ``first`` on, if there are any and that was not done before."""
        if first < len(hashes) and name not in self._questions:
            self._questions[name] = self._pool.ask(hashes[first:]), first

    def found(self, name: str) -> range | None:
        """Which of a request's blocks turned out to be there, said once; None: not known yet."""
        question = self._questions.get(name)
        if question is None:
            return range(0)
        number, first = question
        count = self._pool.answer(number)
        if count is None:
            return None
        self._questions[name] = None
        return range(first, first + count)

    def forget(self, name: str) -> None:
        """A request is over."""
        question = self._questions.pop(name, None)
        if question is not None:
            self._pool.forget(question[0])

    def reset(self) -> None:
        """The pool is emptied: what was asked before is not there, whatever is answered."""
        for name, question in self._questions.items():
            if question is not None:
                self._pool.forget(question[0])
                self._questions[name] = None

    def close(self) -> None:
        """Nothing is asked any more."""
        self._pool.close()
