"""What callers pass, checked and put into the form that the layers below use."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import SupportsIndex, cast

import numpy as np

from aiokv.errors import CapacityError, InvalidBlocks
from aiokv.proto.fields import index
from aiokv.proto.layout import CacheLayout
from aiokv.proto.plan import GroupBlocks
from aiokv.proto.settings import SECOND

__all__ = [
    "BlockIds",
    "Window",
    "block_lists",
    "checked_addresses",
    "checked_id",
    "checked_priority",
    "checked_stream",
    "checked_trace",
    "layer_index",
    "room_of",
    "seconds",
    "wanted_tokens",
    "whole",
]


@dataclass(frozen=True, slots=True)
class Window:
    """Blocks of one KV cache group that begin with a later token than the first.

    For a sliding-window group, whose earlier blocks are gone: it need list no more than the last
    ``window`` tokens. Both sides may list from where they like, as long as what is needed is there.

    Attributes:
        start: Index of the first listed block's first token; a multiple of the block size.
        ids: Block ids, in the order of the tokens from there on.
    """

    start: int
    ids: Sequence[int]


#: Block ids of one transfer: a list where the cache has one group, else a list for each group.
BlockIds = Sequence[int] | Sequence[Sequence[int] | Window] | Window

#: Block ids that one transfer can list: a message has to fit in a control frame.
_MOST_BLOCKS = 200_000

#: Numbers in messages are less than this.
_MOST = 2**48

#: The highest priority; the lowest is as far below 0.
_MOST_URGENT = 2**31

#: The longest deadline, in seconds.
_DAY = 86_400


def block_lists(blocks: BlockIds, layout: CacheLayout) -> tuple[GroupBlocks, ...]:
    """Block lists by group, as arrays.

    Raises:
        TypeError: It is no list.
        InvalidBlocks: The wrong number of lists, or something other than integers.
        CapacityError: More blocks than one transfer can list.
    """
    if isinstance(blocks, Window):
        blocks = [blocks]
    if not _listed(blocks):
        raise TypeError(f"blocks is a list of block ids, or a list of those for each group, not {blocks!r}")
    groups = len(layout.groups)
    nested = len(blocks) > 0 and (_listed(blocks[0]) or isinstance(blocks[0], Window))
    lists = list(cast("Sequence[Sequence[int] | Window]", blocks)) if nested or groups > 1 else [blocks]
    if len(lists) != groups:
        raise InvalidBlocks(f"blocks has lists for {len(lists)} groups, the cache has {groups}")
    found = []
    for entry, group in zip(lists, layout.groups, strict=True):
        start, ids = 0, entry
        if isinstance(entry, Window):
            start, ids = whole(entry.start, "Window.start"), entry.ids
        if start % group.block_size:
            raise InvalidBlocks(f"Window.start={start} is no multiple of the block size {group.block_size}")
        try:
            array = np.asarray(ids)
        except ValueError:  # lists within it, of different lengths
            array = np.empty(())
        if array.ndim != 1:
            raise InvalidBlocks(f"block ids come as a list for each group, not as {ids!r}")
        if array.size and array.dtype.kind not in "iu":
            raise InvalidBlocks(f"block ids are integers, not {array.dtype}")
        found.append(GroupBlocks(start=start, ids=array.astype(np.int64)))
    if sum(listed.ids.size for listed in found) > _MOST_BLOCKS:
        raise CapacityError(f"a transfer lists at most {_MOST_BLOCKS} blocks")
    return tuple(found)


def _listed(entry: object) -> bool:
    """Whether it is a list, or an array or tensor that is more than a number."""
    if isinstance(entry, list | int):  # nearly always
        return isinstance(entry, list)
    listed = isinstance(entry, Sequence) and not isinstance(entry, str | bytes | bytearray)
    dimensions: int = getattr(entry, "ndim", int(listed))
    return dimensions > 0


def room_of(blocks: Sequence[GroupBlocks], layout: CacheLayout) -> int:
    """Tokens that block lists have room for, in every group that keeps an entry for each token."""
    rooms = [
        listed.start + listed.ids.size * group.block_size
        for listed, group in zip(blocks, layout.groups, strict=True)
        if group.kind != "state"
    ]
    return min(rooms, default=1)


def wanted_tokens(first_token: SupportsIndex, tokens: SupportsIndex | None, room: int) -> tuple[int, int]:
    """The first token that a fetch wants, and how many there are in all; -1: as many as are offered.

    Raises:
        TypeError: One is no integer.
        ValueError: One is negative.
        InvalidBlocks: The blocks have no room for them.
    """
    first = whole(first_token, "first_token")
    last = -1 if tokens is None else whole(tokens, "tokens")
    if not room and last < 0:
        raise InvalidBlocks("blocks is empty: there is no room for what is offered")
    if last > room:
        raise InvalidBlocks(f"tokens={last}, but the blocks have room for {room}")
    if first > (room if last < 0 else last):
        end = f"tokens={last}" if last >= 0 else f"the {room} tokens that the blocks have room for"
        raise InvalidBlocks(f"first_token={first} lies beyond {end}")
    return first, last


def whole(value: SupportsIndex, what: str, least: int = 0) -> int:
    """An integer that a message can carry, as Python's own.

    Raises:
        TypeError: It is no integer.
        ValueError: It is too small, or too large.
    """
    number = index(value, what)
    if not least <= number < _MOST:
        raise ValueError(f"{what} is an integer of at least {least} and less than 2**48, not {value!r}")
    return number


def checked_priority(value: SupportsIndex) -> int:
    """A priority, as Python's own integer.

    Raises:
        TypeError: It is no integer.
        ValueError: It is further from 0 than anybody needs.
    """
    number = index(value, "priority")
    if not -_MOST_URGENT <= number < _MOST_URGENT:
        raise ValueError(f"priority is an integer from -2**31 to 2**31 - 1, not {value!r}")
    return number


def layer_index(value: SupportsIndex, layers: int) -> int:
    """Index of a layer, as Python's own integer: a mask of layers outgrows those of NumPy.

    Raises:
        TypeError: It is no integer.
        IndexError: There is no such layer.
    """
    number = index(value, "layer")
    if not 0 <= number < layers:
        raise IndexError(f"layer {number} is not one of 0..{layers - 1}")
    return number


def checked_id(tid: str) -> str:
    """The transfer id, if it can be one.

    Raises:
        TypeError: It is no string.
        ValueError: It is empty, too long, or has no UTF-8.
    """
    if not isinstance(tid, str):
        raise TypeError(f"tid, the transfer id, is a string, not {tid!r}")
    if not 0 < len(tid) <= 256 or not _encodes(tid):
        raise ValueError(f"tid, the transfer id, is a string of 1 to 256 characters, not {_shown(tid)}")
    return tid


def checked_trace(trace: str) -> str:
    """The trace context, if a message can carry it.

    Raises:
        TypeError: It is no string.
        ValueError: It is too long, or has no UTF-8.
    """
    if not isinstance(trace, str):
        raise TypeError(f"trace, a trace context, is a string, not {trace!r}")
    if len(trace) > 64 or not _encodes(trace):
        raise ValueError(f"trace, a trace context, is a string of at most 64 characters, not {_shown(trace)}")
    return trace


def checked_addresses(given: Collection[str], what: str) -> list[str]:
    """Addresses, each named once.

    Raises:
        TypeError: It is no list, or not of strings.
        ValueError: It names an address twice.
    """
    if isinstance(given, str):  # a sequence, too, but of characters
        raise TypeError(f"{what} is a list of addresses, not the one address {given!r}")
    if given == ():  # nearly always
        return []
    if not isinstance(given, Collection) or isinstance(given, Mapping | bytes | bytearray):
        raise TypeError(f"{what} is a list of addresses, not {given!r}")
    for address in given:
        if not isinstance(address, str):
            raise TypeError(f"{what} lists control addresses, which are strings, not {address!r}")
    if len(set(given)) != len(given):
        raise ValueError(f"{what} must name each engine once: {list(given)}")
    return list(given)


def checked_stream(stream: object | None) -> object | None:
    """A stream that a device may adopt, whatever device that is.

    Raises:
        TypeError: It is no stream.
    """
    ours = hasattr(stream, "record") and hasattr(stream, "wait")
    if stream is not None and not ours and not hasattr(stream, "__cuda_stream__"):
        raise TypeError(f"stream is what has __cuda_stream__, or None, not {stream!r}")
    return stream


def _encodes(text: str) -> bool:
    """Whether there is UTF-8 for it: for half of a surrogate pair there is none."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _shown(text: str) -> str:
    """A text for a message, which nobody wants to have a megabyte of."""
    return repr(text) if len(text) <= 80 else f"{text[:40]!r} and {len(text) - 40} characters more"


def seconds(deadline: float, what: str = "deadline") -> int:
    """A deadline in nanoseconds from now.

    Raises:
        TypeError: It is no number.
        ValueError: It is not after now, or more than a day away.
    """
    given: object = deadline
    if not isinstance(given, float | int | Real):
        raise TypeError(f"{what} is a number of seconds, not {deadline!r}")
    if not 0 < deadline < _DAY:
        raise ValueError(f"{what} lies between 0 s and a day, not at {deadline!r} s")
    return max(1, int(deadline * SECOND))
