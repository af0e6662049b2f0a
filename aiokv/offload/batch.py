"""One load or store, and its parts in the order of the prefix: each has a lease, a plan and a submission."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from aiokv.device.base import Event, Stream
from aiokv.device.submission import Submission
from aiokv.engine.bell import Bell
from aiokv.engine.leases import Lease
from aiokv.errors import AiokvError
from aiokv.offload.calls import Stored
from aiokv.offload.policies import Key
from aiokv.proto.plan import GroupBlocks

__all__ = ["Batch", "Part"]


@dataclass(slots=True, eq=False)
class Part:
    """Blocks ``lo`` to ``hi`` of a batch."""

    lo: int
    hi: int
    lease: Lease
    nbytes: int = 0
    #: None until there is something to submit, and where that was not possible.
    submission: Submission | None = None
    #: Whether it was begun, and whether it is over: nothing can touch its blocks, or places, any more.
    begun: bool = False
    quiet: bool = False
    began_ns: int = 0
    #: Whether it is across, and counts.
    across: bool = False


@dataclass(slots=True, eq=False)
class Batch:
    """One load or store.

    Attributes:
        store: Towards the pool.
        places: In the pool, in the order of the prefix.
        blocks: Of the cache, for each group.
        priority: The higher goes first.
        parts: In order.
        keys: What the places are to hold.
        indices: Of the blocks, in the call of a store that named them.
        call: What that store named.
        own_stream: No other batch uses its stream.
        landed: Blocks of the prefix that are across.
        checking: Parts that are across and are looked at, whether they are what they were.
        error: Why no more will be; None while nothing went wrong.
        stopped: Nothing more is begun.
        waiters: Callers that wait for it.
        bell: Rung when any of this changes.
    """

    store: bool
    places: Sequence[int]
    blocks: tuple[GroupBlocks, ...]
    priority: int
    stream: Stream
    #: What the stream waits for, of the caller's; None if nothing.
    held: Event | None
    own_stream: bool = False
    keys: Sequence[Key] = ()
    indices: Sequence[int] = ()
    call: Stored | None = None
    parts: list[Part] = field(default_factory=list)
    landed: int = 0
    checking: int = 0
    error: AiokvError | None = None
    stopped: bool = False
    waiters: int = 0
    bell: Bell = field(default_factory=Bell)

    @property
    def quiet(self) -> bool:
        """Whether nothing can touch its blocks any more."""
        return all(part.quiet for part in self.parts)

    @property
    def ended(self) -> bool:
        """Whether no more of the prefix will land."""
        return not self.checking and self.quiet

    def good_up_to(self, part: Part, first_bad: int) -> int:
        """Blocks of the prefix that count, though a part of it doesn't from one of its blocks on."""
        return part.lo + first_bad if self.landed == part.lo else self.landed

    def arrived(self, part: Part) -> None:
        """A part is across, and counts as soon as all before it do."""
        part.across = True
        for each in self.parts:
            if not each.across:
                break
            self.landed = each.hi
        self.bell.ring()
