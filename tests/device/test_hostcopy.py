"""The ways in which pieces are copied on the host, each against bytes moved one run at a time."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from aiokv.device import hostcopy
from aiokv.proto.layout import CacheLayout
from aiokv.proto.placement import Placement
from aiokv.proto.plan import Copy, GroupBlocks, Section, Side, plan_copy


def section(src: list[int], dst: list[int], run: int, loops: list[tuple[int, int, int]]) -> Section:
    return Section(
        np.array(src, dtype=np.int64),
        np.array(dst, dtype=np.int64),
        tuple(loop[0] for loop in loops),
        tuple(loop[1] for loop in loops),
        tuple(loop[2] for loop in loops),
        run,
    )


BIG = hostcopy.RELEASE_BYTES
CASES = {
    "one byte each": section([9, 0, 4], [1, 7, 3], 1, []),
    "small runs, gathered": section(list(range(9000, 0, -30)), list(range(0, 12000, 40)), 30, []),
    "small pieces with loops, gathered": section([900, 0, 450], [500, 0, 250], 7, [(4, 100, 50), (3, 10, 8)]),
    "small pieces in a row": section([40, 50, 60, 0], [10, 20, 30, 90], 10, []),
    "small pieces in a row, with loops": section([40, 60, 0], [15, 35, 80], 5, [(2, 15, 15)]),
    "blocks": section([4096 * n for n in (5, 0, 3)], [4096 * n for n in (1, 2, 0)], 4096, []),
    "odd offsets": section([4097, 1, 9001], [3, 5003, 10007], 4096, []),
    "blocks in a row": section([4096 * n for n in (2, 3, 4, 0)], [4096 * n for n in (5, 6, 7, 1)], 4096, []),
    "heads of tokens": section([65536, 0], [8192, 0], 512, [(16, 2048, 512)]),
    "transposed": section([65536, 0], [0, 65536], 256, [(8, 256, 4096), (16, 2048, 256)]),
    "so many runs that numpy gives up the GIL": section([0], [0], 8, [(100, 160, 80), (10, 16, 8)]),
    "gives up the GIL": section([BIG + 3, 0], [1, 2 * BIG], BIG, []),
}


@pytest.mark.parametrize("name", CASES)
def test_pieces_arrive_and_nothing_else_is_touched(name: str, seed: int) -> None:
    part = CASES[name]
    copy = Copy(part, ((0, 5), (1, 7)), ((0, 11), (1, 2)))
    rng = random.Random(seed)
    before = [rng.randbytes(part.src_reach + base) for _, base in copy.src]
    src = [memoryview(bytearray(data)) for data in before]
    dst = [memoryview(bytearray(part.dst_reach + base)) for _, base in copy.dst]
    wanted = [bytearray(len(data)) for data in dst]
    for lo, hi in ((0, 1), (1, len(part.src)), (0, len(part.src))):
        for piece in range(lo, hi):
            for steps in np.ndindex(*part.shape):
                at = int(part.src[piece]) + int(np.dot(part.src_strides, steps))
                to = int(part.dst[piece]) + int(np.dot(part.dst_strides, steps))
                for n, ((_, here), (_, there)) in enumerate(zip(copy.src, copy.dst, strict=True)):
                    moved = before[n][at + here : at + here + part.run]
                    wanted[n][to + there : to + there + part.run] = moved
        if lo < hi:
            hostcopy.copy_pieces(copy, lo, hi, src, dst)
        assert dst == wanted
    assert src == before


@pytest.mark.parametrize("name", ["small runs, gathered", "blocks", "transposed"])
@pytest.mark.parametrize("short", ["source", "destination"])
def test_a_byte_too_few_and_nothing_is_copied(name: str, short: str) -> None:
    part = CASES[name]
    copy = Copy(part, ((0, 0),), ((0, 0),))
    src = memoryview(bytes(part.src_reach - (short == "source")))
    dst = memoryview(bytearray(b"x" * (part.dst_reach - (short == "destination"))))
    with pytest.raises(ValueError, match="beyond a buffer"):
        hostcopy.copy_pieces(copy, 0, 1, [src], [dst])
    assert bytes(dst) == b"x" * len(dst)
    with pytest.raises(TypeError, match="read-only"):
        hostcopy.copy_pieces(
            copy, 0, 1, [memoryview(bytes(part.src_reach))], [memoryview(bytes(part.dst_reach))]
        )


@pytest.mark.parametrize("name", CASES)
def test_within_one_buffer(name: str) -> None:
    part = replace(CASES[name])
    size = max(part.src_reach, part.dst_reach)
    both = memoryview(bytearray(size))
    hostcopy.copy_pieces(Copy(part, ((0, 0),), ((0, 0),)), 0, len(part.src), [both], [both])


def test_a_whole_cache_between_two_layouts(seed: int) -> None:
    ids = np.random.default_rng(seed).permutation(12).astype(np.int64)
    sides = []
    for axes, size in (("bsthd", 16), ("bhtsd", 24)):
        layout = CacheLayout.attention(
            layers=2, blocks=12, block_size=size, heads=4, head_size=16, dtype="float16", axes=axes
        )
        sides.append(Side(layout, Placement.dense(layout), (GroupBlocks(0, ids),)))
    here, there = sides
    tokens = 12 * 16 - 3
    data = random.Random(seed).randbytes(here.placement.buffers[0])
    src, dst, back = (memoryview(bytearray(side.placement.buffers[0])) for side in (here, there, here))
    src[:] = data
    for one, two, source, target in ((here, there, src, dst), (there, here, dst, back)):
        plan = plan_copy(one, two, first_token=0, tokens=tokens, heads=(0, 4))
        for chunk in plan.chunks(plan.layers, 5000):
            copy = plan.copy(chunk)
            hostcopy.copy_pieces(copy, chunk.lo, chunk.hi, [source] * len(copy.src), [target] * len(copy.dst))
    again = plan_copy(here, here, first_token=0, tokens=tokens, heads=(0, 4))
    for layer in again.layers:
        for copy in again.copies(layer):
            for _, starts, _, _, lengths in copy.extents(0, 99):
                for at, length in zip(starts.tolist(), lengths.tolist(), strict=True):
                    assert back[at : at + length] == src[at : at + length]
