"""The control plane inside one process: channels that find each other by name.

For tests, and for engines that share a process. It behaves as the one over ZeroMQ does: frames to an
address where nobody listens wait, up to a bound, for whoever binds it; frames on their way to a channel that
closes are lost. Everything happens on the running loop through ``call_soon``, so a loop with virtual time
runs it too.
"""

from __future__ import annotations

import asyncio
import errno
import re
from collections import deque
from collections.abc import Callable

from aiokv.control.base import MAX_FRAME
from aiokv.errors import CapacityError, ClosedError, LocalProtocolError

__all__ = ["MemoryChannel", "MemoryNetwork", "MemoryPort"]

_TURN_FRAMES = 256  # at most so many are delivered before other callbacks of the loop have their turn


class MemoryNetwork:
    """The channels that can reach each other, by addresses such as ``memory://prefill``.

    All its channels belong to one loop.

    Args:
        queue: Frames of one port that may be under way at once.
    """

    def __init__(self, *, queue: int = 4096) -> None:
        if queue < 1:
            raise ValueError(f"queue={queue}: at least one frame must fit")
        self.queue = queue
        self._bound: dict[str, MemoryChannel] = {}
        self._waiting: dict[str, deque[_Frame]] = {}  # by the address that nobody has bound
        self._aliases: dict[str, str] = {}

    def channel(self, address: str) -> MemoryChannel:
        """A channel that ``start`` will bind to ``address``.

        Raises:
            ValueError: The address isn't of the form ``memory://name``.
        """
        return MemoryChannel(self, checked(address))

    def alias(self, name: str, address: str) -> None:
        """Let whoever is at ``address`` be reached by another name too, as 127.0.0.1 is by localhost."""
        self._aliases[checked(name)] = checked(address)

    def resolve(self, name: str) -> str:
        """The address that a name stands for: itself, unless it is an alias."""
        return self._aliases.get(name, name)

    def carry(self, port: MemoryPort, frame: bytes) -> None:
        """Bring a frame from ``port`` to where it goes. A network with faults does it otherwise."""
        self.arrive(port, frame)

    def arrive(self, port: MemoryPort, frame: bytes) -> None:
        """Hand a frame to the channel at ``port.target``, or keep it for the one that will be there."""
        target = self.resolve(port.target)
        channel = self._bound.get(target)
        if channel is None:
            self._waiting.setdefault(target, deque()).append((port, frame))
        else:
            channel.push(port, frame)

    def bind(self, channel: MemoryChannel) -> None:
        """Make ``channel`` the one that frames to its address reach.

        Raises:
            OSError: Another one is (``EADDRINUSE``).
        """
        address = channel.address
        if address in self._bound:
            raise OSError(errno.EADDRINUSE, f"can't bind {address}: address already in use")
        self._bound[address] = channel
        for port, frame in self._waiting.pop(address, ()):
            channel.push(port, frame)

    def release(self, channel: MemoryChannel) -> None:
        """Give the address of ``channel`` back; nothing happens if it isn't bound."""
        if self._bound.get(channel.address) is channel:
            del self._bound[channel.address]

    def forget(self, port: MemoryPort) -> None:
        """Drop what waits from ``port`` for its address to be bound."""
        target = self.resolve(port.target)
        waiting = self._waiting.pop(target, deque())
        kept = deque(entry for entry in waiting if entry[0] is not port)
        if kept:
            self._waiting[target] = kept


