"""Staging memory is handed out in turn, and nobody gets what another may still use."""

from __future__ import annotations

import random
from typing import cast

import pytest

from aiokv.device.cudaring import Ring
from aiokv.device.cudastream import CudaEvent, CudaStream

MIB = 1 << 20


class Stream:
    """Notes the events that it is told to follow."""

    def __init__(self) -> None:
        self.followed: list[int] = []

    def follow(self, event: int) -> None:
        self.followed.append(event)


def test_each_stream_follows_all_who_had_its_range(seed: int) -> None:
    draw = random.Random(seed)
    ring, size = Ring(4096), 4096
    last: dict[int, int] = {}  # the last use of each byte
    behind: list[set[int]] = []  # of each use, what is over before it: what it follows, and what those do
    for number in range(300):
        nbytes, stream = draw.choice([1, 100, 256, 1000, 2048, 4096]), Stream()
        start = ring.take(nbytes, cast(CudaStream, stream))
        assert start % 256 == 0
        assert start + nbytes <= size
        over = set(stream.followed).union(*(behind[event] for event in stream.followed))
        assert {last[byte] for byte in range(start, start + nbytes) if byte in last} <= over
        behind.append(over)
        last.update(dict.fromkeys(range(start, start + nbytes), number))
        ring.used(nbytes, cast(CudaEvent, number))
        assert len(ring._used) <= 2 * size // 256


def taken(ring: Ring, nbytes: int, number: int) -> tuple[int, list[int]]:
    """A range for a stream of its own: its offset, and what that stream follows."""
    stream = Stream()
    start = ring.take(nbytes, cast(CudaStream, stream))
    ring.used(nbytes, cast(CudaEvent, number))
    return start, stream.followed


def test_two_who_share_what_one_had_both_follow_it() -> None:
    ring = Ring(24 * MIB)
    for number, size in enumerate([8, 4, 8, 4]):
        assert not taken(ring, size * MIB, number)[1]
    assert taken(ring, 4 * MIB, 4) == (0, [0])
    assert taken(ring, 4 * MIB, 5) == (4 * MIB, [0])
    assert taken(ring, 4 * MIB, 6) == (8 * MIB, [1])


def test_what_was_skipped_is_not_forgotten() -> None:
    ring = Ring(24 * MIB)
    for number, size in enumerate([20, 4, 20]):
        taken(ring, size * MIB, number)
    # The last four don't hold it: it starts anew, and follows who had those, too.
    assert taken(ring, 20 * MIB, 3) == (0, [1, 2])
    assert taken(ring, 4 * MIB, 4) == (20 * MIB, [3])


def test_a_range_that_was_not_used_is_handed_out_again() -> None:
    ring = Ring(4096)
    taken(ring, 4096, 0)
    ring.take(256, cast(CudaStream, Stream()))
    assert taken(ring, 256, 1) == (0, [0])


def test_nobody_waits_while_there_is_room() -> None:
    ring, stream = Ring(4096), Stream()
    for number in range(4):
        assert ring.take(1024, cast(CudaStream, stream)) == 1024 * number
        ring.used(1024, cast(CudaEvent, number))
    assert not stream.followed
    assert ring.take(1024, cast(CudaStream, stream)) == 0
    assert stream.followed == [0]


@pytest.mark.parametrize("nbytes", [4095, 4096])
def test_a_range_as_large_as_the_ring(nbytes: int) -> None:
    ring, stream = Ring(4096), Stream()
    for number in range(3):
        assert ring.take(nbytes, cast(CudaStream, stream)) == 0
        ring.used(nbytes, cast(CudaEvent, number))
    assert stream.followed == [0, 1]
