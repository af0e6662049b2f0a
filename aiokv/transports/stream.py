"""What the two ends of a link over stream sockets have in common.

Bytes go straight between the sockets and the registered memory, a vector of fragments at a time.
No transport of asyncio's is used: those copy what the socket doesn't take at once (asyncio before
Python 3.12), or hold on to it until a time of their own choosing, and here it must be known when
memory is read and written no more. Each turn of the loop moves at most a slice, so that the loop
is never held for long.

A link has one socket or several. A frame goes over one of them, frames on different sockets are in
no order, and the loss of any socket is the loss of the link.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

from aiokv.transports.ends import LinkEnd

__all__ = ["StreamEnd", "slice_of"]

#: Bytes that one turn of the loop moves at most for a link: half a millisecond's worth, at a usual rate.
_SLICE = 2 << 20
#: What each of many streams may move at least, since a turn has its price, too.
_LEAST = 256 << 10


def slice_of(streams: int) -> int:
    """Bytes that one of a link's so many streams moves at most in one turn of the loop."""
    return max(_SLICE // streams, _LEAST)


class StreamEnd(LinkEnd):
    """What both ends do: own the sockets, and lose them together."""

    def __init__(self, link: bytes, name: str, socks: Sequence[socket.socket], table: set[StreamEnd]) -> None:
        super().__init__(link, name)
        self._socks = tuple(socks)
        #: Where this end is kept until it is lost.
        self._table = table
        table.add(self)

    def cut(self, reason: str) -> None:
        """Let go of the sockets: from here on nothing is read, written, or called back."""
        if self._lost:
            return
        for sock in self._socks:
            self._loop.remove_reader(sock.fileno())
            self._loop.remove_writer(sock.fileno())
            sock.close()
        self._table.discard(self)
        self._lose(reason)

    def close(self) -> None:
        """Give the link up at once; what the sockets had not taken is not sent."""
        self.cut("closed at this end")
