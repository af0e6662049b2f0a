from __future__ import annotations

import contextlib
import errno
import os
import socket

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiokv.transports.vectors import MAX_ENTRIES, Vector, VectorIO


def vector_of(memory: np.ndarray, ranges: list[tuple[int, int]]) -> Vector:
    starts, lengths = np.array(ranges, dtype=np.int64).T
    return Vector(starts + memory.ctypes.data, lengths)


def scattered(rng: np.random.Generator, count: int, gap: int = 3) -> list[tuple[int, int]]:
    lengths = rng.integers(1, 50, count)
    starts = np.cumsum(lengths + gap) - lengths
    order = rng.permutation(count)
    return list(zip(starts[order].tolist(), lengths[order].tolist(), strict=True))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.data())
def test_worked_off_in_any_steps(lengths: list[int], data: st.DataObject) -> None:
    starts = [100 * number for number in range(len(lengths))]
    vector = Vector(np.array(starts), np.array(lengths))
    todo = [start + at for start, length in zip(starts, lengths, strict=True) for at in range(length)]
    while vector.left:
        limit = data.draw(st.integers(1, 30))
        _, count, asked = vector.begin(limit)
        vector.end(count, asked, 0)  # a call that moved nothing
        address, count, asked = vector.begin(limit)
        first = (address - vector._base) // 16
        told = [
            start + at
            for start, length in np.array(vector._entries).reshape(-1, 2)[first : first + count].tolist()
            for at in range(length)
        ]
        assert told == todo[:asked]
        assert asked == min(limit, len(todo))
        moved = data.draw(st.integers(1, asked))
        vector.end(count, asked, moved)
        del todo[:moved]
        assert vector.left == len(todo)


@pytest.mark.parametrize("limit", [7, 5_000, 1 << 20])
def test_through_a_socket(seed: int, limit: int) -> None:
    rng = np.random.default_rng(seed)
    ranges = scattered(rng, 3000)  # more than one call takes
    there = rng.integers(0, 256, 400_000, dtype=np.uint8)
    here = np.zeros_like(there)
    a, b = socket.socketpair()
    with a, b:
        a.setblocking(False)
        b.setblocking(False)
        io, out, into = VectorIO(), vector_of(there, ranges), vector_of(here, ranges)
        while into.left:
            for call, fd, vector in ((io.write, a.fileno(), out), (io.read, b.fileno(), into)):
                if vector.left:
                    with contextlib.suppress(BlockingIOError):
                        assert 0 < call(fd, vector, limit) <= limit
        with pytest.raises(BlockingIOError):
            io.read(b.fileno(), vector_of(here, [(0, 1)]), 1)
        a.close()
        assert io.read(b.fileno(), vector_of(here, [(0, 1)]), 1) == 0
        with pytest.raises(BrokenPipeError):
            io.write(b.fileno(), vector_of(here, [(0, 1)]), 1)
    expected = np.zeros_like(there)
    for start, length in ranges:
        expected[start : start + length] = there[start : start + length]
    np.testing.assert_array_equal(here, expected)


def test_from_a_process(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ranges = scattered(rng, 3000)
    there = rng.integers(0, 256, 400_000, dtype=np.uint8)
    here = np.zeros_like(there)
    starts, lengths = np.array(ranges, dtype=np.int64).T
    io, into, out = VectorIO(), starts + here.ctypes.data, starts + there.ctypes.data
    for first in range(0, len(lengths), MAX_ENTRIES):
        moved = io.read_process(os.getpid(), into[first:], out[first:], lengths[first:])
        assert moved == lengths[first : first + MAX_ENTRIES].sum()
    for start, length in ranges:
        np.testing.assert_array_equal(here[start : start + length], there[start : start + length])
    with pytest.raises(OSError) as caught:
        io.read_process(os.getpid(), into[:1], np.array([1]), np.array([1]))
    assert caught.value.errno == errno.EFAULT
