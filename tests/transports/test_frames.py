from __future__ import annotations

from aiokv.proto.plan import Chunk
from aiokv.transports.frames import HEADER_BYTES, pack, tag_of, unpack


def test_a_header_says_what_it_was_told() -> None:
    chunk = Chunk(layer=79, layers=3, copy=1, lo=2**40, hi=2**41, nbytes=2**63)
    header = pack(tag_of(("transfer", 1)), chunk)
    assert len(header) == HEADER_BYTES
    assert unpack(header) == (tag_of(("transfer", 1)), chunk)


def test_every_part_has_a_tag_of_its_own() -> None:
    parts = [("a", 1), ("a", 11), ("a:1", 1), ("1:a", 1), ("", 1), ("ä", 1), ("x" * 10_000, 1)]
    assert len({tag_of(part) for part in parts}) == len(parts)
