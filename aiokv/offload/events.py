"""What was stored and removed, told to whoever wants to know, such as a router that goes by it."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from aiokv.engine.bell import Bell
from aiokv.offload.policies import Key

__all__ = ["BlocksLost", "BlocksRemoved", "BlocksStored", "Events", "TierEvent"]


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Blocks can be found from now on.

    Attributes:
        hashes: Of blocks that continue each other.
        parent: The hash of the block before the first; None if there is none, or nobody said.
        block_size: Tokens of a block.
        tokens: Their tokens, where the caller gave them.
    """

    hashes: tuple[Key, ...]
    parent: Key | None
    block_size: int
    tokens: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks can't be found any more.

    Attributes:
        hashes: Which. Of a pool that is shared, where all are gone (``"reset"``, ``"lost"``), none is listed.
        why: ``"evicted"`` for others, ``"deleted"``, ``"reset"``, ``"dropped"`` (a copy failed, or the
            content was corrupted), or ``"lost"`` (the owner of a pool that is shared).
    """

    hashes: tuple[Key, ...]
    why: str


@dataclass(frozen=True, slots=True)
class BlocksLost:
    """Events before the next were lost, as they were not read in time; what is known of the tier is wrong.

    Attributes:
        events: How many.
    """

    events: int


TierEvent = BlocksStored | BlocksRemoved | BlocksLost


class _Reader:
    """What one reader has not read yet."""

    def __init__(self, most: int) -> None:
        self.queue: deque[TierEvent] = deque(maxlen=most)
        self.lost = 0


class Events:
    """Hands events to readers. Costs nothing where there is none.

    Args:
        most: Events that wait for each reader.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._readers: dict[_Reader, None] = {}
        self._bell = Bell()
        self._closed = False

    def __bool__(self) -> bool:
        """Whether anybody reads."""
        return bool(self._readers)

    def tell(self, event: TierEvent) -> None:
        """Something happened."""
        for reader in self._readers:
            if len(reader.queue) == self._most:
                reader.lost += 1
            reader.queue.append(event)
        self._bell.ring()

    def close(self) -> None:
        """Nothing more will happen: readers end when they have read all."""
        self._closed = True
        self._bell.ring()

    def read(self) -> AsyncIterator[TierEvent]:
        """All events from now on, not from the first step of the iteration on."""
        reader = _Reader(self._most)
        self._readers[reader] = None
        return self._read(reader)

    async def _read(self, reader: _Reader) -> AsyncIterator[TierEvent]:
        try:
            while True:
                if reader.lost:
                    lost, reader.lost = reader.lost, 0
                    yield BlocksLost(lost)
                elif reader.queue:
                    yield reader.queue.popleft()
                elif self._closed:
                    return
                else:
                    await self._bell.wait()
        finally:
            self._readers.pop(reader, None)


def stored(
    hashes: Sequence[Key],
    parent: Key | None,
    block_size: int,
    tokens: Sequence[int] | None,
    indices: Sequence[int],
) -> list[BlocksStored]:
    """Events of those blocks of a call that were stored, one for each run of neighbours.

    Args:
        hashes: All of the call.
        parent: Of the first of them.
        block_size: Tokens of a block.
        tokens: All of the call; None if it gave none.
        indices: Which were stored, ascending.
    """
    found = []
    start = 0
    for at in range(1, len(indices) + 1):
        if at < len(indices) and indices[at] == indices[at - 1] + 1:
            continue
        first, last = indices[start], indices[at - 1] + 1
        own = None if tokens is None else tuple(tokens[first * block_size : last * block_size])
        before = hashes[first - 1] if first else parent
        found.append(BlocksStored(tuple(hashes[first:last]), before, block_size, own))
        start = at
    return found
