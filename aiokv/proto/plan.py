"""Which bytes go where: the plan of one copy between two caches.

Both ends of a transfer know both layouts, both placements and both block lists, so both compute
the same plan, and a ``Chunk`` of a few small numbers names the same bytes at both ends. Nothing
here touches memory; devices and transports carry the plan out.

A plan stays as small as what it came from. A ``Section`` is a set of equally shaped *pieces*, one
offset on each side for each piece, and the loops inside a piece; all layers of a group share it, K
and V do where they lie apart, and these *tensors* differ only in where they begin. So a chunk may be
of many layers at once. Only ``Copy.extents`` expands it, for host copies and sockets; a kernel is
given the offsets, the loops and where the tensors begin.

The order of the bytes of a chunk is: layers, tensors, pieces, then the loops of a piece from the
outermost, then the run. Staging memory and sockets carry the bytes in that order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from aiokv.errors import InvalidBlocks, LayoutMismatch
from aiokv.proto.ends import End, GroupBlocks, Side, cut
from aiokv.proto.layout import CacheLayout
from aiokv.proto.placement import GroupPlacement
from aiokv.proto.section import Copy, Loop, Offsets, Section, find_joins, minimal

__all__ = ["Chunk", "Copy", "CopyPlan", "GroupBlocks", "Section", "Side", "plan_copy", "planned_bytes"]


#: The only tensor of a layer, from its start, at both sides.
_WHOLE = ((0, 0, 0, 0),)


class Chunk(NamedTuple):
    """The same pieces of some layers: what is moved at a time.

    Attributes:
        layer: Of the model; the first.
        layers: How many: this one, and those that come after it in its KV cache group.
        copy: Index of one of the copies that each layer of the group has.
        lo: The first piece.
        hi: The end of the range of pieces.
        nbytes: Bytes of these pieces, of all tensors.
    """

    layer: int
    layers: int
    copy: int
    lo: int
    hi: int
    nbytes: int


class _Item(NamedTuple):
    """One section, and what has it of each layer: all tensors, or one of those.

    Attributes:
        section: The pieces.
        tensors: Plane and shift at the source, and at the destination, of each tensor.
        singles: Index of the item for each of these tensors alone; its own, if it is that.
    """

    section: Section
    tensors: tuple[tuple[int, int, int, int], ...]
    singles: tuple[int, ...]

    @property
    def piece_bytes(self) -> int:
        """Bytes of a piece of all these tensors."""
        return len(self.tensors) * self.section.piece_bytes


class _GroupPlan(NamedTuple):
    """The items that every layer of one group is copied by."""

    #: Those of all tensors first, which together are a layer; then those of single tensors.
    items: tuple[_Item, ...]
    #: How many are of all tensors.
    wholes: int
    src: GroupPlacement
    dst: GroupPlacement
    #: Of the model, in order.
    layers: tuple[int, ...]
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
        self.total: int = sum(group.nbytes * len(group.layers) for group in groups)
        self._where = {layer: (group, place) for group in groups for place, layer in enumerate(group.layers)}
        # Built on demand: a plan is made on the event loop, which needs some layers at a time.
        self._copies: dict[tuple[int, int, int], Copy] = {}

    def __repr__(self) -> str:
        return f"<CopyPlan of {len(self.layers)} layers, {self.total} bytes>"

    def nbytes(self, layer: int) -> int:
        """Bytes to move for one layer.

        Raises:
            KeyError: The model has no such layer.
        """
        return self._where[layer][0].nbytes

    def chunks(self, layers: Sequence[int], limit: int) -> Iterator[Chunk]:
        """Cut layers into chunks of at most ``limit`` bytes, in the order of ``layers``.

        Small layers that follow each other in their group share chunks. A larger one is cut between its
        tensors, and these between pieces; a piece that is larger is a chunk alone.

        Raises:
            KeyError: The model has no such layer.
        """
        at = 0
        while at < len(layers):
            layer = layers[at]
            group, place = self._where[layer]
            most = min(limit // group.nbytes, len(layers) - at) if group.nbytes else 1
            count = 1
            while count < most and _follows(self._where[layers[at + count]], group, place + count):
                count += 1
            for index in range(group.wholes):
                item = group.items[index]
                whole = Chunk(layer, count, index, 0, len(item.section.src), count * _nbytes(item))
                yield from _cut(group, place, whole, limit)
            at += count

    def copy(self, chunk: Chunk) -> Copy:
        """The copy that a chunk's pieces are of.

        Raises:
            LookupError: The chunk isn't within the plan.
        """
        where = chunk[:3]
        found = self._copies.get(where)
        if found is None:
            if len(self._copies) > 2 * len(self.layers):
                self._copies.clear()  # a peer makes up chunks as it likes
            found = self._copies[where] = self._made(*where)
        return found

    def _made(self, layer: int, layers: int, copy: int) -> Copy:
        group, place = self._where[layer]
        item = group.items[copy]
        src: list[tuple[int, int]] = []
        dst: list[tuple[int, int]] = []
        for number in range(place, place + layers):
            here, there = group.src.layers[number], group.dst.layers[number]
            for src_plane, src_shift, dst_plane, dst_shift in item.tensors:
                source, base = here[src_plane]
                src.append((source, base + src_shift))
                target, base = there[dst_plane]
                dst.append((target, base + dst_shift))
        return Copy(item.section, tuple(src), tuple(dst))

    def copies(self, layer: int) -> Sequence[Copy]:
        """The copies that one layer consists of; empty when there is nothing to move.

        Raises:
            KeyError: The model has no such layer.
        """
        return [self._made(layer, 1, index) for index in range(self._where[layer][0].wholes)]

    def layers_of(self, chunk: Chunk) -> Sequence[int]:
        """The layers that a chunk has pieces of, each as many bytes.

        Raises:
            KeyError: The model has no such layer.
        """
        if chunk.layers == 1:
            return (chunk.layer,)
        group, place = self._where[chunk.layer]
        return group.layers[place : place + chunk.layers]

    def shares(self, chunk: Chunk) -> Iterator[tuple[int, int]]:
        """What a chunk has pieces of, apart: each layer, and each tensor by the index of its own copy.

        Raises:
            LookupError: The chunk isn't within the plan.
        """
        singles = self._where[chunk.layer][0].items[chunk.copy].singles
        return product(self.layers_of(chunk), singles)

    def check(self, chunk: Chunk) -> None:
        """Look at a chunk, which a peer may have made up.

        Raises:
            ValueError: It isn't within the plan.
        """
        layer, layers, copy, lo, hi, nbytes = chunk
        if layer not in self._where:
            raise ValueError(f"{chunk}: there is no layer {layer}")
        group, place = self._where[layer]
        if not 1 <= layers <= len(group.layers) - place:
            raise ValueError(f"{chunk}: layer {layer} and those after it are {len(group.layers) - place}")
        if not 0 <= copy < len(group.items):
            raise ValueError(f"{chunk}: layer {layer} has {len(group.items)} copies")
        item = group.items[copy]
        if not 0 <= lo < hi <= len(item.section.src):
            raise ValueError(f"{chunk}: copy {copy} has {len(item.section.src)} pieces")
        if nbytes != layers * (hi - lo) * item.piece_bytes:
            raise ValueError(f"{chunk}: these pieces are {layers * (hi - lo) * item.piece_bytes} bytes")

    def split(self, chunk: Chunk, limit: int) -> Iterator[Chunk]:
        """A chunk as chunks of at most ``limit`` bytes, in plan order; a larger piece is a chunk alone.

        Raises:
            LookupError: The chunk isn't within the plan.
        """
        return _cut(*self._where[chunk.layer], chunk, limit)


def _nbytes(item: _Item) -> int:
    return len(item.section.src) * item.piece_bytes


def _cut(group: _GroupPlan, place: int, chunk: Chunk, limit: int) -> Iterator[Chunk]:
    """Between layers, then between tensors, then between pieces."""
    if chunk.nbytes <= limit:
        yield chunk
        return
    each = chunk.nbytes // chunk.layers
    if each <= limit:
        step = limit // each
        for at in range(0, chunk.layers, step):
            count = min(step, chunk.layers - at)
            yield chunk._replace(layer=group.layers[place + at], layers=count, nbytes=count * each)
        return
    item = group.items[chunk.copy]
    size = item.section.piece_bytes
    step = max(1, limit // size)
    for layer in group.layers[place : place + chunk.layers]:
        for copy in item.singles:
            for lo in range(chunk.lo, chunk.hi, step):
                hi = min(lo + step, chunk.hi)
                yield Chunk(layer, 1, copy, lo, hi, (hi - lo) * size)


def _follows(where: tuple[_GroupPlan, int], group: _GroupPlan, place: int) -> bool:
    return where[0] is group and where[1] == place


def plan_copy(
    src: Side,
    dst: Side,
    *,
    first_token: int | Sequence[int],
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
        first_token: Tokens before this one stay as they are at the destination; one for all groups, or one
            for each.
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
    shares = _shares(heads, src.layout)
    firsts = [first_token] * len(shares) if isinstance(first_token, int) else first_token
    plans = [
        _plan_group(index, src, dst, first, tokens, share)
        for index, (first, share) in enumerate(zip(firsts, shares, strict=True))
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
        return _GroupPlan((), 0, a.place, b.place, a.group.layers, 0)
    a.check_start(first_token, hi)
    b.check_start(first_token, hi)
    if lo >= hi:
        return _GroupPlan((), 0, a.place, b.place, a.group.layers, 0)
    if a.group.kind == "state":
        if a.size != b.size:
            raise LayoutMismatch(f"group {index}: state blocks of {a.size} tokens against {b.size}")
        lo, hi = lo // a.size * a.size, -(-hi // a.size) * a.size
    a.check(lo, hi)
    b.check(lo, hi)
    separate = a.group.split or b.group.split
    wholes: list[tuple[Section, tuple[tuple[int, int, int, int], ...]]] = []
    for count, starts in cut(lo, hi, a.size, b.size):
        src_offsets, dst_offsets = a.offsets(starts), b.offsets(starts)
        plain = minimal(_loops(a, b, count), a.group.head_bytes)
        if a.group.halves == 1:
            wholes.append((_section(src_offsets, dst_offsets, *plain), _WHOLE))
            continue
        loop_s = (2, a.place.strides[1], b.place.strides[1])
        joined = minimal([*_loops(a, b, count), loop_s], a.group.head_bytes)
        if not separate and not _pays(plain, joined, src_offsets, dst_offsets):
            wholes.append((_section(src_offsets, dst_offsets, *joined), _WHOLE))
            continue
        section = _section(src_offsets, dst_offsets, *plain)
        wholes.append((section, tuple((*a.plane(half), *b.plane(half)) for half in range(2))))
    items = _with_singles(wholes)
    nbytes = sum(_nbytes(item) for item in items[: len(wholes)])
    return _GroupPlan(items, len(wholes), a.place, b.place, a.group.layers, nbytes)


def _with_singles(wholes: list[tuple[Section, tuple[tuple[int, int, int, int], ...]]]) -> tuple[_Item, ...]:
    """Items of all tensors of a layer, and after them one for each tensor alone."""
    items: list[_Item] = []
    singles: list[_Item] = []
    for index, (section, tensors) in enumerate(wholes):
        if len(tensors) == 1:
            items.append(_Item(section, tensors, (index,)))
            continue
        first = len(wholes) + len(singles)
        items.append(_Item(section, tensors, tuple(range(first, first + len(tensors)))))
        singles += [_Item(section, (tensor,), (first + n,)) for n, tensor in enumerate(tensors)]
    return (*items, *singles)


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
