"""Pinned memory of the host, in rings of slots, through which a GPU's memory goes to transports of the host.

A link has a ring of its own at each end. It is made off the loop, and before the link moves anything;
a slot is free again when the device's copy from or to it is done, by that copy's own event, and the
other side of it (a socket, a peer) has had its turn. When no slot is free what comes waits. A ring
is given back when its link is over and nothing on the device is in flight to or from it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol, cast

from aiokv.device.base import Buffer, Event, StagingDevice, Stream
from aiokv.device.cache import KVCache
from aiokv.device.gate import gated
from aiokv.device.host import HostBuffer
from aiokv.device.offloop import off_loop
from aiokv.device.poller import CompletionPoller
from aiokv.errors import CapacityError, DeviceError
from aiokv.proto.plan import Chunk, CopyPlan
from aiokv.proto.settings import Settings
from aiokv.transports.patience import ended_within

__all__ = [
    "PINNED_BYTES",
    "STAGING_BYTES",
    "Gpu",
    "Pending",
    "Ring",
    "Staging",
    "split",
]

_log = logging.getLogger(__name__)

#: Pinned memory of one link at one end, in bytes, unless something else is asked for; and what all links of
#: one transport pin at most: memory that nothing else on the host can use.
STAGING_BYTES, PINNED_BYTES = Settings().staging_bytes, Settings().pinned_bytes
#: What is moved at a time. Smaller slots cost more turns of the loop, larger ones more time before the
#: first byte and after the last.
_SLOT_BYTES = 16 << 20
#: The least slots that keep a device busy while one is being sent.
_LEAST_SLOTS = 4
_PAGE = 4096
#: How many times the size of a ring here one of a peer's may have; as much as is usual in any case.
_MOST_RINGS = 4
#: How long closing waits for copies that are in flight, in seconds.
_PATIENCE_S = 2.0


class Gpu(StagingDevice, Protocol):
    """What staging in pinned memory needs of a device of the kind ``cuda``."""

    def pin_now(self, host: HostBuffer, *, readonly: bool = False) -> PinnedMemory:
        """Pin host memory, which then belongs to what is returned. Blocks."""


class PinnedMemory(Buffer, Protocol):
    """Host memory that the device copies from and to."""

    @property
    def view(self) -> memoryview:
        """All of it, as bytes."""

    @property
    def fd(self) -> int | None:
        """Its descriptor, where other processes can be given it."""

    def close(self) -> None:
        """Give it back; nothing may be in flight. Blocks."""


def split(plan: CopyPlan, chunk: Chunk, limit: int) -> Iterator[Chunk]:
    """A chunk as chunks of at most ``limit`` bytes, in plan order.

    Raises:
        DeviceError: A piece of it is larger.
    """
    size = plan.copy(chunk).section.piece_bytes
    if size > limit:
        raise DeviceError(
            f"{chunk} has pieces of {size} bytes, and staging memory slots of {limit}; raise `staging`"
        )
    return plan.split(chunk, limit)


class Ring:
    """Pinned memory in slots of one size. Made by ``Staging``.

    Args:
        memory: The memory.
        slot_bytes: Size of a slot.
        poller: Tells when events are done.
        close: Gives the memory back; called once, when that may be done.
    """

    def __init__(
        self, memory: PinnedMemory, slot_bytes: int, poller: CompletionPoller, close: Callable[[Ring], None]
    ) -> None:
        self.memory = memory
        self.slot_bytes = slot_bytes
        self.slots = memory.nbytes // slot_bytes
        self._poller = poller
        self._close = close
        self._free = deque(range(self.slots))
        #: Copies that are in flight.
        self._flying = 0
        self._retired = False

    @property
    def free(self) -> int:
        """How many slots are free."""
        return len(self._free)

    def take(self) -> int:
        """A free slot, which is now its taker's."""
        return self._free.popleft()

    def give(self, slot: int) -> None:
        """A slot is used no more."""
        self._free.append(slot)

    def offset(self, slot: int) -> int:
        """Where a slot begins in the memory, in bytes."""
        return slot * self.slot_bytes

    def address(self, slot: int) -> int:
        """Where a slot begins in this process."""
        return self.memory.address + slot * self.slot_bytes

    def watch(self, event: Event, stream: Stream, then: Callable[[DeviceError | None], None]) -> None:
        """A copy from or to the memory is in flight until ``event`` is done; then call ``then``."""
        self._flying += 1
        self._poller.watch(event, stream, partial(self._landed, then))

    def _landed(self, then: Callable[[DeviceError | None], None], error: DeviceError | None) -> None:
        self._flying -= 1
        then(error)
        if self._retired and not self._flying:
            self._close(self)

    def retire(self) -> None:
        """Give the memory back as soon as nothing is in flight. May be called twice."""
        if self._retired:
            return
        self._retired = True
        if not self._flying:
            self._close(self)


