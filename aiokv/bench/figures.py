"""What many measurements of one thing come to: a median, and how far they lie apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

__all__ = ["Spread", "highest", "lowest", "over", "quantile"]

Case = TypeVar("Case")


@dataclass(frozen=True, slots=True)
class Spread:
    """The middle of some measurements."""

    median: float
    #: The quartiles: half of the measurements lie between them.
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Of at least one measurement.

        Raises:
            ValueError: There is none.
        """
        kept = sorted(values)
        return cls(median(kept), quantile(kept, 0.25), quantile(kept, 0.75), len(kept))

    def __format__(self, spec: str) -> str:
        spec = spec or ".3g"
        return f"{self.median:{spec}} ({self.low:{spec}}..{self.high:{spec}})"


def quantile(values: Sequence[float], share: float) -> float:
    """The value that this share of sorted ``values`` doesn't exceed, between two of them by weight.

    Raises:
        ValueError: There is none.
    """
    if not values:
        raise ValueError("no values, no quantile")
    at = share * (len(values) - 1)
    below = int(at)
    above = min(below + 1, len(values) - 1)
    return values[below] + (values[above] - values[below]) * (at - below)


def over(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Ours over theirs, round by round: what disturbed both of one round is divided out."""
    return [mine / other for mine, other in zip(ours, theirs, strict=True)]


def lowest(by_case: Mapping[Case, Sequence[float]]) -> Sequence[float]:
    """The measurements of the case whose median is the lowest."""
    return min(by_case.values(), key=median)


def highest(by_case: Mapping[Case, Sequence[float]]) -> Sequence[float]:
    """The measurements of the case whose median is the highest."""
    return max(by_case.values(), key=median)
