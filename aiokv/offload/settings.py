"""Sizes and bounds of a host tier, in one place."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

from aiokv.proto.fields import index

__all__ = ["TierSettings", "size_of"]

_SIZE = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?) ?(?P<unit>[kKMGT]i?B|B|)", re.ASCII)
_POWERS = {"": 0, "K": 1, "k": 1, "M": 2, "G": 3, "T": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSettings:
    """Bounds of one tier. All are positive.

    Attributes:
        segment_bytes: The pool grows, and is pinned, in pieces of about this size; blocks of one piece can be
            moved together.
        part_bytes: A load or store is cut into parts of about this size, each of which is there, and given
            back, as soon as it is across. In a small part the blocks of a layer are a short run, and cost
            more: 32 MiB of a model of 8B go at half of what PCIe gives.
        chunk_bytes: What one submitted copy moves at most. On the host a chunk is copied in one go, so this
            bounds for how long the loop is held; on a GPU it is 16 times as much.
        window_bytes: Bytes of submitted loads, and of submitted stores, that may be unfinished. What is
            submitted can't be called back, so this bounds how long a cancelled copy takes to be quiet.
        drain_s: Seconds that a cancelled or closing caller waits for quiet at most; what isn't quiet then
            keeps its blocks.
        retries: How often a store whose copy failed is tried again.
        events: Stored and removed events that wait for each reader at most; then the oldest are lost, which
            it is told.

    Raises:
        TypeError: One is no number.
        ValueError: One is out of range.
    """

    segment_bytes: int = 256 << 20
    part_bytes: int = 256 << 20
    chunk_bytes: int = 1 << 20
    window_bytes: int = 512 << 20
    drain_s: float = 2.0
    retries: int = 1
    events: int = 4096

    def __post_init__(self) -> None:
        """Refuse what is no number."""
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name == "drain_s":
                if isinstance(value, bool) or not isinstance(value, int | float):
                    raise TypeError(f"drain_s is a number of seconds, not {value!r}")
                if not 0 < value < 3600:
                    raise ValueError(f"drain_s lies between 0 s and an hour, not at {value!r} s")
                continue
            number = index(value, each.name)
            if not int(each.name != "retries") <= number < 2**62:
                raise ValueError(f"{each.name} is out of range: {value!r}")
            object.__setattr__(self, each.name, number)


def size_of(value: int | str, what: str) -> int:
    """A number of bytes, also written as text such as ``"64GiB"``.

    Raises:
        TypeError: It is neither.
        ValueError: It isn't positive, or no such text.
    """
    if not isinstance(value, str):
        found = index(value, what)
    else:
        match = _SIZE.fullmatch(value.strip())
        if match is None:
            raise ValueError(f'{what} is a number of bytes, or text such as "64GiB", not {value!r}')
        unit = match["unit"]
        base = 1024 if "i" in unit else 1000
        found = int(float(match["number"]) * base ** _POWERS[unit.rstrip("iB")])
    if not 0 < found < 2**62:
        raise ValueError(f"{what} is a positive number of bytes, not {value!r}")
    return found
