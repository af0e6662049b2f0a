"""``tcp``: the producer sends over TCP, by one connection or several for each link.

The consumer dials. Bytes go from memory to the socket and from the socket to memory, without
serialization and without a copy in between; those of a GPU by way of pinned memory (``staging``),
chunk by chunk. The two ends may have different kinds of memory. Each connection proves that both ends
know the token; the data on them is neither encrypted nor authenticated.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

from aiokv.errors import CapacityError, ClosedError, DeviceError, LocalProtocolError, PeerLostError
from aiokv.transports.base import Link, PeerInfo
from aiokv.transports.dialling import Place, dial_more, open_place
from aiokv.transports.ends import keep_until_lost
from aiokv.transports.greeting import greet, join
from aiokv.transports.handshake import MAX_STREAMS, STREAMS
from aiokv.transports.listener import Listener
from aiokv.transports.receiver import Receiver
from aiokv.transports.sender import Sender
from aiokv.transports.staging import PINNED_BYTES, STAGING_BYTES, Ring, Staging
from aiokv.transports.staging_receiver import StagedReceiver
from aiokv.transports.staging_sender import StagedSender
from aiokv.transports.stream import StreamEnd
from aiokv.transports.vectors import VectorIO

if TYPE_CHECKING:
    from aiokv.device.cache import KVCache

__all__ = ["TcpTransport"]

#: Links that consumers may have to one transport at a time.
_MAX_LINKS = 4096


class TcpTransport:
    """One engine's end of the TCP paths; see ``Transport`` for the contract.

    Args:
        ports: To listen at, the first of them that can be had; none for any that is free.
        advertise: Host name or address that consumers are told to dial. By default the one that
            is listened at, or where that is all of them, the one that control messages go to.
        streams: Connections of each link, 1 to 16: what this end would like, and the most that it
            lets a consumer have. The lower of the two ends' numbers is used.
        staging: Bytes of pinned memory that each link takes here, where the cache is on a GPU.
        pinned: Bytes that all links take at most; one is made in any case.

    Raises:
        ValueError: There can't be so many streams.
    """

    def __init__(
        self,
        ports: Sequence[int] = (),
        advertise: str | None = None,
        *,
        streams: int = STREAMS,
        staging: int = STAGING_BYTES,
        pinned: int = PINNED_BYTES,
    ) -> None:
        if not 1 <= streams <= MAX_STREAMS:
            raise ValueError(f"a link has 1 to {MAX_STREAMS} streams, not {streams}")
        self._streams = streams
        self._staging_bytes, self._pinned_bytes = staging, pinned
        self._ports = tuple(ports) or (0,)
        self._advertise = advertise
        self._started = False
        #: None until started and when closed.
        self._listener: Listener | None = None
        self._place = Place("", 0, b"")
        self._io = VectorIO()
        #: Where a GPU's bytes pass through; None for host memory, and until started.
        self._staging: Staging | None = None
        #: Ends at this engine that are not lost: senders and receivers.
        self._ends: set[StreamEnd] = set()
        self._accepted: dict[bytes, Sender] = {}

    @property
    def name(self) -> str:
        """``"tcp"``."""
        return "tcp"

    @property
    def one_sided(self) -> bool:
        """False: producers send."""
        return False

    async def start(self, cache: KVCache, host: str) -> None:
        """Listen for consumers at ``host``."""
        if self._started:
            raise LocalProtocolError("this tcp transport was started before")
        if cache.device.kind not in ("host", "cuda"):
            raise DeviceError(
                f"tcp: the cache is {cache.device.kind} memory; the host's and GPUs' can be sent"
            )
        sock, place = await open_place(self.name, host, self._ports, self._advertise)
        self._place = place
        self._listener = Listener(sock, self._place.token, streams=self._streams, admit=self._admit)
        if cache.device.kind == "cuda":
            self._staging = Staging(cache, self._staging_bytes, self._pinned_bytes)
        self._started = True

    def _admit(self, socks: list[socket.socket], link: bytes) -> None:
        if len(self._accepted) >= _MAX_LINKS:
            for sock in socks:
                sock.close()
            return
        if self._staging is None:
            keep_until_lost(self._accepted, Sender(link, self.name, socks, self._io, self._ends))
        else:
            sender = StagedSender(link, self.name, socks, self._io, self._ends, self._staging)
            keep_until_lost(self._accepted, sender)

    def describe(self) -> bytes:
        """Host, port and token."""
        self._check_open()
        return self._place.encode()

    def _check_open(self) -> None:
        if self._listener is None:
            raise ClosedError("this tcp transport is not started, or it is closed")

    async def connect(self, description: bytes, peer: PeerInfo) -> Link:
        """Dial the producer and prove, both ways, that the token is known."""
        self._check_open()
        socks: list[socket.socket] = []
        try:
            try:
                there = Place.decode(description)
                socks.append(await there.dial(peer))
                welcome = await greet(socks[0], there.token, self._streams)
                await dial_more(socks, welcome.streams)
                await join(socks[1:], welcome)
            except (OSError, ValueError, PeerLostError) as error:
                raise PeerLostError(f"tcp to {peer.address}: {error}") from error
            ring = await self._ring()
            try:
                self._check_open()
                return self._received(welcome.link, socks, ring)
            except BaseException as error:
                if ring is not None:
                    ring.retire()
                if isinstance(error, DeviceError):
                    raise PeerLostError(f"tcp: this end can't receive: {error}") from error
                raise
        except BaseException:
            for sock in socks:
                sock.close()
            raise

    def _received(self, link: bytes, socks: list[socket.socket], ring: Ring | None) -> Receiver:
        """The consumer's end; if this raises, the sockets and the ring are the caller's still."""
        if ring is None or self._staging is None:
            return Receiver(link, self.name, socks, self._io, self._ends)
        return StagedReceiver(link, self.name, socks, self._io, self._ends, self._staging, ring)

    async def _ring(self) -> Ring | None:
        """Memory that a GPU's bytes arrive in; None for host memory."""
        if self._staging is None:
            return None
        try:
            return await self._staging.ring()
        except (CapacityError, DeviceError) as error:
            raise PeerLostError(f"tcp: this end has no staging memory: {error}") from error

    def accepted(self, link: bytes) -> Link | None:
        """This engine's end of a link that a consumer opened, until it is lost."""
        return self._accepted.get(link)

    async def aclose(self) -> None:
        """Close all links and the socket. May be called twice."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for end in list(self._ends):
            end.close()
        self._accepted.clear()
        if self._staging is not None:
            await self._staging.aclose()
