"""What of a prompt the host tier keeps as one: the tokens that blocks of all KV cache groups have in common.

A block of the tier is one stretch: the blocks of each group that hold its tokens. vLLM names what it hashes
by the end of the tokens hashed, so the last hash within a stretch names all of it, and what comes before.

A group with a sliding window keeps no blocks that are before it. vLLM gives them to others as soon as they
are, without a word, and lists none in their place where a request comes with tokens that are computed
already. So such a block is read only while the window reaches it for certain, and written only where vLLM
lists it. As all of a stretch is there when the last of it is filled, whole stretches are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

from aiokv.integrations.vllm.orders import NULL, Blocks, listed

__all__ = ["Stretches"]

Lists = Sequence[Sequence[int]]


class Stretches:
    """How the tokens of any request are cut. Immutable.

    Args:
        block_sizes: Tokens per block, of each group.
        windows: Tokens of the sliding window of each group, 0 where it has none; None: none has.
        hash_size: Tokens per hash; by default as many as of a stretch.

    Attributes:
        tokens: Of a stretch.
        windows: As given.

    Raises:
        ValueError: Stretches are so long that a window never reaches all of one.
    """

    def __init__(
        self, block_sizes: Sequence[int], windows: Sequence[int] | None = None, hash_size: int | None = None
    ) -> None:
        self.tokens = lcm(*block_sizes)
        self.windows = tuple(windows or [0] * len(block_sizes))
        self._sizes = tuple(block_sizes)
        #: Hashes of each.
        self._every = self.tokens // (hash_size or self.tokens)
        for index, (size, window) in enumerate(zip(self._sizes, self.windows, strict=True)):
            if window and self.tokens - size >= window - 1:
                raise ValueError(
                    f"host_tier: blocks of all KV cache groups end together after each {self.tokens} tokens "
                    f"only, and group {index} keeps the last {window}: choose --block-size so that they end "
                    "together more often"
                )

    def hashes(self, hashes: Sequence[bytes]) -> Sequence[bytes]:
        """Names of stretches, by vLLM's hashes of a request."""
        return hashes if self._every == 1 else hashes[self._every - 1 :: self._every]

    def filled(self, lists: Lists, tokens: int) -> int:
        """How many stretches of a request are full of its first tokens, and have blocks in all groups."""
        room = min(len(ids) * size for ids, size in zip(lists, self._sizes, strict=True))
        return min(tokens, room) // self.tokens

    def written(self, lists: Lists, first: int) -> list[int]:
        """Blocks of all groups that may be written from token ``first`` on."""
        return [block for ids, size in zip(lists, self._sizes, strict=True) for block in ids[first // size :]]

    def reached(self, lists: Lists, at: int, computed: int) -> bool:
        """Whether all blocks of a stretch are a request's for certain.

        Args:
            lists: Blocks of the request, in each group, from its first token on.
            at: Index of the stretch.
            computed: Tokens that the request had computed when it was last given blocks, or more.
        """
        for ids, size, window in zip(lists, self._sizes, self.windows, strict=True):
            first = at * self.tokens // size
            # vLLM gives up what ends before the window of the token to be computed next.
            if window and (ids[first] == NULL or (first + 1) * size <= computed - window + 1):
                return False
        return True

    def blocks(self, lists: Lists, first: int, last: int) -> tuple[tuple[int, ...], ...]:
        """Blocks of the stretches from ``first`` up to ``last``, in each group."""
        return tuple(
            tuple(ids[first * self.tokens // size : last * self.tokens // size])
            for ids, size in zip(lists, self._sizes, strict=True)
        )

    def listed(self, lists: Lists, first: int, last: int) -> tuple[Blocks, ...]:
        """The same, without those that vLLM lists as none."""
        return tuple(
            listed(ids, size, first * self.tokens, last * self.tokens)
            for ids, size in zip(lists, self._sizes, strict=True)
        )
