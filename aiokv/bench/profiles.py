"""What dominates a profile, as rows."""

from __future__ import annotations

import cProfile
import io
import pstats
from pathlib import Path
from typing import NamedTuple

__all__ = ["Cost", "costs", "text"]


class Cost(NamedTuple):
    """One function of a profile; times in microseconds for each transfer, as profiled."""

    function: str
    calls: float
    own_us: float
    with_callees_us: float


def costs(profile: cProfile.Profile | str, transfers: int, most: int) -> list[Cost]:
    """The functions that took the most by themselves.

    Args:
        profile: It, or the file that it was written to.
        transfers: How many were made meanwhile.
        most: How many functions.
    """
    found = []
    # A mapping that the type stubs don't name: (file, line, function) to (_, calls, own, with callees, _).
    stats = vars(pstats.Stats(profile))["stats"]
    for (file, line, name), (_, calls, own, whole, _) in stats.items():
        where = name if file == "~" else f"{_short(file)}:{line} {name}"
        found.append(Cost(where, calls / transfers, own * 1e6 / transfers, whole * 1e6 / transfers))
    return sorted(found, key=lambda cost: -cost.own_us)[:most]


def text(profile: cProfile.Profile | str) -> str:
    """All of a profile, for a person: by own time, and by time with callees."""
    out = io.StringIO()
    stats = pstats.Stats(profile, stream=out)
    stats.sort_stats("tottime").print_stats(60)
    stats.sort_stats("cumulative").print_stats(60)
    return out.getvalue()


def _short(file: str) -> str:
    """A module's file from its package on."""
    parts = Path(file).parts
    return "/".join(parts[parts.index("aiokv") :]) if "aiokv" in parts else "/".join(parts[-2:])
