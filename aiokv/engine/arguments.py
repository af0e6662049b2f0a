"""What callers pass, checked and put into the form that the layers below use."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import SupportsIndex, cast

import numpy as np

from aiokv.errors import CapacityError, InvalidBlocks
from aiokv.proto.layout import CacheLayout
from aiokv.proto.plan import GroupBlocks
from aiokv.proto.settings import SECOND

__all__ = [
    "BlockIds",
    "block_lists",
    "checked_addresses",
    "checked_id",
    "checked_trace",
    "room_of",
    "seconds",
    "whole",
]

#: Block ids of one transfer: a list where the cache has one group, else a list for each group.
BlockIds = Sequence[int] | Sequence[Sequence[int]]

#: Block ids that one transfer can list: a message has to fit in a control frame.
_MOST_BLOCKS = 200_000

#: Numbers in messages are less than this.
_MOST = 2**48

#: The longest deadline, in seconds.
_DAY = 86_400


def block_lists(blocks: BlockIds, layout: CacheLayout) -> tuple[GroupBlocks, ...]:
    """Block lists by group, as arrays.

    Raises:
        InvalidBlocks: The wrong number of lists, or something other than integers.
        CapacityError: More blocks than one transfer can list.
    """
    groups = len(layout.groups)
    nested = len(blocks) > 0 and _listed(blocks[0])
    lists = list(cast("Sequence[Sequence[int]]", blocks)) if nested or groups > 1 else [blocks]
    if len(lists) != groups:
        raise InvalidBlocks(f"block lists for {len(lists)} groups, the cache has {groups}")
    found = []
    for ids in lists:
        try:
            array = np.asarray(ids)
        except ValueError:  # lists within it, of different lengths
            array = np.empty(())
        if array.ndim != 1:
            raise InvalidBlocks(f"block ids come as a list for each group, not as {ids!r}")
        if array.size and array.dtype.kind not in "iu":
            raise InvalidBlocks(f"block ids are integers, not {array.dtype}")
        found.append(GroupBlocks(start=0, ids=array.astype(np.int64)))
    if sum(listed.ids.size for listed in found) > _MOST_BLOCKS:
        raise CapacityError(f"a transfer lists at most {_MOST_BLOCKS} blocks")
    return tuple(found)


def _listed(entry: object) -> bool:
    """Whether an entry of a list is a list itself, or an array or tensor that is more than a number."""
    dimensions: int = getattr(entry, "ndim", int(isinstance(entry, Sequence) and not isinstance(entry, str)))
    return dimensions > 0


def room_of(blocks: Sequence[GroupBlocks], layout: CacheLayout) -> int:
    """Tokens that block lists have room for, in every group that keeps an entry for each token."""
    rooms = [
        listed.start + listed.ids.size * group.block_size
        for listed, group in zip(blocks, layout.groups, strict=True)
        if group.kind != "state"
    ]
    return min(rooms, default=1)


def whole(value: SupportsIndex, what: str, least: int = 0) -> int:
    """An integer that a message can carry, as Python's own."""
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if not least <= number < _MOST:
        raise ValueError(f"{what} is an integer of at least {least} and less than 2**48, not {value!r}")
    return number


def checked_id(tid: str) -> str:
    """The transfer id, if it can be one."""
    if not isinstance(tid, str) or not 0 < len(tid) <= 256 or not _encodes(tid):
        raise ValueError(f"a transfer id is a string of 1 to 256 characters, not {tid!r}")
    return tid


def checked_trace(trace: str) -> str:
    """The trace context, if a message can carry it."""
    if not isinstance(trace, str) or len(trace) > 64 or not _encodes(trace):
        raise ValueError(f"a trace context is a string of at most 64 characters, not {trace!r}")
    return trace


def checked_addresses(given: Sequence[str], what: str) -> list[str]:
    """Addresses, each named once."""
    if isinstance(given, str):  # a sequence, too, but of characters
        raise ValueError(f"{what} is a list of addresses, not the one address {given!r}")  # noqa: TRY004
    if len(set(given)) != len(given):
        raise ValueError(f"{what} must name each engine once: {list(given)}")
    return list(given)


def _encodes(text: str) -> bool:
    """Whether there is UTF-8 for it: for half of a surrogate pair there is none."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def seconds(deadline: float) -> int:
    """A deadline in nanoseconds from now."""
    if not 0 < deadline < _DAY:
        raise ValueError(f"a deadline lies between 0 s and a day, not {deadline}")
    return int(deadline * SECOND)
