"""Finds accesses to one memory range that nothing orders.

On a GPU a copy that was not made to wait for its producer usually reads the right bytes all the
same, until the day on which the timing differs. Here the order is judged by what was asked for,
not by how things happened to run: one access comes before another when

* both are on one stream, in that order, or
* a chain of events recorded and waited for leads from one to the other, or
* the host had seen it done when it submitted the other.

All three are known when the later one is submitted, so that is when it is checked. The host
counts as one, whichever of its threads or devices saw an event: engines in one process tell each
other what is done by messages that these rules can't see.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

__all__ = ["Access", "Hazard", "History", "Point", "Timeline"]

HazardKind = Literal["read before ready", "write under a reader", "write under a writer", "use after free"]


class Timeline:
    """The order of one stream: a vector clock, as one number for each stream it depends on."""

    __slots__ = ("clock", "confirmed", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        #: How much of each timeline comes before what is submitted next.
        self.clock: dict[Timeline, int] = {self: 0}
        #: How much of this one the host has seen done. Only grows.
        self.confirmed = 0

    def advance(self) -> Point:
        """The next point, which comes after all that this timeline has waited for."""
        number = self.clock.pop(self) + 1
        # What the host knows to be over comes before everything; without this, clocks would keep
        # every stream that ever was.
        self.clock = {other: seen for other, seen in self.clock.items() if seen > other.confirmed}
        self.clock[self] = number
        return Point(self, self.clock[self], dict(self.clock))

    def join(self, point: Point) -> None:
        """What is submitted from now on comes after ``point``."""
        for timeline, number in point.clock.items():
            self.clock[timeline] = max(self.clock.get(timeline, 0), number)


@dataclass(frozen=True, slots=True, eq=False)
class Point:
    """One operation's place in the order."""

    timeline: Timeline
    number: int
    clock: dict[Timeline, int]

    def confirm(self) -> None:
        """The host has seen this point reached, and with it all that comes before."""
        for timeline, number in self.clock.items():
            timeline.confirmed = max(timeline.confirmed, number)

    @property
    def confirmed(self) -> bool:
        """Whether the host knows that it is over, so that whatever it submits comes after."""
        return self.number <= self.timeline.confirmed

    def precedes(self, later: Point | None) -> bool:
        """Whether this is over before ``later`` (None: the host itself) begins, however they run."""
        if self.confirmed:
            return True
        return later is not None and later.clock.get(self.timeline, 0) >= self.number


class Access:
    """Ranges of one buffer that one operation reads or writes."""

    __slots__ = ("ends", "point", "reach", "starts", "what", "writes")

    def __init__(
        self,
        what: str,
        offsets: NDArray[np.int64],
        lengths: NDArray[np.int64],
        *,
        writes: bool,
        point: Point | None,
    ) -> None:
        order = np.argsort(offsets, kind="stable")
        #: For messages: which operation this is.
        self.what = what
        self.starts = offsets[order]
        self.ends = self.starts + lengths[order]
        #: The furthest end of this range and all that start before it.
        self.reach = np.maximum.accumulate(self.ends)
        self.writes = writes
        #: None for an access by the host, which is over when it returns.
        self.point = point

    def overlap(self, other: Access) -> tuple[int, int] | None:
        """The first range that both touch, or None."""
        before = np.searchsorted(other.starts, self.ends, side="left")
        touched = (before > 0) & (other.reach[before - 1] > self.starts)
        if not touched.any():
            return None
        mine = int(np.argmax(touched))
        theirs = int(np.argmax((other.starts < self.ends[mine]) & (other.ends > self.starts[mine])))
        lo = max(int(self.starts[mine]), int(other.starts[theirs]))
        return lo, min(int(self.ends[mine]), int(other.ends[theirs]))


@dataclass(frozen=True, slots=True)
class Hazard:
    """Two accesses that nothing orders, or one to memory that was given back."""

    kind: HazardKind
    #: Which buffer, and the half-open range of bytes in it.
    buffer: str
    lo: int
    hi: int
    #: The two operations, in the order in which they were submitted.
    first: str
    second: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.second} after {self.first}, bytes {self.lo}..{self.hi} of {self.buffer}"


class History:
    """The accesses to one buffer that the host doesn't know to be over."""

    __slots__ = ("_accesses", "_buffer", "_freed", "_lock", "_nbytes")

    def __init__(self, buffer: str, nbytes: int) -> None:
        self._buffer = buffer
        self._nbytes = nbytes
        self._accesses: list[Access] = []
        self._freed = False
        # Two devices, each under its own lock, may copy from and to the same buffer.
        self._lock = threading.Lock()

    def add(self, access: Access) -> list[Hazard]:
        """Take up one access, as it is submitted, and say what is wrong with it."""
        with self._lock:
            self._forget_confirmed()
            if self._freed:
                lo, hi = int(access.starts[0]), int(access.reach[-1])
                return [Hazard("use after free", self._buffer, lo, hi, "free", access.what)]
            found = [hazard for earlier in self._accesses if (hazard := self._clash(earlier, access))]
            if access.point is not None:
                self._accesses.append(access)
            return found

    def free(self) -> list[Hazard]:
        """The buffer is given back by the host: nothing may still touch it."""
        with self._lock:
            self._forget_confirmed()
            self._freed = True
            pending, self._accesses = self._accesses, []
            return [
                Hazard("use after free", self._buffer, 0, self._nbytes, access.what, "free")
                for access in pending
            ]

    def _forget_confirmed(self) -> None:
        self._accesses = [a for a in self._accesses if a.point is not None and not a.point.confirmed]

    def _clash(self, earlier: Access, later: Access) -> Hazard | None:
        if not (earlier.writes or later.writes):
            return None
        if earlier.point is None or earlier.point.precedes(later.point):
            return None
        overlap = earlier.overlap(later)
        if overlap is None:
            return None
        kind: HazardKind = "read before ready"
        if later.writes:
            kind = "write under a writer" if earlier.writes else "write under a reader"
        return Hazard(kind, self._buffer, *overlap, earlier.what, later.what)
