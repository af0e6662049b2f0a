"""What the log was told already, so that a peer that is refused and comes back doesn't fill it."""

from __future__ import annotations

import logging

__all__ = ["Told"]

#: What is remembered at most; past that only debugging tells, since anybody can make up more.
_MOST = 1024


class Told:
    """What one channel has told of whom: the same of the same peer goes to debugging from then on."""

    def __init__(self) -> None:
        self._told: set[tuple[str, str]] = set()

    def level(self, who: str, what: str) -> int:
        """The level at which to log this now: INFO at first, then DEBUG."""
        if (who, what) in self._told or len(self._told) >= _MOST:
            return logging.DEBUG
        self._told.add((who, what))
        return logging.INFO
