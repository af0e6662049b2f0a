"""Staging memory is handed out in turn, and nobody gets what another may still use."""

from __future__ import annotations

import random
from typing import cast

import pytest

from aiokv.device.cudaring import Ring
from aiokv.device.cudastream import CudaEvent, CudaStream


class Stream:
    """Notes the events that it is told to follow."""

    def __init__(self) -> None:
        self.followed: list[int] = []

    def follow(self, event: int) -> None:
        self.followed.append(event)


def test_who_gets_a_range_follows_all_who_had_it(seed: int) -> None:
    draw = random.Random(seed)
    ring, size = Ring(4096), 4096
    last: dict[int, int] = {}  # the last use of each byte
    over: set[int] = set()
    for number in range(300):
        nbytes, stream = draw.choice([1, 100, 256, 1000, 2048, 4096]), Stream()
        start = ring.take(nbytes, cast(CudaStream, stream))
        assert start % 256 == 0
        assert start + nbytes <= size
        over.update(stream.followed)
        assert {last[byte] for byte in range(start, start + nbytes) if byte in last} <= over
        last.update(dict.fromkeys(range(start, start + nbytes), number))
        ring.used(nbytes, cast(CudaEvent, number))


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
