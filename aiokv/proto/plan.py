"""Which bytes go where: the plan of one copy between two caches.

Both ends of a transfer know both layouts, both placements and both block lists, so both compute
the same plan, and a ``Chunk`` of four small numbers names the same bytes at both ends. Nothing
here touches memory; devices and transports carry the plan out.

A plan stays as small as what it came from. A ``Section`` is a set of equally shaped *pieces*, one
offset on each side for each piece, and the loops inside a piece; all layers of a group share it
and differ in the base address only. Only ``Copy.extents`` expands it, for host copies and
sockets; a kernel is given the offsets and the loops as they are.

The order of the bytes of a chunk is: pieces, then the loops of a piece from the outermost, then
the run. Staging memory and sockets carry the bytes in that order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from aiokv.errors import InvalidBlocks, LayoutMismatch
from aiokv.proto.ends import End, GroupBlocks, Side, cut
from aiokv.proto.layout import CacheLayout
from aiokv.proto.placement import GroupPlacement
from aiokv.proto.section import Copy, Loop, Offsets, Section, find_joins, minimal

__all__ = ["Chunk", "Copy", "CopyPlan", "GroupBlocks", "Section", "Side", "plan_copy", "planned_bytes"]


class Chunk(NamedTuple):
    """Pieces ``lo`` to ``hi`` of ``plan.copies(layer)[copy]``: what is moved at a time.

    Attributes:
        layer: Of the model.
        copy: Index of one of the layer's copies.
        lo: The first piece.
        hi: The end of the range of pieces.
        nbytes: Bytes of these pieces.
    """

    layer: int
    copy: int
    lo: int
    hi: int
    nbytes: int


class _Item(NamedTuple):
    """One section, and which tensor of a layer it is for at each side."""

    section: Section
    src_plane: int
    src_shift: int
    dst_plane: int
    dst_shift: int


class _GroupPlan(NamedTuple):
    """The items that every layer of one group is copied by."""

    items: tuple[_Item, ...]
    src: GroupPlacement
    dst: GroupPlacement
    #: Bytes of one layer.
    nbytes: int


class CopyPlan:
    """What ``plan_copy`` found; the same at both ends of a transfer. Immutable.

    Attributes:
        layers: Every layer of the model, ascending, also those with nothing to move.
        total: Bytes that the whole plan moves.
    """

    __slots__ = ("_copies", "_where", "layers", "total")

    def __init__(self, layout: CacheLayout, groups: Sequence[_GroupPlan]) -> None:
        self.layers: tuple[int, ...] = tuple(range(layout.layers))
        self.total: int = sum(
            plan.nbytes * len(group.layers) for plan, group in zip(groups, layout.groups, strict=True)
        )
        self._where = {
            layer: (plan, place)
            for plan, group in zip(groups, layout.groups, strict=True)
            for place, layer in enumerate(group.layers)
        }
        # Built on demand: a plan is made on the event loop, which needs one layer at a time.
        self._copies: dict[int, tuple[Copy, ...]] = {}

    def __repr__(self) -> str:
        return f"<CopyPlan of {len(self.layers)} layers, {self.total} bytes>"

    def copies(self, layer: int) -> Sequence[Copy]:
        """The copies of one layer; empty when there is nothing to move.

        Raises:
            KeyError: The model has no such layer.
        """
        found = self._copies.get(layer)
        if found is None:
            plan, place = self._where[layer]
            src, dst = plan.src.layers[place], plan.dst.layers[place]
            made = []
            for item in plan.items:
                src_buffer, src_base = src[item.src_plane]
                dst_buffer, dst_base = dst[item.dst_plane]
                made.append(
                    Copy(
                        src_buffer,
                        src_base + item.src_shift,
                        dst_buffer,
                        dst_base + item.dst_shift,
                        item.section,
                    )
                )
            found = self._copies[layer] = tuple(made)
        return found

    def nbytes(self, layer: int) -> int:
        """Bytes to move for one layer.

        Raises:
            KeyError: The model has no such layer.
        """
        return self._where[layer][0].nbytes

    def chunks(self, layer: int, limit: int) -> Iterator[Chunk]:
        """Cut one layer into chunks of at most ``limit`` bytes; a larger piece is a chunk alone.

        Raises:
            KeyError: The model has no such layer.
        """
        for index, item in enumerate(self._where[layer][0].items):
            size, count = item.section.piece_bytes, len(item.section.src)
            step = max(1, limit // size)
            for lo in range(0, count, step):
                hi = min(lo + step, count)
                yield Chunk(layer, index, lo, hi, (hi - lo) * size)

    def check(self, chunk: Chunk) -> None:
        """Look at a chunk, which a peer may have made up.

        Raises:
            ValueError: It isn't within the plan.
        """
        layer, index, lo, hi, nbytes = chunk
        if layer not in self._where:
            raise ValueError(f"{chunk}: there is no layer {layer}")
        items = self._where[layer][0].items
        if not 0 <= index < len(items):
            raise ValueError(f"{chunk}: layer {layer} has {len(items)} copies")
        section = items[index].section
        if not 0 <= lo < hi <= len(section.src):
            raise ValueError(f"{chunk}: copy {index} has {len(section.src)} pieces")
        if nbytes != (hi - lo) * section.piece_bytes:
            raise ValueError(f"{chunk}: these pieces are {(hi - lo) * section.piece_bytes} bytes")


def plan_copy(
    src: Side,
    dst: Side,
    *,
    first_token: int,
    tokens: int,
    heads: tuple[int, int] | Sequence[tuple[int, int]],
) -> CopyPlan:
    """Plan to move tokens ``first_token`` to ``tokens`` of some KV heads from ``src`` to ``dst``.

    In each group the tokens are those that both sides list blocks for: from the latest of
    ``first_token`` and the two lists' starts. In a window group a list may start as late as the
    last ``window`` tokens. A state group, whose lists may start anywhere, moves the whole blocks
    that these tokens lie in.

    Args:
        src: Where the bytes come from.
        dst: Where they go.
        first_token: Tokens before this one stay as they are at the destination.
        tokens: End of the range of tokens.
        heads: For each group the half-open range of the model's KV heads; where it is empty,
            nothing of that group moves. Or one range for all groups; those with a single head
            (MLA) then move that head whatever it says.

    Raises:
        InvalidBlocks: A block list is too short, starts within a block or after a token that is
            needed, or names a block that its cache doesn't have.
        LayoutMismatch: The two caches don't hold the same KV.
        ValueError: A side doesn't keep all of ``heads``.
    """
    for side in (src, dst):
        if not len(side.blocks) == len(side.placement.groups) == len(side.layout.groups):
            raise InvalidBlocks(f"{len(side.blocks)} block lists for {len(side.layout.groups)} groups")
    if len(src.layout.groups) != len(dst.layout.groups):
        raise LayoutMismatch(f"{len(src.layout.groups)} KV cache groups against {len(dst.layout.groups)}")
    plans = [
        _plan_group(index, src, dst, first_token, tokens, share)
        for index, share in enumerate(_shares(heads, src.layout))
    ]
    return CopyPlan(src.layout, plans)


def planned_bytes(
    layout: CacheLayout,
    blocks: Sequence[GroupBlocks],
    *,
    first_token: int,
    tokens: int,
    heads: Sequence[tuple[int, int]],
) -> int:
    """Bytes that a plan moves from or to some blocks, without making it.

    Args:
        layout: Of the cache that the blocks are in.
        blocks: One list for each group; those of the other side are taken to start no later.
        first_token: As of ``plan_copy``.
        tokens: As of ``plan_copy``.
        heads: For each group the half-open range of the model's KV heads.
    """
    total = 0
    for group, listed, (low, high) in zip(layout.groups, blocks, heads, strict=True):
        first, last, size = max(first_token, listed.start), tokens, group.block_size
        if first >= last or low >= high:
            continue
        if group.kind == "state":
            first, last = first // size * size, -(-last // size) * size
        total += len(group.layers) * (last - first) * group.halves * (high - low) * group.head_bytes
    return total


def _shares(heads: tuple[int, int] | Sequence[tuple[int, int]], layout: CacheLayout) -> list[tuple[int, int]]:
    """The range of heads of each group."""
    match heads:
        case (int(first), int(last)):
            if first >= last:
                raise ValueError(f"nobody keeps the heads {heads}")
            return [(0, 1) if group.total_heads == 1 else (first, last) for group in layout.groups]
        case _:
            shares = [(first, last) for first, last in heads]
            if len(shares) != len(layout.groups):
                raise ValueError(f"heads of {len(shares)} groups, there are {len(layout.groups)}")
            return shares


def _plan_group(
    index: int, src: Side, dst: Side, first_token: int, tokens: int, heads: tuple[int, int]
) -> _GroupPlan:
    a, b = End(src, index, heads, "source"), End(dst, index, heads, "destination")
    if a.group != b.group:
        for name in ("layers", "kind", "window", "halves", "head_bytes", "total_heads"):
            if getattr(a.group, name) != getattr(b.group, name):
                raise LayoutMismatch(f"group {index}: {name} differ between source and destination")
    lo, hi = max(first_token, a.blocks.start, b.blocks.start), tokens
    if first_token >= hi or heads[0] >= heads[1]:
        return _GroupPlan((), a.place, b.place, 0)
    a.check_start(first_token, hi)
    b.check_start(first_token, hi)
    if lo >= hi:
        return _GroupPlan((), a.place, b.place, 0)
    if a.group.kind == "state":
        if a.size != b.size:
            raise LayoutMismatch(f"group {index}: state blocks of {a.size} tokens against {b.size}")
        lo, hi = lo // a.size * a.size, -(-hi // a.size) * a.size
    a.check(lo, hi)
    b.check(lo, hi)
    separate = a.group.split or b.group.split
    items: list[_Item] = []
    for count, starts in cut(lo, hi, a.size, b.size):
        src_offsets, dst_offsets = a.offsets(starts), b.offsets(starts)
        plain = minimal(_loops(a, b, count), a.group.head_bytes)
        if a.group.halves == 1:
            items.append(_Item(_section(src_offsets, dst_offsets, *plain), 0, 0, 0, 0))
            continue
        loop_s = (2, a.place.strides[1], b.place.strides[1])
        joined = minimal([*_loops(a, b, count), loop_s], a.group.head_bytes)
        if not separate and not _pays(plain, joined, src_offsets, dst_offsets):
            items.append(_Item(_section(src_offsets, dst_offsets, *joined), 0, 0, 0, 0))
            continue
        section = _section(src_offsets, dst_offsets, *plain)
        items.extend(_Item(section, *a.plane(half), *b.plane(half)) for half in range(2))
    nbytes = sum(len(item.section.src) * item.section.piece_bytes for item in items)
    return _GroupPlan(tuple(items), a.place, b.place, nbytes)


def _loops(a: End, b: End, tokens: int) -> list[Loop]:
    """Loops over the tokens and heads of a piece."""
    _, _, token_a, head_a = a.place.strides
    _, _, token_b, head_b = b.place.strides
    return [(tokens, token_a, token_b), (a.heads[1] - a.heads[0], head_a, head_b)]


def _pays(plain: tuple[list[Loop], int], joined: tuple[list[Loop], int], src: Offsets, dst: Offsets) -> bool:
    """Whether to copy K and V one after the other, though they are in one tensor on both sides.

    Where K and V are far apart (``sbthd``), a piece that holds both keeps neighbouring blocks
    from being one run. Apart, they are two copies instead of one: worth it where runs become
    at least four times as long.
    """
    loops, run = plain
    if loops or not joined[0] or len(src) < 4:
        return False
    found = find_joins(src, dst, run, run)
    return found is not None and 4 * (len(src) - int(np.count_nonzero(found))) <= len(src)


def _section(src: Offsets, dst: Offsets, loops: list[Loop], run: int) -> Section:
    shape, src_strides, dst_strides = zip(*loops, strict=True) if loops else ((), (), ())
    return Section(src, dst, shape, src_strides, dst_strides, run)
