"""Checksums of some of the blocks, made when they are stored and looked at when they are loaded.

They find what happens to a block in between: memory that goes bad, a stray write. The hash is xxh3 where
``xxhash`` is installed (``pip install 'aiokv[checksums]'``), and zlib's CRC-32 elsewhere, which comes with
Python and misses one such damage in 2**32; neither is proof against somebody who means to deceive. At about
8 GB/s for the one, and 1 GB/s for the other, the host can't look at every block as fast as PCIe brings them.
So a share of the blocks is drawn, and hashed in slices of the loop's time.
"""

from __future__ import annotations

import asyncio
import random
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Protocol

from aiokv.offload.policies import Key

__all__ = ["Checksums", "hasher"]

#: Bytes that are hashed in one go; xxhash gives up the GIL from 64 KiB on, and takes some 30 us for these.
_SLICE = 256 << 10
#: Slices of one turn of the loop.
_SLICES = 2


class Hash(Protocol):
    """A hash under way."""

    def update(self, data: memoryview) -> None:
        """More bytes."""

    def intdigest(self) -> int:
        """Of all bytes so far."""


class _Crc:
    """CRC-32 in the form of a hash."""

    __slots__ = ("_value",)

    def __init__(self) -> None:
        self._value = 0

    def update(self, data: memoryview) -> None:
        self._value = zlib.crc32(data, self._value)

    def intdigest(self) -> int:
        return self._value


def hasher() -> Callable[[], Hash]:
    """The best hash that is installed."""
    try:
        from xxhash import xxh3_64
    except ModuleNotFoundError:
        return _Crc
    made: Callable[[], Hash] = xxh3_64
    return made


class Checksums:
    """Belongs to the loop's thread.

    Args:
        loop: Whose turns are used.
        share: Of the stored blocks, 0 to 1.
        views: The bytes of a place.
        seed: Of the draw.
        make: Starts a hash.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        share: float,
        views: Callable[[int], Iterator[memoryview]],
        *,
        seed: int | None = None,
        make: Callable[[], Hash] | None = None,
    ) -> None:
        self._loop = loop
        self._share = share
        self._views = views
        self._random = random.Random(seed)  # noqa: S311 - a sample, not a secret
        self._make = make or hasher()
        self._known: dict[Key, int] = {}
        #: Hashes under way, and what to call where one is given up.
        self._queue: deque[tuple[Iterator[None], Callable[[], None]]] = deque()
        self._turn: asyncio.Handle | None = None
        #: Blocks that were looked at when they were loaded, and those of them that had changed.
        self.checked = 0
        self.failed = 0

    def __len__(self) -> int:
        """Blocks whose checksum is known."""
        return len(self._known)

    def sampled(self, places: Sequence[int]) -> list[int]:
        """Which of some blocks to make a checksum of."""
        if not self._share:
            return []
        draw = self._random.random
        return [place for place in places if draw() < self._share]

    def known(self, keys: Collection[Key]) -> bool:
        """Whether there is a checksum of any of these."""
        return bool(self._known) and not self._known.keys().isdisjoint(keys)

    def forget(self, keys: Collection[Key]) -> None:
        """These blocks are gone."""
        if self._known:
            for key in keys:
                self._known.pop(key, None)

    def forget_all(self) -> None:
        """All blocks are gone."""
        self._known.clear()

    def make(self, key: Key, place: int, done: Callable[[bool], None]) -> None:
        """Make a block's checksum; then call ``done`` with whether there is one."""

        def over(digest: int) -> None:
            self._known[key] = digest
            done(True)

        self._add(place, over, lambda: done(False))

    def check(self, key: Key, place: int, done: Callable[[bool], None]) -> None:
        """Call ``done`` with whether a block is what it was; at once where it has no checksum."""
        expected = self._known.get(key)
        if expected is None:
            done(True)
            return

        def over(digest: int) -> None:
            self.checked += 1
            self.failed += digest != expected
            done(digest == expected)

        self._add(place, over, lambda: done(True))

    def close(self) -> None:
        """Hash nothing more; whoever waits is called now. May be called twice."""
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None
        while self._queue:
            self._queue.popleft()[1]()

    def _add(self, place: int, over: Callable[[int], None], given_up: Callable[[], None]) -> None:
        self._queue.append((self._hashed(place, over), given_up))
        if self._turn is None:
            self._turn = self._loop.call_soon(self._work)

    def _hashed(self, place: int, over: Callable[[int], None]) -> Iterator[None]:
        state, done = self._make(), 0
        for view in self._views(place):
            for start in range(0, len(view), _SLICE):
                part = view[start : start + _SLICE]
                state.update(part)
                done += len(part)
                if done >= _SLICE:
                    done = 0
                    yield
        over(state.intdigest())

    def _work(self) -> None:
        self._turn = None
        for _ in range(_SLICES):
            if not self._queue:
                return
            try:
                next(self._queue[0][0])
            except StopIteration:
                self._queue.popleft()
        if self._queue:
            self._turn = self._loop.call_soon(self._work)
