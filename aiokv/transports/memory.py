"""``memory``: engines of one process read each other's buffers directly.

Used by tests, by the simulation on mocked devices, and by a prefill and a decode engine that
share a process. Nothing but a hub's name is random and nothing depends on time: ids are counted,
and every notice is one turn of the loop away.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING

from aiokv.device.base import Buffer, Device, Event, Stream
from aiokv.errors import ClosedError, LocalProtocolError, PeerLostError
from aiokv.proto.plan import Chunk, CopyPlan
from aiokv.transports.base import Link, PeerInfo
from aiokv.transports.ends import LinkEnd

if TYPE_CHECKING:
    from aiokv.device.cache import KVCache

__all__ = ["MemoryHub", "MemoryTransport"]

#: Of a GPU that copies from or to pinned memory: so many times more is submitted at a time than the host
#: copies, and so many bytes go through PCIe in a nanosecond.
_PACE = 32
_RATE = 60


class MemoryHub:
    """Where the memory transports of one process find each other; give the same one to all.

    Args:
        name: 8 bytes that begin each of its ids, drawn by default: what another process, or another
            hub of this one, tells of itself must not be found here.
    """

    def __init__(self, name: bytes | None = None) -> None:
        self._name = secrets.token_bytes(8) if name is None else name
        self._transports: dict[bytes, MemoryTransport] = {}
        self._issued = 0

    def issue(self) -> bytes:
        """A new id: 16 bytes, the hub's name and a count."""
        self._issued += 1
        return self._name + self._issued.to_bytes(8, "big")

    def enter(self, transport: MemoryTransport) -> bytes:
        """Make ``transport`` found under the name that is returned."""
        token = self.issue()
        self._transports[token] = transport
        return token

    def leave(self, token: bytes) -> None:
        """Make it found no more; a name that isn't known does nothing."""
        self._transports.pop(token, None)

    def find(self, token: bytes) -> MemoryTransport | None:
        """The transport that entered under this name, and hasn't left."""
        return self._transports.get(token)

    def kill(self, transport: MemoryTransport) -> None:
        """As if the engine of ``transport`` had died at once: the ends that others hold are lost.

        Its buffers stay readable, so that a copy in flight may end, but the link it came over is
        lost by then. ``transport`` itself learns nothing, like a process that is killed.
        """
        transport.die()


class MemoryTransport:
    """One engine's end of the paths within this process; see ``Transport`` for the contract."""

    def __init__(self, hub: MemoryHub) -> None:
        self._hub = hub
        #: The cache that is served, and whose device copies; None until started.
        self._cache: KVCache | None = None
        #: This transport's name in the hub; empty while it can't be found there.
        self._token = b""
        #: Ends at this engine by link: what others read through, and what this one reads through.
        self._served: dict[bytes, _ProducerEnd] = {}
        self._reading: dict[bytes, _ConsumerEnd] = {}

    @property
    def name(self) -> str:
        """``"memory"``."""
        return "memory"

    @property
    def one_sided(self) -> bool:
        """True: consumers read."""
        return True

    async def start(self, cache: KVCache, host: str) -> None:
        """Let the engines of this process find ``cache``; ``host`` means nothing here."""
        if self._cache is not None:
            raise LocalProtocolError("this memory transport was started before")
        self._cache = cache
        self._token = self._hub.enter(self)

    def describe(self) -> bytes:
        """This transport's name in the hub."""
        if not self._token:
            raise ClosedError("this memory transport is not started, or it is closed")
        return self._token

    async def connect(self, description: bytes, peer: PeerInfo) -> Link:
        """A path to the engine of this process that sent ``description``."""
        if self._cache is None or not self._token:
            raise ClosedError("this memory transport is not started, or it is closed")
        producer = self._hub.find(description)
        if producer is None:
            raise PeerLostError(f"memory: {peer.address} is not in this process and hub")
        reader = _ConsumerEnd(self._hub.issue(), self._cache.device, producer.show(peer), self._reading)
        reader.other = producer.admit(reader)
        return reader

    def show(self, peer: PeerInfo) -> Sequence[Buffer]:
        """At the producer: the buffers, if they are those that ``peer``'s placement tells of."""
        buffers = self._cache.buffers if self._cache is not None else ()
        if tuple(buffer.nbytes for buffer in buffers) != peer.placement.buffers:
            raise PeerLostError(f"memory: the buffers of {peer.address} are not those of its placement")
        return buffers

    def admit(self, reader: _ConsumerEnd) -> _ProducerEnd:
        """At the producer: its end for a new reader."""
        return _ProducerEnd(reader, self._served)

    def accepted(self, link: bytes) -> Link | None:
        """This engine's end of a link that a consumer opened, until it is lost."""
        return self._served.get(link) if self._token else None

    async def aclose(self) -> None:
        """Leave the hub and close all links. May be called twice."""
        self._hub.leave(self._token)
        self._token = b""
        for end in [*self._served.values(), *self._reading.values()]:
            end.close()

    def die(self) -> None:
        """See ``MemoryHub.kill``."""
        self._hub.leave(self._token)
        self._token = b""
        for served in list(self._served.values()):
            served.reader.producer_gone("the producer died")
        for reading in list(self._reading.values()):
            reading.other.reader_gone("the consumer died")


class _ConsumerEnd(LinkEnd):
    """Reads the producer's buffers, on its own engine's device."""

    #: The producer's end; set as soon as that exists, before anybody sees this one.
    other: _ProducerEnd

    def __init__(
        self, link: bytes, device: Device, theirs: Sequence[Buffer], table: dict[bytes, _ConsumerEnd]
    ) -> None:
        super().__init__(link, "memory")
        self._device = device
        self._theirs = theirs
        #: Where this end is kept until its owner closes it.
        self._table = table
        table[link] = self

    @property
    def pace(self) -> int:
        """As of PCIe, where a GPU is the one that copies."""
        return _PACE if self._device.kind == "cuda" else 1

    @property
    def rate(self) -> int:
        """As of PCIe, where a GPU is the one that copies."""
        return _RATE if self._device.kind == "cuda" else 0

    def read(self, plan: CopyPlan, chunk: Chunk, dst: Sequence[Buffer], *, stream: Stream) -> Event:
        """Enqueue the copy on the consumer's own device and ``stream``."""
        if self.lost:
            raise self.lost_error()
        self._device.copy(plan, chunk, self._theirs, dst, stream=stream)
        return stream.record()

    def close(self) -> None:
        """Read no more; the producer's end is lost. To be called when no read is in flight."""
        self._table.pop(self.id, None)
        self._lose("closed at this end")
        self.other.reader_gone("the consumer closed it")

    def producer_gone(self, reason: str) -> None:
        """The producer closed its end, or died; what is in flight may still read its buffers."""
        self._lose(reason)


class _ProducerEnd(LinkEnd):
    """Knows only whether the consumer may still read: until that closes its own end, or dies."""

    def __init__(self, reader: _ConsumerEnd, table: dict[bytes, _ProducerEnd]) -> None:
        super().__init__(reader.id, "memory")
        self.reader = reader
        self._table = table
        table[self.id] = self

    def close(self) -> None:
        """Tell the consumer; this end is lost when the consumer has closed its own."""
        self.reader.producer_gone("the producer closed it")

    def reader_gone(self, reason: str) -> None:
        """The consumer reads no more."""
        self._table.pop(self.id, None)
        self._lose(reason)