class MemoryChannel:
    """A ``Channel`` of a ``MemoryNetwork``, whose ``channel`` makes it."""

    def __init__(self, network: MemoryNetwork, address: str) -> None:
        self.address = address
        self._network = network
        self.ports: set[MemoryPort] = set()
        self._inbox: deque[_Frame] = deque()
        self._delivery: asyncio.Handle | None = None  # the next one; None while the inbox is empty
        self._loop: asyncio.AbstractEventLoop | None = None  # None before start and after aclose
        self._receive: Callable[[bytes], None] | None = None  # as the loop
        self._closed = False
        self.sender = ""  # whoever shares this process is trusted

    def __repr__(self) -> str:
        state = "closed" if self._closed else "new" if self._loop is None else "bound"
        return f"<MemoryChannel {self.address} {state}>"

    async def start(self, receive: Callable[[bytes], None]) -> str:
        """Bind, then call ``receive`` on the loop for each frame; see ``Channel.start``."""
        if self._closed:
            raise ClosedError(f"{self.address}: the channel is closed")
        if self._loop is not None:
            raise LocalProtocolError(f"{self.address}: the channel is started already")
        self._loop, self._receive = asyncio.get_running_loop(), receive
        try:
            self._network.bind(self)
        except OSError:
            self._loop = self._receive = None
            raise
        return self.address

    def open(self, address: str) -> MemoryPort:
        """A port to ``address``; see ``Channel.open``.

        Raises:
            ValueError: The address isn't of the form ``memory://name``.
            ClosedError: The channel is closed.
            LocalProtocolError: The channel was not started.
        """
        checked(address)
        if self._closed:
            raise ClosedError(f"{self.address}: the channel is closed")
        if self._loop is None:
            raise LocalProtocolError(f"{self.address}: start the channel before opening ports")
        port = MemoryPort(self._network, self, address)
        self.ports.add(port)
        return port

    async def aclose(self) -> None:
        """Close all ports and give the address back."""
        self._closed = True
        self._network.release(self)
        for port in tuple(self.ports):
            port.close()
        self.discard()
        self._loop = self._receive = None

    def push(self, port: MemoryPort, frame: bytes) -> None:
        """Take a frame in; ``receive`` gets it in a later turn of the loop."""
        if self._loop is None:
            port.pending -= 1
            return
        self._inbox.append((port, frame))
        self._deliver_soon()

    def discard(self) -> list[tuple[MemoryPort, bytes]]:
        """Take back what was not delivered yet."""
        if self._delivery is not None:
            self._delivery.cancel()
            self._delivery = None
        undelivered = list(self._inbox)
        self._inbox.clear()
        for port, _ in undelivered:
            port.pending -= 1
        return undelivered

    def _deliver_soon(self) -> None:
        if self._inbox and self._delivery is None and self._loop is not None:
            self._delivery = self._loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        self._delivery = None
        try:
            # What the callbacks send to this channel comes in the next turn, so that nobody is starved.
            for _ in range(min(len(self._inbox), _TURN_FRAMES)):
                if not self._inbox or self._loop is None or self._receive is None:
                    break  # the callback closed the channel
                port, frame = self._inbox.popleft()
                port.pending -= 1
                try:
                    self._receive(frame)
                except Exception as exc:  # noqa: BLE001 (the callback's; it must not stop other frames)
                    self._loop.call_exception_handler(
                        {"message": f"{self.address}: error in the callback for a message", "exception": exc}
                    )
        finally:
            self._deliver_soon()


class MemoryPort:
    """A ``Port`` of a ``MemoryNetwork``; ``MemoryChannel.open`` makes it.

    Attributes:
        owner: The channel that it belongs to.
        target: The address that it sends to.
        pending: Frames sent and not delivered, lost or dropped yet.
    """

    def __init__(self, network: MemoryNetwork, owner: MemoryChannel, target: str) -> None:
        self.owner = owner
        self.target = target
        self.pending = 0
        self._network = network
        self._closed = False

    def send(self, frame: bytes) -> None:
        """Send one frame, or queue it; see ``Port.send``."""
        if len(frame) > MAX_FRAME:
            raise ValueError(f"{self.target}: a frame of {len(frame)} bytes; {MAX_FRAME} is the most")
        if self._closed:
            raise ClosedError(f"{self.target}: closed")
        if self.pending >= self._network.queue:
            raise CapacityError(
                f"{self.target}: {self.pending} frames wait; the peer doesn't read or isn't there"
            )
        self.pending += 1
        self._network.carry(self, frame)

    def close(self) -> None:
        """Give up the port and what waits for its address to be bound."""
        if not self._closed:
            self._closed = True
            self.owner.ports.discard(self)
            self._network.forget(self)


_Frame = tuple[MemoryPort, bytes]


def checked(address: str) -> str:
    """The address, if it is of the form ``memory://name``; else ``ValueError``."""
    if not re.fullmatch(r"memory://[\w.:-]+", address, re.ASCII):
        raise ValueError(f"{address!r} is not memory://name")
    return address
