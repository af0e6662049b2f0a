"""``HostTier`` for callers that have no event loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self, TypedDict, Unpack

import aiokv
from aiokv.blocking.thread import Future, LoopThread, Shared, iterate
from aiokv.engine.arguments import BlockIds
from aiokv.offload.events import TierEvent
from aiokv.offload.policies import Key

__all__ = ["HostTier", "Lookup"]


class LoadOptions(TypedDict, total=False):
    """What a load may be told; see ``aiokv.HostTier.load``."""

    stream: object | None
    priority: int
    deadline: float | None


class StoreOptions(LoadOptions, total=False):
    """What a store may be told; see ``aiokv.HostTier.store``."""

    parent: Key | None
    tokens: Sequence[int] | None


class Lookup:
    """The longest prefix that a tier has; made by ``HostTier.lookup``, and a context manager.

    While it is entered nothing of it is evicted, however much is stored.

    Args:
        tier: Whose.
        lookup: The lookup.
    """

    def __init__(self, tier: HostTier, lookup: aiokv.Lookup) -> None:
        self._tier = tier
        self.lookup = lookup

    def __len__(self) -> int:
        """Blocks of the prefix that are held."""
        return len(self.lookup)

    @property
    def tokens(self) -> int:
        """Tokens of these."""
        return self.lookup.tokens

    def __enter__(self) -> Self:
        """Look, and hold what is found; the errors are those of ``aiokv.Lookup``."""
        try:
            self._tier.thread.run(self.lookup.__aenter__())
        except BaseException:
            if self.lookup.places is not None:  # interrupted just when it was entered
                self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._tier.thread.run(self.lookup.__aexit__(kind, error, traceback))


class HostTier(Shared):
    """``aiokv.HostTier`` in a thread; a context manager.

    What isn't said here is as there. A ``stream`` that isn't given is the calling thread's current one.

    Args:
        tier: The tier, not entered.
        thread: Runs its loop: that of its engine, if it has one. By default one of its own, which ends with
            it.

    Attributes:
        tier: As given.
        cache: The tier's.
        block_size: Tokens of one block of the tier.
    """

    def __init__(self, tier: aiokv.HostTier, *, thread: LoopThread | None = None) -> None:
        super().__init__(tier, thread)
        self.tier = tier
        self.cache = tier.cache
        self.block_size = tier.block_size

    def grown(self) -> Future[None]:
        """Over when the pool is as large as it is to be; see ``aiokv.HostTier.grown``."""
        return self.thread.submit(self.tier.grown)

    def lookup(self, hashes: Sequence[Key]) -> Lookup:
        """The longest prefix of blocks that the tier has: ``with tier.lookup(hashes) as hit``."""
        return Lookup(self, self.tier.lookup(hashes))

    def load(self, hit: Lookup, blocks: BlockIds, **options: Unpack[LoadOptions]) -> Future[int]:
        """Bring a prefix into blocks; gives how many are in place. See ``aiokv.HostTier.load``."""
        options["stream"] = self.cache.device.adopt(options.get("stream"))
        return self.thread.submit(lambda: self.tier.load(hit.lookup, blocks, **options))

    def loading(self, hit: Lookup, blocks: BlockIds, **options: Unpack[LoadOptions]) -> Iterator[int]:
        """The same, prefix first: gives how many are in place, each time there are more."""
        options["stream"] = self.cache.device.adopt(options.get("stream"))
        steps = self.thread.call(lambda: self.tier.loading(hit.lookup, blocks, **options))
        return iterate(self.thread, steps)

    def store(self, hashes: Sequence[Key], blocks: BlockIds, **options: Unpack[StoreOptions]) -> Future[int]:
        """Keep blocks; gives how many of the prefix are kept. See ``aiokv.HostTier.store``."""
        options["stream"] = self.cache.device.adopt(options.get("stream"))
        return self.thread.submit(lambda: self.tier.store(hashes, blocks, **options))

    def exists(self, hashes: Sequence[Key]) -> Future[int]:
        """How many blocks of a prefix there are, without holding them."""
        return self.thread.submit(lambda: self.tier.exists(hashes))

    def delete(self, hashes: Sequence[Key]) -> Future[int]:
        """Drop blocks; gives how many were there."""
        return self.thread.submit(lambda: self.tier.delete(hashes))

    def reset(self) -> Future[aiokv.Dropped]:
        """Drop all blocks; over when no copy is going on. See ``aiokv.HostTier.reset``."""
        return self.thread.submit(self.tier.reset)

    def worth_loading(self, n_tokens: int, prefill_rate: float) -> bool:
        """Whether so many tokens are there sooner when loaded than when computed, as measured so far."""
        return self.thread.call(lambda: self.tier.worth_loading(n_tokens, prefill_rate))

    def events(self) -> Iterator[TierEvent]:
        """What is stored and removed from now on; ends when the tier is closed."""
        return iterate(self.thread, self.thread.call(self.tier.events))

    def statistics(self) -> aiokv.TierStatistics:
        """Counts so far, and what is going on. Never blocks."""
        return self.tier.statistics()
