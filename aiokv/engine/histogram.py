"""How long something took, each time, counted in buckets: cheap to add to, and enough for percentiles."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

__all__ = ["BOUNDS", "Histogram", "Times"]

#: Upper bounds of the buckets in seconds: 1, 2.5 and 5 times the powers of ten from 10 us to 10 s, then the
#: default deadline and ten minutes. What took longer is counted beside them.
BOUNDS = (
    *(step * 10.0**power for power in range(-5, 1) for step in (1.0, 2.5, 5.0)),
    *(10.0, 30.0, 60.0, 600.0),
)

_BOUNDS_NS = tuple(round(bound * 1e9) for bound in BOUNDS)


@dataclass(frozen=True, slots=True)
class Times:
    """A snapshot of a ``Histogram``."""

    #: How often it took up to each of ``BOUNDS`` and longer than the one before; last, longer than all.
    counts: tuple[int, ...]
    #: Seconds in all.
    total: float

    @property
    def count(self) -> int:
        """How often it happened."""
        return sum(self.counts)


class Histogram:
    """Counts of durations by bucket."""

    __slots__ = ("_counts", "_total_ns")

    def __init__(self) -> None:
        self._counts = [0] * (len(_BOUNDS_NS) + 1)
        self._total_ns = 0

    def add(self, ns: int) -> None:
        """It took this long, once more (nanoseconds)."""
        self._counts[bisect_left(_BOUNDS_NS, ns)] += 1
        self._total_ns += ns

    def snapshot(self) -> Times:
        """As it stands. May be called from any thread."""
        return Times(tuple(self._counts), self._total_ns / 1e9)
