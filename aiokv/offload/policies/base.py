"""What an eviction policy is asked and told."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Protocol, runtime_checkable

__all__ = ["Key", "Policy"]

#: What names the content of a block: ``aiokv.block_hashes``, or whatever an inference engine uses.
Key = Hashable


@runtime_checkable
class Policy(Protocol):
    """Puts the blocks that may go in an order. Knows nothing of memory, copies or time.

    A block is called by the number of its place, less than the tier's capacity in blocks; after ``removed``
    the number stands for nothing until it is ``stored`` again. That blocks which are in use, or which others
    continue, can't go is seen to elsewhere: a policy need not know. What it does wrong costs hits and
    nothing else; one that raises is replaced by ``Lru``.
    """

    def stored(self, blocks: Sequence[int], keys: Sequence[Key]) -> None:
        """New blocks, in the order of their tokens; not to go before they are ``idle``."""

    def used(self, blocks: Sequence[int], *, hit: bool) -> None:
        """Blocks were asked for.

        Args:
            blocks: In the order of their tokens.
            hit: They were looked up; else they were offered once more, as part of a longer prefix.
        """

    def idle(self, blocks: Sequence[int]) -> None:
        """These may go from now on: nothing uses them, and none continues them. May be told again."""

    def victims(self) -> Iterator[int]:
        """Blocks that may go, the best first; each at most once, until it is told to be idle again.

        Each is taken (``removed`` follows once all are known) or can't go at the moment (``idle`` follows
        when it can).
        """

    def freed(self, block: int) -> bool:
        """The last victim was taken, and nothing continues this block any more.

        Returns:
            Whether it is the next victim; else it is idle, as if ``idle`` had been called.
        """

    def removed(self, blocks: Sequence[int], keys: Sequence[Key], *, evicted: bool) -> None:
        """These blocks are gone: evicted for others, or dropped."""
