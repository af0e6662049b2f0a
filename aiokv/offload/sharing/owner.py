"""``HostPool``: host memory for KV blocks that several processes of one host share."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import secrets
import socket
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Literal, Self

from aiokv.device.host import HostBuffer, available_bytes
from aiokv.device.offloop import off_loop
from aiokv.errors import AiokvError, CapacityError, ClosedError, LayoutMismatch, Refused
from aiokv.offload.outlasting import until_over
from aiokv.offload.policies import Admission, Policy, policy_named
from aiokv.offload.settings import size_of
from aiokv.offload.sharing.desk import Desk, say_once
from aiokv.offload.sharing.door import bound, checked_path, same_user, unbound, watched
from aiokv.offload.sharing.form import GroupForm, differences, place_bytes, segment_bytes
from aiokv.offload.sharing.messages import (
    VERSION,
    Attach,
    Refusal,
    Room,
    Short,
    Welcome,
)
from aiokv.offload.sharing.shares import Shares
from aiokv.transports.staging_shared import shared

__all__ = ["HostPool", "PoolStatistics"]

_log = logging.getLogger("aiokv")

#: Connections at a time; further ones are closed.
_MOST_GUESTS = 1024
#: Segments, so that descriptors suffice.
_MOST_SEGMENTS = 128
#: Places; an index of as many takes some GiB.
_MOST_PLACES = 1 << 25
#: How long a store waits for what another process stores, in seconds: once to twice that.
_PATIENCE_S = 5.0
#: What accept() says when this process or machine is short of descriptors or memory.
_SHORT = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatistics:
    """What a pool has, and what goes on there.

    Attributes:
        guests: Tiers that share it.
        guests_lost: Those whose connection ended and whose process is there: what they hold stays theirs.
        places: Blocks that there is room for, so far.
        places_wanted: Blocks that there will be room for; 0 until the first tier came.
        places_used: Places with a block in them, or being written.
        places_pinned: Places that a tier holds.
        places_pending: Places that a tier writes.
        waiting: Stores that wait for another tier's.
        evicted_blocks: Blocks that went for others.
        pool_bytes: Bytes of memory that it has taken.
    """

    guests: int
    guests_lost: int
    places: int
    places_wanted: int
    places_used: int
    places_pinned: int
    places_pending: int
    waiting: int
    evicted_blocks: int
    pool_bytes: int


class HostPool:
    """Host memory that the tiers of several processes share: each finds what the others stored.

    An async context manager; it belongs to the thread of the loop that it was entered on. ``python -m aiokv
    pool`` is one as a program. The first tier that comes says how large a block is. ::

        async with aiokv.HostPool("/run/aiokv/pool", capacity="64GiB"):
            ...
        # in each of the others
        async with aiokv.HostTier(cache, pool="/run/aiokv/pool") as tier:
            ...

    Processes of this user, and no others, can share it. What a process holds is held until it says that it
    doesn't, or is gone: it may have copies going on.

    Args:
        path: Of its socket, at most 107 bytes. One that was left behind is replaced.
        capacity: Host memory for blocks: bytes, or text such as ``"64GiB"``.
        policy: As of ``HostTier``.
        admission: As of ``HostTier``.
        segment_bytes: Memory is made, and pinned by each process, in pieces of about this size.

    Raises:
        TypeError: An argument of the wrong kind.
        ValueError: One that can't be meant.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        capacity: int | str,
        policy: str | Policy = "lru",
        *,
        admission: Admission | None = None,
        segment_bytes: int | str = 256 << 20,
    ) -> None:
        if admission is not None and not isinstance(admission, Admission):
            raise TypeError(f"admission has what aiokv.offload.policies.Admission has, not {admission!r}")
        self.path = checked_path(path)
        self._capacity = size_of(capacity, "capacity")
        self._segment_bytes = size_of(segment_bytes, "segment_bytes")
        self._shares = Shares(policy_named(policy), admission, self._on_distrusted)
        self._state: Literal["new", "open", "closed"] = "new"
        #: Listens; None unless open.
        self._sock: socket.socket | None = None
        #: Looks for stores that wait too long for others; None while none waits.
        self._looking: asyncio.TimerHandle | None = None
        #: Set while nobody is let in for want of descriptors.
        self._pause: asyncio.TimerHandle | None = None
        self._desks: dict[Desk, None] = {}
        #: What a place is; empty until the first tier came.
        self._groups: tuple[GroupForm, ...] = ()
        self._places = 0
        self._each = 1
        self._segments: list[tuple[Room, HostBuffer]] = []
        #: Why there will be no more segments; empty while there may.
        self._shortfall = ""
        #: Makes the segments; None until the first tier came.
        self._growing: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<HostPool {self._state} at {self.path}, {len(self._desks)} tiers>"

    async def __aenter__(self) -> Self:
        """Listen. Memory is taken when the first tier comes.

        Raises:
            BusyError: A pool is there already.
            CapacityError: The machine hasn't so much memory.
            ClosedError: It was entered before.
            DeviceError: There can be no socket there.
            ValueError: Something else than a socket is there.
        """
        if self._state != "new":
            raise ClosedError(f"a pool can be entered once; this one is {self._state}")
        self._state = "closed"
        available = await off_loop(available_bytes, "aiokv-pool")
        if available is not None and self._capacity > available:
            raise CapacityError(
                f"capacity: {self._capacity} bytes of host memory, and {available} are available"
            )
        binding = off_loop(partial(bound, self.path), "aiokv-pool")
        cancelled = await until_over(binding)
        sock = binding.result()
        if cancelled is not None:
            await until_over(off_loop(partial(unbound, self.path, sock), "aiokv-pool"))
            raise cancelled
        self._sock, self._state = sock, "open"
        asyncio.get_running_loop().add_reader(self._sock.fileno(), self._accept)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Let go of the socket, and of all tiers: they keep what they mapped. May be called twice."""
        sock, self._sock = self._sock, None
        self._state = "closed"
        if sock is None:
            return
        asyncio.get_running_loop().remove_reader(sock.fileno())
        for timer in (self._pause, self._looking):
            if timer is not None:
                timer.cancel()
        for desk in list(self._desks):
            desk.close()
        cancelled = await until_over(off_loop(partial(unbound, self.path, sock), "aiokv-pool"))
        if self._growing is not None:
            cancelled = await until_over(self._growing) or cancelled
        buffers, self._segments = [buffer for _, buffer in self._segments], []
        cancelled = await until_over(off_loop(partial(_close_all, buffers), "aiokv-pool")) or cancelled
        if cancelled is not None:
            raise cancelled

    def statistics(self) -> PoolStatistics:
        """What there is, and what goes on."""
        table, guests = self._shares.table, list(self._shares.guests)
        return PoolStatistics(
            guests=sum(guest.there for guest in guests),
            guests_lost=sum(not guest.there for guest in guests),
            places=table.capacity,
            places_wanted=self._places,
            places_used=table.capacity - table.free,
            places_pinned=table.in_use,
            places_pending=table.pending,
            waiting=sum(len(guest.waiting) for guest in guests),
            evicted_blocks=self._shares.evicted,
            pool_bytes=sum(buffer.nbytes for _, buffer in self._segments),
        )

    # -- who comes

    def _accept(self) -> None:
        if self._sock is None:
            return
        try:
            sock, _ = self._sock.accept()
        except OSError as error:
            if error.errno in _SHORT:
                # The socket stays readable, so going on would spin; others may give some back.
                loop = asyncio.get_running_loop()
                loop.remove_reader(self._sock.fileno())
                self._pause = loop.call_later(1.0, self._resume)
            return
        sock.setblocking(False)
        try:
            if len(self._desks) >= _MOST_GUESTS:
                raise Refused(f"{_MOST_GUESTS} tiers share this pool already")
            if not same_user(sock):
                raise Refused("this pool is another user's")
            watch = watched(sock)
        except (Refused, OSError) as error:
            _log.warning("the host pool at %s refused a process: %s", self.path, error)
            say_once(sock, Refusal("refused", str(error)))
            return
        self._desks[Desk(self, sock, watch)] = None

    def _resume(self) -> None:
        self._pause = None
        if self._sock is not None:
            asyncio.get_running_loop().add_reader(self._sock.fileno(), self._accept)

    def settle(self, attach: Attach) -> Welcome:
        """Agree on what a place is.

        Raises:
            CapacityError: There is no room for a single one.
            LayoutMismatch: It is something else here.
            Refused: It speaks otherwise.
        """
        if attach.version != VERSION:
            raise Refused(
                f"it speaks version {attach.version} and this pool {VERSION}: use one aiokv for all"
            )
        if not self._groups:
            size = place_bytes(attach.groups)
            if size > self._capacity:
                raise CapacityError(
                    f"the capacity of {self._capacity} bytes has no room for one block, which takes {size}"
                )
            if any(group.nbytes % 2 for group in attach.groups if group.split):
                raise LayoutMismatch("K and V of a block are not of the same size")
            if self._capacity // size > _MOST_PLACES:
                raise CapacityError(
                    f"blocks of {size} bytes are too small for a capacity of {self._capacity}: that would be "
                    f"more than {_MOST_PLACES} of them"
                )
            self._groups = attach.groups
            self._places = self._capacity // size
            # Each process has two descriptors of each segment, and usually no more than a thousand.
            each = max(self._segment_bytes, -(-self._capacity // _MOST_SEGMENTS))
            self._each = max(1, min(self._places, each // size))
            self._growing = asyncio.get_running_loop().create_task(self._grow())
        elif found := differences(attach.groups, self._groups):
            raise LayoutMismatch(f"this cache's blocks and the pool's differ: {found}")
        return Welcome(self._places, self._each, self._groups, secrets.randbits(62))

    def quit(self, ticket: int) -> None:
        """A process touches nothing any more of what it held by a connection that it lost."""
        for desk in list(self._desks):
            if desk.ticket == ticket:
                desk.free()

    def rooms(self) -> list[tuple[Room, int]]:
        """The segments so far, and their descriptors."""
        return [(room, buffer.fd) for room, buffer in self._segments if buffer.fd is not None]

    @property
    def shortfall(self) -> str:
        """Why there will be no more segments; empty while there may."""
        return self._shortfall

    @property
    def shares(self) -> Shares:
        """Who holds what."""
        return self._shares

    def heard(self) -> None:
        """A tier said something: see that none of them waits for ever."""
        if self._looking is None and self._shares.waiting:
            self._looking = asyncio.get_running_loop().call_later(_PATIENCE_S, self._look)

    def _look(self) -> None:
        self._looking = None
        self._shares.give_up_old()
        self.heard()

    def left(self, desk: Desk) -> None:
        """It is through with its process."""
        self._desks.pop(desk, None)

    # -- memory

    async def _grow(self) -> None:
        first = 0
        try:
            while first < self._places:
                places = min(self._each, self._places - first)
                nbytes = segment_bytes(self._groups, places)
                buffer = await off_loop(partial(shared, nbytes), "aiokv-pool")
                room = Room(first, places, nbytes)
                self._segments.append((room, buffer))
                first += places
                if self._sock is None:  # closed meanwhile
                    return
                self._shares.table.grow(places)
                for desk in self._desks:
                    desk.pass_on(room, buffer)
        except AiokvError as error:
            self._shortfall = str(error)
            _log.warning("the host pool at %s has %d of %d places: %s", self.path, first, self._places, error)
            for desk in self._desks:
                desk.say(Short(self._shortfall))

    def _on_distrusted(self, error: Exception) -> None:
        _log.error("the host pool's policy failed and was replaced by LRU: %r", error)


def _close_all(buffers: list[HostBuffer]) -> None:
    for buffer in buffers:
        buffer.close()
