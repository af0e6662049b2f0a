"""What other libraries are to move, and that one which isn't installed is left out by name."""

from __future__ import annotations

import numpy as np
import pytest

from aiokv.bench.moves import Work
from aiokv.bench.peers.fragments import FILLED, check, fragments
from aiokv.bench.peers.pair import LARGEST, LIBRARIES, Library


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("at_once", [1, 3])
def test_fragments_cover_every_byte_once_on_both_sides(paged: bool, at_once: int) -> None:
    nbytes = 1 << 20
    found = list(fragments(nbytes, paged, at_once))
    assert len(found) == at_once
    for side in (0, 1):
        seen = np.zeros(nbytes * at_once, np.uint8)
        for entry in found:
            for at in entry[side]:
                seen[at : at + entry[2]] += 1
        assert (seen == 1).all()
    assert (found[0][2] == 32 << 10) is paged


def test_bytes_that_did_not_come_are_noticed() -> None:
    memory = np.full(8, FILLED, np.uint8)
    check(memory, 8)
    memory[7] = 0
    with pytest.raises(RuntimeError):
        check(memory, 8)


def test_a_library_that_is_not_there_is_not_installed() -> None:
    assert not Library("none", "none", "a_module_that_nobody_has", scatters=True, spins=True).installed
    assert Library("numpy", "none", "numpy", scatters=True, spins=True).installed


def test_each_library_has_a_name_of_its_own() -> None:
    assert len({library.name for library in LIBRARIES}) == len(LIBRARIES)


@pytest.mark.parametrize("nbytes", [64 << 10, 1 << 20, 16 << 20, 64 << 20])
@pytest.mark.parametrize("paged", [False, True])
def test_work_lists_each_block_once(nbytes: int, paged: bool) -> None:
    work = Work(nbytes, paged, 8, 1)
    blocks = work.blocks(3)
    assert len(blocks) == 8
    flat = [block for listed in blocks for block in listed]
    assert sorted(flat) == list(range(nbytes * 8 // (64 << 10) // work.layers))
    assert (flat == sorted(flat)) is not paged or len(flat) == 1
    assert work.total == 8 * nbytes
    assert work.total <= LARGEST or nbytes > 16 << 20
