"""How far a prefix has come that several batches bring: those of one call, and those that it joined."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from aiokv.offload.batch import Batch

__all__ = ["Progress", "Run", "runs_of"]

#: A batch, and which of its blocks; None where blocks are there already.
Run = tuple[Batch | None, int, int]


@dataclass(slots=True, eq=False, weakref_slot=True)
class Progress:
    """What one caller waits for.

    Attributes:
        wanted: Blocks in all.
        runs: For each run of its blocks, in order, the batch that brings it and which of the batch's blocks;
            None where they are there already.
        own: Batches that this call began.
        stale: It is worth nothing any more: the tier was reset.
    """

    wanted: int
    runs: list[Run] = field(default_factory=list)
    own: list[Batch] = field(default_factory=list)
    stale: bool = False
    #: Whether this caller doesn't wait any more.
    left: bool = False

    @classmethod
    def of(cls, runs: Iterable[Run], own: Iterable[Batch]) -> Progress:
        """Made from what brings the blocks; this caller now waits for it."""
        found = cls(0, list(runs), list(own))
        found.wanted = sum(hi - lo for _, lo, hi in found.runs)
        for batch in found.batches:
            batch.waiters += 1
        return found

    @property
    def batches(self) -> list[Batch]:
        """All batches that it waits for, each once."""
        return list(dict.fromkeys([batch for batch, _, _ in self.runs if batch is not None] + self.own))

    @property
    def count(self) -> int:
        """Blocks of the prefix that are there."""
        if self.stale:
            return 0
        total = 0
        for batch, lo, hi in self.runs:
            got = hi - lo if batch is None else min(max(batch.landed - lo, 0), hi - lo)
            total += got
            if got < hi - lo:
                break
        return total

    @property
    def failed(self) -> bool:
        """Whether a batch that it waits for went wrong."""
        return any(batch.error is not None or batch.stopped for batch in self.batches)

    def waits_for(self) -> Batch | None:
        """The batch whose bell to listen to; None if nothing more will come, and all of its own is quiet."""
        for batch, _, hi in self.runs:
            if batch is not None and batch.landed < hi:
                if not batch.ended:
                    return batch
                break
        return next((batch for batch in self.own if not batch.ended), None)

    async def more(self, than: int) -> int:
        """Wait until more blocks are there than ``than``, or no more will be.

        Returns:
            How many are.
        """
        while self.count <= than and (batch := self.waits_for()) is not None:
            await batch.bell.wait()
        return self.count

    async def over(self) -> None:
        """Wait until no more will come, and what was begun for it is quiet."""
        while (batch := self.waits_for()) is not None:
            await batch.bell.wait()

    def leave(self) -> list[Batch]:
        """Wait no longer; the batches that nobody waits for any more."""
        if self.left:
            return []
        self.left = True
        alone = []
        for batch in self.batches:
            batch.waiters -= 1
            if not batch.waiters:
                alone.append(batch)
        return alone


def runs_of(sources: Iterable[tuple[Batch | None, int]]) -> list[Run]:
    """The batch and the index in it of each block, as runs."""
    runs: list[Run] = []
    for batch, index in sources:
        last = runs[-1] if runs else None
        if last is not None and last[0] is batch and (batch is None or last[2] == index):
            runs[-1] = (batch, last[1], last[2] + 1)
        else:
            runs.append((batch, index, index + 1))
    return runs
