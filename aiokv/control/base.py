"""The contract of the control plane: small messages, in order, between engines.

A ``Channel`` is one engine's end: it is bound to one address, hands every arriving frame to one
callback, and opens a ``Port`` to each peer it wants to write to. What a frame means is not its
business; neither is whether a frame arrives: sequence numbers inside the frames find losses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

__all__ = ["MAX_FRAME", "Channel", "Port"]

#: Largest frame in bytes. A larger one is refused by the sender and dropped by the receiver.
MAX_FRAME = 1 << 20


class Port(Protocol):
    """The way to one peer's address; sends only."""

    def send(self, frame: bytes) -> None:
        """Send one frame, or queue it. Never blocks; a dead address is not reported.

        Raises:
            CapacityError: The bound on queued frames is reached: the peer doesn't read.
            ClosedError: The port or its channel was closed.
            ValueError: The frame is larger than ``MAX_FRAME``.
        """

    def close(self) -> None:
        """Give up the port and what it has queued. May be called twice."""


class Channel(Protocol):
    """One engine's end of the control plane.

    Where peers have keys or certificates, a channel takes frames only from those that were let in. Its own
    address then names its key (``tcp://host:port#key``), and it sends only to whom the address given to
    ``open`` names.
    """

    @property
    def sender(self) -> str:
        """Key of who sent the frame that ``receive`` is being called with; empty where peers have none."""

    async def start(self, receive: Callable[[bytes], None]) -> str:
        """Bind, then call ``receive`` on the loop for each frame that arrives.

        An exception out of ``receive`` goes to the loop's exception handler and stops nothing.

        Returns:
            The address where peers reach this channel, with the real port.

        Raises:
            OSError: The address can't be bound (in use, not ours).
        """

    def open(self, address: str) -> Port:
        """A port to ``address``. Never blocks; connecting goes on behind it.

        Raises:
            ValueError: This channel can't reach such an address.
        """

    async def aclose(self) -> None:
        """Close all ports, give the address back. Queued frames are dropped. May be called twice."""
