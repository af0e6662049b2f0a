"""Alternating rounds: what is compared is measured in turn, so that a disturbance meets all alike."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Mapping
from typing import TypeVar

__all__ = ["alternate"]

Name = TypeVar("Name", bound=Hashable)
Figure = TypeVar("Figure")


async def alternate(
    rounds: int, measures: Mapping[Name, Callable[[], Awaitable[Figure]]], *, warm: int = 1
) -> dict[Name, list[Figure]]:
    """Measure each of some things once a round, in the other order every second round.

    Args:
        rounds: How many count.
        measures: Each measures one thing once.
        warm: Rounds before them that don't count.

    Returns:
        For each thing its figures, one a round.
    """
    found: dict[Name, list[Figure]] = {name: [] for name in measures}
    names = list(measures)
    for number in range(warm + rounds):
        for name in names if number % 2 else reversed(names):
            figure = await measures[name]()
            if number >= warm:
                found[name].append(figure)
    return found
