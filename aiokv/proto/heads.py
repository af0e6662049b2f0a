"""Which source sends which KV heads to one consumer rank."""

from __future__ import annotations

from collections.abc import Sequence

from aiokv.errors import LayoutMismatch
from aiokv.proto.layout import CacheLayout

__all__ = ["assign_heads"]


def assign_heads(wanted: CacheLayout, sources: Sequence[CacheLayout]) -> list[tuple[tuple[int, int], ...]]:
    """Share the consumer's KV heads out among its sources, each head to one source.

    Sources whose ranges overlap (MLA keeps the same latent head on every rank) are used in the
    order given; a source that has nothing to add gets empty ranges.

    Args:
        wanted: The consumer's layout.
        sources: The producers' layouts, known to be compatible.

    Returns:
        For each source and each group the half-open range of heads to ask it for.

    Raises:
        LayoutMismatch: Some heads are held by no source, or the ranges can't be cut to fit.
    """
    shares: list[list[tuple[int, int]]] = [[(0, 0)] * len(wanted.groups) for _ in sources]
    for index, group in enumerate(wanted.groups):
        # Walk up from the first head wanted; at each point take the source that reaches furthest.
        point, last = group.heads
        while point < last:
            best, reach = -1, point
            for number, source in enumerate(sources):
                low, high = source.groups[index].heads
                if low <= point and min(high, last) > reach and shares[number][index] == (0, 0):
                    best, reach = number, min(high, last)
            if best < 0:
                held = ", ".join(
                    f"{s.groups[index].heads[0]}..{s.groups[index].heads[1] - 1}" for s in sources
                )
                raise LayoutMismatch(
                    f"group {index}: no source holds KV head {point} of {group.heads[0]}..{last - 1} "
                    f"(the sources hold {held})"
                )
            shares[best][index] = (point, reach)
            point = reach
    return [tuple(share) for share in shares]
