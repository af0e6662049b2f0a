"""What became of blocks that were offered to the tier."""

from __future__ import annotations

from dataclasses import dataclass, field

from aiokv.offload.policies import Key

__all__ = ["Offered"]


@dataclass(slots=True)
class Offered:
    """What became of blocks that were offered, by their index in the call.

    Attributes:
        new: What is to be written now, in order: index, and place in the pool.
        pending: What others are writing at the moment: index and place.
        kept: Blocks of the prefix that are there, or will be once ``new`` and ``pending`` are.
        refused: Blocks behind it: not admitted, or no room, as all else is in use.
        evicted: Keys that had to go.
    """

    new: list[tuple[int, int]] = field(default_factory=list)
    pending: list[tuple[int, int]] = field(default_factory=list)
    kept: int = 0
    refused: int = 0
    evicted: list[Key] = field(default_factory=list)
