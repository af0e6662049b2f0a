"""Copies between the cache and the pool, part by part: what is in flight, for whom, and until when.

A part of a ``Batch`` is over when its event is done, whoever still waits for it: only then are its blocks and
places anybody else's. Nothing here waits; whoever does listens to the batch's bell.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress

import numpy as np

from aiokv.device.base import Event, Stream
from aiokv.device.cache import KVCache
from aiokv.device.poller import CompletionPoller
from aiokv.device.submission import Submission, Submissions
from aiokv.engine.leases import BlockLeases, Lease
from aiokv.errors import AiokvError, ClosedError, DeviceError
from aiokv.offload.batch import Batch, Part
from aiokv.offload.calls import without_none
from aiokv.offload.rates import Rate
from aiokv.offload.segments import Segments
from aiokv.proto.plan import GroupBlocks, Side

__all__ = ["RATE", "Copies"]

#: Chunks for a GPU are so many times larger: submitting one doesn't hold the loop for as long as it takes.
_GPU_CHUNKS = 16
#: A rate that no path of a GPU exceeds, in bytes a nanosecond; the poller corrects it by what it sees.
RATE = 60
#: Streams that are kept for batches that will be held up.
_SPARE = 8
#: What loads are taken to bring, in bytes a second, while none was measured; and what they take besides.
_GUESS_GPU = 20e9
_GUESS_HOST = 2e9
_START_S = 200e-6


class Copies:
    """All batches of one tier. Belongs to the loop's thread.

    Args:
        cache: The cache.
        pool: The tier's memory.
        leases: Of the cache's blocks.
        poller: Tells when copies are over.
        submissions: Submits them.
        part_bytes: See ``TierSettings``.
        chunk_bytes: See ``TierSettings``.
        clock: The time (ns).
        over: Told of each part that is over, whether it is across, and why not.
    """

    def __init__(
        self,
        cache: KVCache,
        pool: Segments,
        leases: BlockLeases,
        poller: CompletionPoller,
        submissions: Submissions,
        *,
        part_bytes: int,
        chunk_bytes: int,
        clock: Callable[[], int],
        over: Callable[[Batch, Part, bool, AiokvError | None], None],
    ) -> None:
        self._cache = cache
        self._pool = pool
        self._leases = leases
        self._poller = poller
        self._submissions = submissions
        self._part_bytes = part_bytes
        gpu = cache.device.kind not in ("host", "mocked")
        self._chunk_bytes = chunk_bytes * (_GPU_CHUNKS if gpu else 1)
        self._rate = RATE if gpu else 0
        self._clock = clock
        self._over = over
        #: A stream for loads and one for stores, which all share that nothing holds up.
        self._streams: dict[bool, Stream | None] = {True: None, False: None}
        #: Those that batches had for themselves, with nothing on them; the poller learns by stream.
        self._spare: list[Stream] = []
        #: Batches that are not quiet.
        self.batches: dict[Batch, None] = {}
        #: By direction, store first: bytes that are across, and how fast.
        self.rates = {True: Rate(), False: Rate()}
        self.waiting_bytes = {True: 0, False: 0}
        #: Time of the parts that are over, in sum.
        self.seconds = {True: 0.0, False: 0.0}

    def expected_s(self, blocks: int) -> float:
        """How long a load of so many blocks takes, in seconds, behind what waits already."""
        rate = self.rates[False].value or (_GUESS_GPU if self._rate else _GUESS_HOST)
        return _START_S + (blocks * self._pool.place_bytes + self.waiting_bytes[False]) / rate

    def moved(self, path: str) -> int:
        """Bytes that the device has moved by one of its ways; 0 where it has none to choose from."""
        moved: Mapping[str, int] = getattr(self._cache.device, "moved", {})
        return moved.get(path, 0)

    # -- beginning

    def held(self, blocks: tuple[GroupBlocks, ...]) -> Lease:
        """Have blocks to be read only, until that is given back.

        Raises:
            InvalidBlocks: One is out of range, or stands twice.
            BusyError: One is being written.
        """
        return self._leases.take(blocks, write=False)

    def check(self, blocks: tuple[GroupBlocks, ...], *, store: bool) -> None:
        """Look whether blocks can be leased.

        Raises:
            InvalidBlocks: One is out of range, or stands twice.
            BusyError: One is leased to something that this doesn't go with.
        """
        self._leases.take(self._some(blocks), write=not store).give_back()

    def add(
        self,
        places: Sequence[int],
        blocks: tuple[GroupBlocks, ...],
        *,
        store: bool,
        after: Event,
        priority: int,
        cuts: Collection[int] = (),
    ) -> Batch:
        """Take the blocks' leases and make the parts; ``begin`` starts them.

        Args:
            places: In the pool.
            blocks: Of the cache.
            store: Towards the pool.
            after: What of the caller's comes before.
            priority: The higher goes first.
            cuts: Where parts have to end, besides.

        Raises:
            InvalidBlocks, BusyError: As of ``check``; then nothing is leased.
        """
        self.check(blocks, store=store)
        try:
            free = after.done()
        except DeviceError:  # the copies' own events tell
            free = False
        stream, held = self._stream(store), None
        if not free:
            # A stream of its own: others must not queue behind what this one waits for.
            stream, held = self._spare.pop() if self._spare else self._cache.device.stream(), after
            stream.wait(after)
        batch = Batch(store, places, blocks, priority, stream, held, own_stream=not free)
        lo = 0
        for hi in sorted({*self._pool.cut(places, self._part_bytes), *cuts}):
            some = self._slice(blocks, lo, hi)
            lease = self._leases.take(some, write=not store)
            part = Part(lo, hi, lease, nbytes=self._pool.nbytes_of(some))
            self.waiting_bytes[store] += part.nbytes
            batch.parts.append(part)
            lo = hi
        if batch.parts:
            self.batches[batch] = None
        return batch

    def begin(self, batch: Batch, part: Part) -> None:
        """Have a part submitted; nothing if its batch was stopped, which ended it."""
        if part.begun or part.quiet:
            return
        part.begun = True
        part.began_ns = self._clock()
        self.rates[batch.store].began(part.began_ns)
        cache = Side(self._cache.layout, self._cache.placement, self._slice(batch.blocks, part.lo, part.hi))
        try:
            plan, segment = self._pool.plan(cache, batch.places[part.lo : part.hi], store=batch.store)
            # An idle stream is through with it by now.
            self._held_up(batch)
            pool = (segment.buffer,)
            src, dst = (self._cache.buffers, pool) if batch.store else (pool, self._cache.buffers)
            part.submission = self._submissions.add(
                plan,
                plan.chunks(plan.layers, self._chunk_bytes),
                src,
                dst,
                stream=batch.stream,
                urgent=not batch.store,
                priority=batch.priority,
                after=batch.held,
                then=lambda submission: self._submitted(batch, part, submission),
            )
        except (AiokvError, ValueError) as error:
            self._ended(batch, part, DeviceError(f"a copy can't be planned: {error}"))
            return
        if batch.stopped:  # by what went wrong while this was being submitted
            part.submission.cancel()

    def promote(self, batch: Batch) -> None:
        """Somebody waits for a store."""
        for part in batch.parts:
            if part.submission is not None:
                self._submissions.promote(part.submission)

    def stop(self, batch: Batch, error: AiokvError | None = None) -> None:
        """Begin and submit nothing more; what is in flight is over in its own time."""
        if batch.stopped:
            return
        batch.stopped = True
        batch.error = batch.error or error
        for part in batch.parts:
            if part.quiet:
                continue
            if part.submission is not None:
                part.submission.cancel()
            elif not part.begun:
                self._quiet(batch, part, None, across=False)
        batch.bell.ring()

    # -- ending

    def _submitted(self, batch: Batch, part: Part, submission: Submission) -> None:
        """Nothing more of a part will be submitted."""
        whole = submission.error is None and submission.nbytes == part.nbytes
        error = submission.error
        if error is None and not whole:
            error = ClosedError("given up before all of it was submitted")
        event = submission.event
        if event is None:  # where not even this can be enqueued, nothing runs any more
            self._ended(batch, part, error)
            return
        try:
            if event.done():
                self._ended(batch, part, error)
                return
        except DeviceError as failure:
            self._ended(batch, part, error or failure)
            return
        # Of what isn't held up each chunk was watched before: this is a chunk behind them.
        last = part.nbytes if batch.held else min(part.nbytes, self._chunk_bytes)
        try:
            self._poller.watch(
                event,
                submission.stream,
                lambda failure: self._ended(batch, part, error or failure),
                expected_ns=last // self._rate if self._rate else 0,
            )
        except ClosedError:  # nobody will ever know; the lease stays
            return

    def _ended(self, batch: Batch, part: Part, error: AiokvError | None) -> None:
        """What is in flight of a part is over."""
        now = self._clock()
        failed = isinstance(error, DeviceError)
        self.rates[batch.store].ended(now, 0 if error is not None or batch.held else part.nbytes)
        if failed and self._streams[batch.store] is batch.stream:
            # What comes after a failure on a stream fails, too; so nobody else gets this one.
            self._streams[batch.store] = None
        if error is not None and batch.error is None and not batch.stopped:
            batch.error = error
        self.seconds[batch.store] += (now - part.began_ns) / 1e9
        self._quiet(batch, part, error, across=error is None)
        if error is not None:
            self.stop(batch)

    def _quiet(self, batch: Batch, part: Part, error: AiokvError | None, *, across: bool) -> None:
        part.quiet = True
        part.lease.give_back()
        self.waiting_bytes[batch.store] -= part.nbytes
        if batch.quiet:
            self.batches.pop(batch, None)
            well = not isinstance(batch.error, DeviceError) and not isinstance(error, DeviceError)
            if batch.own_stream and well and not self._held_up(batch) and len(self._spare) < _SPARE:
                self._spare.append(batch.stream)
        self._over(batch, part, across, error)
        batch.bell.ring()

    def _held_up(self, batch: Batch) -> bool:
        """Whether a batch waits for the caller's stream."""
        with suppress(DeviceError):  # then its own event tells
            if batch.held is not None and batch.held.done():
                batch.held = None
        return batch.held is not None

    def _stream(self, store: bool) -> Stream:
        found = self._streams[store]
        if found is None:
            found = self._streams[store] = self._cache.device.stream()
        return found

    def _slice(self, blocks: tuple[GroupBlocks, ...], lo: int, hi: int) -> tuple[GroupBlocks, ...]:
        return self._some(
            tuple(
                GroupBlocks(0, np.ascontiguousarray(listed.ids[lo * ratio : hi * ratio]))
                for listed, ratio in zip(blocks, self._pool.ratios, strict=True)
            )
        )

    def _some(self, blocks: tuple[GroupBlocks, ...]) -> tuple[GroupBlocks, ...]:
        """Lists of those that there are."""
        groups = self._cache.layout.groups
        return tuple(
            without_none(listed, group.block_size) for listed, group in zip(blocks, groups, strict=True)
        )
