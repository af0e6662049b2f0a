"""What the programs are to read: offsets into both buffers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

__all__ = ["FILLED", "check", "fragments"]

#: What a source has in each byte, and a reader has not before it reads.
FILLED = 7

_FRAGMENT = 32 << 10
_SEED = 11


def fragments(
    nbytes: int, paged: bool, at_once: int
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64], int]]:
    """For each transfer of some at once: offsets here, as many there, and the size of each range.

    Args:
        nbytes: Of each transfer.
        paged: In fragments of 32 KiB, in random order on both sides; else as one range.
        at_once: How many transfers.
    """
    random = np.random.default_rng(_SEED)
    size = _FRAGMENT if paged else nbytes
    each = nbytes // size
    here, there = (np.arange(each * at_once) * size for _ in range(2))
    if paged:
        random.shuffle(here)
        random.shuffle(there)
    for first in range(0, len(here), each):
        yield here[first : first + each], there[first : first + each], size


def check(memory: NDArray[np.uint8], nbytes: int) -> None:
    """See that the bytes came.

    Raises:
        RuntimeError: They didn't.
    """
    if memory[0] != FILLED or memory[nbytes - 1] != FILLED:
        raise RuntimeError("the bytes did not come")
