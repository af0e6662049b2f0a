"""Requests to replay: conversations that grow turn by turn, made from a seed, or traces in JSON lines."""

from __future__ import annotations

import json
import random
from bisect import bisect_left
from collections.abc import Hashable, Sequence
from itertools import accumulate
from pathlib import Path

__all__ = ["conversations", "distinct", "read"]

#: Of the shares that conversations have in the requests.
_ZIPF = 0.9
#: Turns after which a conversation is over, and another begins in its place.
_MOST_TURNS = 12
#: Blocks of the system prompts, of which all conversations begin with one.
_SYSTEM = (4, 8, 16, 32)

Trace = list[list[Hashable]]


def conversations(seed: int, requests: int, *, at_once: int = 200) -> Trace:
    """Multi-turn chats: each request is its conversation so far, as hashes of blocks, and some more.

    Args:
        seed: Of all that is drawn.
        requests: How many.
        at_once: Conversations that go on; which one the next request is of has a Zipf distribution.
    """
    draw = random.Random(seed)  # noqa: S311 - a workload, not a secret
    weights = list(accumulate(1 / (rank + 1) ** _ZIPF for rank in range(at_once)))
    live: list[list[Hashable]] = [[] for _ in range(at_once)]
    turns = [0] * at_once
    found: Trace = []
    for made in range(requests):
        which = bisect_left(weights, draw.random() * weights[-1])
        if turns[which] >= _MOST_TURNS or not live[which]:
            system = draw.randrange(len(_SYSTEM))
            live[which] = [(-1 - system, index) for index in range(_SYSTEM[system])]
            turns[which] = 0
        more = 1 + min(int(draw.expovariate(1 / 24)), 256)
        live[which] = live[which] + [(made, index) for index in range(more)]
        turns[which] += 1
        found.append(live[which])
    return found


def read(file: Path) -> Trace:
    """A trace in JSON lines that each have ``hash_ids``, as those that Mooncake published.

    Raises:
        ValueError: A line has none.
    """
    found: Trace = []
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                ids = json.loads(line).get("hash_ids")
                if not isinstance(ids, list):
                    raise ValueError(f"{file}, line {number}: no hash_ids")
                found.append(list(dict.fromkeys(ids)))
    return found


def distinct(trace: Sequence[Sequence[Hashable]]) -> int:
    """How many different blocks a trace has."""
    return len({key for request in trace for key in request})
