"""CPU and memory of the tier's index, by key, with a million of them."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from hashlib import sha256
from itertools import pairwise

from aiokv.bench.usage import resident_bytes
from aiokv.offload.manager import BlockTable
from aiokv.offload.policies import policy_named

__all__ = ["Costs", "measure"]

#: Blocks of a request: 4k tokens in blocks of 16.
_CHAIN = 256

Costs = dict[str, float]


def _prefixes(first: int, count: int) -> list[list[bytes]]:
    """Hashes of the blocks of some prompts that have nothing in common."""
    return [
        [sha256(b"%d %d" % (prompt, index)).digest() for index in range(_CHAIN)]
        for prompt in range(first, first + count)
    ]


def measure(policy: str, keys: int, rounds: int) -> Iterator[Costs]:
    """Fill an index, then look up, store and evict in it; for each round microseconds of CPU a key.

    Each key of a round is looked up in vain, stored, which another is evicted for, and found; what a round
    gives as ``all`` is the sum.
    """
    gc.collect()
    before = resident_bytes()
    table = BlockTable(policy_named(policy))
    table.grow(keys)
    made = keys // _CHAIN
    for first in range(0, made, 256):
        for prompt in _prefixes(first, min(256, made - first)):
            table.finish([place for _, place in table.offer(prompt).new], ok=True)
    gc.collect()
    memory = (resident_bytes() - before) / (made * _CHAIN)
    for _ in range(rounds):
        batch = _prefixes(made, 64)
        again = [[bytes(bytearray(key)) for key in prompt] for prompt in batch]
        made += len(batch)
        count = len(batch) * _CHAIN
        gc.disable()
        marks = [time.thread_time_ns()]
        for prompt in batch:
            table.release(table.lookup(prompt))
        marks.append(time.thread_time_ns())
        for prompt in batch:
            table.finish([place for _, place in table.offer(prompt).new], ok=True)
        marks.append(time.thread_time_ns())
        for prompt in again:
            table.release(table.lookup(prompt))
        marks.append(time.thread_time_ns())
        gc.enable()
        miss, store, hit = ((end - start) / count / 1e3 for start, end in pairwise(marks))
        whole = miss + store + hit
        yield {"miss": miss, "store and evict": store, "hit": hit, "all": whole, "memory": memory}
