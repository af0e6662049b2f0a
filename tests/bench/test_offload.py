"""What the benchmark of the host tier is made of: traces, the optimum, and copies that are played."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest

from aiokv.bench.offload.played import PlayedDevice
from aiokv.bench.offload.replay import optimum, replayed
from aiokv.bench.offload.traces import conversations, distinct, read
from aiokv.errors import DeviceError
from aiokv.offload.manager import BlockTable
from aiokv.offload.policies import Lru


def test_conversations_are_the_same_for_a_seed_and_grow() -> None:
    trace = conversations(3, 200, at_once=20)
    assert trace == conversations(3, 200, at_once=20)
    assert trace != conversations(4, 200, at_once=20)
    grown = sum(
        any(later[: len(one)] == one for later in trace[at + 1 :]) for at, one in enumerate(trace[:100])
    )
    assert grown > 50
    assert all(len(set(one)) == len(one) for one in trace)


def test_traces_are_read(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 0, "hash_ids": [1, 2, 2, 3]}, {"hash_ids": [1, 2, 9]}]
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    assert read(file) == [[1, 2, 3], [1, 2, 9]]
    assert distinct(read(file)) == 4
    file.write_text('{"ids": []}\n')
    with pytest.raises(ValueError, match="line 1"):
        read(file)


def best(trace: list[list[int]], capacity: int) -> float:
    """The most hits by trying all that can be kept after each request; for tiny traces."""
    states = {frozenset[int](): 0}
    for keys in trace:
        following: dict[frozenset[int], int] = {}
        for held, hits in states.items():
            found = len(list(itertools.takewhile(held.__contains__, keys)))
            everything = held | set(keys)
            size = min(capacity, len(everything))
            for kept in itertools.combinations(sorted(everything), size):
                state = frozenset(kept)
                following[state] = max(following.get(state, -1), hits + found)
        states = following
    return max(states.values()) / sum(map(len, trace))


def test_the_optimum_is_one(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(10):
        chains = [[10 * chain + depth for depth in range(3)] for chain in range(3)]
        trace = [draw.choice(chains)[: draw.randint(1, 3)] for _ in range(8)]
        for capacity in (2, 3, 5):
            assert optimum(trace, capacity) == pytest.approx(best(trace, capacity))


def test_no_policy_finds_more_than_the_optimum_and_all_find_all_with_room_for_all() -> None:
    trace = conversations(5, 300, at_once=20)
    blocks = distinct(trace)
    for capacity in (blocks // 20, blocks // 5):
        most = optimum(trace, capacity)
        assert all(0 < replayed(trace, policy, capacity) <= most for policy in ("lru", "arc"))
    assert replayed(trace, "lru", blocks) == replayed(trace, "arc", blocks) == optimum(trace, blocks)


def test_played_copies_take_their_time() -> None:
    device = PlayedDevice(50.0)
    stream = device.stream()
    assert stream.record().done()
    stream.free_at = 1 << 62  # type: ignore[attr-defined]
    event = stream.record()
    assert not event.done()
    other = device.stream()
    other.wait(event)
    assert not other.record().done()
    with pytest.raises(DeviceError):
        device.copy(None, None, (), (), stream=None)  # type: ignore[arg-type]


def test_a_replay_leaves_nothing_in_use() -> None:
    table = BlockTable(Lru())
    table.grow(10)
    for keys in conversations(1, 50, at_once=5):
        places = table.lookup(keys)
        offered = table.offer(keys[len(places) :], keys[len(places) - 1] if places else None)
        table.finish([place for _, place in offered.new], ok=True)
        table.release(places)
    assert table.in_use == 0
