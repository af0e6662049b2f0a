"""How a host tier is made, entered and closed."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Literal, Self

from aiokv.device.cache import KVCache
from aiokv.engine.engine import TransferEngine
from aiokv.engine.leases import BlockLeases
from aiokv.errors import ClosedError, PeerLostError
from aiokv.offload.agreement import Jointly
from aiokv.offload.calls import checked_share
from aiokv.offload.growth import Growth
from aiokv.offload.index import Index, OwnIndex
from aiokv.offload.policies import Admission, Key, Policy, policy_named
from aiokv.offload.pool import Pool
from aiokv.offload.settings import TierSettings, size_of
from aiokv.offload.sharing.door import checked_path
from aiokv.offload.sharing.guest import Guest
from aiokv.offload.sharing.index import SharedIndex
from aiokv.offload.sharing.mapped import SharedPool
from aiokv.offload.traffic import Traffic
from aiokv.ranks import RankGroup

__all__ = ["Life"]

_log = logging.getLogger("aiokv")


class Life:
    """What is open as long as a tier is, and what is checked before; see ``HostTier``."""

    def __init__(
        self,
        cache: KVCache,
        capacity: int | str | None = None,
        policy: str | Policy | None = None,
        *,
        pool: str | os.PathLike[str] | None = None,
        salt: bytes = b"",
        admission: Admission | None = None,
        engine: TransferEngine | None = None,
        ranks: RankGroup | None = None,
        checksums: float = 0.0,
        settings: TierSettings | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        if not isinstance(cache, KVCache):
            raise TypeError(f"cache is a KVCache, not {cache!r}")
        if settings is not None and not isinstance(settings, TierSettings):
            raise TypeError(f"settings is a TierSettings, not {settings!r}")
        if admission is not None and not isinstance(admission, Admission):
            raise TypeError(f"admission has what aiokv.offload.policies.Admission has, not {admission!r}")
        if ranks is not None and not isinstance(ranks, RankGroup):
            raise TypeError(f"ranks is a RankGroup, not {ranks!r}")
        if engine is not None and (not isinstance(engine, TransferEngine) or engine.cache is not cache):
            raise ValueError(f"engine is the one of this cache, not {engine!r}")
        self.cache = cache
        self._settings = settings or TierSettings()
        if (capacity is None) == (pool is None):
            raise ValueError("give the capacity of memory of its own, or the pool whose memory it shares")
        if pool is not None and (policy is not None or admission is not None):
            raise ValueError("what goes first, and what gets a place, is for the pool; give it to HostPool")
        if not isinstance(salt, bytes):
            raise TypeError(f"salt is bytes, not {salt!r}")
        if salt and pool is None:
            raise ValueError("salt is for a pool that others share")
        if pool is not None and not cache.layout.model:
            raise ValueError(
                "in a pool that others share, models are told apart by their fingerprint: give "
                "CacheLayout(model=...)"
            )
        self._pool: Pool | SharedPool
        if capacity is not None:
            size = size_of(capacity, "capacity")
            self._pool = Pool(cache.layout, cache.device, size, self._settings.segment_bytes)
        else:
            self._pool = SharedPool(cache.layout, cache.device)
        #: Where the pool that it shares is; empty if it has memory of its own.
        self._door = "" if pool is None else checked_path(pool)
        self._salt = salt
        self.block_size = self._pool.tokens
        self._policy = policy_named("lru" if policy is None else policy)
        self._admission = admission
        self._engine = engine
        #: Calls in which the ranks agree; None where there is one rank.
        self._jointly = None if ranks is None else Jointly(ranks)
        self._share = checked_share(checksums)
        self._clock = clock
        self._state: Literal["new", "open", "closing", "closed"] = "new"
        self._generation = 0
        #: What is open as long as the tier is; None until it is entered.
        self._traffic: Traffic | None = None
        self._keeping = ExitStack()
        #: Makes the rest of the pool; None until entered.
        self._growth: Growth | None = None
        #: To the owner of the pool that it shares; None if it has memory of its own, or isn't entered.
        self._guest: Guest | None = None
        #: Closes everything; None until that was asked for.
        self._closing: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        size = f"{len(self._pool)} of {self._pool.places} blocks of {self._pool.place_bytes} bytes"
        return f"<HostTier {self._state}, {size}>"

    # -- life

    async def __aenter__(self) -> Self:
        """Take the first of the memory; the rest follows while the tier is used.

        Raises:
            CapacityError: The machine hasn't so much memory, or it can't be pinned; or the pool has no room
                for a single block.
            ClosedError: It was entered before; its cache or engine is closed.
            LayoutMismatch: The pool is used for blocks of another form.
            PeerLostError: Nobody is at the pool's socket, or it doesn't answer.
            Refused: The pool won't have this process, and says why.
        """
        if self._state != "new":
            raise ClosedError(f"a tier can be entered once; this one is {self._state}")
        leases = BlockLeases(self.cache.layout) if self._engine is None else self._engine.leases
        self._state = "closed"
        with ExitStack() as opening:
            opening.enter_context(self.cache.kept_open())
            if isinstance(self._pool, Pool):
                await self._pool.check()
            traffic = Traffic(
                self.cache,
                self._pool,
                leases,
                self._index,
                self._share,
                self._settings,
                self._clock,
            )
            opening.callback(traffic.close)
            try:
                if self._guest is not None:
                    await self._guest.attach()
                first = await self._pool.grow()
                if first is None:
                    raise PeerLostError(f"the pool at {self._door} ended before it gave any memory")
            except BaseException:
                if self._guest is not None:
                    self._guest.close(quiet=True)
                raise
            traffic.table.grow(first.places)
            self._keeping = opening.pop_all()
        self._traffic = traffic
        self._state = "open"
        self._growth = Growth(self._pool, traffic.table.grow)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Give up what is going on, wait until it is quiet, and give the memory back. May be called twice.

        What isn't quiet within the drain bound keeps its memory for the life of the process, and the cache
        stays open; that is logged. Cancelled meanwhile, it goes on, and says so in the end.
        """
        if self._state == "open":
            traffic, self._state = self._opened(), "closing"
            self._closing = asyncio.ensure_future(self._close(traffic))
        cancelled: asyncio.CancelledError | None = None
        while (closing := self._closing) is not None and not closing.done():
            try:
                await asyncio.shield(closing)
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled

    async def _close(self, traffic: Traffic) -> None:
        self._generation += 1
        if isinstance(self._pool, SharedPool):
            self._pool.end()
        if self._growth is not None:
            await self._growth.stop()
        batches = list(traffic.copies.batches)
        traffic.outdate()
        for batch in batches:
            traffic.copies.stop(batch, ClosedError("the host tier was closed"))
        await traffic.followers.drained(batches)
        traffic.events.close()
        traffic.checksums.close()  # it reads what is given back next
        self._state = "closed"
        if self._guest is not None:
            if not traffic.copies.batches:
                await self._guest.leave()
            self._guest.close(quiet=not traffic.copies.batches)
        if traffic.copies.batches:
            _log.error("%r closes with copies in flight; their memory stays", self)
            traffic.stop()
        else:
            try:
                await self._pool.close()
            finally:
                self._keeping.close()

    async def grown(self) -> None:
        """Wait until the pool is as large as it is to be; it can be used before.

        Raises:
            CapacityError: It will not be: there isn't so much memory any more, or it can't be pinned.
            ClosedError: The tier was closed meanwhile.
        """
        self._opened()
        if self._growth is not None:
            await self._growth.wait()
        self._opened()

    def _index(
        self, removed: Callable[[Sequence[Key], str], None], distrusted: Callable[[Exception], None]
    ) -> Index:
        """The index of this tier, or its part of that of the pool."""
        if isinstance(self._pool, Pool):
            return OwnIndex(self._policy, admission=self._admission, removed=removed, distrusted=distrusted)
        self._guest = Guest(self._door, self._pool, self.cache.layout, self._salt)
        index = SharedIndex(self._guest, removed=removed)
        self._guest.serve(index, reset=self._on_reset, lost=self._on_lost, again=self._on_again)
        return index

    def _on_reset(self) -> None:
        """Another process dropped all blocks of the pool."""
        self._generation += 1
        if self._traffic is not None:
            self._traffic.give_up()

    def _on_lost(self, reason: str) -> None:
        """The pool's owner is lost. What goes on ends as it would: the memory is there, and nobody else's."""
        self._generation += 1
        if self._state == "open":
            _log.warning("the host pool at %s is lost, so nothing is found or kept: %s", self._door, reason)

    def _on_again(self) -> None:
        """There is a pool again: its memory is used from here on."""
        if self._traffic is not None and self._state == "open":
            _log.info("another host pool is at %s", self._door)
            self._growth = Growth(self._pool, self._traffic.table.grow, before=self._growth)

    def _opened(self) -> Traffic:
        if self._traffic is None or self._state != "open":
            raise ClosedError(f"the host tier is {self._state}")
        return self._traffic
