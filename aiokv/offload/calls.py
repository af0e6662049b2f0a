"""What callers of a tier pass, checked and put into the form that it uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from aiokv.device.base import Event
from aiokv.engine.arguments import BlockIds, block_lists
from aiokv.errors import CapacityError, InvalidBlocks
from aiokv.offload.policies import Key
from aiokv.proto.layout import CacheLayout, GroupLayout
from aiokv.proto.plan import GroupBlocks

__all__ = ["NONE", "Stored", "Wanted", "checked_blocks", "checked_hashes", "checked_share", "without_none"]

#: In the place of a block that is not to be loaded, in front of all that are.
NONE = -1
#: Tokens before the first block of a window.
_MOST_TOKENS = 1 << 27


@dataclass(frozen=True, slots=True)
class Stored:
    """What a store names.

    Attributes:
        hashes: Of the blocks.
        parent: Of the block before the first.
        tokens: Of all of them, or None.
        block_size: Tokens of each.

    Raises:
        ValueError: There are not as many tokens as the blocks have.
    """

    hashes: Sequence[Key]
    parent: Key | None
    tokens: Sequence[int] | None
    block_size: int

    def __post_init__(self) -> None:
        """Refuse tokens of other blocks."""
        if self.tokens is not None and len(self.tokens) != len(self.hashes) * self.block_size:
            raise ValueError(f"{len(self.tokens)} tokens for {len(self.hashes)} blocks of {self.block_size}")

    def rest(self, first: int) -> Stored:
        """The same without what comes before ``first``."""
        if not first:
            return self
        tokens = None if self.tokens is None else self.tokens[first * self.block_size :]
        return Stored(self.hashes[first:], self.hashes[first - 1], tokens, self.block_size)


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which blocks of the cache are to be read or written.

    Attributes:
        blocks: Of each group, from the first token on; ``NONE`` where there is to be none.
        after: What of the caller's comes before.
        priority: The higher goes first.
        count: How many blocks of the tier they are.
        least: How many there have to be.
        most: How many there can be.

    Raises:
        InvalidBlocks: There are more or fewer.
    """

    blocks: tuple[GroupBlocks, ...]
    after: Event
    priority: int
    count: int
    least: int = 0
    most: int = 1 << 62

    def __post_init__(self) -> None:
        """Refuse other numbers of blocks."""
        if not self.least <= self.count <= self.most:
            wanted = f"{self.most}" if self.least == self.most else f"at most {self.most}"
            raise InvalidBlocks(f"blocks names {self.count} blocks of the tier, not {wanted}")

    def rest(self, first: int, ratios: Sequence[int]) -> Wanted:
        """The same without what comes before ``first``."""
        blocks = tuple(
            GroupBlocks(0, listed.ids[first * ratio :])
            for listed, ratio in zip(self.blocks, ratios, strict=True)
        )
        return Wanted(blocks, self.after, self.priority, self.count - first)


def checked_hashes(hashes: Sequence[Key]) -> Sequence[Key]:
    """Hashes as a list that stays as it is.

    Raises:
        TypeError: It is no list, or one is None.
    """
    if isinstance(hashes, str | bytes | bytearray) or not isinstance(hashes, Sequence):
        raise TypeError(f"hashes is a list of hashes of blocks, not {hashes!r:.80}")
    kept = list(hashes)
    if None in kept:
        raise TypeError("None is no hash of a block")
    return kept


def checked_blocks(
    blocks: BlockIds, layout: CacheLayout, ratios: Sequence[int], *, windows: bool = False
) -> tuple[GroupBlocks, ...]:
    """Block lists of whole blocks of the tier, as many for each group.

    Args:
        blocks: As the caller has them.
        layout: Of the cache.
        ratios: Blocks of each group in one of the tier.
        windows: Whether the list of a group with a sliding window may begin with a later token; what comes
            before is ``NONE`` then.

    Raises:
        TypeError: It is no list.
        InvalidBlocks: They are not, or a list begins with a later token.
        CapacityError: More blocks than one transfer can list.
    """
    listed = block_lists(blocks, layout)
    if windows:
        listed = tuple(
            _from_first(each, group) if group.window else each
            for each, group in zip(listed, layout.groups, strict=True)
        )
    counts = []
    for index, (group, ratio) in enumerate(zip(listed, ratios, strict=True)):
        if group.start:
            raise InvalidBlocks(f"group {index}: the host tier keeps every block of a group; list them all")
        count, rest = divmod(group.ids.size, ratio)
        if rest:
            raise InvalidBlocks(f"group {index}: {group.ids.size} blocks, but {ratio} go together")
        counts.append(count)
    if len(set(counts)) > 1:
        raise InvalidBlocks(f"the groups' lists are of {counts} blocks of the tier, not of as many each")
    return listed


def _from_first(listed: GroupBlocks, group: GroupLayout) -> GroupBlocks:
    if (listed.ids < 0).any():
        raise InvalidBlocks(f"there is no block {listed.ids.min()}; leave out what is not wanted by Window")
    if not listed.start:
        return listed
    if listed.start > _MOST_TOKENS:
        raise CapacityError(
            f"Window.start={listed.start}, and at most {_MOST_TOKENS} tokens are loaded at once"
        )
    before = np.full(listed.start // group.block_size, NONE, np.int64)
    return GroupBlocks(0, np.concatenate([before, listed.ids]))


def without_none(listed: GroupBlocks, block_size: int) -> GroupBlocks:
    """A list that begins with its first block in place of ``NONE``."""
    if not listed.ids.size or listed.ids[0] != NONE:
        return listed
    count = int(np.count_nonzero(listed.ids == NONE))
    return GroupBlocks(count * block_size, listed.ids[count:])


def checked_share(share: float) -> float:
    """A share.

    Raises:
        TypeError: It is no number.
        ValueError: It is not between 0 and 1.
    """
    if isinstance(share, bool) or not isinstance(share, int | float):
        raise TypeError(f"checksums is a share from 0 to 1, not {share!r}")
    if not 0 <= share <= 1:
        raise ValueError(f"checksums is a share from 0 to 1, not {share!r}")
    return float(share)
