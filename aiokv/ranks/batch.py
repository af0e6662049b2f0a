"""A batch that is put together by code that may raise, or be cancelled, and is entered all the same."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from types import TracebackType

from aiokv.errors import AiokvError, LocalProtocolError
from aiokv.proto.fields import integer
from aiokv.ranks.outcomes import Failed, Miss, Outcome, Severity
from aiokv.ranks.rounds import Rounds

__all__ = ["Batch"]


class Batch:
    """What one rank brings to a batch, put together in an ``async with`` block. Made by ``RankGroup.batch``.

    Each request is a miss until it is set. Left normally, the block waits for the answer, which is in
    ``agreed``. Left by an exception or a cancellation, this rank enters with all requests failed of that
    kind, doesn't wait for the answer, and the exception goes on.

    While the block is open no other batch can be entered on this rank.

    Args:
        rounds: Where it is entered.
        size: Requests.
        keys: What they are; None where the caller doesn't say.
        deadline_s: Seconds from when the block is left.
    """

    def __init__(self, rounds: Rounds, size: int, keys: Iterable[bytes] | None, deadline_s: float) -> None:
        count = integer(size, "size")
        if count < 0:
            raise ValueError(f"size is a number of requests, not {count}")
        self._rounds = rounds
        self._keys = None if keys is None else list(keys)
        self._deadline_s = deadline_s
        self._outcomes: list[Outcome] = [Miss()] * count
        self._agreed: list[Outcome] | None = None

    def __len__(self) -> int:
        return len(self._outcomes)

    def __getitem__(self, number: int) -> Outcome:
        return self._outcomes[number]

    def __setitem__(self, number: int, outcome: Outcome) -> None:
        self._outcomes[number] = outcome

    @property
    def agreed(self) -> list[Outcome]:
        """What all ranks came to, a list as from ``RankGroup.agree``.

        Raises:
            LocalProtocolError: The block was not left yet, or not normally.
        """
        if self._agreed is None:
            raise LocalProtocolError("nothing is agreed on before the block is left, and then only normally")
        return self._agreed

    async def __aenter__(self) -> Batch:
        self._rounds.hold(self)
        self._agreed = None
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            entered = self._rounds.enter(self._outcomes, self._keys, self._deadline_s, holder=self)
            self._agreed = await entered
            return
        failed: list[Outcome] = [Failed(Severity.of(error))] * len(self._outcomes)
        with contextlib.suppress(AiokvError):  # of a group that is no more nobody waits for this rank
            entered = self._rounds.enter(failed, self._keys, self._deadline_s, holder=self)
            if not entered.cancel():
                entered.exception()  # of that nobody is told, either
