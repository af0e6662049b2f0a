"""Extents of chunks that are alike: the layers of a plan share their sections and chunks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from aiokv.proto.plan import Copy
from aiokv.proto.section import Section

__all__ = ["Extents"]

#: Shapes that are remembered: more than the chunks of one layer usually have.
_REMEMBERED = 8

_Offsets = NDArray[np.int64]


class Extents:
    """What ``Copy.extents`` gives, which costs as much as moving some hundred KiB, for many layers once."""

    def __init__(self) -> None:
        #: By section and pieces, oldest first. The section is kept, so that its identity stays its own.
        self._known: dict[tuple[int, int, int], tuple[Section, _Offsets, _Offsets, _Offsets]] = {}

    def of(self, copy: Copy, lo: int, hi: int) -> tuple[_Offsets, _Offsets, _Offsets]:
        """Source offsets, destination offsets and lengths of pieces ``lo`` to ``hi``."""
        key = id(copy.section), lo, hi
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = (copy.section, *copy.section.extents(lo, hi))
            if len(self._known) > _REMEMBERED:
                del self._known[next(iter(self._known))]
        _, src, dst, lengths = known
        return src + copy.src_base, dst + copy.dst_base, lengths
