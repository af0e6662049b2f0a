"""How fast copies go, as measured; time is an argument."""

from __future__ import annotations

__all__ = ["Rate"]

#: What is older counts half.
_HALF_LIFE_NS = 1_000_000_000


class Rate:
    """Bytes over the time in which any were on their way."""

    __slots__ = ("_active", "_busy_ns", "_nbytes", "_since")

    def __init__(self) -> None:
        self._active = 0
        self._since = 0
        self._busy_ns = 0.0
        self._nbytes = 0.0

    @property
    def value(self) -> float:
        """Bytes a second; 0 while nothing is known."""
        return self._nbytes / self._busy_ns * 1e9 if self._busy_ns else 0.0

    def began(self, now: int) -> None:
        """A copy is on its way (nanoseconds)."""
        if not self._active:
            self._since = now
        self._active += 1

    def ended(self, now: int, nbytes: int) -> None:
        """It is over; 0 bytes where it failed, or was held up by others."""
        self._active -= 1
        if nbytes:
            self._busy_ns += max(now - self._since, 1)
            self._nbytes += nbytes
            while self._busy_ns > 2 * _HALF_LIFE_NS:
                self._busy_ns /= 2
                self._nbytes /= 2
        self._since = now
