"""One batch on its way through its rounds: decisions without a loop, a clock or a backend."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from aiokv.errors import AiokvError
from aiokv.ranks.outcomes import Failed, Hit, Miss, Outcome, Severity
from aiokv.ranks.units import Blocks, Tokens
from aiokv.ranks.vector import REQUESTS, Header, Lanes, compared, encoded, hashed, read, write

__all__ = ["Agreement"]

_NOTHING = Lanes([], [], 0, False)


class Agreement:
    """What one rank brings, and what has come of it so far.

    A batch that can't be agreed on is taken all the same, and told to the others, who would wait otherwise.

    Args:
        outcomes: Of this rank, for each request.
        keys: What the requests are; None where the caller doesn't say.
        batch: Its number.
        rank: Of this process.
        world: Ranks of the group.

    Attributes:
        batch: Its number, as this rank counts.
        fault: Why this rank's batch can't be agreed on; None where it can.
        error: Why the ranks didn't agree; None where they did, or as long as they might.
    """

    def __init__(
        self,
        outcomes: Sequence[Outcome],
        keys: Iterable[bytes] | None,
        *,
        batch: int,
        rank: int,
        world: int,
    ) -> None:
        self.fault: Exception | None = None
        self.error: AiokvError | None = None
        self.batch = batch
        #: How many batches another rank counted more than this one; 0 before the reduction.
        self.ahead = 0
        self._rank, self._world = rank, world
        known: Sequence[Outcome] | None = None
        self._lanes, self._hashes = _NOTHING, (0, 0)
        try:
            known = tuple(outcomes)
            self._lanes = encoded(known)
            self._hashes = hashed(keys, len(known))
        except Exception as error:  # noqa: BLE001 - raised once the other ranks know
            self.fault = error
        self._outcomes: Sequence[Outcome] = known or ()
        #: There is nothing to agree on, and so nothing to be sent: not even of a fault of this rank.
        self.empty = known is not None and not known
        #: Of the rounds that are over.
        self._counts: list[int] = []
        self._severities: list[int] = []
        self._round = 0

    @property
    def size(self) -> int:
        """Requests."""
        return len(self._outcomes)

    @property
    def rounds(self) -> int:
        """Reductions that are over."""
        return self._round

    def write(self, vector: NDArray[np.int32]) -> None:
        """Put what is to be reduced next into the vector."""
        lanes = self._lanes if self.fault is None else _NOTHING
        write(vector, self._header(), lanes, self._round * REQUESTS)

    def read(self, vector: NDArray[np.int32]) -> bool:
        """Take the reduced vector; whether another round has to follow.

        Raises:
            DeviceError: It isn't the minimum over all ranks.
        """
        finding = compared(vector, self._header())
        self.ahead, self.error = finding.batch - self.batch, finding.error
        self._round += 1
        if self.error is not None or self.fault is not None:
            return False
        left = len(self._outcomes) - len(self._counts)
        counts, severities = read(vector, min(left, REQUESTS))
        self._counts += counts
        self._severities += severities
        return left > REQUESTS

    def agreed(self) -> list[Outcome]:
        """What all ranks came to, request by request.

        Raises:
            Exception: Why this rank's batch can't be agreed on.
            AiokvError: Why the ranks didn't agree.
        """
        if self.fault is not None:
            raise self.fault
        if self.error is not None:
            raise self.error
        own = self._lanes
        counts, severities = self._counts, self._severities
        if not own.hollow and counts == own.counts and severities == own.severities:
            return list(self._outcomes)
        lanes = zip(self._outcomes, counts, severities, strict=True)
        return [_joint(outcome, count, severity) for outcome, count, severity in lanes]

    def _header(self) -> Header:
        return Header(
            batch=self.batch,
            round=self._round,
            size=len(self._outcomes),
            hashes=self._hashes,
            unit=self._lanes.unit,
            rank=self._rank,
            world=self._world,
            faulty=self.fault is not None,
        )


def _joint(own: Outcome, count: int, severity: int) -> Outcome:
    """What a request comes to, by its lanes; ``own`` is what this rank found."""
    if severity:
        return Failed(Severity(-severity))
    # A count of all ranks is one of this rank, too, and of the same unit.
    if not count or type(own) is not Hit:
        return Miss()
    held = own.held
    if held.count == count:
        return own
    return Hit(Blocks(count) if isinstance(held, Blocks) else Tokens(count))
