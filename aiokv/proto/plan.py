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
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from aiokv.errors import InvalidBlocks, LayoutMismatch
from aiokv.proto.layout import CacheLayout, GroupLayout, GroupPlacement, Placement

__all__ = ["Chunk", "Copy", "CopyPlan", "GroupBlocks", "Section", "Side", "plan_copy"]

Offsets = NDArray[np.int64]

#: One loop inside a piece: how often, and the byte strides at the source and the destination.
_Loop = tuple[int, int, int]


@dataclass(frozen=True, slots=True, eq=False)
class GroupBlocks:
    """The blocks of one request in one KV cache group, in token order."""

    #: Index of the first listed block's first token; a multiple of the block size.
    start: int
    #: Block ids.
    ids: Offsets

    def __post_init__(self) -> None:
        """Refuse ids of another type: their bytes are looked at as 64-bit integers."""
        if self.ids.dtype != np.int64 or self.ids.ndim != 1:
            raise TypeError(f"block ids must be a vector of int64, not {self.ids.ndim}-d {self.ids.dtype}")


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """One end of a copy: what its cache holds, where, and which of its blocks take part."""

    layout: CacheLayout
    placement: Placement
    #: One entry for each group of the layout.
    blocks: tuple[GroupBlocks, ...]


@dataclass(frozen=True, eq=False)
class Section:
    """Pieces of one shape; shared by all layers of a group, so offsets are without the base."""

    #: Byte offset of each piece at the source, from the copy's base.
    src: Offsets
    #: Byte offset of each piece at the destination, from the copy's base.
    dst: Offsets
    #: Loops inside a piece, outermost first; empty when a piece is one run.
    shape: tuple[int, ...]
    #: Byte stride of each loop at the source.
    src_strides: tuple[int, ...]
    #: Byte stride of each loop at the destination.
    dst_strides: tuple[int, ...]
    #: Bytes that are contiguous on both sides, innermost.
    run: int

    @cached_property
    def piece_bytes(self) -> int:
        """Bytes of one piece."""
        return prod(self.shape) * self.run

    @cached_property
    def src_reach(self) -> int:
        """Bytes from the base to the end of the farthest piece at the source."""
        return int(self.src.max()) + self._span(self.src_strides) + self.run

    @cached_property
    def dst_reach(self) -> int:
        """Bytes from the base to the end of the farthest piece at the destination."""
        return int(self.dst.max()) + self._span(self.dst_strides) + self.run

    @cached_property
    def firsts(self) -> Offsets | None:
        """Indexes of the pieces that don't begin where the one before them ends, on both sides.

        None when that is every piece, which is the common case of scattered blocks.
        """
        src_size = self._span(self.src_strides) + self.run
        dst_size = self._span(self.dst_strides) + self.run
        joins = _joins(self.src, self.dst, src_size, dst_size)
        return None if joins is None else np.flatnonzero(np.concatenate(([True], ~joins)))

    @cached_property
    def inner(self) -> tuple[Offsets, Offsets]:
        """Offsets of the runs of one piece from the piece's own, at both sides."""
        return _steps(self.shape, self.src_strides), _steps(self.shape, self.dst_strides)

    def _span(self, strides: tuple[int, ...]) -> int:
        return sum((count - 1) * stride for count, stride in zip(self.shape, strides, strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """One section for one tensor of one layer."""

    #: Buffer number in the source's placement.
    src_buffer: int
    #: Byte offset in that buffer, to which the section's offsets are added.
    src_base: int
    #: Buffer number in the destination's placement.
    dst_buffer: int
    #: Byte offset in that buffer, to which the section's offsets are added.
    dst_base: int
    section: Section

    @property
    def nbytes(self) -> int:
        """Bytes that this copy moves."""
        return len(self.section.src) * self.section.piece_bytes

    def extents(self, lo: int, hi: int) -> tuple[Offsets, Offsets, Offsets]:
        """Pieces ``lo`` to ``hi`` as contiguous ranges, in plan order.

        Returns:
            Source offsets, destination offsets (bytes, from the start of their buffers) and
            lengths (bytes). Neighbours that adjoin on both sides are one range.
        """
        section = self.section
        run, firsts = section.run, section.firsts
        if firsts is not None:
            hi = min(hi, len(section.src))
            begin, end = firsts.searchsorted((lo + 1, hi))
            edges = np.concatenate(([lo], firsts[begin:end], [hi]))
            if not section.shape:
                heads = edges[:-1]
                lengths = (edges[1:] - heads) * run
                return section.src[heads] + self.src_base, section.dst[heads] + self.dst_base, lengths
        src = section.src[lo:hi] + self.src_base
        dst = section.dst[lo:hi] + self.dst_base
        if section.shape:
            src_steps, dst_steps = section.inner
            src = np.add.outer(src, src_steps).ravel()
            dst = np.add.outer(dst, dst_steps).ravel()
        if firsts is None or len(edges) > hi - lo:
            return src, dst, np.full(len(src), run, dtype=np.int64)
        # Runs inside a piece never adjoin, since the loops are minimal; those between two may.
        per_piece = len(src) // (hi - lo)
        first = np.ones(len(src), dtype=np.bool_)
        first[::per_piece] = False
        first[(edges[:-1] - lo) * per_piece] = True
        where = np.flatnonzero(first)
        lengths = np.diff(where, append=len(src)) * run
        return src[where], dst[where], lengths


class Chunk(NamedTuple):
    """Pieces ``lo`` to ``hi`` of ``plan.copies(layer)[copy]``: what is moved at a time."""

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
    """What ``plan_copy`` found; the same at both ends of a transfer. Immutable."""

    __slots__ = ("_copies", "_groups", "_where", "layers", "total")

    def __init__(self, layout: CacheLayout, groups: Sequence[_GroupPlan]) -> None:
        #: Every layer of the model, ascending, also those with nothing to move.
        self.layers: tuple[int, ...] = tuple(range(layout.layers))
        #: Bytes that the whole plan moves.
        self.total: int = sum(
            plan.nbytes * len(group.layers) for plan, group in zip(groups, layout.groups, strict=True)
        )
        self._groups = groups
        self._where = {
            layer: (plan, place)
            for plan, group in zip(groups, layout.groups, strict=True)
            for place, layer in enumerate(group.layers)
        }
        # Built on demand: most of a long plan's layers are never looked at twice.
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
        """Bytes to move for one layer."""
        return self._where[layer][0].nbytes

    def chunks(self, layer: int, limit: int) -> Iterator[Chunk]:
        """Cut one layer into chunks of at most ``limit`` bytes; a larger piece is a chunk alone."""
        for index, item in enumerate(self._where[layer][0].items):
            size, count = item.section.piece_bytes, len(item.section.src)
            step = max(1, limit // size)
            for lo in range(0, count, step):
                hi = min(lo + step, count)
                yield Chunk(layer, index, lo, hi, (hi - lo) * size)

    def check(self, chunk: Chunk) -> None:
        """Raise ValueError when ``chunk``, which a peer may have made up, isn't within the plan."""
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
    ``first_token`` and the two lists' starts. A state group moves the whole blocks that these
    tokens lie in.

    Args:
        src: Where the bytes come from.
        dst: Where they go.
        first_token: Tokens before this one stay as they are at the destination.
        tokens: End of the range of tokens.
        heads: For each group the half-open range of the model's KV heads; where it is empty,
            nothing of that group moves. Or one range for all groups; those with a single head
            (MLA) then move that head whatever it says.

    Raises:
        InvalidBlocks: A block list is too short, starts within a block, or names a block that
            its cache doesn't have.
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


class _End:
    """One side of one group, with what the offsets of its pieces are computed from."""

    def __init__(self, side: Side, index: int, heads: tuple[int, int], what: str) -> None:
        self.what = f"group {index} of the {what}"
        self.group: GroupLayout = side.layout.groups[index]
        self.placement = side.placement
        self.place = side.placement.groups[index]
        self.blocks = side.blocks[index]
        self.size = self.group.block_size
        self.heads = heads
        first, last = self.group.heads
        if heads[0] < heads[1] and not first <= heads[0] < heads[1] <= last:
            raise ValueError(f"{self.what} keeps the heads {self.group.heads}, not all of {self.heads}")
        if self.blocks.start < 0 or self.blocks.start % self.size:
            raise InvalidBlocks(
                f"{self.what}: its blocks start at token {self.blocks.start}, which is not a multiple "
                f"of the block size {self.size}"
            )
        self.first_block = self.blocks.start // self.size
        stride_h = self.place.strides[3]
        self.head_offset = (self.heads[0] - first) * stride_h

    def check(self, lo: int, hi: int) -> None:
        """Refuse block lists that don't reach ``hi``, and any that would lead out of the buffers."""
        listed = self.blocks.start + len(self.blocks.ids) * self.size
        if listed < hi:
            raise InvalidBlocks(f"{self.what}: {len(self.blocks.ids)} blocks end at token {listed} of {hi}")
        used = self.blocks.ids[lo // self.size - self.first_block : -(-hi // self.size) - self.first_block]
        # One pass for both ends of the range: as an unsigned number, a negative id is a huge one.
        most = int(used.view(np.uint64).max())
        if most >= self.group.blocks:
            raise InvalidBlocks(
                f"{self.what}: ids {used.min()}..{used.max()} are not in 0..{self.group.blocks - 1}"
            )
        # In Python's integers, since a made-up placement could overflow 64 bits.
        stride_b, stride_s, stride_t, stride_h = self.place.strides
        reach = most * stride_b + (self.size - 1) * stride_t + self.group.head_bytes
        reach += self.head_offset + (self.heads[1] - self.heads[0] - 1) * stride_h
        if self.group.halves > self.group.planes:
            reach += stride_s
        room = [size - reach for size in self.placement.buffers]
        for planes in self.place.layers:
            for buffer, offset in planes:
                if not 0 <= offset <= room[buffer]:
                    raise InvalidBlocks(f"{self.what}: block {most} reaches beyond buffer {buffer}")

    def offsets(self, starts: range | Offsets) -> Offsets:
        """Byte offsets from a tensor's base of the pieces that begin at the tokens ``starts``."""
        stride_b, _, stride_t, _ = self.place.strides
        ids = self.blocks.ids
        if isinstance(starts, range):
            step, rest = divmod(starts.step, self.size)
            if not rest or len(starts) == 1:
                first = starts[0] // self.size - self.first_block
                picked = ids[first : first + (len(starts) - 1) * step + 1 : step or 1]
                offsets: Offsets = picked * stride_b
                offsets += starts[0] % self.size * stride_t + self.head_offset
                return offsets
            starts = np.arange(starts.start, starts.stop, starts.step, dtype=np.int64)
        block, token = np.divmod(starts, self.size)
        offsets = ids[block - self.first_block] * stride_b
        offsets += token * stride_t
        offsets += self.head_offset
        return offsets

    def plane(self, half: int) -> tuple[int, int]:
        """Which tensor of a layer K (0) or V (1) is in, and how far from its start."""
        return (half, 0) if self.group.split else (0, half * self.place.strides[1])


def _plan_group(
    index: int, src: Side, dst: Side, first_token: int, tokens: int, heads: tuple[int, int]
) -> _GroupPlan:
    a, b = _End(src, index, heads, "source"), _End(dst, index, heads, "destination")
    for name in ("layers", "halves", "head_bytes", "total_heads"):
        if getattr(a.group, name) != getattr(b.group, name):
            raise LayoutMismatch(f"group {index}: {name} differ between source and destination")
    lo, hi = max(first_token, a.blocks.start, b.blocks.start), tokens
    if lo >= hi or heads[0] >= heads[1]:
        return _GroupPlan((), a.place, b.place, 0)
    if a.group.kind == "state":
        if a.size != b.size:
            raise LayoutMismatch(f"group {index}: state blocks of {a.size} tokens against {b.size}")
        lo, hi = lo // a.size * a.size, -(-hi // a.size) * a.size
    a.check(lo, hi)
    b.check(lo, hi)
    separate = a.group.split or b.group.split
    items: list[_Item] = []
    for count, starts in _cut(lo, hi, a.size, b.size):
        src_offsets, dst_offsets = a.offsets(starts), b.offsets(starts)
        plain = _minimal(_loops(a, b, count), a.group.head_bytes)
        if a.group.halves == 1:
            items.append(_Item(_section(src_offsets, dst_offsets, *plain), 0, 0, 0, 0))
            continue
        loop_s = (2, a.place.strides[1], b.place.strides[1])
        joined = _minimal([*_loops(a, b, count), loop_s], a.group.head_bytes)
        if not separate and not _pays(plain, joined, src_offsets, dst_offsets):
            items.append(_Item(_section(src_offsets, dst_offsets, *joined), 0, 0, 0, 0))
            continue
        section = _section(src_offsets, dst_offsets, *plain)
        items.extend(_Item(section, *a.plane(half), *b.plane(half)) for half in range(2))
    nbytes = sum(len(item.section.src) * item.section.piece_bytes for item in items)
    return _GroupPlan(tuple(items), a.place, b.place, nbytes)


def _loops(a: _End, b: _End, tokens: int) -> list[_Loop]:
    """Loops over the tokens and heads of a piece."""
    _, _, token_a, head_a = a.place.strides
    _, _, token_b, head_b = b.place.strides
    return [(tokens, token_a, token_b), (a.heads[1] - a.heads[0], head_a, head_b)]


def _minimal(loops: list[_Loop], run: int) -> tuple[list[_Loop], int]:
    """The fewest loops that walk the same bytes: outermost first, with the run inside them."""
    left = [loop for loop in loops if loop[0] > 1]
    absorbed = True
    while absorbed:
        absorbed = False
        for loop in left:
            if loop[1] == run == loop[2]:
                run *= loop[0]
                left.remove(loop)
                absorbed = True
                break
    left.sort(key=lambda loop: (loop[2], loop[1]))
    merged: list[_Loop] = []
    for count, stride_a, stride_b in left:
        if merged:
            inner, inner_a, inner_b = merged[-1]
            if stride_a == inner * inner_a and stride_b == inner * inner_b:
                merged[-1] = (inner * count, inner_a, inner_b)
                continue
        merged.append((count, stride_a, stride_b))
    merged.reverse()
    return merged, run


def _pays(
    plain: tuple[list[_Loop], int], joined: tuple[list[_Loop], int], src: Offsets, dst: Offsets
) -> bool:
    """Whether to copy K and V one after the other, though they are in one tensor on both sides.

    Where K and V are far apart (``sbthd``), a piece that holds both keeps neighbouring blocks
    from being one run. Apart, they are two copies instead of one: worth it where runs become
    at least four times as long.
    """
    loops, run = plain
    if loops or not joined[0] or len(src) < 4:
        return False
    found = _joins(src, dst, run, run)
    return found is not None and 4 * (len(src) - int(np.count_nonzero(found))) <= len(src)


def _joins(src: Offsets, dst: Offsets, src_span: int, dst_span: int) -> NDArray[np.bool_] | None:
    """Where a piece ends on both sides as the next one begins; None when nowhere."""
    found: NDArray[np.bool_] = src[1:] - src[:-1] == src_span
    if not np.count_nonzero(found):
        return None
    found &= dst[1:] - dst[:-1] == dst_span
    return found if np.count_nonzero(found) else None


def _section(src: Offsets, dst: Offsets, loops: list[_Loop], run: int) -> Section:
    shape, src_strides, dst_strides = zip(*loops, strict=True) if loops else ((), (), ())
    return Section(src, dst, shape, src_strides, dst_strides, run)


def _steps(shape: tuple[int, ...], strides: tuple[int, ...]) -> Offsets:
    """Offsets of all steps of nested loops, the last loop fastest."""
    steps: Offsets = np.zeros(1, dtype=np.int64)
    for count, stride in zip(shape, strides, strict=True):
        steps = np.add.outer(steps, np.arange(count, dtype=np.int64) * stride).ravel()
    return steps


def _cut(lo: int, hi: int, size_a: int, size_b: int) -> Iterator[tuple[int, range | Offsets]]:
    """Cut tokens ``lo`` to ``hi`` where either side's blocks end; pieces by their token count.

    Yields:
        Token count, and the first tokens of the pieces of so many tokens.
    """
    fine, coarse = sorted((size_a, size_b))
    if coarse % fine:
        edges = [np.arange(lo // size * size, hi, size, dtype=np.int64) for size in (fine, coarse)]
        cuts = np.unique(np.clip(np.concatenate([*edges, [lo, hi]]), lo, hi))
        counts = np.diff(cuts)
        for count in np.unique(counts)[::-1].tolist():
            yield count, cuts[:-1][counts == count]
        return
    whole, end = -(-lo // fine) * fine, hi // fine * fine
    if lo < whole:
        yield min(whole, hi) - lo, range(lo, lo + 1)
    if whole < end:
        yield fine, range(whole, end, fine)
    if whole <= end < hi:
        yield hi - end, range(end, end + 1)
