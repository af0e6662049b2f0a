"""Where the bytes of chunks are: the layers of a plan share their sections, and so what is known of those."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from aiokv.device.base import Buffer
from aiokv.proto.plan import Copy
from aiokv.proto.section import Section, Tensors, spread

__all__ = ["Extents", "addresses"]

#: Shapes that are remembered: more than the chunks of one layer usually have.
_REMEMBERED = 8

_Offsets = NDArray[np.int64]


class Extents:
    """What ``Section.extents`` gives, which costs what moving some hundred KiB does, once for many layers."""

    def __init__(self) -> None:
        #: By section and pieces, oldest first. The section is kept, so that its identity stays its own.
        self._known: dict[tuple[int, int, int], tuple[Section, _Offsets, _Offsets, _Offsets]] = {}

    def sources(self, copy: Copy, lo: int, hi: int, at: Sequence[int]) -> tuple[_Offsets, _Offsets]:
        """Addresses and lengths of pieces ``lo`` to ``hi`` at the source, whose tensors are at ``at``."""
        src, _, lengths = self._of(copy.section, lo, hi)
        return spread(at, src), _repeated(lengths, len(at))

    def targets(self, copy: Copy, lo: int, hi: int, at: Sequence[int]) -> tuple[_Offsets, _Offsets]:
        """The same at the destination."""
        _, dst, lengths = self._of(copy.section, lo, hi)
        return spread(at, dst), _repeated(lengths, len(at))

    def _of(self, section: Section, lo: int, hi: int) -> tuple[_Offsets, _Offsets, _Offsets]:
        key = id(section), lo, hi
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = (section, *section.extents(lo, hi))
            if len(self._known) > _REMEMBERED:
                del self._known[next(iter(self._known))]
        return known[1:]


def addresses(tensors: Tensors, buffers: Sequence[Buffer]) -> list[int]:
    """Where each tensor of a copy begins."""
    return [buffers[number].address + base for number, base in tensors]


def _repeated(lengths: _Offsets, times: int) -> _Offsets:
    return lengths if times == 1 else np.tile(lengths, times)
