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
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from aiokv.blocking.thread import LoopThread
from aiokv.device.cache import KVCache
from aiokv.engine.arguments import Window
from aiokv.engine.engine import TransferEngine
from aiokv.engine.transfer import Fetch
from aiokv.errors import AiokvError
from aiokv.integrations.vllm.orders import Blocks, Load, Orders, Release, Send, Ticket
from aiokv.integrations.vllm.settings import ConnectorSettings
from aiokv.proto.layout import CacheLayout
from aiokv.router import Instance

__all__ = ["Outcome", "WorkerHalf"]

_log = logging.getLogger("aiokv")


@dataclass(slots=True)
class Outcome:
    """What came to an end since it was last asked for.

    Attributes:
        sent: Requests whose blocks are held no longer.
        loaded: Requests whose load is over, be it well or not.
        failed: Those of them whose load failed, with the blocks that hold nothing.
        loads: For each that went well, the seconds that it took, and its bytes.
        unsent: How many of ``sent`` nobody read to the end.
    """

    sent: set[str] = field(default_factory=set)
    loaded: set[str] = field(default_factory=set)
    failed: dict[str, tuple[Blocks, ...]] = field(default_factory=dict)
    loads: list[tuple[float, int]] = field(default_factory=list)
    unsent: int = 0


@dataclass(frozen=True, slots=True)
class _Ended:
    """How an order ended: well or not, after how many seconds, with how many bytes."""

    order: Send | Load
    well: bool = False
    seconds: float = 0.0
    size: int = 0


