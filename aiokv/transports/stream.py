"""What the two ends of a link over one stream socket have in common.

Bytes go straight between the socket and the registered memory, a vector of fragments at a time.
No transport of asyncio's is used: those copy what the socket doesn't take at once (asyncio before
Python 3.12), or hold on to it until a time of their own choosing, and here it must be known when
memory is read and written no more. Each turn of the loop moves at most a slice, so that the loop
is never held for long.
"""

from __future__ import annotations

import abc
import socket

from aiokv.transports.ends import LinkEnd
from aiokv.transports.vectors import VectorIO

__all__ = ["SLICE", "StreamEnd"]

#: Bytes that one turn of the loop moves at most: half a millisecond's worth, at a usual rate.
SLICE = 2 << 20


class StreamEnd(LinkEnd, abc.ABC):
    """What both ends do: own the socket, and know when it broke."""

    def __init__(
        self, link: bytes, name: str, sock: socket.socket, io: VectorIO, table: set[StreamEnd]
    ) -> None:
        super().__init__(link, name)
        self._sock = sock
        self._fd = sock.fileno()
        self._io = io
        #: Where this end is kept until it is lost.
        self._table = table
        table.add(self)
        self._loop.add_reader(self._fd, self._readable)

    @abc.abstractmethod
    def _readable(self) -> None:
        """The socket has something to read, or its end."""

    def _end(self, reason: str) -> None:
        """Let go of the socket: from here on nothing is read, written, or called back."""
        if self._lost:
            return
        self._loop.remove_reader(self._fd)
        self._loop.remove_writer(self._fd)
        self._sock.close()
        self._table.discard(self)
        self._lose(reason)

    def close(self) -> None:
        """Give the link up at once; what the socket had not taken is not sent."""
        self._end("closed at this end")
