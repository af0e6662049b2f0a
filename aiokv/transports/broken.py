"""Whether a connection broke, whatever is still to be read of it."""

from __future__ import annotations

import select

__all__ = ["Broken"]


class Broken:
    """True once a socket has an error, or both ends are through. For readers that read a part at a time.

    uvloop calls the reader of such a socket once more, and never again: who doesn't read all of it in that
    call would wait for ever for the rest, and for the news that nothing more comes. asyncio's own loops go on
    calling.

    Args:
        fd: The socket's; it is open whenever this is asked.
    """

    def __init__(self, fd: int) -> None:
        self._poll = select.poll()
        self._poll.register(fd, 0)  # errors are told in any case

    def __bool__(self) -> bool:
        """Look."""
        return bool(self._poll.poll(0))
