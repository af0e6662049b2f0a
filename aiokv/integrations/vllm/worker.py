"""The worker's half: it carries out what the scheduler's half decided, in a thread of its own.

vLLM's worker is synchronous. In each step it hands over the orders, and takes what has come to an end;
neither waits for anything. Every order to send or to load ends in exactly one report, whatever happens, since
vLLM has no time-out of its own, and a second report would end its engine. A load is reported only once
nothing can write its blocks any more (vllm#32255, vllm#56104).
"""

from __future__ import annotations

import asyncio
import atexit
import hashlib
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from typing import Any

from aiokv.blocking.thread import LoopThread
from aiokv.device.cache import KVCache
from aiokv.engine.engine import TransferEngine
from aiokv.engine.transfer import Offer
from aiokv.errors import AiokvError
from aiokv.integrations.vllm.loading import Loading
from aiokv.integrations.vllm.news import Change, Kept, Missed, News, Wanted
from aiokv.integrations.vllm.orders import Blocks, Keep, Load, Orders, Recall, Send, Ticket, Watch
from aiokv.integrations.vllm.renewing import Renewing
from aiokv.integrations.vllm.reports import Ended, Outcome, Reports, blocks_of
from aiokv.integrations.vllm.sending import Sending, Work
from aiokv.integrations.vllm.settings import ConnectorSettings
from aiokv.integrations.vllm.tiering import Tiering, tier_of
from aiokv.offload.sharing.form import digest_of
from aiokv.offload.statistics import TierStatistics
from aiokv.proto.layout import CacheLayout
from aiokv.router import Instance

__all__ = ["WorkerHalf"]

_log = logging.getLogger("aiokv")


