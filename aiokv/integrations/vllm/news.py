"""What workers tell the scheduler's half: about their host tiers, and about what is waited for.

A tier lives in its worker's process, so the scheduler keeps a list of what is there, and the workers say what
changes. The list is a little late, never wrong for long: what is on it and can't be brought back is a miss,
which is told too.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Change", "Emptied", "Gone", "Kept", "Missed", "News", "Wanted"]


@dataclass(frozen=True, slots=True)
class Kept:
    """A ``Keep`` reads its blocks no longer.

    Attributes:
        number: The order's.
        count: How many of its blocks are in the tier, from the first on.
    """

    number: int
    count: int


@dataclass(frozen=True, slots=True)
class Gone:
    """Blocks can't be brought back any more: they were evicted, or turned out not to be there.

    Attributes:
        hashes: Which; None: all of them may be gone, as this worker lost count.
    """

    hashes: tuple[bytes, ...] | None


@dataclass(frozen=True, slots=True)
class Emptied:
    """What was there before a reset is gone, and what is told from now on is of after it.

    Attributes:
        reset: The reset's number.
    """

    reset: int


@dataclass(frozen=True, slots=True)
class Missed:
    """A recall did not bring all of its blocks.

    Attributes:
        request: vLLM's name of the request, which computes them.
    """

    request: str


@dataclass(frozen=True, slots=True)
class Wanted:
    """The decode side waits for a chunk that was to be watched for.

    Attributes:
        request: vLLM's name of the request here.
        number: The chunk's.
        first: The first token that the decode side lacks.
    """

    request: str
    number: int
    first: int


Change = Kept | Gone | Emptied | Missed | Wanted


@dataclass(frozen=True, slots=True)
class News:
    """Of one worker.

    Attributes:
        rank: Whose.
        changes: In the order in which they happened.
    """

    rank: int
    changes: tuple[Change, ...]
