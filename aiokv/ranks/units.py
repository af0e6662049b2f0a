"""Blocks and tokens: two counts of one thing, which nobody shall take for each other."""

from __future__ import annotations

import msgspec

from aiokv.proto.fields import integer, settle

__all__ = ["MOST", "Blocks", "Tokens"]

#: Counts travel as int32, together with their negatives.
MOST = 2**31 - 1


def _checked(count: object, name: str) -> int:
    found = integer(count, name)
    if not 0 <= found <= MOST:
        raise ValueError(f"{name} is a count from 0 to {MOST}, not {found}")
    return found


def _block_size(block_size: int) -> int:
    found = integer(block_size, "block_size")
    if found <= 0:
        raise ValueError(f"block_size is at least 1, not {found}")
    return found


class _Count(msgspec.Struct, frozen=True, order=True, gc=False):
    """So many of something; counts of two kinds are neither equal nor in any order."""

    count: int

    def __post_init__(self) -> None:
        count = self.count
        if type(count) is not int or not 0 <= count <= MOST:
            settle(self, count=_checked(count, type(self).__name__))


class Blocks(_Count, frozen=True, order=True, gc=False):
    """So many blocks. Passes for an integer where blocks are listed: ``ids[:hit.held]``.

    Attributes:
        count: How many.

    Raises:
        TypeError: It is no integer.
        ValueError: It is negative, or more than an int32 holds.
    """

    def __index__(self) -> int:
        return self.count

    def tokens(self, block_size: int) -> Tokens:
        """The tokens that they have room for.

        Args:
            block_size: Tokens of one block.
        """
        return Tokens(self.count * _block_size(block_size))


class Tokens(_Count, frozen=True, order=True, gc=False):
    """So many tokens. Doesn't pass for an integer, so that no list of blocks is cut by it.

    Attributes:
        count: How many.

    Raises:
        TypeError: It is no integer.
        ValueError: It is negative, or more than an int32 holds.
    """

    def blocks(self, block_size: int) -> Blocks:
        """The whole blocks among them; what is left over is not counted.

        Args:
            block_size: Tokens of one block.
        """
        return Blocks(self.count // _block_size(block_size))