class WorkerHalf:
    """One rank's transfer engine and its thread.

    Its methods belong to vLLM's thread, but for those that say otherwise.

    Args:
        cache: What vLLM registered; closed with this.
        settings: How it is set up.
        rank: Rank of this worker within its instance.
        ranks: Ranks of the instance.
        weights: Tells apart whose blocks can't be used here, in a pool.

    Attributes:
        address: Where peers reach the engine.
        digest: Names in a pool what blocks hold here; None without one.

    Raises:
        AiokvError, OSError, ValueError: The engine can't be had.
    """

    def __init__(
        self,
        cache: KVCache,
        settings: ConnectorSettings,
        rank: int = 0,
        ranks: int = 1,
        *,
        weights: bytes = b"",
    ) -> None:
        self._cache = cache
        self._settings = settings
        sizes = {group.block_size for group in cache.layout.groups}
        if cache.device.kind != "cuda" and len(sizes) > 1:
            raise ValueError(f"on a CPU, KV cache groups need one block size, not {sorted(sizes)}")
        self._rank = rank
        #: Tokens that are moved together. vLLM's kernels for CPUs keep the tokens of a block interleaved, so
        #: that no part of one means anything.
        self._unit = 1 if cache.device.kind == "cuda" else cache.layout.groups[0].block_size
        self._reports = Reports()
        #: Recalls under way, by request; the loop's thread alone.
        self._recalls: dict[str, asyncio.Task[Any]] = {}
        #: Who waits until a chunk is asked for, by the chunk's ticket; the loop's thread alone.
        self._watches: dict[Ticket, asyncio.Task[None]] = {}
        #: Chunks that are asked for, not yet told.
        self._wanted: deque[Wanted] = deque()
        #: The host tier; None where there is none.
        self._tiering: Tiering | None = None
        #: Tasks of orders under way; the loop's thread alone.
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = LoopThread("aiokv")
        self._closed = False
        #: What the loop's thread entered, to be left from the last to the first.
        self._entered = AsyncExitStack()
        try:
            self._engine: TransferEngine = self._thread.run(self._enter(rank, ranks, weights))
        except BaseException:
            self._thread.close()
            raise
        self.address = self._engine.address
        self.digest = None if settings.host_pool is None else digest_of(cache.layout, weights)
        self._readers = settings.decode_ranks or ranks
        self._sending = Sending(self._engine, settings, self._readers, self._unit)
        self._loading = Loading(self._engine, settings, self._unit, self._tiering)
        self._renewing = Renewing(self._engine, settings.hold)
        # vLLM within the caller's process (``LLM``) just ends with it; peers are to be told all the same.
        atexit.register(self.close)

    async def _enter(self, rank: int, ranks: int, weights: bytes) -> TransferEngine:
        async with AsyncExitStack() as stack:
            engine = await stack.enter_async_context(self._settings.at_rank(rank).engine(self._cache))
            if self._settings.keeps:
                tier = tier_of(self._cache, self._settings, ranks=ranks, weights=weights, engine=engine)
                tiering = Tiering(tier, timeout=self._settings.load_timeout)
                try:
                    self._tiering = await stack.enter_async_context(tiering)
                except AiokvError as error:
                    field = "host_tier" if self._settings.host_pool is None else "host_pool"
                    error.add_note(f"It is what {field} in kv_connector_extra_config asks for.")
                    raise
            if (given := self._settings.router) is not None and rank == 0:
                # vLLM's server knows nothing of the router's tokens: that it is healthy must do.
                instance = Instance(
                    given.address,
                    role=given.role,
                    http=given.http,
                    models=given.models,
                    fingerprint=_fingerprint(self._cache.layout),
                    engine=self._settings.registered(engine.address, ranks),
                    probe="/health",
                    bind=given.bind,
                )
                await stack.enter_async_context(instance)
            self._entered = stack.pop_all()
        return engine

    # -- vLLM's thread

    def carry_out(self, orders: Orders, stream: object | None = None) -> None:
        """Begin what was ordered, but for what ``before`` does. Never blocks.

        vLLM calls it when the model's work of this step is enqueued.

        Args:
            orders: Of one step.
            stream: The stream that the model computes on: blocks are written after what is enqueued there.
        """
        if not orders:
            return
        self._reports.expect(orders)
        try:
            self._thread.post(self._begin, orders, stream)
        except RuntimeError:  # closed: nothing will ever be moved
            left: list[Load | Recall] = [*orders.loads, *orders.recalls]
            for order in left:
                self._reports.add(Ended(order, blocks_of(order)))
            if self._tiering is not None:
                self._tiering.changes.extend(Missed(recall.request) for recall in orders.recalls)

    def _hand_over(self, keeps: Sequence[Keep], stream: object | None) -> None:
        if self._tiering is None:
            return
        try:
            self._thread.post(self._keep, keeps, stream)
        except RuntimeError:  # closed
            self._tiering.changes.extend(Kept(keep.number, 0) for keep in keeps)

    def before(self, orders: Orders, stream: Callable[[], object | None] = lambda: None) -> None:
        """Before a step: wait until nobody reads what it writes, and begin to send what there is, or will be.

        Such blocks are rarely read; else it never blocks, or for 50 us where it sends what it computes.

        Args:
            orders: Of the step.
            stream: Gives the stream that the model computes on: what earlier steps computed is sent once what
                is enqueued there now is done, and so need not wait for this step.
        """
        early = [send for send in orders.sends if send.early]
        try:
            if orders.watches or len(orders.sends) > len(early):
                self._thread.post(self._begin_sending, orders, stream())
            if early or orders.fences or orders.lost:
                self._sending.announcing = self._thread.run(self._prepare(orders, early))
        except RuntimeError:  # closed: nothing is read, or sent, any more
            for send in orders.sends:
                self._reports.add(Ended(send, send.blocks))

    def written(self, layer: int, stream: Callable[[], object | None] = lambda: None) -> None:
        """A layer of this step is computed, as of what is enqueued on a stream now. Never blocks."""
        self._sending.written(layer, stream)

    def computed(self, orders: Orders, stream: Callable[[], object | None] = lambda: None) -> None:
        """All layers of this step are. Never blocks."""
        self._sending.computed(stream)
        if orders.keeps:
            self._hand_over(orders.keeps, stream())

    def outcome(self) -> Outcome | None:
        """What came to an end since the last call, each request once; None: nothing did. Never blocks."""
        return self._reports.take()

    def news(self) -> News | None:
        """What changed in the host tier, or is asked for, since the last call; None: nothing."""
        changed = () if self._tiering is None else self._tiering.changes
        if not changed and not self._wanted:
            return None
        queues: list[deque[Any]] = [self._wanted, *([changed] if changed else [])]
        found: list[Change] = [each.popleft() for each in queues for _ in range(len(each))]
        return News(self._rank, tuple(found))

    def tier_statistics(self) -> TierStatistics | None:
        """What the host tier did so far; None where there is none."""
        return None if self._tiering is None else self._tiering.tier.statistics()

    def close(self) -> None:
        """Abort what is going on, on both sides, and give everything back. Blocks; may be called twice."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        self._thread.run(self._leave())
        self._thread.close()
        self._cache.close()

    # -- the loop's thread

    async def _leave(self) -> None:
        self._renewing.close()
        await self._entered.aclose()
        await asyncio.gather(*self._tasks, *self._watches.values(), return_exceptions=True)

    def _begin(self, orders: Orders, stream: object | None) -> None:
        if orders.reset is not None and self._tiering is not None:
            self._spawn(self._tiering.reset(orders.reset))
        for name in orders.aborts:
            # What was ordered just now begins in this turn of the loop.
            asyncio.get_running_loop().call_soon(self._abort, name)
        for recall in orders.recalls:
            self._spawn(self._until_over(recall, self._recall(recall, stream)))
        for queued in orders.queued:
            self._renewing.begin(queued)
        for load in orders.loads:
            self._renewing.end(load.ticket)
            self._spawn(self._until_over(load, self._loading.load(load, stream)))
        for release in orders.releases:
            self._renewing.end(release.ticket)
            self._spawn(self._loading.release(release))
        for refusal in orders.refusals:
            self._end_watch(refusal.ticket)
            self._spawn(self._sending.refuse(refusal))

    def _begin_sending(self, orders: Orders, stream: object | None) -> None:
        for watch in orders.watches:
            self._end_watch(watch.ticket)  # of another request by the same id
            self._watches[watch.ticket] = asyncio.ensure_future(self._watch(watch))
        for send in orders.sends:
            if not send.early:
                self._end_watch(send.ticket)
                self._spawn(self._until_over(send, self._sending.send(send, stream)))

    def _keep(self, keeps: Sequence[Keep], stream: object | None) -> None:
        assert self._tiering is not None  # noqa: S101 (asked for before)
        for keep in keeps:
            self._tiering.keep(keep, stream)

    def _abort(self, name: str) -> None:
        if name in self._recalls:
            self._recalls[name].cancel()
        self._loading.give_up(name)
        self._sending.give_up(name)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch(self, watch: Watch) -> None:
        ticket = watch.ticket
        try:
            first = await self._engine.wanted(ticket.transfer, readers=self._readers, attempt=ticket.attempt)
        except AiokvError as error:
            _log.debug("transfer %s is not watched for: %s", ticket.transfer, error)
        else:
            self._wanted.append(Wanted(watch.request, watch.number, first))
        finally:
            if self._watches.get(ticket) is asyncio.current_task():
                del self._watches[ticket]

    def _end_watch(self, ticket: Ticket) -> None:
        task = self._watches.pop(ticket, None)
        if task is not None:
            task.cancel()

    async def _until_over(self, order: Send | Load | Recall, work: Work) -> None:
        """Do it, and report it once."""
        what = "sent to others" if isinstance(order, Send) else "loaded"
        began, end = time.monotonic_ns(), Ended(order, blocks_of(order))
        try:
            size, failed = await work
            end = Ended(order, failed, (time.monotonic_ns() - began) / 1e9, size)
        except (AiokvError, TypeError, ValueError) as error:
            _log.warning("the KV of request %s was not %s: %s", order.request, what, error)
        except Exception:  # noqa: BLE001 (what isn't reported holds the request for ever)
            _log.exception("the KV of request %s was not %s", order.request, what)
        finally:
            self._reports.add(end)

    async def _prepare(self, orders: Orders, early: Sequence[Send]) -> list[Offer]:
        await self._sending.lose(orders.lost)
        if orders.fences and self._tiering is not None:
            await self._tiering.over(orders.fences)
        begun = []
        for send in early:
            self._end_watch(send.ticket)
            try:
                offer = self._sending.begin(send)
            except (AiokvError, TypeError, ValueError) as error:
                _log.warning("the KV of request %s is not sent to others: %s", send.request, error)
                self._reports.add(Ended(send, send.blocks))
            else:
                self._spawn(self._until_over(send, self._sending.until_sent(send, offer)))
                begun.append(offer)
        return begun

    async def _recall(self, recall: Recall, stream: object | None) -> tuple[int, tuple[Blocks, ...]]:
        task = asyncio.current_task()
        assert self._tiering is not None  # noqa: S101 (the scheduler's half recalls nothing else)
        assert task is not None  # noqa: S101
        self._recalls[recall.request] = task
        try:
            return await self._tiering.recall(recall, stream)
        finally:
            del self._recalls[recall.request]


def _fingerprint(layout: CacheLayout) -> str:
    """The same for two instances if one can fetch from the other."""
    names = ("kind", "layers", "total_heads", "head_size", "dtype", "window", "halves")
    facts = [[getattr(group, name) for name in names] for group in layout.groups]
    return hashlib.sha256(repr((layout.model, facts)).encode()).hexdigest()
