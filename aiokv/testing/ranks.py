"""Ranks of a group in one process, joined by memory: what ``RankGroup`` is tested on, and your code with it.

::

    ranks = MemoryRanks(4, seed=7)
    groups = [RankGroup(ranks.collective(rank)) for rank in range(4)]
    answers = await asyncio.gather(*(group.agree(found) for group, found in zip(groups, findings)))

A rank can be lost, and reductions can take their time, both as a backend does it: what was given up is
written to all the same when the last rank comes.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
from numpy.typing import NDArray

from aiokv.errors import ClosedError, DeviceError
from aiokv.ranks.vector import LENGTH

__all__ = ["MemoryCollective", "MemoryRanks"]


class _Meeting:
    """One reduction: the ranks that came to it, and when each of them has the result."""

    def __init__(self) -> None:
        self.brought: dict[int, NDArray[np.int32]] = {}
        #: By rank; empty until all came.
        self.ready_at: dict[int, int] = {}
        self.result = np.zeros(0, np.int32)
        #: Ranks that have been given the result, or an error.
        self.told: set[int] = set()


class MemoryRanks:
    """A group of ranks, and what may go wrong with it.

    Args:
        size: How many.
        seed: Of what is drawn: how long a reduction takes for each rank, and what the loss of one tells.
        longest_ns: The longest that a rank gets its result after the last came.
        clock: Nanoseconds of a clock that never goes back.
    """

    def __init__(
        self,
        size: int,
        *,
        seed: int = 0,
        longest_ns: int = 0,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        if size < 1:
            raise ValueError(f"a group has at least one rank, not {size}")
        self.size = size
        self.clock = clock
        #: Ranks that were lost, with when the others know of it.
        self.lost: dict[int, int] = {}
        self._random = random.Random(seed)  # noqa: S311 - not a secret
        self._longest_ns = longest_ns
        self._meetings: list[_Meeting] = []

    def collective(self, rank: int) -> MemoryCollective:
        """What the ``RankGroup`` of one rank is made of; one for each rank."""
        if not 0 <= rank < self.size:
            raise ValueError(f"ranks are 0 to {self.size - 1}, not {rank}")
        return MemoryCollective(self, rank)

    def lose(self, rank: int) -> None:
        """Let a rank's process end. It comes to nothing more, and those that wait for it hear of it."""
        self.lost.setdefault(rank, self.clock() + self._random.randint(0, self._longest_ns))

    @property
    def reductions(self) -> int:
        """Those that at least one rank came to."""
        return len(self._meetings)

    def entered(self, rank: int) -> int:
        """Reductions that a rank came to."""
        return sum(rank in meeting.brought for meeting in self._meetings)

    def come(self, number: int, rank: int, vector: NDArray[np.int32]) -> None:
        """A rank comes to its reduction of this number. For ``MemoryCollective``."""
        while len(self._meetings) <= number:
            self._meetings.append(_Meeting())
        meeting = self._meetings[number]
        meeting.brought[rank] = vector.copy()
        if len(meeting.brought) == self.size:
            meeting.result = np.minimum.reduce(list(meeting.brought.values()))
            now = self.clock()
            for each in range(self.size):
                meeting.ready_at[each] = now + self._random.randint(0, self._longest_ns)

    def result(self, number: int, rank: int) -> NDArray[np.int32] | None:
        """What came of a reduction, once this rank has it. For ``MemoryCollective``.

        Raises:
            DeviceError: A rank was lost before this one had it.
        """
        meeting, now = self._meetings[number], self.clock()
        ready_at = meeting.ready_at.get(rank)
        if ready_at is not None and ready_at <= now:
            return meeting.result
        for lost, known_at in self.lost.items():
            # Where all had come, those that have what they need don't mind the loss.
            if known_at <= now and (ready_at is None or ready_at > known_at):
                raise DeviceError(f"rank {lost} is gone")
        return None


class MemoryCollective:
    """One rank of ``MemoryRanks``; a ``Collective``."""

    guard: AbstractContextManager[object] | None = None

    def __init__(self, ranks: MemoryRanks, rank: int) -> None:
        self.rank = rank
        self.size = ranks.size
        self.vector: NDArray[np.int32] = np.zeros(LENGTH, np.int32)
        self._ranks = ranks
        self._number = 0
        self._closed = False

    def reduce(self, timeout_s: float) -> _Reduction:
        """Come to the next reduction; see ``Collective.reduce``."""
        if self._closed:
            raise ClosedError("the group was let go of")
        if self.rank in self._ranks.lost:
            raise DeviceError("this rank is gone itself")
        number = self._number
        self._number += 1
        self._ranks.come(number, self.rank, self.vector)
        return _Reduction(self._ranks, number, self.rank, self.vector)

    def close(self) -> None:
        """Come to no more."""
        self._closed = True


class _Reduction:
    """A reduction, as one rank sees it."""

    def __init__(self, ranks: MemoryRanks, number: int, rank: int, vector: NDArray[np.int32]) -> None:
        self._ranks = ranks
        self._number = number
        self._rank = rank
        self._vector = vector
        self._done = False

    def done(self) -> bool:
        """Whether the result is in the vector.

        Raises:
            DeviceError: A rank was lost.
        """
        if not self._done:
            result = self._ranks.result(self._number, self._rank)
            if result is None:
                return False
            self._vector[:] = result
            self._done = True
        return True
