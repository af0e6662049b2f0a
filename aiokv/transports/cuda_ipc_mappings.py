"""Other processes' device memory, mapped once for each incarnation and allocation."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from aiokv.device.gate import gated
from aiokv.device.offloop import off_loop
from aiokv.errors import DeviceError, PeerLostError
from aiokv.transports.cuda_ipc_driver import Allocation, IpcDriver
from aiokv.transports.patience import ended_within

__all__ = ["Mapped", "Mappings", "Wanted"]

#: How long closing waits for calls of the driver, in seconds.
_PATIENCE_S = 2.0


_T = TypeVar("_T")


class Wanted(NamedTuple):
    """An allocation of a producer."""

    #: Which life of which engine it belongs to.
    incarnation: bytes
    handle: bytes
    #: Its address in the producer's process.
    base: int
    nbytes: int
    #: It is of this very process, whose own memory no handle opens.
    own: bool


class Mapped:
    """One allocation, for as long as somebody uses it.

    Args:
        wanted: What it is.
        opening: Addresses of all that are opened together, once they are.
        place: Which of those this is.
    """

    def __init__(self, wanted: Wanted, opening: asyncio.Future[list[int]], place: int) -> None:
        self.wanted = wanted
        self.opening = opening
        self._place = place
        self.users = 0

    @property
    def base(self) -> int:
        """Address of its first byte here; 0 if it couldn't be opened, or isn't yet."""
        if not self.opening.done() or self.opening.exception() is not None:
            return 0
        return self.opening.result()[self._place]


class Mappings:
    """Opens and closes allocations on daemon threads. Used on one loop only.

    Args:
        driver: What opens them.
        device: Whose gate the calls go through.
    """

    def __init__(self, driver: IpcDriver, device: object) -> None:
        self._driver = driver
        self._device = device
        self._known: dict[Wanted, Mapped] = {}
        #: Threads that open or close.
        self._busy: set[asyncio.Future[Any]] = set()

    def __len__(self) -> int:
        """How many are in use."""
        return len(self._known)

    async def acquire(self, wanted: Sequence[Wanted]) -> list[Mapped]:
        """Map what isn't mapped yet; each is to be released once.

        Args:
            wanted: No two of them equal.

        Raises:
            PeerLostError: One can't be mapped, or isn't what the producer says. Nothing is kept.
        """
        new = [each for each in wanted if each not in self._known]
        if new:
            opening = self._call(partial(_open, self._driver, new))
            for place, each in enumerate(new):
                self._known[each] = Mapped(each, opening, place)
        found = [self._known[each] for each in wanted]
        for mapped in found:
            mapped.users += 1
        try:
            for mapped in found:
                await asyncio.shield(mapped.opening)
        except BaseException as error:
            self.release(found)
            if isinstance(error, DeviceError):
                raise PeerLostError(f"its GPU memory can't be mapped here: {error}") from error
            raise
        return found

    async def read(self, mapped: Mapped, nbytes: int) -> bytes:
        """Its first bytes. It stays mapped until its thread has read them, whoever waits for that.

        Raises:
            DeviceError: They can't be read.
        """
        reading = self._call(partial(self._driver.read, mapped.base, nbytes))
        mapped.users += 1
        reading.add_done_callback(lambda _: self.release((mapped,)))
        return await asyncio.shield(reading)

    def release(self, mapped: Sequence[Mapped]) -> None:
        """Let go; what nobody uses any more is unmapped. Nothing may be reading it."""
        unused = []
        for each in mapped:
            each.users -= 1
            if not each.users:
                del self._known[each.wanted]
                unused.append(each)
        for opening in {each.opening for each in unused}:
            opening.add_done_callback(
                partial(self._close, [each for each in unused if each.opening is opening])
            )

    def _close(self, mapped: Sequence[Mapped], opening: asyncio.Future[list[int]]) -> None:
        bases = [each.base for each in mapped if each.base and not each.wanted.own]
        if bases:
            _ = self._call(partial(_close_all, self._driver, bases))

    def _call(self, work: Callable[[], _T]) -> asyncio.Future[_T]:
        """In a thread, and not while the device is busy with what such a call would wait for."""
        calling = off_loop(gated(self._device, work), "aiokv-cuda-ipc")
        self._busy.add(calling)
        calling.add_done_callback(self._over)
        return calling

    def _over(self, work: asyncio.Future[Any]) -> None:
        self._busy.discard(work)
        work.exception()  # seen, for nobody may have waited for it

    async def aclose(self) -> None:
        """Wait for what is being mapped and unmapped, but no longer than a driver's call should take."""
        for _ in range(3):  # what is mapped may have been read meanwhile, and what was read is unmapped
            for _ in range(2):  # the callbacks of what was released in this turn, and theirs
                await asyncio.sleep(0)
            await ended_within(_PATIENCE_S, self._busy, "cuda_ipc")


def _open(driver: IpcDriver, wanted: Sequence[Wanted]) -> list[int]:
    bases: list[int] = []
    try:
        while len(bases) < len(wanted):
            bases.append(_open_one(driver, wanted[len(bases)]))
    except BaseException:
        _close_all(driver, [base for base, each in zip(bases, wanted, strict=False) if not each.own])
        raise
    return bases


def _open_one(driver: IpcDriver, wanted: Wanted) -> int:
    if wanted.own:
        # First, as the driver finds nothing on a GPU that this one can't reach yet. Opening a handle does it.
        driver.reach(wanted.base)
        found = driver.find(wanted.base)
        _check(found, wanted)
        return found.base
    found = driver.open(wanted.handle)
    try:
        _check(found, wanted)
    except DeviceError:
        driver.close(found.base)
        raise
    return found.base


def _check(found: Allocation, wanted: Wanted) -> None:
    # A copy from beyond its end would break this process's GPU context.
    if found.nbytes < wanted.nbytes or (wanted.own and found.base != wanted.base):
        raise DeviceError(f"{found.nbytes} bytes were found instead of {wanted.nbytes}")


def _close_all(driver: IpcDriver, bases: Sequence[int]) -> None:
    for base in bases:
        with contextlib.suppress(DeviceError):  # what can't be unmapped stays, which harms nobody
            driver.close(base)
