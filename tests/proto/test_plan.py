"""Copy plans against a slow reference, over layouts, placements, block lists and ranges."""

from __future__ import annotations

import inspect
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiokv.errors import InvalidBlocks, LayoutMismatch
from aiokv.proto.layout import CacheLayout, GroupLayout, Kind, itemsize
from aiokv.proto.placement import GroupPlacement, Placement
from aiokv.proto.plan import Chunk, Copy, CopyPlan, GroupBlocks, Section, Side, plan_copy, planned_bytes

#: (axes, split) of everything that keeps K and V of several heads.
FULL = [
    ("sbthd", False),
    ("bsthd", False),
    ("bshtd", False),
    ("bhtsd", False),
    ("sbhtd", False),
    ("bthsd", False),
    ("bthd", True),
    ("bhtd", True),
]
LATENT = [("btd", False), ("bthd", False)]
KINDS: list[Kind] = ["attention", "attention", "window", "mla", "state"]

Pair = tuple[int, int, int, int]


# -- the reference ----------------------------------------------------------------------------------


def reference(
    src: Side, dst: Side, first_token: int, tokens: int, heads: tuple[int, int]
) -> dict[int, list[Pair]]:
    """For each layer, every element that moves: buffer and address at both sides."""
    moves: dict[int, list[Pair]] = {layer: [] for layer in range(src.layout.layers)}
    for index, group in enumerate(src.layout.groups):
        first_head, last_head = (0, 1) if group.total_heads == 1 else heads
        starts = [side.blocks[index].start for side in (src, dst)]
        wanted = range(max(first_token, *starts), tokens)
        if group.kind == "state":
            blocks = sorted({token // group.block_size for token in wanted})
            wanted_tokens = [b * group.block_size + t for b in blocks for t in range(group.block_size)]
        else:
            wanted_tokens = list(wanted)
        for layer in group.layers:
            for half in range(group.halves):
                for token in wanted_tokens:
                    for head in range(first_head, last_head):
                        for element in range(group.head_size):
                            at = (layer, half, token, head, element)
                            moves[layer].append((*address(src, index, *at), *address(dst, index, *at)))
    return moves


def address(
    side: Side, index: int, layer: int, half: int, token: int, head: int, element: int
) -> tuple[int, int]:
    group, place, blocks = side.layout.groups[index], side.placement.groups[index], side.blocks[index]
    planes = place.layers[group.layers.index(layer)]
    buffer, offset = planes[half] if group.split else planes[0]
    block = int(blocks.ids[(token - blocks.start) // group.block_size])
    stride_b, stride_s, stride_t, stride_h = place.strides
    offset += block * stride_b + token % group.block_size * stride_t + (head - group.heads[0]) * stride_h
    if not group.split:
        offset += half * stride_s
    return buffer, offset + element * itemsize(group.dtype)


def elements(plan: CopyPlan, side: Side, layer: int, limit: int) -> list[Pair]:
    """The same from a plan, in the order of its chunks."""
    size = itemsize(side.layout.groups[side.layout.group_of(layer)].dtype)
    found: list[Pair] = []
    for chunk in plan.chunks((layer,), limit):
        for here, at, there, to, length in extents(plan.copy(chunk), chunk.lo, chunk.hi):
            assert length > 0
            assert length % size == 0
            found.extend((here, at + step, there, to + step) for step in range(0, length, size))
    return found


def extents(copy: Copy, lo: int, hi: int) -> list[tuple[int, int, int, int, int]]:
    """Each range of a copy: buffer and offset at both sides, and length."""
    return [
        (here, at, there, to, length)
        for here, froms, there, tos, lengths in copy.extents(lo, hi)
        for at, to, length in zip(froms.tolist(), tos.tolist(), lengths.tolist(), strict=True)
    ]


def walked(section: Section) -> Iterator[tuple[int, int]]:
    """A section's runs by its loops, as a kernel would walk them."""
    for src, dst in zip(section.src.tolist(), section.dst.tolist(), strict=True):
        for steps in np.ndindex(*section.shape):
            yield (
                src + sum(s * n for s, n in zip(section.src_strides, steps, strict=True)),
                dst + sum(s * n for s, n in zip(section.dst_strides, steps, strict=True)),
            )


# -- what is planned --------------------------------------------------------------------------------


@st.composite
def placements(draw: st.DrawFn, layout: CacheLayout) -> Placement:
    """Dense, or padded with the axes in any order in memory, over two buffers."""
    if draw(st.booleans()):
        return Placement.dense(layout, align=draw(st.sampled_from([1, 64])))
    ends = [0, 0]
    groups = []
    for group in layout.groups:
        counts = {"b": group.blocks, "t": group.block_size, "h": group.head_count}
        if group.halves > group.planes:
            counts["s"] = 2
        strides = dict.fromkeys("bsth", 0)
        step = group.head_bytes
        for axis in draw(st.permutations(sorted(counts))):
            step += draw(st.sampled_from([0, 0, group.head_bytes]))
            strides[axis] = step
            step *= counts[axis]
        layers = []
        for _ in group.layers:
            planes = []
            for _ in range(group.planes):
                buffer = draw(st.integers(0, 1))
                planes.append((buffer, ends[buffer]))
                ends[buffer] += step
            layers.append(tuple(planes))
        groups.append(
            GroupPlacement(
                strides=(strides["b"], strides["s"], strides["t"], strides["h"]), layers=tuple(layers)
            )
        )
    return Placement(buffers=(ends[0], ends[1]), groups=tuple(groups))


@st.composite
def block_lists(draw: st.DrawFn, group: GroupLayout, start: int, tokens: int) -> GroupBlocks:
    """Enough blocks for the tokens from ``start``, scattered or partly in a row."""
    needed = max(0, -(-(tokens - start) // group.block_size)) + draw(st.integers(0, 1))
    free = list(range(group.blocks))
    if draw(st.booleans()):
        free = draw(st.permutations(free))
    skip = draw(st.integers(0, len(free) - needed))
    return GroupBlocks(start, np.array(free[skip : skip + needed], dtype=np.int64))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Side, Side, int, int, tuple[int, int]]:
    """Both sides, the first token, the tokens and the heads."""
    total = draw(st.integers(2, 4))
    wanted = draw(ranges(0, total))
    tokens = draw(st.integers(1, 26))
    first_token = draw(st.integers(0, tokens))
    groups: tuple[list[GroupLayout], list[GroupLayout]] = ([], [])
    lists: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
    layers = 0
    for _ in range(draw(st.integers(1, 2))):
        kind: Kind = draw(st.sampled_from(KINDS))
        count = draw(st.integers(1, 2))
        head_size = draw(st.sampled_from([1, 3]))
        dtype = draw(st.sampled_from(["uint8", "bfloat16"]))
        size = draw(st.sampled_from([1, 2, 4, 6]))
        window = draw(st.integers(1, 9)) if kind == "window" else 0
        # The last token that a list may start with.
        latest = {"window": max(first_token, tokens - window), "state": tokens}.get(kind, first_token)
        for mine, own in zip(groups, lists, strict=True):
            if kind in ("attention", "window"):
                axes, split = draw(st.sampled_from(FULL))
                heads = (draw(st.integers(0, wanted[0])), draw(st.integers(wanted[1], total)))
            else:
                axes, split = draw(st.sampled_from(LATENT))
                heads = (0, 1)
            own_size = size if kind == "state" or draw(st.booleans()) else draw(st.sampled_from([1, 3, 4, 8]))
            mine.append(
                GroupLayout(
                    layers=tuple(range(layers, layers + count)),
                    blocks=-(-tokens // own_size) + 3,
                    block_size=own_size,
                    heads=heads,
                    total_heads=total if kind in ("attention", "window") else 1,
                    head_size=head_size,
                    dtype=dtype,
                    axes=axes,
                    split=split,
                    kind=kind,
                    window=window,
                )
            )
            own.append((own_size, draw(st.integers(0, latest // own_size)) if draw(st.booleans()) else 0))
        layers += count
    sides = []
    for mine, own in zip(groups, lists, strict=True):
        layout = CacheLayout(groups=tuple(mine))
        placement = draw(placements(layout))
        placement.check(layout)
        blocks = tuple(
            draw(block_lists(group, size * skipped, tokens))
            for group, (size, skipped) in zip(mine, own, strict=True)
        )
        sides.append(Side(layout, placement, blocks))
    return sides[0], sides[1], first_token, tokens, wanted


@st.composite
def ranges(draw: st.DrawFn, low: int, high: int) -> tuple[int, int]:
    first = draw(st.integers(low, high - 1))
    return first, draw(st.integers(first + 1, high))


@settings(max_examples=150)
@given(cases(), st.integers(1, 400))
def test_a_plan_moves_exactly_what_the_reference_moves(
    case: tuple[Side, Side, int, int, tuple[int, int]], limit: int
) -> None:
    src, dst, first_token, tokens, heads = case
    plan = plan_copy(src, dst, first_token=first_token, tokens=tokens, heads=heads)
    expected = reference(src, dst, first_token, tokens, heads)
    assert plan.layers == tuple(expected)
    for layer in plan.layers:
        found = elements(plan, src, layer, limit)
        assert sorted(found) == sorted(expected[layer])
    sizes = [itemsize(src.layout.groups[src.layout.group_of(layer)].dtype) for layer in plan.layers]
    assert plan.total == sum(len(expected[layer]) * sizes[layer] for layer in plan.layers)
    assert plan.total == sum(plan.nbytes(layer) for layer in plan.layers)


@settings(max_examples=100)
@given(cases(), st.integers(1, 400))
def test_chunks_cover_each_piece_once_and_keep_to_the_limit(
    case: tuple[Side, Side, int, int, tuple[int, int]], limit: int
) -> None:
    src, dst, first_token, tokens, heads = case
    plan = plan_copy(src, dst, first_token=first_token, tokens=tokens, heads=heads)
    bytes_of: Counter[int] = Counter()
    seen: Counter[tuple[int, int, int]] = Counter()
    for chunk in plan.chunks(plan.layers, limit):
        plan.check(chunk)
        copy = plan.copy(chunk)
        assert chunk.nbytes == sum(length for *_, length in extents(copy, chunk.lo, chunk.hi))
        assert chunk.nbytes <= limit or (len(copy.src), chunk.hi - chunk.lo) == (1, 1)
        for layer in plan.layers_of(chunk):
            bytes_of[layer] += chunk.nbytes // chunk.layers
        seen.update((*share, piece) for share in plan.shares(chunk) for piece in range(chunk.lo, chunk.hi))
    assert set(seen.values()) <= {1}
    for layer in plan.layers:
        assert bytes_of[layer] == plan.nbytes(layer) == sum(copy.nbytes for copy in plan.copies(layer))


@settings(max_examples=100)
@given(cases(), st.integers(1, 400), st.integers(1, 4000))
def test_a_chunk_that_is_split_has_the_same_bytes_in_the_same_order(
    case: tuple[Side, Side, int, int, tuple[int, int]], limit: int, first: int
) -> None:
    src, dst, first_token, tokens, heads = case
    plan = plan_copy(src, dst, first_token=first_token, tokens=tokens, heads=heads)

    def order(chunk: Chunk) -> list[Pair]:
        return [
            (here, at + step, there, to + step)
            for here, at, there, to, length in extents(plan.copy(chunk), chunk.lo, chunk.hi)
            for step in range(length)
        ]

    for chunk in plan.chunks(plan.layers, first):
        parts = list(plan.split(chunk, limit))
        for part in parts:
            plan.check(part)
            assert part.nbytes <= limit or (len(plan.copy(part).src), part.hi - part.lo) == (1, 1)
        assert [pair for part in parts for pair in order(part)] == order(chunk)


def test_small_layers_of_a_group_share_a_chunk() -> None:
    layout = CacheLayout(groups=(group((0, 1, 2, 4, 5)), group((3,), kind="window", window=8)))
    one = side(layout, [0, 1])
    plan = plan_copy(one, one, first_token=0, tokens=8, heads=(0, 2))
    size = plan.nbytes(0)
    assert [(chunk.layer, chunk.layers) for chunk in plan.chunks(plan.layers, 2 * size)] == [
        (0, 2),
        (2, 1),
        (3, 1),
        (4, 2),
    ]
    assert [(chunk.layer, chunk.layers) for chunk in plan.chunks((0, 2, 4), 9 * size)] == [(0, 1), (2, 2)]
    (chunk, *_) = plan.chunks((1, 2, 4), 9 * size)
    assert chunk.nbytes == 3 * size
    assert list(plan.layers_of(chunk)) == [1, 2, 4]
    assert len(list(plan.chunks((1, 2, 4), size - 1))) > 3


@settings(max_examples=100)
@given(cases())
def test_extents_are_the_loops_walked_in_order_with_neighbours_joined(
    case: tuple[Side, Side, int, int, tuple[int, int]],
) -> None:
    src, dst, first_token, tokens, heads = case
    plan = plan_copy(src, dst, first_token=first_token, tokens=tokens, heads=heads)
    for layer in plan.layers:
        for copy in plan.copies(layer):
            section = copy.section
            joined: list[list[int]] = []
            for number, (at, to) in enumerate(walked(section)):
                last = joined[-1] if joined else [-1, -1, 0]
                begins = (
                    number % math.prod(section.shape) == 0
                )  # a piece; within one they may adjoin by chance
                if begins and [last[0] + last[2], last[1] + last[2]] == [at, to]:
                    last[2] += section.run
                else:
                    joined.append([at, to, section.run])
            assert extents(copy, 0, len(section.src)) == [
                (here, at + base, there, to + other, length)
                for (here, base), (there, other) in zip(copy.src, copy.dst, strict=True)
                for at, to, length in joined
            ]
            assert section.src_reach == max(at for at, _ in walked(section)) + section.run
            assert section.dst_reach == max(to for _, to in walked(section)) + section.run


@given(cases())
def test_how_much_it_moves_is_known_without_it(case: tuple[Side, Side, int, int, tuple[int, int]]) -> None:
    src, dst, first_token, tokens, heads = case
    plan = plan_copy(src, dst, first_token=first_token, tokens=tokens, heads=heads)
    shares = [(0, 1) if group.total_heads == 1 else heads for group in src.layout.groups]
    for mine, theirs in ((src, dst), (dst, src)):
        starts = zip(mine.blocks, theirs.blocks, strict=True)
        if all(listed.start >= other.start for listed, other in starts):
            found = planned_bytes(
                mine.layout, mine.blocks, first_token=first_token, tokens=tokens, heads=shares
            )
            assert found == plan.total


def over_a_wire(side: Side) -> Side:
    return Side(
        msgspec.msgpack.decode(msgspec.msgpack.encode(side.layout), type=CacheLayout),
        msgspec.msgpack.decode(msgspec.msgpack.encode(side.placement), type=Placement),
        tuple(
            GroupBlocks(one.start, np.frombuffer(one.ids.tobytes(), dtype=np.int64)) for one in side.blocks
        ),
    )


@settings(max_examples=50)
@given(cases())
def test_both_ends_compute_the_same_plan(case: tuple[Side, Side, int, int, tuple[int, int]]) -> None:
    src, dst, first_token, tokens, heads = case
    one = plan_copy(src, dst, first_token=first_token, tokens=tokens, heads=heads)
    again = plan_copy(over_a_wire(src), over_a_wire(dst), first_token=first_token, tokens=tokens, heads=heads)
    for layer in one.layers:
        for mine, theirs in zip(one.copies(layer), again.copies(layer), strict=True):
            assert extents(mine, 0, 99) == extents(theirs, 0, 99)
    for limit in (64, 640):
        assert list(one.chunks(one.layers, limit)) == list(again.chunks(one.layers, limit))


# -- how small it stays -----------------------------------------------------------------------------


def attention(
    axes: str = "sbthd", *, split: bool = False, heads: tuple[int, int] = (0, 8), block_size: int = 16
) -> CacheLayout:
    return CacheLayout.attention(
        layers=2,
        blocks=40,
        block_size=block_size,
        heads=8,
        head_size=64,
        dtype="bfloat16",
        axes=axes,
        split=split,
        rank_heads=heads,
    )


def side(layout: CacheLayout, ids: list[int], start: int = 0) -> Side:
    blocks = GroupBlocks(start, np.array(ids, dtype=np.int64))
    return Side(layout, Placement.dense(layout), (blocks,) * len(layout.groups))


HEAD = 64 * 2


@pytest.mark.parametrize(
    ("src", "dst", "heads", "shape", "run", "copies"),
    [
        # Equal layouts: whole blocks, or a half of one where K and V are far apart.
        (attention("bsthd"), attention("bsthd"), (0, 8), (), 2 * 16 * 8 * HEAD, 1),
        (attention("bhtsd"), attention("bhtsd"), (0, 8), (), 2 * 16 * 8 * HEAD, 1),
        (attention("sbthd"), attention("sbthd"), (0, 8), (2,), 16 * 8 * HEAD, 1),
        (attention("sbthd"), attention("bsthd"), (0, 8), (2,), 16 * 8 * HEAD, 1),
        # K and V split on either side are two copies.
        (attention("bthd", split=True), attention("bthd", split=True), (0, 8), (), 16 * 8 * HEAD, 2),
        (attention("bthd", split=True), attention("bsthd"), (0, 8), (), 16 * 8 * HEAD, 2),
        (attention("bhtsd"), attention("bhtd", split=True), (0, 8), (8 * 16,), HEAD, 2),
        # Another order of tokens and heads leaves a loop over each, of one head a run.
        (attention("bthd", split=True), attention("bhtd", split=True), (0, 8), (8, 16), HEAD, 2),
        # Some of the heads: tokens are apart in NHD; in HND the heads asked for are one run.
        (attention("bthd", split=True), attention("bthd", split=True), (2, 4), (16,), 2 * HEAD, 2),
        (attention("bhtd", split=True), attention("bhtd", split=True), (2, 4), (), 2 * 16 * HEAD, 2),
        (attention("bshtd"), attention("bshtd", heads=(2, 4)), (2, 4), (2,), 2 * 16 * HEAD, 1),
        (attention("bsthd"), attention("bsthd", heads=(2, 4)), (2, 4), (32,), 2 * HEAD, 1),
    ],
)
def test_loops_are_as_few_as_can_be(
    src: CacheLayout, dst: CacheLayout, heads: tuple[int, int], shape: tuple[int, ...], run: int, copies: int
) -> None:
    plan = plan_copy(side(src, [3, 9, 1]), side(dst, [2, 0, 7]), first_token=0, tokens=48, heads=heads)
    found = plan.copies(0)
    assert [(copy.section.shape, copy.section.run, len(copy.src)) for copy in found] == [(shape, run, copies)]


def test_layers_share_one_section() -> None:
    plan = plan_copy(
        side(attention(), [3, 9]), side(attention(), [2, 0]), first_token=0, tokens=32, heads=(0, 8)
    )
    assert plan.copies(0)[0].section is plan.copies(1)[0].section
    (chunk,) = plan.chunks((0, 1), 1 << 30)
    assert plan.copy(chunk) is plan.copy(chunk)
    assert plan.copy(chunk).section is plan.copies(0)[0].section


@pytest.mark.parametrize("axes", ["sbthd", "bsthd", "bhtsd"])
def test_blocks_in_a_row_are_one_run(axes: str) -> None:
    layout = attention(axes)
    one = side(layout, list(range(5, 15)))
    plan = plan_copy(one, side(layout, list(range(20, 30))), first_token=0, tokens=160, heads=(0, 8))
    lengths = [length for copy in plan.copies(0) for *_, length in extents(copy, 0, 10)]
    assert lengths == ([160 * 8 * HEAD] * 2 if axes == "sbthd" else [2 * 160 * 8 * HEAD])


def test_runs_join_across_a_chunk_only_where_both_sides_adjoin() -> None:
    layout = attention("bsthd")
    block = layout.groups[0].block_bytes
    plan = plan_copy(
        side(layout, [4, 5, 6, 7, 20]),
        side(layout, [0, 1, 9, 10, 11]),
        first_token=0,
        tokens=80,
        heads=(0, 8),
    )
    (copy,) = plan.copies(0)

    def ranges(lo: int, hi: int) -> list[tuple[int, int, int]]:
        return [(at // block, to // block, size // block) for _, at, _, to, size in extents(copy, lo, hi)]

    assert ranges(0, 5) == [(4, 0, 2), (6, 9, 2), (20, 11, 1)]
    assert ranges(1, 3) == [(5, 1, 1), (6, 9, 1)]
    assert ranges(1, 4) == [(5, 1, 1), (6, 9, 2)]
    assert ranges(3, 99) == [(7, 10, 1), (20, 11, 1)]


def test_a_few_blocks_in_a_row_do_not_make_two_copies() -> None:
    layout = attention("sbthd")
    plan = plan_copy(
        side(layout, [4, 5, 6, 9, 20]), side(layout, [0, 1, 2, 7, 3]), first_token=0, tokens=80, heads=(0, 8)
    )
    assert [copy.section.shape for copy in plan.copies(0)] == [(2,)]


# -- groups -----------------------------------------------------------------------------------------


def group(layers: tuple[int, ...], **changes: object) -> GroupLayout:
    base = GroupLayout(
        layers=layers, blocks=9, block_size=4, heads=(0, 2), total_heads=2, head_size=8, dtype="uint8"
    )
    return msgspec.structs.replace(base, **changes)


def test_a_window_group_moves_from_the_start_of_its_list() -> None:
    layout = CacheLayout(groups=(group((0,)), group((1,), kind="window", window=6)))
    ids = np.arange(4, dtype=np.int64)
    one = Side(layout, Placement.dense(layout), (GroupBlocks(0, ids), GroupBlocks(8, ids[:2])))
    plan = plan_copy(one, one, first_token=2, tokens=15, heads=(0, 2))
    token = 2 * 2 * 8
    assert plan.nbytes(0) == 13 * token
    assert plan.nbytes(1) == 7 * token


def test_a_single_head_moves_whatever_heads_are_asked_for() -> None:
    latent = group((1,), kind="mla", axes="btd", heads=(0, 1), total_heads=1)
    layout = CacheLayout(groups=(group((0,)), latent))
    one = side(layout, [0, 1])
    plan = plan_copy(one, one, first_token=0, tokens=8, heads=(1, 2))
    assert plan.nbytes(0) == 8 * 2 * 8
    assert plan.nbytes(1) == 8 * 8


def test_state_moves_in_whole_blocks() -> None:
    layout = CacheLayout(groups=(group((0,), kind="state", axes="btd", heads=(0, 1), total_heads=1),))
    plan = plan_copy(side(layout, [7, 2, 5]), side(layout, [0, 1, 3]), first_token=5, tokens=9, heads=(0, 1))
    (copy,) = plan.copies(0)
    assert [(at, to, size) for _, at, _, to, size in extents(copy, 0, 2)] == [
        (2 * 32, 32, 32),
        (5 * 32, 3 * 32, 32),
    ]


def test_state_blocks_of_two_sizes_are_refused() -> None:
    here = CacheLayout(groups=(group((0,), kind="state", axes="btd", heads=(0, 1), total_heads=1),))
    there = CacheLayout(groups=(msgspec.structs.replace(here.groups[0], block_size=8),))
    with pytest.raises(LayoutMismatch, match="state blocks of 4 tokens against 8"):
        plan_copy(side(here, [0, 1]), side(there, [0]), first_token=0, tokens=8, heads=(0, 1))


@pytest.mark.parametrize("first_token", [8, 9])
def test_nothing_to_move_is_a_plan_of_nothing(first_token: int) -> None:
    one = side(CacheLayout(groups=(group((0, 1)),)), [])
    plan = plan_copy(one, one, first_token=first_token, tokens=8, heads=(0, 2))
    assert (plan.layers, plan.total) == ((0, 1), 0)
    assert list(plan.copies(1)) == []
    assert list(plan.chunks((1,), 1 << 20)) == []
    assert plan.nbytes(1) == 0


@pytest.mark.parametrize(
    "public", [CacheLayout, GroupLayout, Placement, GroupPlacement, GroupBlocks, Side, Section, Copy, Chunk]
)
def test_help_explains_every_field(public: type) -> None:
    told = re.findall(r"^    (\w+): [A-Z\"`(]", str(inspect.getdoc(public)), re.MULTILINE)
    assert [name for name in told if not name.endswith("Error")] == list(inspect.signature(public).parameters)


# -- refusals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "start", "message"),
    [
        ([1], 0, "end at token 4 of 8"),
        ([], 0, "end at token 0 of 8"),
        ([1, 9], 0, r"ids 1..9 are not in 0..8"),
        ([1, -1], 0, r"ids -1..1 are not in 0..8"),
        ([1, 2], 2, "not a multiple of the block size 4"),
        ([1, 2], -4, "not a multiple of the block size 4"),
    ],
)
@pytest.mark.parametrize("which", ["source", "destination"])
def test_blocks_that_cannot_be_meant_are_refused(
    ids: list[int], start: int, message: str, which: str
) -> None:
    layout = CacheLayout(groups=(group((0,)),))
    good, bad = side(layout, [3, 4]), side(layout, ids, start)
    src, dst = (bad, good) if which == "source" else (good, bad)
    with pytest.raises(InvalidBlocks, match=f"group 0 of the {which}.*{message}"):
        plan_copy(src, dst, first_token=0, tokens=8, heads=(0, 2))


@pytest.mark.parametrize(
    ("changes", "start", "first_token", "message"),
    [
        ({}, 4, 4, ""),
        ({}, 4, 3, "start at token 4, but token 3 is needed"),
        ({}, 8, 0, "start at token 8, but token 0 is needed"),
        ({"kind": "mla", "axes": "btd", "heads": (0, 1), "total_heads": 1}, 4, 0, "but token 0 is needed"),
        ({"kind": "window", "window": 4}, 4, 0, ""),
        ({"kind": "window", "window": 5}, 4, 0, "start at token 4, but token 3 is needed"),
        ({"kind": "window", "window": 5}, 4, 4, ""),
        ({"kind": "window", "window": 99}, 4, 0, "start at token 4, but token 0 is needed"),
        ({"kind": "state", "axes": "btd", "heads": (0, 1), "total_heads": 1}, 4, 0, ""),
    ],
)
@pytest.mark.parametrize("which", ["source", "destination"])
def test_a_list_that_leaves_out_what_is_needed_is_refused(
    changes: dict[str, object], start: int, first_token: int, message: str, which: str
) -> None:
    layout = CacheLayout(groups=(group((0,), **changes),))
    whole, part = side(layout, [3, 4]), side(layout, [1], start)
    src, dst = (part, whole) if which == "source" else (whole, part)
    if not message:
        plan = plan_copy(src, dst, first_token=first_token, tokens=8, heads=(0, 1))
        assert plan.nbytes(0) == 4 * layout.groups[0].halves * 8
        return
    with pytest.raises(InvalidBlocks, match=f"group 0 of the {which}.*{message}"):
        plan_copy(src, dst, first_token=first_token, tokens=8, heads=(0, 1))


def test_ids_beyond_the_tokens_are_not_looked_at() -> None:
    layout = CacheLayout(groups=(group((0,)),))
    plan = plan_copy(
        side(layout, [99, 1, 2, 99]), side(layout, [0, 3, 4]), first_token=5, tokens=12, heads=(0, 2)
    )
    assert plan.nbytes(0) == 7 * 32


@pytest.mark.parametrize("change", ["buffer", "offset", "stride"])
def test_a_placement_that_leads_out_of_its_buffer_is_refused(change: str) -> None:
    layout = CacheLayout(groups=(group((0,)),))
    good = side(layout, [3, 8])
    placement = good.placement
    place = placement.groups[0]
    changed = {
        "buffer": Placement(buffers=(9 * 128 - 1,), groups=placement.groups),
        "offset": Placement(
            buffers=placement.buffers, groups=(GroupPlacement(strides=place.strides, layers=(((0, -64),),)),)
        ),
        "stride": Placement(
            buffers=placement.buffers,
            groups=(GroupPlacement(strides=(2**62, *place.strides[1:]), layers=place.layers),),
        ),
    }[change]
    bad = replace(good, placement=changed)
    with pytest.raises(InvalidBlocks, match="beyond buffer 0"):
        plan_copy(bad, good, first_token=0, tokens=8, heads=(0, 2))


def test_heads_can_be_given_group_by_group() -> None:
    latent = group((2,), kind="mla", axes="btd", heads=(0, 1), total_heads=1)
    layout = CacheLayout(groups=(group((0,)), group((1,)), latent))
    one = side(layout, [0, 1])
    plan = plan_copy(one, one, first_token=0, tokens=8, heads=[(0, 2), (1, 2), (0, 0)])
    assert [plan.nbytes(layer) for layer in plan.layers] == [8 * 4 * 8, 8 * 2 * 8, 0]
    with pytest.raises(ValueError, match="heads of 2 groups, there are 3"):
        plan_copy(one, one, first_token=0, tokens=8, heads=[(0, 2), (1, 2)])
    with pytest.raises(ValueError, match="group 1 of the source keeps the heads"):
        plan_copy(one, one, first_token=0, tokens=8, heads=[(0, 2), (1, 3), (0, 1)])


@pytest.mark.parametrize("heads", [(0, 3), (1, 1), (2, 1), (-1, 1)])
def test_heads_that_a_side_does_not_keep_are_refused(heads: tuple[int, int]) -> None:
    one = side(CacheLayout(groups=(group((0,)),)), [0])
    with pytest.raises(ValueError, match=r"keeps? the heads"):
        plan_copy(one, one, first_token=0, tokens=4, heads=heads)


def test_caches_of_something_else_are_refused() -> None:
    one = side(CacheLayout(groups=(group((0,)),)), [0])
    for other in (
        CacheLayout(groups=(group((0,), head_size=16),)),
        CacheLayout(groups=(group((0,), axes="bthd"),)),
        CacheLayout(groups=(group((0,), kind="window", window=4),)),
        CacheLayout(groups=(group((0, 1)),)),
        CacheLayout(groups=(group((0,)), group((1,)))),
    ):
        with pytest.raises(LayoutMismatch):
            plan_copy(one, side(other, [0]), first_token=0, tokens=4, heads=(0, 2))


def test_every_group_needs_a_list() -> None:
    one = side(CacheLayout(groups=(group((0,)),)), [0])
    with pytest.raises(InvalidBlocks, match="0 block lists for 1 groups"):
        plan_copy(one, replace(one, blocks=()), first_token=0, tokens=4, heads=(0, 2))


@pytest.mark.parametrize("ids", [np.zeros(2, dtype=np.int32), np.zeros((2, 2), dtype=np.int64)])
def test_ids_of_another_type_are_refused(ids: np.ndarray) -> None:
    with pytest.raises(TypeError, match="vector of int64"):
        GroupBlocks(0, ids)


@pytest.mark.parametrize(
    "chunk",
    [
        Chunk(2, 1, 0, 0, 1, 4096),
        Chunk(-1, 1, 0, 0, 1, 4096),
        Chunk(0, 0, 0, 0, 1, 0),
        Chunk(0, -1, 0, 0, 1, -4096),
        Chunk(0, 3, 0, 0, 1, 3 * 4096),
        Chunk(1, 2, 0, 0, 1, 2 * 4096),
        Chunk(0, 1, 1, 0, 1, 4096),
        Chunk(0, 1, -1, 0, 1, 4096),
        Chunk(0, 1, 0, 0, 4, 4 * 4096),
        Chunk(0, 1, 0, -1, 1, 2 * 4096),
        Chunk(0, 1, 0, 1, 1, 0),
        Chunk(0, 1, 0, 2, 1, -4096),
        Chunk(0, 1, 0, 0, 1, 4095),
        Chunk(0, 2, 0, 0, 1, 4096),
        Chunk(0, 1, 0, 0, 2**63, 4096 * 2**63),
    ],
)
def test_a_chunk_that_a_peer_made_up_is_refused(chunk: Chunk) -> None:
    layout = CacheLayout(groups=(group((0, 1), head_size=256, axes="bsthd"),))
    plan = plan_copy(side(layout, [5, 3, 1]), side(layout, [2, 4, 0]), first_token=0, tokens=12, heads=(0, 2))
    plan.check(Chunk(0, 1, 0, 0, 3, 3 * 4096))
    plan.check(Chunk(0, 2, 0, 0, 3, 6 * 4096))
    with pytest.raises(ValueError, match="Chunk"):
        plan.check(chunk)
