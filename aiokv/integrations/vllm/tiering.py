"""The worker's side of the host tier: carries out what the scheduler's side decided, and says what changed.

All of it runs on the worker's loop; ``changes`` alone is read by vLLM's thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Collection, Iterable
from itertools import chain
from types import TracebackType
from typing import Self

from aiokv.device.cache import KVCache
from aiokv.engine.arguments import Window
from aiokv.engine.engine import TransferEngine
from aiokv.errors import AiokvError, ClosedError
from aiokv.integrations.vllm.news import Change, Emptied, Gone, Kept, Missed
from aiokv.integrations.vllm.orders import Blocks, Keep, Recall
from aiokv.integrations.vllm.settings import ConnectorSettings
from aiokv.offload.events import BlocksLost, BlocksRemoved, TierEvent
from aiokv.offload.settings import TierSettings
from aiokv.offload.tier import HostTier

__all__ = ["Tiering", "tier_of"]

_log = logging.getLogger("aiokv")

#: Seconds that a step waits for a copy to the tier that reads its blocks; then the copy is given up.
_PATIENCE = 0.25


def tier_of(
    cache: KVCache, settings: ConnectorSettings, *, ranks: int, weights: bytes, engine: TransferEngine
) -> HostTier:
    """The host tier of one rank, with memory of its own or in a pool.

    Args:
        cache: What vLLM registered.
        settings: Which it is to be.
        ranks: How many share the memory.
        weights: Tells apart whose blocks can't be used here.
        engine: The transfer engine of the same cache, entered.

    Raises:
        CapacityError: The capacity has no room for a block.
    """
    # Evictions that wait to be read: the scheduler's list is worth nothing if some are lost.
    bounds = TierSettings(events=1 << 20)
    if settings.host_tier is None:
        return HostTier(cache, pool=settings.host_pool, salt=weights, engine=engine, settings=bounds)
    return HostTier(
        cache, settings.host_tier // ranks, settings.host_tier_policy, engine=engine, settings=bounds
    )


class Tiering:
    """One rank's host tier, and what is told of it. An async context manager.

    Args:
        tier: The tier, not entered.
        timeout: Seconds that a copy may take.

    Attributes:
        tier: As given.
        changes: What changed since it was last emptied; a deque's ends need no lock.
    """

    def __init__(self, tier: HostTier, *, timeout: float) -> None:
        self.tier = tier
        self.changes: deque[Change] = deque()
        self._timeout = timeout
        self._keeps: dict[int, asyncio.Task[None]] = {}
        #: Which of them reads a block of the cache.
        self._reading: dict[int, int] = {}
        #: Passes evictions on; None until entered.
        self._watching: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Take the first of the memory; the errors are those of ``HostTier``."""
        await self.tier.__aenter__()
        self._watching = asyncio.ensure_future(self._watch(self.tier.events()))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.tier.aclose()
        if self._watching is not None:
            keeps = list(self._keeps.values())
            for keep in keeps:
                keep.cancel()
            await asyncio.gather(self._watching, *keeps, return_exceptions=True)

    async def _watch(self, events: AsyncIterator[TierEvent]) -> None:
        async for event in events:
            # A pool that was lost, or that another instance has emptied, names no blocks.
            if isinstance(event, BlocksLost) or (isinstance(event, BlocksRemoved) and not event.hashes):
                self.changes.append(Gone(None))
            elif isinstance(event, BlocksRemoved) and event.why != "reset":
                self.changes.append(Gone(event.hashes))  # type: ignore[arg-type]

    async def reset(self, number: int) -> None:
        """Empty the tier. What is there before its first step is not found any more after it."""
        self.changes.append(Emptied(number))
        try:
            dropped = await self.tier.reset()
        except AiokvError as error:
            _log.warning("the host tier was not emptied: %s", error)
        else:
            _log.info("the host tier was emptied: %s", dropped)

    # -- to the tier

    def keep(self, keep: Keep, stream: object | None) -> None:
        """Begin to copy blocks; what is enqueued on the stream now comes before."""
        self._keeps[keep.number] = asyncio.ensure_future(self._keep(keep, stream))
        self._reading.update(dict.fromkeys(chain(*keep.blocks), keep.number))

    async def _keep(self, keep: Keep, stream: object | None) -> None:
        try:
            await self.tier.store(
                keep.hashes, keep.blocks, stream=stream, parent=keep.parent, deadline=self._timeout
            )
        except AiokvError as error:
            _log.info("blocks are not in the host tier: %s", error)
        finally:  # whatever happens: the scheduler's side waits for it
            del self._keeps[keep.number]
            for block in chain(*keep.blocks):
                if self._reading.get(block) == keep.number:
                    del self._reading[block]
            self.changes.append(Kept(keep.number, await self._there(keep.hashes)))

    async def over(self, numbers: Collection[int]) -> None:
        """Wait until these copies read nothing any more; for long, and they are given up.

        What one that was given up has read is in no block of the tier, so that it may as well read on.
        """
        tasks = [task for number in numbers if (task := self._keeps.get(number)) is not None]
        if not tasks:
            return
        _, late = await asyncio.wait(tasks, timeout=_PATIENCE)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late)

    async def unread(self, blocks: Iterable[Blocks]) -> None:
        """The same for whatever reads these blocks, of any group."""
        if self._reading:
            ids = chain(*(group.ids for group in blocks))
            await self.over({self._reading[block] for block in ids if block in self._reading})

    # -- from the tier

    async def recall(self, recall: Recall, stream: object | None) -> tuple[int, tuple[Blocks, ...]]:
        """Bring blocks back, from the first on; gives the bytes that were moved, and what holds nothing.

        Where there are windows it is all of them or none, as these reach back from the last.

        Raises:
            AiokvError: None of them can be had.
        """
        count = 0
        groups = self.tier.cache.layout.groups
        try:
            await self.unread(recall.blocks)
            async with self.tier.lookup(recall.hashes) as hit:
                found, whole = len(hit), any(group.window for group in groups)
                if found and (found == len(recall.hashes) or not whole):
                    blocks = [
                        Window(listed.start - recall.first, listed.ids)
                        if group.window
                        else listed.ids[: found * self.tier.block_size // group.block_size]
                        for listed, group in zip(recall.blocks, groups, strict=True)
                    ]
                    count = await self.tier.load(hit, blocks, stream=stream, deadline=self._timeout)
                    count = 0 if whole and count < found else count
        finally:
            if count < len(recall.hashes):
                self.changes.append(Missed(recall.request))
                missing = recall.hashes[await self._there(recall.hashes) :]
                if missing:
                    self.changes.append(Gone(missing))
        size, empty, end = 0, [], recall.first + count * self.tier.block_size
        for listed, group in zip(recall.blocks, groups, strict=True):
            there = min(len(listed.ids), max(0, end - listed.start) // group.block_size)
            size += there * group.block_bytes * len(group.layers)
            empty.append(Blocks(listed.start + there * group.block_size, listed.ids[there:]))
        return size, tuple(empty) if count < len(recall.hashes) else ()

    async def _there(self, hashes: tuple[bytes, ...]) -> int:
        """How many of a prefix the tier has."""
        try:
            return await self.tier.exists(hashes)
        except ClosedError:
            return 0
