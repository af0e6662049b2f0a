"""Where the owner of a pool serves one process."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from typing import TYPE_CHECKING

from aiokv.device.host import HostBuffer
from aiokv.errors import CapacityError, LayoutMismatch, Refused, RemoteProtocolError
from aiokv.offload.sharing.line import Line
from aiokv.offload.sharing.messages import (
    VERSION,
    Attach,
    Detach,
    Done,
    FromGuest,
    FromOwner,
    Look,
    Quit,
    Refusal,
    Room,
    Short,
    There,
    frame,
    from_guest,
)
from aiokv.offload.sharing.offers import Guest

if TYPE_CHECKING:
    from aiokv.offload.sharing.owner import HostPool

__all__ = ["Desk", "say_once"]

_log = logging.getLogger("aiokv")

#: How long who connects may take to say what for, in seconds.
_PATIENCE_S = 10.0


class Desk:
    """Where one process is served, from when it connects until it holds nothing."""

    def __init__(self, pool: HostPool, sock: socket.socket, watch: int) -> None:
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        #: A pidfd: can be read once the process is gone.
        self._watch = watch
        self._guest: Guest | None = None
        #: It only asks what is there.
        self._looks = False
        #: See ``Welcome``; -1 before.
        self.ticket = -1
        self._line = Line(sock, self._received, self._lost)
        self._loop.add_reader(watch, self._gone)
        #: Ends what says nothing.
        self._patience = self._loop.call_later(_PATIENCE_S, self._unheard)

    def _unheard(self) -> None:
        _log.info("the host pool at %s gave up a connection that says nothing", self._pool.path)
        self.close()

    def say(self, message: FromOwner) -> None:
        """Send a message, if there is anybody who hears it."""
        self._line.send(frame(message))

    def pass_on(self, room: Room, buffer: HostBuffer) -> None:
        """Give it a segment."""
        if self._guest is not None and buffer.fd is not None:
            self._line.send(frame(room), (buffer.fd,))

    def close(self) -> None:
        """The pool is closed."""
        self._line.close()
        self._end()

    def _end(self) -> None:
        self._patience.cancel()
        if self._watch >= 0:
            self._loop.remove_reader(self._watch)
            os.close(self._watch)
            self._watch = -1
        self._pool.left(self)

    def _received(self, body: bytes) -> None:
        message = from_guest(body)
        if self._looks:
            self._answer(message)
        elif self._guest is None:
            if isinstance(message, Look):
                self._look(message)
            elif isinstance(message, Attach):
                self._attach(message)
            else:
                raise RemoteProtocolError("it says something else before it attaches")
        elif isinstance(message, Detach):
            self.free()
        elif isinstance(message, Quit):
            self._pool.quit(message.ticket)
        else:
            self._pool.shares.receive(self._guest, message)
            self._pool.heard()

    def _look(self, message: Look) -> None:
        if message.version != VERSION:
            self.say(Refusal("refused", f"it speaks version {message.version} and this pool {VERSION}"))
            return
        self._patience.cancel()
        self._looks = True

    def _answer(self, message: FromGuest) -> None:
        if not isinstance(message, There):
            raise RemoteProtocolError(f"a {type(message).__name__} of one that only looks")
        shares = self._pool.shares
        self.say(Done(message.id, shares.there(message.digests, message.keys), shares.table.free))

    def _attach(self, message: Attach) -> None:
        try:
            welcome = self._pool.settle(message)
        except (CapacityError, Refused) as error:
            kind = {LayoutMismatch: "layout", CapacityError: "capacity"}.get(type(error), "refused")
            self.say(Refusal(kind, str(error)))
            return
        self.ticket = welcome.ticket
        self._patience.cancel()
        self._guest = self._pool.shares.attach(message.digest, self.say)
        self.say(welcome)
        for room, fd in self._pool.rooms():
            self._line.send(frame(room), (fd,))
        if self._pool.shortfall:
            self.say(Short(self._pool.shortfall))

    def _lost(self, reason: str) -> None:
        """The connection ended. What the process holds stays its own until it is gone: it may copy on."""
        if self._guest is None:
            self._end()
            return
        self._pool.shares.lost(self._guest)
        _log.info("the host pool at %s lost a tier: %s", self._pool.path, reason)

    def _gone(self) -> None:
        """The process is gone, and with it whatever it had in flight.

        The kernel says so when all of its threads have ended, its memory is unmapped and its devices are
        closed: a GPU's driver has stopped its copies by then.
        """
        self._line.drain()  # it may have said that it has written something, and that it is done
        self.free()

    def free(self) -> None:
        """The process touches nothing any more of what it holds here."""
        self._line.close()
        guest, self._guest = self._guest, None
        self._end()
        if guest is not None:
            self._pool.shares.gone(guest)


def say_once(sock: socket.socket, message: FromOwner) -> None:
    """Say the only thing that a connection hears, as far as it goes at once."""
    with sock:
        try:
            sock.send(frame(message))
        except OSError:
            return
