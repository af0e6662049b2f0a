"""The connection of a tier to the owner of the pool that it shares."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Literal

from aiokv.errors import (
    CapacityError,
    LayoutMismatch,
    LocalProtocolError,
    PeerLostError,
    Refused,
    RemoteProtocolError,
)
from aiokv.offload.sharing.door import knock
from aiokv.offload.sharing.form import digest_of
from aiokv.offload.sharing.index import SharedIndex, Then
from aiokv.offload.sharing.line import Line
from aiokv.offload.sharing.mapped import SharedPool
from aiokv.offload.sharing.messages import (
    MOST_FRAME,
    VERSION,
    Attach,
    Detach,
    Done,
    Found,
    FromGuest,
    Kept,
    Mapped,
    Quit,
    Refusal,
    Removed,
    Reset,
    Room,
    Short,
    Welcome,
    frame,
    from_owner,
)
from aiokv.proto.layout import CacheLayout

__all__ = ["Guest"]

_log = logging.getLogger("aiokv")

#: How long an owner may take to answer somebody who comes, in seconds.
_PATIENCE_S = 10.0
#: How long a tier that is closed waits for its last words to be taken, in seconds.
_LEAVE_S = 1.0
#: The same of whatever else it is asked, once to twice; a store may have to wait for another process's.
_SILENCE_S = 20.0
#: After how many seconds a lost owner is looked for, each time twice as many.
_FIRST_S = 0.5
_LAST_S = 30.0
_REFUSALS: dict[str, type[Refused | CapacityError]] = {"layout": LayoutMismatch, "capacity": CapacityError}


class Guest:
    """Belongs to the loop's thread.

    Args:
        path: Where the owner is.
        pool: The places that it gives.
        layout: Of the cache.
        salt: See ``HostTier``.
    """

    def __init__(self, path: str, pool: SharedPool, layout: CacheLayout, salt: bytes = b"") -> None:
        self._path = path
        self._pool = pool
        self._digest = digest_of(layout, salt)
        self._state: Literal["new", "attaching", "there", "lost", "closed"] = "new"
        #: None until it is attached.
        self._line: Line | None = None
        #: Set once the owner has answered: with None, or why not. None unless it is asked.
        self._welcome: asyncio.Future[None] | None = None
        #: What is to get each answer.
        self._asked: dict[int, Then] = {}
        self._number = 0
        #: Looks whether the owner answers; None while nothing is asked. And what was the last question then.
        self._looking: asyncio.TimerHandle | None = None
        self._looked = 0
        #: Tries again, where the owner was lost; None while there is one. And after how many seconds.
        self._retry: asyncio.TimerHandle | None = None
        #: The owner was told that nothing here is in flight.
        self._leaving = False
        self._delay = _FIRST_S
        #: Of the attachment that there is, and of those that were lost, of which things may be in use here.
        self._ticket = -1
        self._owed: list[int] = []
        #: Whether nothing of these is.
        self._idle = True
        #: See ``serve``.
        self._index: SharedIndex | None = None
        self._reset: Callable[[], None] | None = None
        self._lost: Callable[[str], None] | None = None
        self._again: Callable[[], None] | None = None

    def serve(
        self,
        index: SharedIndex,
        *,
        reset: Callable[[], None],
        lost: Callable[[str], None],
        again: Callable[[], None],
    ) -> None:
        """Whom to tell what the owner says.

        Args:
            index: What is held.
            reset: Told that another process dropped all.
            lost: Told why the owner is lost.
            again: Told that there is another one; it gives memory from its first place on.
        """
        self._index, self._reset, self._lost, self._again = index, reset, lost, again

    @property
    def there(self) -> bool:
        """Whether the owner can be asked."""
        return self._state == "there"

    async def attach(self) -> None:
        """Connect, and agree on what a place is.

        Raises:
            CapacityError, LayoutMismatch, Refused: The owner says no.
            PeerLostError: There is none.
        """
        self._welcome = asyncio.get_running_loop().create_future()
        self._knock()
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await self._welcome
        except TimeoutError:
            raise PeerLostError(f"the pool at {self._path} doesn't answer within {_PATIENCE_S} s") from None

    def _knock(self) -> None:
        line = Line(knock(self._path), self._received, self._on_lost, descriptors=True)
        self._line, self._state = line, "attaching"
        line.send(frame(Attach(VERSION, self._digest, self._pool.forms)))

    def _try_again(self) -> None:
        """See whether there is an owner again; until it answers the next attempt waits already."""
        if self._line is not None:
            if self._state == "attaching":  # let in later, it would be kept till this process ends
                self._line.send(frame(Detach()))
            self._line.close()
        self._state = "lost"
        self._delay = min(2 * self._delay, _LAST_S)
        self._retry = asyncio.get_running_loop().call_later(self._delay, self._try_again)
        try:
            self._knock()
        except (PeerLostError, Refused):
            self._state = "lost"

    async def leave(self) -> None:
        """Say that nothing here is in flight, and wait until that is on its way, a second at most.

        An owner that doesn't hear it keeps what is held here until this process is gone.
        """
        if self._line is None or self._state != "there":
            return
        self._leaving = self._idle = True
        self._quit()
        self._line.send(frame(Detach()))
        sent = asyncio.Event()
        self._line.on_idle(sent.set)
        with suppress(TimeoutError):
            async with asyncio.timeout(_LEAVE_S):
                await sent.wait()

    def close(self, *, quiet: bool) -> None:
        """Leave. May be called twice.

        Args:
            quiet: Nothing is in flight. Else the owner keeps what is held here until this process is gone.
        """
        if quiet and self._line is not None and not self._leaving:
            self._idle = True
            self._quit()
            self._line.send(frame(Detach()))
        self._state = "closed"
        if self._retry is not None:
            self._retry.cancel()
        self._pool.end()
        if self._line is not None:
            self._line.close()
        self._answer_all()

    # -- asking

    def ask(self, make: Callable[[int], FromGuest], then: Then) -> None:
        """See ``Owner``.

        Raises:
            CapacityError: It is more than fits into a message.
        """
        if self._state != "there" or self._line is None:
            then(None)
            return
        self._number += 1
        data = frame(make(self._number))
        if len(data) > MOST_FRAME:
            raise CapacityError(
                f"the hashes of one call take {len(data)} bytes, and {MOST_FRAME} can be sent"
            )
        self._asked[self._number] = then
        self._line.send(data)
        if self._looking is None:
            self._look()

    def _look(self) -> None:
        """See that nobody waits for ever, where the owner is stopped, say."""
        if self._looking is not None and any(number <= self._looked for number in self._asked):
            self._looking = None
            if self._line is not None:
                self._line.close()
            self._on_lost(f"it has not answered for {_SILENCE_S} s")
            return
        self._looked = self._number
        loop = asyncio.get_running_loop()
        self._looking = loop.call_later(_SILENCE_S, self._look) if self._asked else None

    def tell(self, message: FromGuest) -> None:
        """See ``Owner``."""
        if self._state == "there" and self._line is not None:
            self._line.send(frame(message))

    def mapped(self, places: int) -> None:
        """See ``Owner``."""
        self.tell(Mapped(places))

    def unused(self) -> None:
        """See ``Owner``."""
        self._pool.forget()
        self._idle = True
        self._quit()

    def _quit(self) -> None:
        """Say that nothing of what was lost is in use: the owner may be the same, and hold it till then."""
        if self._idle and self.there:
            for ticket in self._owed:
                self.tell(Quit(ticket))
            self._owed.clear()

    # -- hearing

    def _received(self, body: bytes) -> None:
        message = from_owner(body)
        if self._state == "attaching":
            self._admitted(message)
            return
        if self._index is None or self._reset is None:
            raise LocalProtocolError("nobody hears what the owner says")
        match message:
            case Found() | Kept() | Done():
                then = self._asked.pop(message.id, None)
                if then is None:
                    raise RemoteProtocolError("an answer to nothing")
                then(message)
            case Removed():
                self._index.removed(message)
            case Reset():
                self._index.reset()
                self._reset()
            case Room():
                if self._line is None or not self._line.fds:
                    raise RemoteProtocolError("a segment without a descriptor")
                self._pool.come(message, self._line.fds.popleft())
            case Short():
                self._pool.short(message.reason)
            case _:
                raise RemoteProtocolError(f"a {type(message).__name__} at a wrong time")

    def _admitted(self, message: object) -> None:
        match message:
            case Welcome():
                try:
                    self._pool.settle(message)
                except LayoutMismatch as error:
                    self._denied(error)
                    return
                self._state, self._ticket = "there", message.ticket
                self._quit()
                if self._retry is not None:
                    self._retry.cancel()
                    self._retry, self._delay = None, _FIRST_S
                if self._welcome is not None and not self._welcome.done():
                    self._welcome.set_result(None)
                elif self._index is not None and self._again is not None:
                    self._index.renew(self._pool.base)
                    self._again()
            case Refusal():
                kind = _REFUSALS.get(message.kind, Refused)
                self._denied(kind(f"the pool at {self._path}: {message.reason}"))
            case _:
                raise RemoteProtocolError(f"a {type(message).__name__} in place of a welcome")

    def _denied(self, error: Exception) -> None:
        if self._welcome is not None and not self._welcome.done():
            self._welcome.set_exception(error)
        else:  # an owner that came after the one that was lost; it is tried again later
            _log.info("another host pool is of no use: %s", error)

    def _on_lost(self, reason: str) -> None:
        was, self._state = self._state, "lost"
        if self._welcome is not None and not self._welcome.done():
            self._welcome.set_exception(PeerLostError(f"the pool at {self._path} is lost: {reason}"))
        if was == "there" and self._index is not None and self._lost is not None:
            self._pool.lose()
            self._idle = False
            self._owed.append(self._ticket)
            self._index.lost(self._pool.base)
            self._lost(reason)
            self._retry = asyncio.get_running_loop().call_later(self._delay, self._try_again)
        self._answer_all()

    def _answer_all(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None
        asked, self._asked = self._asked, {}
        for then in asked.values():
            then(None)
