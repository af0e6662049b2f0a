"""What travels over a stream socket: frames of a header and the bytes of one chunk."""

from __future__ import annotations

import struct
from bisect import bisect_left
from hashlib import blake2b

from aiokv.proto.plan import Chunk
from aiokv.transports.base import PartId

__all__ = ["HEADER_BYTES", "Ranges", "pack", "tag_of", "unpack"]

#: Tag of the part, layer, copy, lo, hi, nbytes.
_HEADER = struct.Struct("!16sIIQQQ")
HEADER_BYTES = _HEADER.size


def tag_of(part: PartId) -> bytes:
    """16 bytes that stand for a part on the wire, so that all headers have one size.

    Both ends work it out from the id, which they know from the control session.
    """
    transfer, attempt = part
    return blake2b(f"{attempt}:{transfer}".encode(), digest_size=16).digest()


def pack(tag: bytes, chunk: Chunk) -> bytes:
    """The header of a frame that carries ``chunk``."""
    return _HEADER.pack(tag, *chunk)


def unpack(header: bytes | bytearray) -> tuple[bytes, Chunk]:
    """Tag and chunk of a header; whether there is such a chunk is for the plan to say."""
    tag, layer, copy, lo, hi, nbytes = _HEADER.unpack(header)
    return tag, Chunk(layer, copy, lo, hi, nbytes)


class Ranges:
    """Half-open ranges of integers, none of them twice; those that adjoin become one.

    In order, as chunks are sent, there is one range at any time.
    """

    def __init__(self) -> None:
        self._los: list[int] = []
        self._his: list[int] = []

    def add(self, lo: int, hi: int) -> bool:
        """Add one range; False, and nothing is added, when some of it is there already."""
        at = bisect_left(self._los, hi)  # ranges from here on begin at its end or later
        if at and self._his[at - 1] > lo:
            return False
        joins_next = at < len(self._los) and self._los[at] == hi
        joins_last = at > 0 and self._his[at - 1] == lo
        if joins_last and joins_next:
            self._his[at - 1] = self._his.pop(at)
            self._los.pop(at)
        elif joins_last:
            self._his[at - 1] = hi
        elif joins_next:
            self._los[at] = lo
        else:
            self._los.insert(at, lo)
            self._his.insert(at, hi)
        return True
