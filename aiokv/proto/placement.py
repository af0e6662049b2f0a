"""Where the layers of a cache are: registered buffers, and the offsets and strides into them.

``Placement`` and the ``CacheLayout`` that it belongs to are all that a copy plan needs, and all that
a peer learns of the other side's memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from aiokv.proto.fields import integers, settle
from aiokv.proto.layout import CacheLayout

__all__ = ["GroupPlacement", "Placement"]


class GroupPlacement(msgspec.Struct, frozen=True, array_like=True):
    """Where one group's layers are.

    Attributes:
        strides: Byte strides of b, s, t, h, the same for every layer of the group; 0 where an axis is absent.
        layers: For each layer, in the group's order: (buffer, byte offset) of each of its tensors (K, V if
            split).

    Raises:
        TypeError: Something isn't an integer.
        ValueError: There aren't four strides, or a place is not a pair.
    """

    strides: tuple[int, int, int, int]
    layers: tuple[tuple[tuple[int, int], ...], ...]

    def __post_init__(self) -> None:
        """Refuse other types; what the numbers lead to is for ``Placement.check``."""
        layers = [tuple(integers(place, "a place", 2) for place in planes) for planes in self.layers]
        settle(self, strides=integers(self.strides, "strides", 4), layers=tuple(layers))


class Placement(msgspec.Struct, frozen=True, array_like=True):
    """Where a whole cache is: the sizes of its buffers, and each group within them.

    Attributes:
        buffers: Size in bytes of each registered buffer.
        groups: One entry for each group of the layout.

    Raises:
        TypeError: A field is of another type.
        ValueError: No buffer can be of such a size.
    """

    buffers: tuple[int, ...]
    groups: tuple[GroupPlacement, ...]

    def __post_init__(self) -> None:
        """Refuse other types, and sizes that 64 bits don't hold."""
        for group in self.groups:
            if not isinstance(group, GroupPlacement):
                raise TypeError(f"groups must be a tuple of GroupPlacement, not of {group!r:.80}")
        settle(self, buffers=integers(self.buffers, "buffers"), groups=tuple(self.groups))
        for size in self.buffers:
            if not 0 <= size < 2**63:
                raise ValueError(f"a buffer of {size} bytes")

    @classmethod
    def dense(cls, layout: CacheLayout, align: int = 4096) -> Placement:
        """All layers one after another in one buffer, each tensor contiguous and aligned."""
        offset = 0
        groups = []
        for group in layout.groups:
            size = group.blocks * group.block_bytes // group.planes
            layers = []
            for _ in group.layers:
                planes = []
                for _ in range(group.planes):
                    planes.append((0, offset))
                    offset += -(-size // align) * align
                layers.append(tuple(planes))
            groups.append(GroupPlacement(strides=group.dense_strides(), layers=tuple(layers)))
        return cls(buffers=(offset,), groups=tuple(groups))

    def check(self, layout: CacheLayout) -> None:
        """Look whether every byte that ``layout`` can name lies within the buffers.

        A placement comes from a peer, and every address that is read later is computed from it.

        Raises:
            ValueError: One doesn't, or the two aren't of one cache.
        """
        if len(self.groups) != len(layout.groups):
            raise ValueError("placement and layout have different numbers of groups")
        for group, place in zip(layout.groups, self.groups, strict=True):
            if len(place.layers) != len(group.layers):
                raise ValueError("placement and layout have different numbers of layers")
            if min(place.strides) < 0 or max(place.strides) >= 2**48:
                raise ValueError(f"strides out of range: {place.strides}")
            counts = (group.blocks, group.halves // group.planes, group.block_size, group.head_count)
            reach = _reach(counts, place.strides) + group.head_bytes
            for planes in place.layers:
                if len(planes) != group.planes:
                    raise ValueError(f"a layer has {len(planes)} tensors instead of {group.planes}")
                for buffer, offset in planes:
                    if not 0 <= buffer < len(self.buffers):
                        raise ValueError(f"there is no buffer {buffer}")
                    if offset < 0 or offset + reach > self.buffers[buffer]:
                        raise ValueError(f"a layer at {offset} reaches beyond buffer {buffer}")


def _reach(counts: Sequence[int], strides: Sequence[int]) -> int:
    """Offset of the last element that ``counts`` steps of ``strides`` lead to."""
    return sum((count - 1) * stride for count, stride in zip(counts, strides, strict=True))
