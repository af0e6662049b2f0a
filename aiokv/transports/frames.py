"""What travels over a stream socket: frames of a header and the bytes of one chunk."""

from __future__ import annotations

import struct
from hashlib import blake2b

from aiokv.proto.plan import Chunk
from aiokv.transports.base import PartId

__all__ = ["HEADER_BYTES", "pack", "tag_of", "unpack"]

#: Tag of the part, and the chunk's layer, layers, copy, lo, hi and nbytes.
_HEADER = struct.Struct("!16sIIIQQQ")
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
    tag, *chunk = _HEADER.unpack(header)
    return tag, Chunk(*chunk)
