"""The contract of the data plane: extents between registered buffers of two engines.

A ``Transport`` belongs to one engine. A ``Link`` is its path from one producer to one consumer,
and exists at both ends. Two kinds of link exist:

* **one-sided**: the consumer reads the producer's memory. Only ``read`` is used; the producer's
  side of the link tells nothing but that the consumer is gone.
* **two-sided**: the producer sends and the consumer receives. ``send`` is used at the producer,
  ``expect`` and ``forget`` at the consumer.

Which chunk goes when is decided above (``proto.schedule``); a link only submits. Nothing here
blocks the loop and nothing here creates a task; bring-up (``start``, ``connect``) is awaited.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from aiokv.device.base import Buffer, Event, Stream
from aiokv.proto.placement import Placement
from aiokv.proto.plan import Chunk, CopyPlan

if TYPE_CHECKING:
    from aiokv.device.cache import KVCache

__all__ = ["Link", "PartId", "PeerInfo", "Transport"]

#: Names a part within one link: transfer id and attempt.
PartId = tuple[str, int]


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """What a transport may know of the producer that it connects to."""

    #: Control address that the producer advertised.
    address: str
    #: 16 random bytes, new for each life of an engine.
    incarnation: bytes
    #: The producer's placement, already checked against its layout.
    placement: Placement
    #: For ``connect`` to call once the producer has proved itself there, if what is left to do takes long:
    #: with the seconds that it may take from then on. Until then only as long is waited as for first contact.
    answered: Callable[[float], object] = field(default=lambda seconds: None, compare=False, repr=False)


class Link(Protocol):
    """One transport's path from one producer to one consumer, seen from either end."""

    @property
    def id(self) -> bytes:
        """Names the link at both ends: the consumer's grant carries it to the producer."""

    @property
    def lost(self) -> bool:
        """The path is gone, and the other side can touch this side's memory through it no more."""

    @property
    def pace(self) -> int:
        """How many times faster than host memory the path is, at least 1.

        What bounds the time of a chunk, and of all that is in flight, is so many times the bytes here.
        """

    @property
    def rate(self) -> int:
        """Bytes a nanosecond that the path moves at most; 0 where a copy is over when it was submitted.

        The time of a copy is guessed by it, and corrected by what is seen: what is too high costs looks
        that come too early, what is too low the first copies some time.
        """

    def on_lost(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once, on the loop, when the link becomes lost (at once if it is)."""

    def read(self, plan: CopyPlan, chunk: Chunk, dst: Sequence[Buffer], *, stream: Stream) -> Event:
        """One-sided: copy one chunk from the producer's buffers into ``dst``.

        Returns:
            An event that is done when the bytes are in place, and raises DeviceError if they
            will not be. After either, nothing of this chunk is in flight.

        Raises:
            PeerLostError: The link is lost.
            DeviceError: It could not be submitted.
        """

    def send(
        self, part: PartId, plan: CopyPlan, chunk: Chunk, src: Sequence[Buffer], *, stream: Stream
    ) -> Event:
        """Two-sided, at the producer: send one chunk of ``src``.

        Returns:
            An event that is done when ``src`` is no longer read: the bytes were handed over, or
            the link is lost (then it raises).

        Raises:
            PeerLostError: The link is lost.
        """

    @property
    def writable(self) -> bool:
        """Two-sided, at the producer: whether ``send`` should be called now."""

    def on_writable(self, callback: Callable[[], None]) -> None:
        """Two-sided, at the producer: call this whenever ``writable`` becomes true again."""

    def expect(
        self, part: PartId, plan: CopyPlan, dst: Sequence[Buffer], landed: Callable[[Chunk], None]
    ) -> None:
        """Two-sided, at the consumer: chunks of ``part`` may arrive from now on.

        ``landed(chunk)`` is called on the loop when a chunk, or a part of one, is in place. Data may
        overtake the call by a little; data of a part that nobody comes to expect, or chunks outside
        the plan, cut the link.
        """

    def forget(self, part: PartId) -> Event | None:
        """Two-sided, at the consumer: nothing more of ``part`` is begun to be written to ``dst``.

        What is still on its way is drained to scratch memory. Also to be called when the link is lost.

        Returns:
            An event that is done, or failed, when no copy on the device writes to ``dst`` any more,
            and never waits for a peer; None when that is so already, as on the host.
        """

    def close(self) -> None:
        """Give the link up at this end; the other end sees it lost. May be called twice."""


class Transport(Protocol):
    """One engine's end of one kind of data path."""

    @property
    def name(self) -> str:
        """``"shm"``, ``"tcp"``, ...: what peers compare."""

    @property
    def one_sided(self) -> bool:
        """Whether consumers read the producer's memory, or are sent to."""

    async def start(self, cache: KVCache, host: str) -> None:
        """Make the producer's end ready for consumers to connect to.

        Args:
            cache: What this engine registered; buffers are kept alive by it.
            host: The host name or IP address to listen at, where that means something.

        Raises:
            DeviceError: This cache, or this machine, can't be served this way; the message says
                why. The engine then goes on without this transport.
        """

    def describe(self) -> bytes:
        """What a consumer needs in order to connect, incl. the token; goes into HELLO."""

    async def connect(self, description: bytes, peer: PeerInfo) -> Link:
        """At the consumer: open and prove a path to the producer that sent ``description``.

        The path is proven by reading a nonce through it. The caller bounds the time by
        cancelling, see also ``PeerInfo.answered``; a cancelled or failed connect leaves nothing behind.

        Raises:
            PeerLostError: The producer can't be reached this way; the message says why.
        """

    def accepted(self, link: bytes) -> Link | None:
        """At the producer: its end of the link that a consumer's grant named, if it is known."""

    async def aclose(self) -> None:
        """Close all links and sockets, give back all memory. May be called twice."""
