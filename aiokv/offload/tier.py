"""``HostTier``: blocks of a KV cache kept in host memory, as their user sees it."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from dataclasses import replace
from typing import Any, SupportsIndex

from aiokv.engine.arguments import BlockIds, checked_priority, checked_stream, seconds
from aiokv.errors import ClosedError, LocalProtocolError
from aiokv.offload.agreement import at_once
from aiokv.offload.begun import Begun
from aiokv.offload.calls import Stored, Wanted, checked_blocks, checked_hashes
from aiokv.offload.events import TierEvent
from aiokv.offload.life import Life
from aiokv.offload.lookup import Lookup
from aiokv.offload.policies import Key
from aiokv.offload.progress import Progress
from aiokv.offload.statistics import Dropped, TierStatistics
from aiokv.offload.traffic import Traffic
from aiokv.ranks import Turn

__all__ = ["HostTier"]

_log = logging.getLogger("aiokv")


class HostTier(Life):
    """Keeps KV blocks in host memory and brings them back, without stopping the model.

    An async context manager. Its methods belong to the thread of the loop that it was entered on. ::

        async with aiokv.HostTier(cache, capacity="64GiB") as tier:
            async with tier.lookup(hashes) as hit:
                n = await tier.load(hit, blocks[: len(hit)], stream=s)
            ...
            await tier.store(hashes, blocks, stream=s)

    A block of the tier is one block of each KV cache group; where their block sizes differ, as many of each
    as have the same tokens (``block_size``). ``stream`` is the stream of the caller's that comes before: a
    store reads what is written there up to the call, a load writes after what may still read there.

    Args:
        cache: The registered memory; it can't be closed while the tier is entered.
        capacity: Host memory for blocks: bytes, or text such as ``"64GiB"``; or None, with ``pool``.
        policy: ``"lru"``, which is the default, ``"arc"``, or one of your own
            (``aiokv.offload.policies.Policy``).
        pool: Where a ``HostPool`` of this host is, whose memory and blocks are shared with others of the same
            user; its capacity and policy are the pool's. Hashes are then bytes, str, int, or tuples of these.
            Where the pool is lost nothing is found, or kept, until there is one again.
        salt: With ``pool``: blocks that were stored with another salt are not found. For what the hashes and
            the layout's ``model`` don't tell apart.
        admission: Which new blocks are worth a place, such as ``SecondSight``; by default all.
        engine: An entered engine of the same cache: blocks that its transfers hold are then refused here, and
            blocks that are on their way here there.
        ranks: The ranks that each keep their share of the same blocks. What is looked up, loaded, stored,
            deleted or reset then gives the same on all of them: the least, or an error where one failed. Each
            call takes one reduction; as with any, all ranks make the same calls in the same order, and one is
            agreed on once those before it are.
        checksums: Share of the stored blocks that get a checksum, which is looked at when they are loaded.
        settings: Sizes and bounds.
        clock: Nanoseconds of a clock that never goes back.

    Attributes:
        cache: As given.
        block_size: Tokens of one block of the tier.

    Raises:
        TypeError: An argument of the wrong kind.
        ValueError: One that can't be meant.
        CapacityError: The capacity has no room for a single block.
        InvalidBlocks: The groups' block sizes have no common multiple that makes sense.
    """

    # -- looking up

    def lookup(self, hashes: Sequence[Key]) -> Lookup:
        """The longest prefix of blocks that the tier has: ``async with tier.lookup(hashes) as hit``.

        Args:
            hashes: What each block holds, in the order of the tokens: ``aiokv.block_hashes``, or anything
                that is hashable and means the same content whenever it is equal.
        """
        return Lookup(self, checked_hashes(hashes))

    async def hold(self, hit: Lookup) -> None:
        """Find and hold what a lookup asks for; called by it."""
        if self._jointly is None:
            await self._find(hit)
            return
        turn = self._jointly.turn("lookup", hit.hashes)
        try:
            places = await self._find(hit)
        except BaseException as error:
            turn.fail(error)
            raise
        try:
            agreed = await self._jointly.least(turn, len(places))
            table = self._opened().table
        except BaseException:
            self.let_go(hit)
            raise
        rest = places[agreed:]
        del places[agreed:]
        table.release(rest)

    async def _find(self, hit: Lookup) -> list[int]:
        traffic = self._opened()
        hit.generation = self._generation
        places = await traffic.lookup(hit.hashes)
        if self._state != "open":  # closed while somebody else was asked
            traffic.table.release(places)
        self._opened()
        hit.places = places
        return places

    def let_go(self, hit: Lookup) -> None:
        """A lookup is left; called by it."""
        places, hit.places = hit.places, None
        if places and self._traffic is not None:
            self._traffic.table.release(places)

    # -- loading

    def load(
        self,
        hit: Lookup,
        blocks: BlockIds,
        *,
        stream: object | None = None,
        priority: SupportsIndex = 0,
        deadline: float | None = None,
    ) -> Coroutine[Any, Any, int]:
        """Bring a prefix into blocks of the cache; it begins with the call, and is awaited.

        The blocks are held, and nobody else's, until the copies' own events. Where the same block of the tier
        is on its way to the same block of the cache already, that copy is waited for, and no other made. Left
        by an exception or cancelled, it ends once nothing more can touch the blocks.

        Args:
            hit: From an entered ``lookup``.
            blocks: As many as are to be loaded, from the first of the prefix on: a list of block ids, or one
                for each group. For a group with a sliding window a ``Window`` leaves out what comes before.
            stream: What may still read or write the blocks; see ``TransferEngine.fetch``.
            priority: Of loads that wait the higher goes first.
            deadline: Seconds that it is worth waiting for; what isn't there then doesn't count.

        Returns:
            Blocks of the prefix that are in place. The others are as good as not found: recompute them.

        Raises:
            ClosedError: The tier isn't open.
            LocalProtocolError: The hit isn't entered, or of another tier.
            InvalidBlocks: Blocks out of range, twice, or more than were found.
            BusyError: A block is leased to a transfer, or to another load or store.
        """

        def begin() -> Coroutine[Any, Any, int]:
            traffic, progress, until = self._begin_load(hit, blocks, stream, priority, deadline)
            return Begun(traffic.followers.over(progress, until))

        return begin() if self._jointly is None else self._jointly.counted("load", hit.hashes, begin)

    def loading(
        self,
        hit: Lookup,
        blocks: BlockIds,
        *,
        stream: object | None = None,
        priority: SupportsIndex = 0,
        deadline: float | None = None,
    ) -> AsyncGenerator[int, None]:
        """The same, prefix first: gives how many blocks of the prefix are in place, each time there are more.

        The arguments and errors are those of ``load``; it begins with the call, too, and is left once nothing
        more can touch the blocks: by ``async with contextlib.aclosing(...)`` where it isn't read to its end.
        """
        if self._jointly is not None:  # each rank has steps of its own; all come to the last
            return at_once(self.load(hit, blocks, stream=stream, priority=priority, deadline=deadline))
        traffic, progress, until = self._begin_load(hit, blocks, stream, priority, deadline)
        return traffic.followers.steps(progress, until)

    def _begin_load(
        self,
        hit: Lookup,
        blocks: BlockIds,
        stream: object | None,
        priority: SupportsIndex,
        deadline: float | None,
    ) -> tuple[Traffic, Progress, int | None]:
        traffic = self._opened()
        if hit.places is None or hit not in self:
            raise LocalProtocolError(f"{hit!r} is not entered, or not of this tier")
        listed = checked_blocks(blocks, self.cache.layout, self._pool.ratios, windows=True)
        count = listed[0].ids.size // self._pool.ratios[0]
        wanted = Wanted(
            listed,
            self.cache.device.adopt(checked_stream(stream)).record(),
            checked_priority(priority),
            count=count,
            most=len(hit),
        )
        until = None if deadline is None else self._clock() + seconds(deadline)
        if hit.generation != self._generation:
            return traffic, Progress(0, stale=True), until
        return traffic, traffic.load(hit.places[:count], wanted), until

    def __contains__(self, hit: Lookup) -> bool:
        """Whether a lookup is this tier's."""
        return hit.tier is self

    # -- storing

    def store(
        self,
        hashes: Sequence[Key],
        blocks: BlockIds,
        *,
        stream: object | None = None,
        priority: SupportsIndex = 0,
        deadline: float | None = None,
        parent: Key | None = None,
        tokens: Sequence[int] | None = None,
    ) -> Coroutine[Any, Any, int]:
        """Keep blocks; it begins with the call, and is awaited.

        What is there, or being stored, is not copied again. Each part can be found as soon as it is across.
        The blocks are held, to be read only, until the copies' own events. Cancelled, it ends once nothing
        more reads them, and what was not across is not kept.

        Args:
            hashes: As for ``lookup``.
            blocks: The blocks that hold them: a list of block ids, or one for each group.
            stream: What writes them.
            priority: Of stores that wait the higher goes first; all loads go before.
            deadline: Seconds that it may take; what isn't across then is not kept.
            parent: Hash of the block before the first, so that this is not kept for longer than that.
            tokens: Their token ids, for those who read ``events``.

        Returns:
            Blocks of the prefix that are kept, as far as there was room.

        Raises:
            ClosedError: The tier isn't open.
            ValueError: A hash stands twice, or there are not as many blocks or tokens as hashes.
            InvalidBlocks: Blocks out of range, or twice.
            BusyError: A block is being written by a transfer, or by a load.
        """
        kept = checked_hashes(hashes)

        def begin() -> Coroutine[Any, Any, int]:
            traffic = self._opened()
            call = Stored(kept, parent, tokens, self.block_size)
            listed = checked_blocks(blocks, self.cache.layout, self._pool.ratios)
            count = len(call.hashes)
            after = self.cache.device.adopt(checked_stream(stream)).record()
            wanted = Wanted(
                listed, after, checked_priority(priority),
                count=listed[0].ids.size // self._pool.ratios[0], least=count, most=count,
            )  # fmt: skip
            until = None if deadline is None else self._clock() + seconds(deadline)
            return Begun(traffic.followers.kept(traffic.store(call, wanted), call, wanted, until))

        return begin() if self._jointly is None else self._jointly.counted("store", kept, begin)

    # -- what is there

    def exists(self, hashes: Sequence[Key]) -> Coroutine[Any, Any, int]:
        """How many blocks of a prefix there are, without holding them: they may go at any time.

        Raises:
            ClosedError: The tier isn't open.
        """
        wanted = checked_hashes(hashes)

        async def look() -> int:
            return await self._opened().table.count(wanted)

        return look() if self._jointly is None else self._jointly.counted("exists", wanted, look)

    def delete(self, hashes: Sequence[Key]) -> Coroutine[Any, Any, int]:
        """Drop blocks, whether or not they are a prefix; those in use go once they aren't.

        Returns:
            How many were there.

        Raises:
            ClosedError: The tier isn't open.
            ValueError: A hash stands twice.
        """
        wanted = checked_hashes(hashes)

        async def drop() -> int:
            return await self._opened().table.delete(wanted)

        return drop() if self._jointly is None else self._jointly.counted("delete", wanted, drop)

    # -- all of it

    def reset(self) -> Coroutine[Any, Any, Dropped]:
        """Drop all blocks, and wait until no copy is going on: the weights changed, say.

        Nothing that was stored before is found, or loaded, afterwards: loads that are going on end as misses,
        and lookups that are entered are worth nothing any more.

        Returns:
            What was dropped. When it returns, no copy of before touches the cache, unless it says so.

        Raises:
            ClosedError: The tier isn't open.
        """
        turn = None if self._jointly is None else self._jointly.turn("reset")
        return Begun(self._dropped(turn))

    async def _dropped(self, turn: Turn | None) -> Dropped:
        try:
            dropped = await self._reset()
        except BaseException as error:
            if turn is not None:
                turn.fail(error)
            raise
        if turn is None or self._jointly is None:
            return dropped
        return replace(dropped, drained=bool(await self._jointly.least(turn, int(dropped.drained))))

    async def _reset(self) -> Dropped:
        traffic = self._opened()
        self._generation += 1
        batches = list(traffic.copies.batches)
        traffic.outdate()
        try:
            blocks = await traffic.table.clear()
        finally:
            for batch in batches:
                traffic.copies.stop(batch)
        cancelled = await traffic.followers.drained(batches)
        if cancelled is not None:
            raise cancelled
        stores = sum(batch.store for batch in batches)
        drained = all(batch.ended for batch in batches)
        return Dropped(
            blocks=blocks,
            stores=stores,
            loads=len(batches) - stores,
            pinned=traffic.table.in_use,
            drained=drained,
        )

    def worth_loading(self, n_tokens: SupportsIndex, prefill_rate: float) -> bool:
        """Whether so many tokens are there sooner when loaded than when computed, as measured so far.

        Args:
            n_tokens: Tokens that could be loaded.
            prefill_rate: Tokens a second that the model computes.

        Raises:
            ClosedError: The tier isn't open.
            ValueError: One is not positive.
        """
        traffic = self._opened()
        tokens = n_tokens.__index__()
        if tokens <= 0 or not prefill_rate > 0:
            raise ValueError(f"n_tokens and prefill_rate are positive, not {n_tokens!r} and {prefill_rate!r}")
        return bool(traffic.copies.expected_s(-(-tokens // self.block_size)) < tokens / prefill_rate)

    def events(self) -> AsyncIterator[TierEvent]:
        """What is stored and removed from now on; ends when the tier is closed.

        Raises:
            ClosedError: The tier isn't open.
        """
        return self._opened().events.read()

    def statistics(self) -> TierStatistics:
        """Counts so far, and what is going on. From any thread.

        Raises:
            ClosedError: The tier was not entered.
        """
        if self._traffic is None:
            raise ClosedError(f"the host tier is {self._state}")
        return self._traffic.statistics()
