"""One TCP connection of the stream channel: TLS where there is any, and what both ends have in common."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable

from aiokv.control.tls import TlsEnd
from aiokv.control.told import Told
from aiokv.control.wire import spoken
from aiokv.errors import RemoteProtocolError

__all__ = ["CONTACT", "Connection"]

_log = logging.getLogger("aiokv")

#: Seconds until both ends have greeted; then the connection is given up.
CONTACT = 2.0
#: Bytes that a transport may hold before it says that the peer doesn't read.
_WRITE_AHEAD = 1 << 16
#: Seconds that what a transport holds may take to go out once the connection is closed.
_LINGER = 0.25

# The kernel finds hosts that vanished, so that their connections don't pile up; no timer of ours.
_KEEPALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPALIVE": 60, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}


class Connection(asyncio.BufferedProtocol):
    """What both ends do; each adds what it does once secured, with what it hears, and in the end.

    Args:
        name: How messages call it.
        memory: Where bytes are received. All connections of a loop can share it: what one receives is taken
            out before the loop turns to the next.
        tls: This end of the TLS connection; None without TLS.
        lost: Called when nothing of it is left.
        told: What the log was told already.
    """

    def __init__(
        self,
        name: str,
        memory: memoryview,
        tls: TlsEnd | None,
        lost: Callable[[Connection], None],
        told: Told,
    ) -> None:
        self.name = name
        #: How the log tells peers apart: the name without what is another with each connection.
        self.who = name
        #: Both ends have greeted.
        self.greeted = False
        #: The transport holds as much as it may.
        self.full = False
        #: Fingerprint of the certificate at the other end; empty if it showed none, and before ``secured``.
        self.peer = ""
        #: What has arrived and was not taken yet.
        self.arrived = bytearray()
        self._memory = memory
        self._tls = tls
        self._lost = lost
        self._told = told
        self._began = b""  # the first bytes that the peer sent, with TLS
        #: This side ended it.
        self.ended_here = False
        self._transport: asyncio.Transport | None = None  # None before it is connected
        self._linger: asyncio.TimerHandle | None = None  # None unless it is closing with something to send
        self._over = False  # ``lost`` was called

    # -- what each end adds

    def secured(self) -> None:
        """TLS is up, if there is any; nothing was heard yet."""

    def heard(self) -> None:
        """``arrived`` has grown.

        Raises:
            RemoteProtocolError: The peer says what it must not.
        """

    # -- for those who have one

    @property
    def closing(self) -> bool:
        """Whether nothing can be sent or heard: not connected, or closed by anybody."""
        return self._transport is None or self._transport.is_closing()

    def write(self, data: bytes) -> None:
        """Send bytes; see ``full``."""
        if self._transport is None or self._transport.is_closing():
            return
        if self._tls is not None:
            try:
                data = self._tls.seal(data)
            except ssl.SSLError as error:
                self.cut(f"TLS: {error}")
                return
        self._transport.write(data)

    def pause(self, paused: bool) -> None:
        """Stop receiving, or go on."""
        if self._transport is None or self._transport.is_closing():
            return
        if paused:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def close(self) -> None:
        """End it. What the transport holds has a quarter of a second to go out, if the peer reads at all."""
        self.ended_here = True
        if self._transport is None or self.full:
            self.abort()
        elif not self._transport.is_closing():
            if self._transport.get_write_buffer_size():
                self._linger = asyncio.get_running_loop().call_later(_LINGER, self.abort)
            self._transport.close()

    def abort(self) -> None:
        """End it at once."""
        self.ended_here = True
        if self._transport is not None:
            self._transport.abort()

    def give_up(self) -> None:
        """End it at once, after the attempt to connect it has failed or was cancelled.

        uvloop then closes the transport behind the protocol's back, and never says that the connection is
        lost.
        """
        self.ended_here = True
        if self._transport is not None:
            self._transport.abort()
            asyncio.get_running_loop().call_soon(self.connection_lost, None)

    def cut(self, reason: object) -> None:
        """End it for what the peer did. What is on its way goes out first, such as TLS's alert."""
        self.tell(f"cut: {reason}")
        self.close()

    def tell(self, what: str) -> None:
        """Log it, once for each peer: who is refused comes back, ten times a second."""
        _log.log(self._told.level(self.who, what), "control %s %s", self.name, what)

    # -- what the loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The TCP connection is there."""
        self._transport = transport  # type: ignore[assignment]
        self._transport.set_write_buffer_limits(high=_WRITE_AHEAD)  # type: ignore[union-attr]
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            if hasattr(socket, option):  # each system knows some of them
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        if self._tls is None:
            self.secured()
        else:
            self._send_outgoing(self._tls)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where to receive."""
        return self._memory

    def buffer_updated(self, nbytes: int) -> None:
        """So many bytes were received."""
        try:
            if self._tls is None:
                self.arrived += self._memory[:nbytes]
            else:
                self._decrypt(self._tls, self._memory[:nbytes])
            if self.arrived and not self.closing:
                self.heard()
        except RemoteProtocolError as error:
            self.cut(error)
        except ssl.SSLError as error:
            said = spoken(self._began)
            plain = "" if said.startswith("TLS") else f" (what is there speaks {said})"
            self.cut(f"TLS: {error.reason or error}{plain}")

    def pause_writing(self) -> None:
        """The transport holds as much as it may."""
        self.full = True

    def resume_writing(self) -> None:
        """The transport holds little."""
        self.full = False

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is left of it."""
        if self._linger is not None:
            self._linger.cancel()
        self.arrived.clear()
        if not self._over:
            self._over = True
            self._lost(self)

    def _decrypt(self, tls: TlsEnd, data: memoryview) -> None:
        was_ready = tls.ready
        if not self._began:
            self._began = bytes(data[:8])
        try:
            said = tls.receive(data)
        finally:
            self._send_outgoing(tls)  # where it raises: the alert that tells the peer why
        if tls.ready and not was_ready:
            self.peer = tls.peer
            self.secured()
        self.arrived += said

    def _send_outgoing(self, tls: TlsEnd) -> None:
        if (data := tls.outgoing()) and self._transport is not None:
            self._transport.write(data)