class Staging:
    """One transport's staging memory, and the poller of its copies. Made on the loop.

    Args:
        cache: What is moved; its blocks decide how large a slot is at least.
        nbytes: Size of a ring; it has four slots at least, each at least as large as a block of one layer.
        budget: Bytes that all rings have at most; one is made in any case.
    """

    def __init__(self, cache: KVCache, nbytes: int = STAGING_BYTES, budget: int = PINNED_BYTES) -> None:
        self.device = cast(Gpu, cache.device)
        # A piece of a plan, which can't be divided, is within one block of one layer.
        blocks = [group.block_bytes for group in cache.layout.groups]
        size = max(min(_SLOT_BYTES, nbytes // _LEAST_SLOTS), *blocks)
        self.slot_bytes = -(-size // _PAGE) * _PAGE
        self.slots = max(nbytes // self.slot_bytes, _LEAST_SLOTS)
        self._budget = max(budget, self.nbytes)
        #: Bytes that are pinned, or being pinned or unpinned.
        self._pinned = 0
        self.poller = CompletionPoller(asyncio.get_running_loop())
        self._pinning: set[asyncio.Future[PinnedMemory]] = set()
        self._rings: set[Ring] = set()
        self._closing: set[asyncio.Future[None]] = set()
        #: Set when the last ring was given back.
        self._idle = asyncio.Event()

    @property
    def nbytes(self) -> int:
        """Size of a ring."""
        return self.slots * self.slot_bytes

    @property
    def most(self) -> int:
        """Size of the largest ring of a peer's that is pinned here."""
        return max(_MOST_RINGS * self.nbytes, STAGING_BYTES)

    def stream(self) -> Stream:
        """A side stream of the device."""
        return self.device.stream()

    def check(self, nbytes: int) -> None:
        """See whether so much more may be pinned.

        Raises:
            CapacityError: It may not.
        """
        if self._pinned + nbytes > self._budget:
            raise CapacityError(
                f"staging memory: {self._pinned} of the {self._budget} bytes that all links may have are in "
                f"use, and one more needs {nbytes}; let `pinned` be more, or `staging` less"
            )

    async def ring(
        self,
        make: Callable[[int], HostBuffer] = HostBuffer.allocate,
        slot_bytes: int | None = None,
        nbytes: int | None = None,
    ) -> Ring:
        """New pinned memory, made off the loop; whoever asked for it retires it.

        Args:
            make: Makes the memory, from its size.
            slot_bytes: Size of its slots, where it isn't what is usual here.
            nbytes: Its size, where it isn't what is usual here.

        Raises:
            CapacityError: There isn't so much, or the transport may not have it.
            DeviceError: It can't be pinned.
        """
        pinning = self._pin(make, nbytes or self.nbytes)
        try:
            memory = await asyncio.shield(pinning)
        except asyncio.CancelledError:
            pinning.add_done_callback(self._unwanted)
            raise
        return self._made(memory, slot_bytes)

    def request(
        self,
        then: Callable[[Ring | None, BaseException | None], None],
        make: Callable[[int], HostBuffer] = HostBuffer.allocate,
    ) -> None:
        """The same, for who can't await it: ``then`` gets the ring, or why there is none."""

        def made(pinning: asyncio.Future[PinnedMemory]) -> None:
            error = pinning.exception()
            then(None if error is not None else self._made(pinning.result()), error)

        try:
            self._pin(make, self.nbytes).add_done_callback(made)
        except CapacityError as error:
            _log.warning("a link is refused: %s", error)
            asyncio.get_running_loop().call_soon(then, None, error)

    def _pin(self, make: Callable[[int], HostBuffer], nbytes: int) -> asyncio.Future[PinnedMemory]:
        self.check(nbytes)
        self._pinned += nbytes
        pinning = off_loop(gated(self.device, partial(_pinned, self.device, make, nbytes)), "aiokv-pin")
        self._pinning.add(pinning)
        pinning.add_done_callback(partial(self._over, nbytes))
        return pinning

    def _over(self, nbytes: int, pinning: asyncio.Future[PinnedMemory]) -> None:
        self._pinning.discard(pinning)
        if pinning.exception() is not None:
            self._pinned -= nbytes

    def _made(self, memory: PinnedMemory, slot_bytes: int | None = None) -> Ring:
        ring = Ring(memory, slot_bytes or self.slot_bytes, self.poller, self._give_back)
        self._rings.add(ring)
        return ring

    def _unwanted(self, pinning: asyncio.Future[PinnedMemory]) -> None:
        if pinning.exception() is None:
            self._made(pinning.result()).retire()

    def _give_back(self, ring: Ring) -> None:
        self._rings.discard(ring)
        closing = off_loop(gated(self.device, ring.memory.close), "aiokv-unpin")
        self._closing.add(closing)
        closing.add_done_callback(partial(self._given_back, ring.memory.nbytes))

    def _given_back(self, nbytes: int, closing: asyncio.Future[None]) -> None:
        self._closing.discard(closing)
        self._pinned -= nbytes
        closing.exception()  # seen: a device that is lost unpins nothing
        if not self._rings:
            self._idle.set()

    async def aclose(self) -> None:
        """Give all memory back, once nothing is in flight. May be called twice."""
        # And those who asked for it, whose links are over, retire it.
        await ended_within(_PATIENCE_S, self._pinning, "pinning memory")
        for ring in list(self._rings):
            ring.retire()
        # Better memory that stays pinned than a copy to nowhere.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE_S):
                while self._rings:
                    self._idle.clear()
                    await self._idle.wait()
        await ended_within(_PATIENCE_S, self._closing, "unpinning memory")
        self.poller.close()


def _pinned(device: Gpu, make: Callable[[int], HostBuffer], nbytes: int) -> PinnedMemory:
    host = make(nbytes)
    try:
        return device.pin_now(host)
    except BaseException:
        host.close()
        raise


class Pending:
    """An event that is done when as many copies as were foretold are, and raises when one fails.

    Args:
        left: How many.
    """

    __slots__ = ("_events", "_failure", "left")

    def __init__(self, left: int) -> None:
        #: How many more it is to be told of.
        self.left = left
        self._events: list[Event] = []
        self._failure: DeviceError | None = None

    @property
    def failed(self) -> bool:
        """Whether it was given up, or a copy failed."""
        return self._failure is not None

    def add(self, event: Event) -> None:
        """One more copy is in flight."""
        self._events.append(event)
        self.left -= 1

    def fail(self, error: DeviceError) -> None:
        """No more copies come; the first reason counts."""
        self._failure = self._failure or error

    def done(self) -> bool:
        """Whether nothing is in flight and nothing comes.

        Raises:
            DeviceError: It was given up, and nothing is in flight.
        """
        while self._events:
            try:
                if not self._events[-1].done():
                    return False
            except DeviceError as error:
                self.fail(error)
            self._events.pop()
        if self._failure is not None:
            raise self._failure
        return not self.left
