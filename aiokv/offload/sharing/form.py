"""What a place of a pool is, whoever uses it; and whose blocks hold the same KV."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Annotated

import msgspec

from aiokv.errors import LayoutMismatch
from aiokv.proto.layout import MOST_LAYERS, CacheLayout

__all__ = ["GroupForm", "Groups", "digest_of", "forms_of", "place_bytes", "segment_bytes", "shaped"]

#: Of a tensor of one layer within a segment, as of ``Placement.dense``.
_ALIGN = 4096
_DIGEST_BYTES = 16


class GroupForm(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One KV cache group of a pool's places.

    Attributes:
        layers: How many.
        nbytes: Of a place, in one layer.
        axes: The order in which a block keeps its axes. Copies from caches with another are slower.
        split: K and V lie apart.
    """

    layers: Annotated[int, msgspec.Meta(ge=1, le=MOST_LAYERS)]
    nbytes: Annotated[int, msgspec.Meta(ge=1, lt=2**40)]
    axes: Annotated[str, msgspec.Meta(max_length=5)]
    split: bool

    def __str__(self) -> str:
        return f"{self.layers} layers of {self.nbytes} bytes a block"


Groups = Annotated[tuple[GroupForm, ...], msgspec.Meta(min_length=1, max_length=MOST_LAYERS)]


def forms_of(layout: CacheLayout, ratios: Sequence[int]) -> tuple[GroupForm, ...]:
    """The form of places that suit a cache best.

    Args:
        layout: Of the cache.
        ratios: Blocks of each group that a place has room for.
    """
    return tuple(
        GroupForm(
            len(group.layers), ratio * group.block_bytes, "b" + group.axes.replace("b", ""), group.split
        )
        for group, ratio in zip(layout.groups, ratios, strict=True)
    )


def place_bytes(groups: Sequence[GroupForm]) -> int:
    """Bytes of one place."""
    return sum(group.layers * group.nbytes for group in groups)


def segment_bytes(groups: Sequence[GroupForm], places: int) -> int:
    """Bytes of a segment of so many places."""
    total = 0
    for group in groups:
        planes = 2 if group.split else 1
        total += group.layers * planes * -(-places * group.nbytes // planes // _ALIGN) * _ALIGN
    return total


def differences(ours: Sequence[GroupForm], theirs: Sequence[GroupForm]) -> str:
    """What keeps blocks of one form from places of the other, in words; empty if nothing does."""
    if len(ours) != len(theirs):
        return f"{len(ours)} KV cache groups against {len(theirs)}"
    return "; ".join(
        f"group {index}: {mine} against {other}"
        for index, (mine, other) in enumerate(zip(ours, theirs, strict=True))
        if (mine.layers, mine.nbytes) != (other.layers, other.nbytes)
    )


def shaped(layout: CacheLayout, ratios: Sequence[int], groups: Sequence[GroupForm]) -> CacheLayout:
    """A cache's layout in the form of a pool's places.

    Raises:
        LayoutMismatch: Its blocks don't go into such places.
    """
    found = differences(forms_of(layout, ratios), groups)
    if not found:
        try:
            made = CacheLayout(
                groups=tuple(
                    msgspec.structs.replace(group, axes=form.axes, split=form.split)
                    for group, form in zip(layout.groups, groups, strict=True)
                ),
                model=layout.model,
            )
        except (TypeError, ValueError) as error:
            found = str(error)
        else:
            found = differences(forms_of(made, ratios), groups)
            if not found:
                return made
    raise LayoutMismatch(f"this cache's blocks and the pool's differ: {found}")


def digest_of(layout: CacheLayout, salt: bytes = b"") -> bytes:
    """Equal for caches whose blocks of one name hold the same KV, however they lie in memory.

    So ranks with different heads never see each other's blocks, and what all ranks keep is there once.

    Args:
        layout: Of the cache.
        salt: Tells apart what the layout doesn't.
    """
    groups = [
        (
            group.layers,
            group.block_size,
            group.heads,
            group.total_heads,
            group.head_size,
            group.dtype,
            group.halves,
            group.kind,
            group.window,
        )
        for group in layout.groups
    ]
    facts = (layout.model, groups, salt) if salt else (layout.model, groups)
    return sha256(msgspec.msgpack.encode(facts)).digest()[:_DIGEST_BYTES]
