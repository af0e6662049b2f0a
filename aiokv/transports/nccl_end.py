"""What the two ends of an NCCL link have in common: a line, a communicator, and what is in flight on it.

A link outlives its communicators, which are made when there are bytes to send and let go of when there
have been none for a while. But when one breaks, or either side gives it up, the link is over: it is marked
so on the loop first, then the communicator is aborted off it, and when the events of all that was in flight
are done, since no kernel runs any more, the link is lost. What such an event says is not believed: after an
abort it is done as if the bytes had come.
"""

from __future__ import annotations

import abc
import asyncio
import socket
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Generic, TypeVar

from aiokv.device.offloop import off_loop
from aiokv.errors import DeviceError, PeerLostError
from aiokv.transports.ends import LinkEnd
from aiokv.transports.nccl_calls import Communicator
from aiokv.transports.nccl_home import Home
from aiokv.transports.nccl_line import Dead, Line, Said
from aiokv.transports.nccl_making import Making
from aiokv.transports.nccl_staging import Pool, Slot
from aiokv.transports.patience import Patience

__all__ = ["NcclEnd"]

#: How long a communicator may take to be made, in seconds.
_MAKE_S = 10.0
#: How often a communicator with something in flight is asked whether it is well.
_LOOK_S = 0.1
#: The rate that is expected of a path, in bytes a nanosecond. The poller corrects it by what it sees.
_RATE = 10


#: What one end keeps of each chunk in flight.
_Unit = TypeVar("_Unit")