class WorkerHalf:
    """One rank's transfer engine and its thread.

    Its methods belong to vLLM's thread, but for those that say otherwise.

    Args:
        cache: What vLLM registered; closed with this.
        settings: How it is set up.
        rank: Rank of this worker within its instance.
        ranks: Ranks of the instance.

    Attributes:
        address: Where peers reach the engine.

    Raises:
        AiokvError, OSError, ValueError: The engine can't be had.
    """

    def __init__(self, cache: KVCache, settings: ConnectorSettings, rank: int = 0, ranks: int = 1) -> None:
        self._cache = cache
        self._settings = settings
        sizes = {group.block_size for group in cache.layout.groups}
        if cache.device.kind != "cuda" and len(sizes) > 1:
            raise ValueError(f"on a CPU, KV cache groups need one block size, not {sorted(sizes)}")
        self._readers = settings.decode_ranks or ranks
        #: Tokens that are moved together. vLLM's kernels for CPUs keep the tokens of a block interleaved, so
        #: that no part of one means anything.
        self._unit = 1 if cache.device.kind == "cuda" else cache.layout.groups[0].block_size
        #: What has ended: written by the loop's thread, read by vLLM's. A deque's ends need no lock.
        self._ended: deque[_Ended] = deque()
        #: Loads under way, by request; the loop's thread alone.
        self._fetches: dict[str, Fetch] = {}
        #: Tasks of orders under way; the loop's thread alone.
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = LoopThread("aiokv")
        self._closed = False
        #: What the loop's thread entered, to be left from the last to the first.
        self._entered = AsyncExitStack()
        try:
            self._engine: TransferEngine = self._thread.run(self._enter(rank, ranks))
        except BaseException:
            self._thread.close()
            raise
        self.address = self._engine.address
        # vLLM within the caller's process (``LLM``) just ends with it; peers are to be told all the same.
        atexit.register(self.close)

    async def _enter(self, rank: int, ranks: int) -> TransferEngine:
        async with AsyncExitStack() as stack:
            engine = await stack.enter_async_context(self._settings.at_rank(rank).engine(self._cache))
            if (given := self._settings.router) is not None:
                if ranks > 1:
                    raise ValueError("router: an instance of several ranks can't register itself yet")
                # vLLM's server knows nothing of the router's tokens: that it is healthy must do.
                instance = Instance(
                    given.address,
                    role=given.role,
                    http=given.http,
                    models=given.models,
                    fingerprint=_fingerprint(self._cache.layout),
                    engine=engine.address,
                    probe="/health",
                    bind=given.bind,
                )
                await stack.enter_async_context(instance)
            self._entered = stack.pop_all()
        return engine

    # -- vLLM's thread

    def carry_out(self, orders: Orders, stream: object | None = None) -> None:
        """Begin what was ordered. Never blocks.

        Args:
            orders: Of one step.
            stream: The stream that the model computes on: blocks are read after what is enqueued there now,
                and written after it, too.
        """
        if not orders:
            return
        try:
            self._thread.post(self._begin, orders, stream)
        except RuntimeError:  # closed: nothing will ever be moved
            self._ended.extend(map(_Ended, orders.sends))
            self._ended.extend(map(_Ended, orders.loads))

    def outcome(self) -> Outcome:
        """What came to an end since the last call; each order is in it once. Never blocks."""
        found = Outcome()
        while self._ended:
            end = self._ended.popleft()
            if isinstance(end.order, Send):
                found.sent.add(end.order.request)
                found.unsent += not end.well
                continue
            found.loaded.add(end.order.request)
            if end.well:
                found.loads.append((end.seconds, end.size))
            else:
                found.failed[end.order.request] = end.order.blocks
        return found

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
        await self._entered.aclose()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, orders: Orders, stream: object | None) -> None:
        for name in orders.aborts:
            fetch = self._fetches.get(name)
            if fetch is not None:
                fetch.cancel("the request was aborted")
        for send in orders.sends:
            self._spawn(self._until_over(send, self._send(send, stream)))
        for load in orders.loads:
            self._spawn(self._until_over(load, self._load(load, stream)))
        for release in orders.releases:
            self._spawn(self._release(release))
        for ticket in orders.refusals:
            self._spawn(self._refuse(ticket))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _until_over(self, order: Send | Load, work: Coroutine[Any, Any, int]) -> None:
        """Do it, and report it once."""
        what = "sent to others" if isinstance(order, Send) else "loaded"
        began, end = time.monotonic_ns(), _Ended(order)
        try:
            size = await work
            end = _Ended(order, well=True, seconds=(time.monotonic_ns() - began) / 1e9, size=size)
        except (AiokvError, TypeError, ValueError) as error:
            _log.warning("the KV of request %s was not %s: %s", order.request, what, error)
        except Exception:  # noqa: BLE001 (what isn't reported holds the request for ever)
            _log.exception("the KV of request %s was not %s", order.request, what)
        finally:
            self._ended.append(end)

    async def _send(self, send: Send, stream: object | None) -> int:
        offer = self._engine.offer(
            send.ticket.transfer,
            _windows(send.blocks),
            tokens=-(-send.tokens // self._unit) * self._unit,
            readers=self._readers,
            attempt=send.ticket.attempt,
            deadline=_lasts(send.ticket, self._settings.hold),
        )
        offer.start()
        for layer in range(self._cache.layout.layers):
            offer.layer_ready(layer, stream=stream)
        await offer.wait()
        return offer.progress.bytes_moved

    async def _load(self, load: Load, stream: object | None) -> int:
        fetch = self._engine.fetch(
            load.ticket.transfer,
            _windows(load.blocks),
            sources=load.sources,
            first_token=load.first // self._unit * self._unit,
            tokens=-(-load.tokens // self._unit) * self._unit,
            attempt=load.ticket.attempt,
            deadline=_lasts(load.ticket, self._settings.load_timeout),
            stream=stream,
        )
        fetch.start()
        self._fetches[load.request] = fetch
        try:
            await fetch.wait()
        finally:
            del self._fetches[load.request]
        return fetch.progress.bytes_moved

    async def _release(self, release: Release) -> None:
        """Fetch nothing: the other side then knows that it is done."""
        nothing = [Window(0, ()) for _ in self._cache.layout.groups]
        try:
            fetch = self._engine.fetch(
                release.ticket.transfer,
                nothing,
                sources=release.sources,
                tokens=0,
                attempt=release.ticket.attempt,
                deadline=self._settings.load_timeout,
            )
            fetch.start()
            await fetch.wait()
        except (AiokvError, TypeError, ValueError) as error:
            _log.info(
                "transfer %s: the other side holds it until its time is over: %s",
                release.ticket.transfer,
                error,
            )

    async def _refuse(self, ticket: Ticket) -> None:
        """Offer something and take it back: who waits for it, or asks later, is told so."""
        some = [Window(0, (0,)) for _ in self._cache.layout.groups]
        try:
            offer = self._engine.offer(
                ticket.transfer, some, tokens=1, readers=self._readers, attempt=ticket.attempt
            )
            offer.start()
            offer.cancel("the request was aborted before its KV was there")
            await offer.wait()
        except AiokvError as error:
            _log.debug("transfer %s: %s", ticket.transfer, error)


def _fingerprint(layout: CacheLayout) -> str:
    """The same for two instances if one can fetch from the other."""
    names = ("kind", "layers", "total_heads", "head_size", "dtype", "window", "halves")
    facts = [[getattr(group, name) for name in names] for group in layout.groups]
    return hashlib.sha256(repr((layout.model, facts)).encode()).hexdigest()


def _lasts(ticket: Ticket, at_most: float) -> float:
    """Seconds that a transfer may take."""
    return at_most if ticket.deadline is None else min(ticket.deadline, at_most)


def _windows(blocks: Sequence[Blocks]) -> list[Window]:
    return [Window(group.start, group.ids) for group in blocks]
