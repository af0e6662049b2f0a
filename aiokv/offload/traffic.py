"""What an open tier does: its index, its copies and its memory, put together.

Everything that happens comes through here: a call of the user, or a part of a copy that is over. Neither
waits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat
from weakref import WeakSet

from aiokv.device.cache import KVCache
from aiokv.device.poller import CompletionPoller
from aiokv.device.submission import Submissions
from aiokv.engine.leases import BlockLeases
from aiokv.errors import AiokvError, DeviceError
from aiokv.offload.batch import Batch, Part
from aiokv.offload.calls import Stored, Wanted
from aiokv.offload.checksums import Checksums
from aiokv.offload.copies import RATE, Copies
from aiokv.offload.events import BlocksRemoved, Events, stored
from aiokv.offload.following import Followers
from aiokv.offload.index import Index
from aiokv.offload.integrity import Integrity
from aiokv.offload.loading import Loading
from aiokv.offload.offered import Offered
from aiokv.offload.policies import Key
from aiokv.offload.progress import Progress, Run, runs_of
from aiokv.offload.segments import Segments
from aiokv.offload.settings import TierSettings
from aiokv.offload.snapshot import snapshot
from aiokv.offload.statistics import TierCounts, TierStatistics
from aiokv.proto.plan import GroupBlocks

__all__ = ["Traffic"]

_log = logging.getLogger("aiokv")


class Traffic:
    """The working parts of one open tier. Belongs to its loop's thread.

    Args:
        cache: The cache.
        pool: The tier's memory.
        leases: Of the cache's blocks.
        index: Makes the index, which tells of keys that went, and why, and of policies that failed.
        share: Of the blocks that get a checksum.
        settings: Bounds.
        clock: The time (ns).
    """

    def __init__(
        self,
        cache: KVCache,
        pool: Segments,
        leases: BlockLeases,
        index: Callable[[Callable[[Sequence[Key], str], None], Callable[[Exception], None]], Index],
        share: float,
        settings: TierSettings,
        clock: Callable[[], int],
    ) -> None:
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._pool = pool
        self._leases = leases
        self._settings = settings
        self._ratios = pool.ratios
        self.counts = TierCounts()
        self.events = Events(settings.events)
        self.table = index(self._on_removed, self._on_distrusted)
        guard = getattr(cache.device, "quiet", None)
        self._poller = CompletionPoller(loop, clock=clock, guard=guard)
        self._submissions = Submissions(
            cache.device,
            loop,
            poller=self._poller,
            window_bytes=settings.window_bytes,
            rate=RATE,
            clock=clock,
        )
        self.checksums = Checksums(loop, share, pool.views)
        self.copies = Copies(
            cache,
            pool,
            leases,
            self._poller,
            self._submissions,
            part_bytes=settings.part_bytes,
            chunk_bytes=settings.chunk_bytes,
            clock=clock,
            over=self._on_over,
        )
        self._integrity = Integrity(self.table, self.checksums, self._on_changed)
        #: Which store writes each pending place, and which of its blocks that is.
        self._storing: dict[int, tuple[Batch, int]] = {}
        self._loading = Loading(pool.ratios, [group.blocks for group in cache.layout.groups])
        #: Parts of loads that wait for a store.
        self._blocked: dict[Part, Batch] = {}
        #: What callers wait for, as long as they do.
        self._progress: WeakSet[Progress] = WeakSet()
        self.followers = Followers(
            clock=clock,
            drain_s=settings.drain_s,
            retries=settings.retries,
            ratios=pool.ratios,
            stop=self.copies.stop,
            store=self.store,
        )

    def close(self) -> None:
        """Stop for good; nothing is in flight."""
        self.stop()
        self._poller.close()

    def stop(self) -> None:
        """Submit and look at nothing more."""
        self._submissions.close()
        self.checksums.close()

    # -- calls of the user

    async def lookup(self, keys: Sequence[Key]) -> list[int]:
        """Find and hold."""
        found = await self.table.find(keys)
        self.counts.lookups += 1
        self.counts.hit_blocks += len(found)
        self.counts.miss_blocks += len(keys) - len(found)
        return found

    def load(self, places: Sequence[int], wanted: Wanted) -> Progress:
        """Begin to bring places into blocks, but for those that are on their way there already."""
        # What turned out to be bad since it was found is a miss.
        if self.table.detached and None in (keys := self.table.keys_at(places)):
            places = places[: keys.index(None)]
        runs, fresh = self._loading.join(places, wanted)
        own: list[Batch] = []
        if fresh:
            batch = self._begin_load(places, wanted, fresh)
            own.append(batch)
            if runs:
                runs = [(batch, lo, hi) if other is None else (other, lo, hi) for other, lo, hi in runs]
            else:
                runs.append((batch, 0, len(fresh)))
        self.counts.joined_blocks += len(places) - len(fresh)
        if not fresh:
            # When many come at once, the copies that they wait for would have to wait for all of them.
            self._submissions.go_on()
        return self._followed(Progress.of(runs, own))

    def _begin_load(self, places: Sequence[int], wanted: Wanted, fresh: Sequence[int]) -> Batch:
        places = [places[index] for index in fresh]
        writers: list[tuple[Batch, int] | None] = []
        cuts: set[int] = set()
        if not self._storing.keys().isdisjoint(places):
            writers = [self._storing.get(place) for place in places]
            # A part waits for one part of a store at most.
            parts = [_part_of(writer) for writer in writers]
            cuts = {index for index in range(1, len(parts)) if parts[index] is not parts[index - 1]}
        batch = self.copies.add(
            places,
            self._picked(wanted.blocks, fresh),
            store=False,
            after=wanted.after,
            priority=wanted.priority,
            cuts=cuts,
        )
        self.table.pin(places)
        self._loading.add(batch)
        batch.keys = self.table.keys_at(places)
        for part in batch.parts:
            writer = writers[part.lo] if writers else None
            if writer is None:
                self.copies.begin(batch, part)
            else:
                self._blocked[part] = batch
                self.counts.joined_blocks += part.hi - part.lo
                self.copies.promote(writer[0])
        return batch

    def store(self, call: Stored, wanted: Wanted) -> Progress:
        """Begin to keep blocks, but for those that are kept, or on their way, already."""
        # Another process may have to be asked. Until it is known which blocks are read none is written.
        lease = self.copies.held(wanted.blocks)
        progress = Progress.asking(lease.give_back)
        try:
            self.table.keep(call.hashes, call.parent, partial(self._begin_store, progress, call, wanted))
        except BaseException:
            lease.give_back()
            raise
        return self._followed(progress)

    def _begin_store(self, progress: Progress, call: Stored, wanted: Wanted, offered: Offered) -> None:
        """It is known which blocks lack, and where they are to be written."""
        places = [place for _, place in offered.new]
        if progress.left or progress.stale:
            self.table.finish(places, ok=False)
            progress.known((), ())
            return
        self.counts.refused_blocks += offered.refused
        self.counts.joined_blocks += len(offered.pending)
        own: list[Batch] = []
        if offered.new:
            indices = [index for index, _ in offered.new]
            try:
                batch = self.copies.add(
                    places,
                    self._picked(wanted.blocks, indices),
                    store=True,
                    after=wanted.after,
                    priority=wanted.priority,
                )
            except BaseException:
                self.table.finish(places, ok=False)
                progress.known((), ())
                raise
            batch.call, batch.indices = call, indices
            own.append(batch)
            self._storing.update(zip(places, zip(repeat(batch), range(len(places))), strict=False))
        runs = self._brought(offered)
        for batch in own:
            for part in batch.parts:
                self.copies.begin(batch, part)
        progress.known(runs, own)

    def _brought(self, offered: Offered) -> list[Run]:
        """What brings the blocks of a store that are kept."""
        count = offered.kept
        if len(offered.new) == count > 0:
            return [(self._storing[offered.new[0][1]][0], 0, count)]
        sources: list[tuple[Batch | None, int]] = [(None, index) for index in range(count)]
        for index, place in (*offered.pending, *offered.new):
            sources[index] = self._storing[place]
        return runs_of(sources)

    def _picked(self, blocks: Sequence[GroupBlocks], indices: Sequence[int]) -> tuple[GroupBlocks, ...]:
        if len(indices) * self._ratios[0] == blocks[0].ids.size:
            return tuple(blocks)
        return tuple(
            GroupBlocks(0, listed.ids.reshape(-1, ratio)[indices].ravel())
            for listed, ratio in zip(blocks, self._ratios, strict=True)
        )

    def outdate(self) -> None:
        """What callers wait for is worth nothing any more."""
        for progress in list(self._progress):
            progress.outdate()

    def give_up(self) -> None:
        """End what goes on: none of it is worth anything any more."""
        self.outdate()
        for batch in list(self.copies.batches):
            self.copies.stop(batch)

    def _followed(self, progress: Progress) -> Progress:
        self._progress.add(progress)
        return progress

    # -- what is over

    def _on_over(self, batch: Batch, part: Part, across: bool, failure: AiokvError | None) -> None:
        if isinstance(failure, DeviceError):
            self.counts.failed_copies += 1
            _log.debug("a part of a %s failed: %s", "store" if batch.store else "load", failure)
        places = batch.places[part.lo : part.hi]
        if batch.store:
            self._stored(batch, part, places, across=across)
            return
        self._loading.over(batch, part)
        self._blocked.pop(part, None)
        if not across:
            self.table.release(places)
        else:
            self._integrity.look(batch, part, partial(self._loaded, batch, part, places))

    def _stored(self, batch: Batch, part: Part, places: Sequence[int], *, across: bool) -> None:
        for place in places:
            del self._storing[place]
        across = across and not self.table.orphaned(places)
        if across:
            self.table.pin(places)  # somebody else's index knows only what is in use
        self.table.finish(places, ok=across)
        if across:
            self.counts.stored_blocks += len(places)
            batch.arrived(part)
            there = [place for place in places if self.table.ready(place)]
            if self.events and len(there) == len(places) and batch.call is not None:
                call, indices = batch.call, batch.indices[part.lo : part.hi]
                for event in stored(call.hashes, call.parent, call.block_size, call.tokens, indices):
                    self.events.tell(event)
            self._integrity.stored(there)
            self.table.release(places)
        for waiting, load in list(self._blocked.items()):
            self._unblock(load, waiting)

    def _unblock(self, load: Batch, part: Part) -> None:
        places = load.places[part.lo : part.hi]
        if self._storing.keys().isdisjoint(places):
            self._blocked.pop(part, None)
            if all(self.table.ready(place) for place in places):
                self.copies.begin(load, part)
            else:
                self.copies.stop(load, DeviceError("the store that this load waited for did not succeed"))

    def _loaded(self, batch: Batch, part: Part, places: Sequence[int]) -> None:
        self.table.release(places)
        self.counts.loaded_blocks += len(places)
        self.counts.loaded_bytes += part.nbytes
        batch.arrived(part)

    def _on_changed(self, load: Batch) -> None:
        self.copies.stop(load, DeviceError("a block had changed since it was stored"))

    def _on_removed(self, keys: Sequence[Key], why: str) -> None:
        if why in (
            "lost",
            "reset",
        ):  # all of them; what is not in use here isn't listed by a pool that is shared
            self.checksums.forget_all()
        self.checksums.forget(keys)
        if why == "evicted":
            self.counts.evicted_blocks += len(keys)
        elif why == "dropped":
            self.counts.dropped_blocks += len(keys)
        if self.events:
            self.events.tell(BlocksRemoved(tuple(keys), why))

    def _on_distrusted(self, error: Exception) -> None:
        self.counts.policy_faults += 1
        _log.error("the host tier's policy failed and was replaced by LRU: %r", error)

    # -- what there is to tell

    def statistics(self) -> TierStatistics:
        """See ``HostTier.statistics``."""
        return snapshot(
            self.counts, self.table, self.copies, self.checksums, self._submissions, self._leases, self._pool
        )


def _part_of(writer: tuple[Batch, int] | None) -> Part | None:
    """The part of a store that brings a block."""
    if writer is None:
        return None
    batch, index = writer
    return next(part for part in batch.parts if index < part.hi)
