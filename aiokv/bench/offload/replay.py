"""Hit rates of policies on a trace, beside the best that anybody could do who knew what comes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from heapq import heappop, heappush

from aiokv.offload.manager import BlockTable
from aiokv.offload.policies import policy_named

__all__ = ["optimum", "replayed"]


def replayed(trace: Sequence[Sequence[Hashable]], policy: str, capacity: int) -> float:
    """Share of the blocks that requests ask for which a table of this capacity has."""
    table = BlockTable(policy_named(policy))
    table.grow(capacity)
    hits = asked = 0
    for keys in trace:
        places = table.lookup(keys)
        hits += len(places)
        asked += len(keys)
        if len(places) < len(keys):
            parent = keys[len(places) - 1] if places else None
            offered = table.offer(keys[len(places) :], parent)
            table.finish([place for _, place in offered.new], ok=True)
        table.release(places)
    return hits / asked


def optimum(trace: Sequence[Sequence[Hashable]], capacity: int) -> float:
    """The same of Belady's policy: what is used again last goes first, or never comes in."""
    never = len(trace)
    following: list[list[int]] = []
    last: dict[Hashable, int] = {}
    for index in range(len(trace) - 1, -1, -1):
        following.append([last.get(key, never) for key in trace[index]])
        last.update(dict.fromkeys(trace[index], index))
    following.reverse()
    held: dict[Hashable, int] = {}
    # Of those used again at the same time the tail goes before the head.
    heap: list[tuple[int, int, int, Hashable]] = []
    hits = asked = made = 0
    for keys, again in zip(trace, following, strict=True):
        asked += len(keys)
        counting = True
        for depth, (key, use) in enumerate(zip(keys, again, strict=True)):
            counting = counting and key in held
            hits += counting
            held[key] = use
            made += 1
            heappush(heap, (-use, -depth, made, key))
        while len(held) > capacity:
            use, _, _, key = heappop(heap)
            if held.get(key) == -use:
                del held[key]
    return hits / asked
