"""The router's end of the control channel: hears instances, asks whether they are where they say."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal

from aiokv.control.base import Channel, Port
from aiokv.errors import AiokvError, RemoteProtocolError
from aiokv.router.messages import (
    Abort,
    Aborted,
    Bye,
    FromRouter,
    Heard,
    Report,
    decode_from_instance,
    encode,
)
from aiokv.router.registry import Member, Registry

__all__ = ["Discovery"]

_log = logging.getLogger("aiokv")

#: Aborts that one instance may owe an answer for; beyond them the oldest is given up.
_MOST_ABORTS = 4096
#: Refusals on their way at once; beyond them nobody is told.
_MOST_REFUSALS = 64
#: A timer that comes this late (ns) may have kept reports waiting; those are read before anybody is judged.
_LATE_NS = 20_000_000
#: Sweeps that the lag is of; one comes in three intervals at most.
_SWEEPS = 20
#: How long that reading may take (s).
_READ_S = 0.05


@dataclass(slots=True)
class _Line:
    """What the router has of one instance beside its membership."""

    port: Port
    #: Aborts that were not answered, said again after each report.
    owed: dict[tuple[str, int], Abort] = field(default_factory=dict)
    #: Whether its HTTP address is being asked.
    asking: asyncio.Task[None] | None = None


class Discovery:
    """Keeps a registry by what instances say; an async context manager.

    Args:
        channel: Not started yet; it is closed with this.
        registry: The members.
        ask: Whether a member is at its HTTP address: gives why not, or nothing.
        gone: Called with each member that is one no more, and why.
        clock: Monotonic (ns).

    Attributes:
        address: Where instances reach this router; empty before it is entered.
        garbage: Frames that were no messages.
    """

    def __init__(
        self,
        channel: Channel,
        registry: Registry,
        *,
        ask: Callable[[Member], Awaitable[str]],
        gone: Callable[[Member, str], None],
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._channel = channel
        self._registry = registry
        self._ask = ask
        self._gone = gone
        self._clock = clock
        self._me = os.urandom(16)
        self._lines: dict[bytes, _Line] = {}
        self._timer: asyncio.TimerHandle | None = None  # None while there is no member
        self._timer_at = 0  # what it is set for (ns)
        self._asking: set[asyncio.Task[None]] = set()
        #: Ports to those that were refused, and when they are closed.
        self._refusals: dict[Port, asyncio.TimerHandle] = {}
        self.address = ""
        self.garbage = 0
        self._lags: deque[int] = deque(maxlen=_SWEEPS)

    async def __aenter__(self) -> Discovery:
        """Bind.

        Raises:
            OSError: The address can't be bound.
        """
        self.address = await self._channel.start(self._on_frame)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for closing in self._refusals.values():
            closing.cancel()
        asking = tuple(self._asking)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await self._channel.aclose()

    def abort(self, member: Member, transfer: str, attempt: int, why: str) -> None:
        """Tell an instance that nobody wants a request any more; again after its reports until it answers."""
        line = self._lines.get(member.incarnation)
        if line is None:
            return
        told = Abort(member.incarnation, transfer, attempt, why[:2048])
        if len(line.owed) >= _MOST_ABORTS:
            line.owed.pop(next(iter(line.owed)))
        line.owed[transfer, attempt] = told
        self._say(line.port, told)

    def suspect(self, member: Member) -> None:
        """An instance couldn't be reached: it gets nothing until it reports again."""
        self._registry.suspect(member.incarnation)

    def _on_frame(self, frame: bytes) -> None:
        try:
            message = decode_from_instance(frame)
        except RemoteProtocolError as error:
            self.garbage += 1
            _log.debug("router: %s", error)
            return
        match message:
            case Report():
                self._on_report(message)
            case Bye():
                member = self._registry.bye(message.incarnation, self._channel.sender)
                if member is not None:
                    self._let_go(member, "it said goodbye")
            case Aborted():
                line = self._lines.get(message.incarnation)
                if line is not None:
                    line.owed.pop((message.transfer, message.attempt), None)

    def _on_report(self, report: Report) -> None:
        sender = self._channel.sender
        if sender and not report.address.endswith(f"#{sender}"):
            self.garbage += 1  # its address names another's key; an answer would go there
            return
        was = report.incarnation in self._registry.members
        member, why, ask = self._registry.report(report, self._clock(), sender)
        if member is None:
            if why:
                self._refuse(report, why)
            return
        line = self._lines.get(report.incarnation)
        if line is None:
            try:
                line = self._lines[report.incarnation] = _Line(self._channel.open(report.address))
            except (AiokvError, ValueError) as error:
                # Nobody there could ever be told of an abort; its time is over by itself.
                self._registry.unverified(report.incarnation, str(error))
                _log.warning("router: instance at %.80r can't be answered: %s", report.http, error)
                self._set_timer()
                return
        if not was:
            _log.info("router: %s instance %s joins", member.role, member.http)
        if ask and line.asking is None:
            line.asking = asyncio.get_running_loop().create_task(self._verify(member, line))
            self._asking.add(line.asking)
            line.asking.add_done_callback(self._asking.discard)
        self._answer(member, line)
        for owed in list(line.owed.values()):
            self._say(line.port, owed)
        self._set_timer()

    def _answer(self, member: Member, line: _Line) -> None:
        state: Literal["joining", "up", "refused"] = "joining"
        if member.verified or member.why:
            state = "up" if member.verified else "refused"
        heard = Heard(self._me, member.incarnation, member.report.number, state, member.why)
        self._say(line.port, heard)

    def _refuse(self, report: Report, why: str) -> None:
        """Tell somebody that isn't a member why it isn't; a port for this one frame's sake."""
        _log.info("router: instance at %.80r refused: %s", report.http, why)
        if report.incarnation in self._lines or len(self._refusals) >= _MOST_REFUSALS:
            return  # somebody speaks in a member's name, which is not to be disturbed; or there are many
        try:
            port = self._channel.open(report.address)
        except (AiokvError, ValueError):
            return
        self._say(port, Heard(self._me, report.incarnation, report.number, "refused", why[:2048]))
        # Closing drops what isn't out yet, and connecting takes a while.
        self._refusals[port] = asyncio.get_running_loop().call_later(1.0, self._refused, port)

    def _refused(self, port: Port) -> None:
        del self._refusals[port]
        port.close()

    async def _verify(self, member: Member, line: _Line) -> None:
        try:
            why = await self._ask(member)
        finally:
            line.asking = None
        if self._registry.members.get(member.incarnation) is not member:
            return
        why = why or self._registry.outdone(member)
        if why:
            if why != member.why:
                _log.warning("router: instance at %s is not let in: %s", member.http, why)
            self._registry.unverified(member.incarnation, why)
        else:
            for before in self._registry.verified(member.incarnation):
                self._let_go(before, f"another one, started later, is at {member.http}")
            _log.info("router: %s instance %s is up", member.role, member.http)
        self._answer(member, line)

    def _let_go(self, member: Member, why: str) -> None:
        _log.info("router: %s instance %s is gone: %s", member.role, member.http, why)
        line = self._lines.pop(member.incarnation, None)
        if line is not None:
            line.port.close()
            if line.asking is not None:
                line.asking.cancel()
        self._gone(member, why)

    def _say(self, port: Port, message: FromRouter) -> None:
        try:
            port.send(encode(message))
        except AiokvError as error:  # it doesn't read: its time will be over
            _log.debug("router: %s", error)

    # -- whose time is over

    @property
    def lag(self) -> float:
        """How late the sweep came, at the worst of the last 20 (seconds), which is about a minute."""
        return max(self._lags, default=0) / 1e9

    def _set_timer(self) -> None:
        """One timer for the first whose time may be over; nothing is scheduled while there is nobody."""
        at = self._registry.next_at()
        if at is None or (self._timer is not None and self._timer_at <= at):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._schedule(at)

    def _schedule(self, at: int) -> None:
        self._timer_at = at
        delay = max(0, at - self._clock()) / 1e9
        self._timer = asyncio.get_running_loop().call_later(delay + 0.001, self._on_timer)

    def _on_timer(self) -> None:
        now = self._clock()
        late = now - self._timer_at
        self._lags.append(late)
        self._timer = None
        if late > _LATE_NS:
            # This process was held or stopped. What instances said meanwhile lies unread.
            self._timer = asyncio.get_running_loop().call_later(_READ_S, self._sweep)
            if late > self._patience():
                self._registry.stalled(now)
        else:
            self._sweep()

    def _patience(self) -> float:
        """Lateness (ns) beyond which our own standing still explains what we didn't hear."""
        spans = [each.expires_at - each.heard_at for each in self._registry.members.values()]
        return min(spans, default=0) / 3

    def _sweep(self) -> None:
        self._timer = None
        for member in self._registry.sweep(self._clock()):
            self._let_go(member, "it was silent for three intervals")
        self._set_timer()
