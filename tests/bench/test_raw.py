"""The baselines move the bytes."""

from __future__ import annotations

import os
from contextlib import closing

import numpy as np
import pytest

from aiokv.bench.raw import PlainCopy, ProcessReads, RawReader, RawSender

SIZE = 300_001


def memory(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, SIZE, dtype=np.uint8)


@pytest.mark.parametrize("streams", [1, 2, 5])
def test_sockets(streams: int) -> None:
    there, here = memory(1), memory(2)
    with (
        closing(RawSender(there.data, streams)) as sender,
        closing(RawReader(sender.port, streams)) as reader,
    ):
        for size in (SIZE, 5, 4096 * streams):
            here[:] = 0
            reader.read(here.data[:size])
            assert np.array_equal(here[:size], there[:size])
            assert not here[size:].any()


@pytest.mark.parametrize("threads", [1, 3])
def test_copies(threads: int) -> None:
    there, here = memory(1), memory(2)
    with closing(PlainCopy(here.ctypes.data, there.ctypes.data, threads)) as copy:
        copy.copy(SIZE)
    assert np.array_equal(here, there)


def test_process_reads() -> None:
    there, here = memory(1), memory(2)
    reads = ProcessReads(os.getpid(), there.ctypes.data, here.ctypes.data)
    try:
        reads.read(SIZE)
    except PermissionError:
        pytest.skip("process_vm_readv is refused here")
    assert np.array_equal(here, there)
    here[:] = 0
    pieces = np.arange(0, 4096, 2)
    reads.read_vectors(reads.vectors(pieces, pieces[::-1].copy(), 2))
    assert np.array_equal(here[:4096].reshape(-1, 2), there[:4096].reshape(-1, 2)[::-1])
    with pytest.raises(OSError, match="address|bytes"):
        ProcessReads(os.getpid(), 1, here.ctypes.data).read(8)
