"""How far a prefix has come that several batches bring: those of one call, and those that it joined."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from aiokv.engine.bell import Bell
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
        asked: Rung when it is known what brings the blocks; None once that is known.
        let_go: Gives back what is held until then.
    """

    wanted: int
    runs: list[Run] = field(default_factory=list)
    own: list[Batch] = field(default_factory=list)
    stale: bool = False
    asked: Bell | None = None
    let_go: Callable[[], None] | None = None
    #: Whether this caller doesn't wait any more.
    left: bool = False

    @classmethod
    def of(cls, runs: Iterable[Run], own: Iterable[Batch]) -> Progress:
        """Made from what brings the blocks; this caller now waits for it."""
        found = cls(0)
        found.known(runs, own)
        return found

    @classmethod
    def asking(cls, let_go: Callable[[], None]) -> Progress:
        """One of which is asked what brings the blocks; ``known`` says it.

        Args:
            let_go: Called once, when it is known or this caller has had enough. May be called twice.
        """
        return cls(0, asked=Bell(), let_go=let_go)

    def known(self, runs: Iterable[Run], own: Iterable[Batch]) -> None:
        """What brings the blocks; this caller now waits for it."""
        self.runs, self.own = list(runs), list(own)
        self.wanted = sum(hi - lo for _, lo, hi in self.runs)
        for batch in self.batches:
            batch.waiters += 1
        if self.let_go is not None:
            self.let_go()
        asked, self.asked = self.asked, None
        if asked is not None:
            asked.ring()

    def outdate(self) -> None:
        """It is worth nothing any more."""
        self.stale = True
        if self.asked is not None:
            self.asked.ring()

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

    def waits_for(self) -> Bell | None:
        """The bell to listen to; None if nothing more will come, and all of its own is quiet."""
        if self.asked is not None:
            return None if self.stale else self.asked
        for batch, _, hi in self.runs:
            if batch is not None and batch.landed < hi:
                if not batch.ended:
                    return batch.bell
                break
        return next((batch.bell for batch in self.own if not batch.ended), None)

    async def more(self, than: int) -> int:
        """Wait until more blocks are there than ``than``, or no more will be.

        Returns:
            How many are.
        """
        while self.count <= than and (bell := self.waits_for()) is not None:
            await bell.wait()
        return self.count

    async def over(self) -> None:
        """Wait until no more will come, and what was begun for it is quiet."""
        while (bell := self.waits_for()) is not None:
            await bell.wait()

    def leave(self) -> list[Batch]:
        """Wait no longer; the batches that nobody waits for any more."""
        if self.left:
            return []
        self.left = True
        if self.let_go is not None:
            self.let_go()
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
