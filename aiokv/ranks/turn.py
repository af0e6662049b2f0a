"""A place in the order of batches that is taken before it is known what to bring."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from aiokv.ranks.outcomes import Failed, Outcome, Severity
from aiokv.ranks.rounds import Rounds

__all__ = ["Turn"]


class Turn:
    """The next place on this rank; made by ``RankGroup.turn``. It has to be entered, whatever happens.

    Args:
        rounds: Where it is taken.
        size: Requests.
        keys: What they are; None where the caller doesn't say.
        deadline_s: Seconds from when it is entered.
    """

    def __init__(self, rounds: Rounds, size: int, keys: Iterable[bytes] | None, deadline_s: float) -> None:
        self._keys = None if keys is None else list(keys)
        self._size = size
        self._deadline_s = deadline_s
        self._rounds = rounds
        self._place = rounds.take()

    def enter(self, outcomes: Sequence[Outcome]) -> asyncio.Future[list[Outcome]]:
        """Bring what this rank found; never blocks or raises. Only the first time counts.

        Returns:
            What all ranks come to, or why they don't, as for ``RankGroup.agree``. May be cancelled by whoever
            doesn't want it any more.
        """
        self._rounds.fill(self._place, outcomes, self._keys, self._deadline_s)
        return self._place.future

    def fail(self, error: BaseException) -> None:
        """Tell the others what this rank met, and don't wait for them."""
        entered = self.enter([Failed(Severity.of(error))] * self._size)
        if not entered.cancel() and not entered.cancelled():
            entered.exception()  # is seen, or asyncio would report it