class NcclEnd(LinkEnd, abc.ABC, Generic[_Unit]):
    """One end of a link.

    Args:
        link: Its id.
        sock: Where both ends have proved themselves; owned from now on.
        home: The transport's.
        pool: Where this end gets its slots.
        rank: Of this end.
    """

    def __init__(self, link: bytes, sock: socket.socket, home: Home, pool: Pool, rank: int) -> None:
        super().__init__(link, "nccl")
        self._home = home
        self._pool = pool
        self._rank = rank
        self._stream = home.device.stream()
        #: The same, as CUDA knows it.
        self._handle: int = self._stream.handle  # type: ignore[attr-defined]
        self._line = Line(sock, self._loop, self._heard, partial(self.kill, tell=False))
        self._epoch = 0
        #: None while there is none to be used.
        self._comm: Communicator | None = None
        #: Slots of this communicator: all of them, and those that no chunk is in.
        self._slots: list[Slot] = []
        self._free: list[Slot] = []
        #: Since when there is one, by the loop's time, and whether it is to be let go of for others' sake.
        self._since = 0.0
        self._yielding = False
        #: What was posted and is not over, oldest first.
        self._flights: deque[list[_Unit]] = deque()
        #: Why the link is over, as soon as it is.
        self._dying = ""
        self._making: Making | None = None
        self._making_for: Patience | None = None
        self._look_at: asyncio.TimerHandle | None = None
        home.ends[self] = None

    @property
    def pace(self) -> int:
        """4: what crosses between GPUs is that much faster than a copy on the host."""
        return 4

    @property
    def rate(self) -> int:
        """As of several network cards."""
        return 100

    # -- what each end does by itself

    @abc.abstractmethod
    def _heard(self, said: Sequence[Said]) -> None:
        """The other end said this."""

    @abc.abstractmethod
    def _up(self) -> None:
        """The communicator can be used."""

    @abc.abstractmethod
    def _arrived(self, units: list[_Unit]) -> None:
        """These were in flight and came across."""

    @abc.abstractmethod
    def _ended(self, units: list[_Unit]) -> None:
        """These were in flight and are no more; nobody knows what became of them."""

    @abc.abstractmethod
    def _quiet(self) -> None:
        """Nothing is in flight."""

    @abc.abstractmethod
    def _give_up(self) -> None:
        """The link is over: what was not posted never will be."""

    @abc.abstractmethod
    def relieve(self) -> None:
        """Others lack memory: let go of the communicator if it is not needed."""

    @abc.abstractmethod
    def _hand_over(self) -> None:
        """Others lack memory: see that the communicator is let go of, although it is needed."""

    # -- turns

    def holds(self, pool: Pool, since: float) -> int:
        """Slots of ``pool`` that it has had since then (the loop's time), and was not asked for."""
        if pool is not self._pool or self._comm is None or self._yielding or self._since > since:
            return 0
        return len(self._slots)

    def hand_over(self) -> None:
        """Its turn is over: others wait for memory. It gets some again in its turn."""
        self._yielding = True
        self._hand_over()

    # -- the communicator

    def _within(self, seconds: float, too_long: str) -> None:
        """What comes next on the way to a communicator must not take longer than this."""
        if self._making_for is not None:
            self._making_for.cancel()
        self._making_for = Patience(seconds, partial(self.kill, too_long))

    def _make_within(self) -> None:
        """The making of a communicator has begun, and must not take for ever."""
        self._within(_MAKE_S, f"no communicator was made within {_MAKE_S:g} s")

    def _make(self, name: bytes, nonce: bytes) -> None:
        home = self._home
        making = self._making = Making(
            home.calls,
            home.gate,
            home.device.ordinal,
            home.current,
            self._stream,
            self._handle,
            self._slots,
            self._rank,
            name,
            nonce,
        )
        making.begin().add_done_callback(partial(self._made, making))

    def _made(self, making: Making, future: asyncio.Future[Communicator]) -> None:
        error = future.exception()
        if making is not self._making:  # given up meanwhile
            if error is None:
                self._abort(future.result())
            self._pool.give(making.slots)
            self._home.leave(-1)
            return
        self._making = None
        if self._making_for is not None:
            self._making_for.cancel()
        if error is not None:
            self.kill(f"no communicator could be made: {error}")
            return
        self._comm, self._since = future.result(), self._loop.time()
        self._up()

    def _abort(self, comm: Communicator) -> None:
        home, idle = self._home, not self._flights

        def abort(kept: Home = home) -> None:
            """If it never returns, the staging memory may be written for ever, and so is kept."""
            home.calls.use(home.device.ordinal)
            with home.gate.call(waits=idle):
                comm.abort()

        def ended(future: asyncio.Future[None]) -> None:
            future.exception()  # nothing can be done about it
            home.leave(-1)

        home.leave(1)
        off_loop(abort, "aiokv-nccl-abort").add_done_callback(ended)

    def _let_go(self) -> None:
        """The communicator is not needed now, and nothing is in flight on it at either end."""
        comm, self._comm = self._comm, None
        slots, self._slots, self._free = self._slots, [], []
        self._yielding = False
        if comm is not None:
            self._abort(comm)
        self._pool.give(slots)

    # -- what is in flight

    def _fly(self, units: list[_Unit], nbytes: int) -> None:
        """These were just enqueued."""
        self._flights.append(units)
        try:
            event = self._stream.record()
        except DeviceError as error:  # then nobody will ever know when it is over
            self.kill(str(error))
            return
        self._home.poller.watch(event, self, self._over, expected_ns=nbytes // _RATE)
        if self._look_at is None:
            self._look_at = self._loop.call_later(_LOOK_S, self._look)

    def _look(self) -> None:
        self._look_at = None
        if error := self._comm.error() if self._comm is not None else "":
            self.kill(error)
        elif self._flights:
            self._look_at = self._loop.call_later(_LOOK_S, self._look)

    def _over(self, error: DeviceError | None) -> None:
        """The event of the oldest flight is done."""
        units = self._flights.popleft()
        why = "" if error is None else str(error)
        if not self._dying and self._comm is not None:
            why = why or self._comm.error()
        if self._dying or why:
            self._ended(units)
            self.kill(why)
            self._settle()
            return
        self._arrived(units)
        if not self._flights and not self._dying:
            if self._look_at is not None:
                self._look_at.cancel()
                self._look_at = None
            self._quiet()

    # -- the end

    def close(self) -> None:
        """Give the link up. It is lost when nothing of it is in flight at this end any more."""
        self.kill("closed at this end")

    def kill(self, reason: str, *, tell: bool = True) -> None:
        """The link is over: from now on nothing is posted, nothing lands, and no event is believed."""
        if self._dying or self._lost:
            return
        self._dying = reason
        if tell:
            self._line.say(Dead(self._epoch))
        self._line.close()
        for timer in (self._making_for, self._look_at):
            if timer is not None:
                timer.cancel()
        self._pool.leave(self)
        making, self._making = self._making, None
        if making is not None:
            making.abandon()
            self._slots = []  # its thread has them
            self._home.leave(1)
        self._give_up()
        comm, self._comm = self._comm, None
        if comm is not None:
            self._abort(comm)
        self._settle()

    def _settle(self) -> None:
        """See whether the end is reached: nothing is posted any more, and what was is over."""
        if self._lost or self._flights:
            return
        self._home.ends.pop(self, None)
        slots, self._slots, self._free = self._slots, [], []
        self._pool.give(slots)
        self._lose(self._dying)

    def dying_error(self) -> PeerLostError:
        """What to raise where the link is used although it is over."""
        return PeerLostError(f"nccl link {self._id.hex()[:8]} is over: {self._dying or self._reason}")
