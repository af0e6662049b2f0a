"""Who connects to the stream channel: a stranger until it has greeted, then a peer that sends frames."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiokv.control.connection import CONTACT, Connection
from aiokv.control.tls import Tls, TlsEnd
from aiokv.control.told import Told
from aiokv.control.wire import GREETING, greeted, take
from aiokv.errors import RemoteProtocolError

__all__ = ["MAX_MEMBERS", "Accepted", "Door"]

#: Connections and ports that one channel has, at most.
MAX_MEMBERS = 1 << 14
# Connections that have not greeted yet; the oldest gives way to a new one.
_MAX_STRANGERS = 64
# One turn's share of the loop: a peer that floods us gets its next turn behind everybody else's callbacks.
_TURN_FRAMES = 256


class Door:
    """Lets peers in.

    Args:
        memory: Where bytes are received.
        tls: The certificates; None without TLS.
        allow: Fingerprints of the certificates that may come in; None: whoever TLS lets in.
        receive: Called for each frame.
        members: Where each connection stands while there is anything of it.
        gone: Called once there isn't.
        told: What the log was told already.
    """

    def __init__(
        self,
        memory: memoryview,
        tls: Tls | None,
        allow: frozenset[str] | None,
        receive: Callable[[bytes], None],
        members: set[object],
        gone: Callable[[object], None],
        told: Told,
    ) -> None:
        self._memory = memory
        self._tls = tls
        self._keyed = tls is not None and tls.mutual
        self._allow = allow
        self._receive = receive
        self._members = members
        self._gone = gone
        self._told = told
        #: Certificate of who sent the frame that is being delivered; empty while none is, and where addresses
        #: name none.
        self.sender = ""
        self._closed = False
        #: Who has not greeted yet, oldest first.
        self._strangers: dict[Accepted, None] = {}

    def accept(self) -> Accepted:
        """What a connection that comes is given to."""
        tls = None if self._tls is None else self._tls.server_end()
        return Accepted(self, self._memory, tls, self._lost, self._told)

    def close(self) -> None:
        """Let nobody in any more, also not whom the loop has accepted and is about to announce."""
        self._closed = True

    def met(self, connection: Accepted) -> None:
        """Somebody has connected."""
        if self._closed or len(self._members) >= MAX_MEMBERS:
            connection.abort()
        elif len(self._strangers) >= _MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            self.knows(oldest)
            oldest.cut("others want to greet")
        self._members.add(connection)
        self._strangers[connection] = None

    def admits(self, certificate: str) -> bool:
        """Whether who shows this certificate may come in."""
        return self._allow is None or certificate in self._allow

    def knows(self, connection: Accepted) -> None:
        """Who connected has greeted, or will not."""
        self._strangers.pop(connection, None)

    def deliver(self, connection: Accepted, frame: bytes) -> None:
        """Hand a frame on."""
        self.sender = connection.peer if self._keyed else ""
        try:
            self._receive(frame)
        except Exception as exc:  # noqa: BLE001 (the callback's, and none of the connection's business)
            asyncio.get_running_loop().call_exception_handler(
                {
                    "message": f"control {connection.name}: error in the callback for a message",
                    "exception": exc,
                }
            )
        finally:
            self.sender = ""

    def _lost(self, connection: Connection) -> None:
        if isinstance(connection, Accepted):
            self.knows(connection)
        self._gone(connection)


class Accepted(Connection):
    """A connection that a peer opened: its greeting, then its frames."""

    def __init__(
        self,
        door: Door,
        memory: memoryview,
        tls: TlsEnd | None,
        lost: Callable[[Connection], None],
        told: Told,
    ) -> None:
        super().__init__("from a stranger", memory, tls, lost, told)
        self._door = door
        self._loop = asyncio.get_running_loop()
        self._patience: asyncio.TimerHandle | None = None  # None before it is connected
        self._next: asyncio.Handle | None = None  # the next turn; receiving pauses until that is through

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The TCP connection is there."""
        where = transport.get_extra_info("peername") or ("a stranger",)  # none if it is gone again
        self.name, self.who = f"connection from {where}", f"connection from {where[0]}"
        self._patience = self._loop.call_later(CONTACT, self.cut, "it has not greeted in time")
        super().connection_made(transport)
        self._door.met(self)

    def secured(self) -> None:
        """See whether this certificate may come in."""
        if not self._door.admits(self.peer):
            self.cut(f"certificate {self.peer or '(none)'} is not allowed")

    def heard(self) -> None:
        """Its greeting, which is answered, then frames."""
        if not self.greeted:
            if not greeted(self.arrived):
                return
            self.greeted = True
            if self._patience is not None:
                self._patience.cancel()
            self._door.knows(self)
            self.write(GREETING)
        if self._next is None:
            self._take()

    def pause_writing(self) -> None:
        """It makes TLS answer and doesn't read the answers; nothing else is written here."""
        self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is left of it."""
        for handle in (self._patience, self._next):
            if handle is not None:
                handle.cancel()
        super().connection_lost(exc)

    def _take(self) -> None:
        """Deliver frames, so many in one turn; no more is received while some are left for the next."""
        paused, self._next = self._next is not None, None
        left, through = _TURN_FRAMES, False
        try:
            while left and not self.closing and (frame := take(self.arrived)) is not None:
                left -= 1
                self._door.deliver(self, frame)
            through = left > 0
        finally:
            # Also when KeyboardInterrupt comes by: what has arrived must not be forgotten.
            if not self.closing and not through:
                self._next = self._loop.call_soon(self._take_next)
            if paused != (self._next is not None):
                self.pause(paused=not paused)

    def _take_next(self) -> None:
        try:
            self._take()
        except RemoteProtocolError as error:
            self.cut(error)
