"""What the ends of all links have in common: an id, one way to be lost, and what they refuse."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

from aiokv.device.base import Buffer, Event, Stream
from aiokv.errors import LocalProtocolError, PeerLostError
from aiokv.proto.plan import Chunk, CopyPlan
from aiokv.transports.base import PartId

__all__ = ["LinkEnd", "keep_until_lost"]


class LinkEnd:
    """One end of a link, which refuses every use; a transport's ends override what they can do.

    Belongs to the loop that it was made on, and is used on that loop only.
    """

    def __init__(self, link: bytes, name: str) -> None:
        self._id = link
        #: Name of the transport, for messages.
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._lost = False
        #: Why the link is lost; empty while it isn't.
        self._reason = ""
        self._callbacks: list[Callable[[], None]] = []

    @property
    def id(self) -> bytes:
        """Names the link at both ends."""
        return self._id

    @property
    def lost(self) -> bool:
        """The path is gone, and the other side can touch this side's memory through it no more."""
        return self._lost

    @property
    def pace(self) -> int:
        """1: not faster than host memory."""
        return 1

    @property
    def rate(self) -> int:
        """0: a copy on the host is over when it was submitted."""
        return 0

    def on_lost(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once, in a turn of its own, when the link becomes lost (at once if it is)."""
        if self._lost:
            callback()
        else:
            self._callbacks.append(callback)

    def _lose(self, reason: str) -> None:
        """Become lost, once. Only to be called when nothing of the other side can touch this side."""
        if self._lost:
            return
        self._lost, self._reason = True, reason
        callbacks, self._callbacks = self._callbacks, []
        # A loop that was closed has nobody left to tell: the user abandoned the engine with it.
        if not self._loop.is_closed():
            for callback in callbacks:
                self._loop.call_soon(callback)

    def lost_error(self) -> PeerLostError:
        """What to raise where the link is used although it is lost."""
        return PeerLostError(f"{self._name} link {self._id.hex()[:8]} is lost: {self._reason}")

    def read(self, plan: CopyPlan, chunk: Chunk, dst: Sequence[Buffer], *, stream: Stream) -> Event:
        """One-sided, at the consumer; see ``Link.read``."""
        self._refuse("read")

    def send(
        self, part: PartId, plan: CopyPlan, chunk: Chunk, src: Sequence[Buffer], *, stream: Stream
    ) -> Event:
        """Two-sided, at the producer; see ``Link.send``."""
        self._refuse("send")

    @property
    def writable(self) -> bool:
        """Two-sided, at the producer: whether ``send`` should be called now."""
        return False

    def on_writable(self, callback: Callable[[], None]) -> None:
        """Two-sided, at the producer; any other end is never writable, so never calls."""

    def expect(
        self, part: PartId, plan: CopyPlan, dst: Sequence[Buffer], landed: Callable[[Chunk], None]
    ) -> None:
        """Two-sided, at the consumer; see ``Link.expect``."""
        self._refuse("expect")

    def forget(self, part: PartId) -> Event | None:
        """Two-sided, at the consumer; see ``Link.forget``."""
        self._refuse("forget")

    def close(self) -> None:
        """Give the link up at this end; the other end sees it lost. May be called twice."""
        self._refuse("close")

    def _refuse(self, what: str) -> NoReturn:
        raise LocalProtocolError(f"this end of a {self._name} link has no {what}()")


_End = TypeVar("_End", bound=LinkEnd)


def keep_until_lost(table: dict[bytes, _End], end: _End) -> None:
    """Let ``end`` be found in ``table`` by its link's id, until it is lost."""
    table[end.id] = end

    def forget() -> None:
        table.pop(end.id, None)

    end.on_lost(forget)
