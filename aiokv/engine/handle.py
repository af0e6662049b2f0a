"""What offers and fetches have in common: beginning, waiting, giving up, and being over.

A handle is an async context manager. Inside, the transfer runs; leaving normally waits until it is
over; leaving by an exception gives it up on both sides. In either case what comes after the
``async with`` can use the blocks: nothing in flight touches them any more.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from aiokv.engine.course import Course
from aiokv.errors import AiokvError, LocalProtocolError, TransferAborted
from aiokv.proto.layout import CacheLayout
from aiokv.proto.transfers import Part, Transfer

__all__ = ["Handle", "Progress", "Pump"]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a transfer has got, at one moment.

    Attributes:
        bytes_moved: Bytes so far: in place (fetch), handed over to a transport that sends, or
            read by readers that confirmed all of it (offer).
        bytes_total: Bytes that the transfer moves in all, over the parts whose other side is
            known; 0 while none is.
        layers: Layers that are in place (fetch), or announced as ready (offer).
        parts: Parts (pairs of engines) by state: ``offered``, ``granted``, ``moving``,
            ``draining``, ``landed``, ``failed``, ``aborted``.
        transports: Names of the transports that carry it, as far as they are known.
    """

    bytes_moved: int
    bytes_total: int
    layers: int
    parts: dict[str, int]
    transports: tuple[str, ...]


class Pump(Protocol):
    """What a handle needs of its engine's core."""

    @property
    def layout(self) -> CacheLayout:
        """Layout of the engine's cache."""

    def abort(self, transfer: Transfer, error: AiokvError, reason: str) -> None:
        """Give a transfer up on both sides."""

    def explain(self, part: Part) -> str:
        """What a part waits for, in words."""

    def woke(self, transfer: Transfer) -> None:
        """A task that waited for the end of a transfer runs again."""


class Handle(ABC):
    """A transfer of either role: begun once, waited for by any number of tasks, given up or over.

    Args:
        core: Carries it out.
        course: What the core notes of it.
        begin: Takes the blocks and registers it; raises where that can't be.
    """

    def __init__(self, core: Pump, course: Course, begin: Callable[[], None]) -> None:
        self._core = core
        self._course = course
        self._transfer = course.transfer
        self._begin = begin
        self._begun = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._transfer} {self.explain()}>"

    @property
    def transfer_id(self) -> str:
        """The id that the router or caller issued."""
        return self._transfer.tid

    @property
    def attempt(self) -> int:
        """Which attempt at this id it is."""
        return self._transfer.attempt

    @property
    def error(self) -> AiokvError | None:
        """Why the transfer failed, as far as it has; None while all is well."""
        return self._transfer.error

    @property
    def progress(self) -> Progress:
        """How far it has got."""
        parts: dict[str, int] = {}
        for part in self._transfer.parts:
            parts[part.state.value] = parts.get(part.state.value, 0) + 1
        return Progress(
            bytes_moved=self._course.bytes_moved,
            bytes_total=self._course.bytes_total,
            layers=self._layers().bit_count(),
            parts=parts,
            transports=tuple(sorted({part.link for part in self._transfer.parts if part.link})),
        )

    @abstractmethod
    def _layers(self) -> int:
        """Layers that are in place (fetch), or announced as ready (offer), as a bit mask."""

    def explain(self) -> str:
        """One line for a person: what each part waits for, and for how long it still may."""
        if not self._begun:
            return "not begun"
        return "; ".join(self._core.explain(part) for part in self._transfer.parts)

    def done(self) -> bool:
        """Whether the transfer is over, and its blocks quiet and given back. Never blocks."""
        return self._course.over

    def start(self) -> None:
        """Begin without ``async with``; then ``wait`` (or ``cancel`` and ``wait``) ends it.

        Raises:
            LocalProtocolError: It was begun before.
            InvalidBlocks, BusyError, CapacityError, ClosedError: It can't begin; nothing was taken.
        """
        if self._begun:
            raise LocalProtocolError(f"transfer {self._transfer} was begun before")
        self._begin()
        self._begun = True

    def cancel(self, reason: str = "cancelled") -> None:
        """Give the transfer up on both sides. Never blocks; ``wait`` tells when it is quiet.

        Raises:
            LocalProtocolError: It was not begun; it would begin all the same when it is.
        """
        if not self._begun:
            raise LocalProtocolError(f"transfer {self._transfer} was not begun")
        error = TransferAborted(f"transfer {self._transfer}: {reason}")
        self._core.abort(self._transfer, error, "cancelled")

    async def wait(self) -> None:
        """Wait until the transfer is over and nothing in flight touches its blocks.

        Any number of tasks may wait; cancelling one of them changes nothing for the transfer.

        Raises:
            LocalProtocolError: It was not begun.
            AiokvError: The transfer failed; which error says why.
        """
        if not self._begun:
            raise LocalProtocolError(f"transfer {self._transfer} was not begun")
        await self._course.quiet()
        self._core.woke(self._transfer)
        self._raise()

    def _raise(self) -> None:
        self._course.observed = True
        if self._transfer.error is not None:
            raise _again(self._transfer.error)

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            await self._give_up(error)
            return
        try:
            self._complete()
            await self.wait()
        except BaseException as failure:  # we are cancelled, or layers can't be announced
            await self._give_up(failure)
            raise

    def _complete(self) -> None:  # noqa: B027 (a fetch has nothing to do)
        """The body of the ``async with`` was left normally."""

    async def _give_up(self, error: BaseException) -> None:
        """Abort, and come back only once the blocks are quiet, however often we are cancelled."""
        self._course.observed = True
        cancelled = isinstance(error, asyncio.CancelledError)
        if not self._transfer.resolved:
            what = "cancelled" if cancelled else f"{type(error).__name__}: {error}"
            abort = TransferAborted(f"transfer {self._transfer}: {what}")
            self._core.abort(self._transfer, abort, "cancelled" if cancelled else "failed")
        again: asyncio.CancelledError | None = None
        while not self._course.over:
            try:
                await self._course.quiet()
            except asyncio.CancelledError as more:
                again = more
        if again is not None and not cancelled:
            raise again


def _again(error: AiokvError) -> AiokvError:
    """A fresh copy to raise: several tasks may raise the same error, each with its own traceback."""
    copy = type(error)(*error.args)
    copy.__cause__ = error.__cause__
    return copy
