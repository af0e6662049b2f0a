"""How a host tier is made, entered and closed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Literal, Self

from aiokv.device.cache import KVCache
from aiokv.engine.engine import TransferEngine
from aiokv.engine.leases import BlockLeases
from aiokv.errors import ClosedError
from aiokv.offload.agreement import Jointly
from aiokv.offload.calls import checked_share
from aiokv.offload.growth import Growth
from aiokv.offload.policies import Admission, Policy, policy_named
from aiokv.offload.pool import Pool
from aiokv.offload.settings import TierSettings, size_of
from aiokv.offload.traffic import Traffic
from aiokv.ranks import RankGroup

__all__ = ["Life"]

_log = logging.getLogger("aiokv")


class Life:
    """What is open as long as a tier is, and what is checked before; see ``HostTier``."""

    def __init__(
        self,
        cache: KVCache,
        capacity: int | str,
        policy: str | Policy = "lru",
        *,
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
        self._pool = Pool(
            cache.layout, cache.device, size_of(capacity, "capacity"), self._settings.segment_bytes
        )
        self.block_size = self._pool.tokens
        self._policy = policy_named(policy)
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
        #: Closes everything; None until that was asked for.
        self._closing: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        size = f"{len(self._pool)} of {self._pool.places} blocks of {self._pool.place_bytes} bytes"
        return f"<HostTier {self._state}, {size}>"

    # -- life

    async def __aenter__(self) -> Self:
        """Take the first of the memory; the rest follows while the tier is used.

        Raises:
            CapacityError: The machine hasn't so much memory, or it can't be pinned.
            ClosedError: It was entered before; its cache or engine is closed.
        """
        if self._state != "new":
            raise ClosedError(f"a tier can be entered once; this one is {self._state}")
        leases = BlockLeases(self.cache.layout) if self._engine is None else self._engine.leases
        self._state = "closed"
        with ExitStack() as opening:
            opening.enter_context(self.cache.kept_open())
            await self._pool.check()
            traffic = Traffic(
                self.cache,
                self._pool,
                leases,
                self._policy,
                self._admission,
                self._share,
                self._settings,
                self._clock,
            )
            opening.callback(traffic.close)
            first = await self._pool.grow()
            traffic.table.grow(first.places if first else 0)
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
        if self._growth is not None:
            await self._growth.stop()
        batches = list(traffic.copies.batches)
        traffic.outdate()
        for batch in batches:
            traffic.copies.stop(batch, ClosedError("the host tier was closed"))
        await traffic.followers.drained(batches)
        traffic.events.close()
        self._state = "closed"
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

    def _opened(self) -> Traffic:
        if self._traffic is None or self._state != "open":
            raise ClosedError(f"the host tier is {self._state}")
        return self._traffic
