"""When to look for the completion of an operation: decisions without a clock or a loop.

A look too early costs CPU until the operation is done; a look too late is detection lag. What is
known of an operation is the caller's guess (bytes over a rate) and how that guess did before.

The trap is to learn from the time at which one looked: an operation found done at the first look
after a sleep may have been done for long, and a guess fed with that time grows by its own
oversleeping. Here such a finding only ever shortens the next sleep. Only completions that came
while polling, and so lie between two looks, lengthen it.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Expectations", "Outlook", "interval_ns"]

#: Share of operations that may be done before the first look: their lag is small, since steps
#: are, and not to allow any would mean to poll for the whole of the variation.
LATE_SHARE = 0.1
#: The sleep ends this much early at first: what a timer takes to wake the loop.
GUARD_NS = 10_000
#: Sleeps shorter than this aren't worth a timer.
SHORTEST_SLEEP_NS = 30_000
#: Where operations are polled for less than this on average, or than this part of what they
#: take, it is worth to look each turn.
WORTH_SPINNING_NS = 70_000
WORTH_SPINNING_PARTS = 50
#: Where not, looks are this part of that average apart.
POLLED_PARTS = 8
#: Smallest step of the correction: the jitter of a timer.
SMALLEST_STEP_NS = 4_000
#: Number of streams and sizes that corrections are kept for.
KEPT = 256

SHORTEST_INTERVAL_NS = 30_000
LONGEST_INTERVAL_NS = 1_000_000
#: Beyond that the interval is at most this part of the time waited, and never longer than 10 ms.
LATE_PARTS = 100
LONGEST_LATE_INTERVAL_NS = 10_000_000


class Outlook(NamedTuple):
    """What to do about one operation, in nanoseconds."""

    #: How long to sleep before the first look.
    sleep_ns: int
    #: How far apart to look then; 0 where it is worth to look each turn.
    pace_ns: int


#: For an operation that nobody expects anything of.
UNKNOWN = Outlook(0, 0)


def interval_ns(waited_ns: int, pace_ns: int = 0) -> int:
    """Time to the next look, when polling has gone on for ``waited_ns``.

    The pace, for twice as long as usual. Then a quarter of the time waited, at most 1 ms; for
    what takes longer than 0.1 s, 1 % of it.
    """
    if waited_ns < 2 * POLLED_PARTS * pace_ns:
        return pace_ns
    longest = max(LONGEST_INTERVAL_NS, min(waited_ns // LATE_PARTS, LONGEST_LATE_INTERVAL_NS))
    return min(max(waited_ns // 4, SHORTEST_INTERVAL_NS), longest)


class _Correction:
    """How the guesses for one stream and size do, as multiples of the guess."""

    __slots__ = ("overslept", "step", "wake")

    def __init__(self) -> None:
        #: Where to wake: a low quantile of the duration.
        self.wake = 1.0
        #: How long after the first look they are done on average: how far a correction goes.
        self.step = 0.125
        #: The sleep before this one was too long.
        self.overslept = False


class Expectations:
    """Where to wake for an expected duration, learnt for each stream and order of magnitude.

    A fixed cost makes small operations take a larger multiple of bytes over rate than large
    ones, so each power of two is a matter of its own.
    """

    __slots__ = ("_corrections", "_uncorrected")

    def __init__(self) -> None:
        #: What guesses are taken for before anything is known of them; never changed.
        self._uncorrected = _Correction()
        self._corrections: dict[tuple[int, int], _Correction] = {}

    def outlook(self, stream: object, expected_ns: int) -> Outlook:
        """When to look at what its caller expects to take ``expected_ns``; 0 is not to know."""
        if expected_ns <= 0:
            return UNKNOWN
        correction = self._corrections.get(_key(stream, expected_ns), self._uncorrected)
        sleep = int(expected_ns * correction.wake) - GUARD_NS
        polled = int(expected_ns * correction.step)
        worth = max(WORTH_SPINNING_NS, expected_ns // WORTH_SPINNING_PARTS)
        pace = 0 if polled < worth else max(polled // POLLED_PARTS, SHORTEST_INTERVAL_NS)
        return Outlook(sleep if sleep >= SHORTEST_SLEEP_NS else 0, pace)

    def overslept(self, stream: object, expected_ns: int) -> None:
        """Done at the first look, or found done before that was due: the sleep was too long."""
        if expected_ns <= 0:
            return
        correction = self._of(stream, expected_ns)
        # By how much is not known, so a second time in a row goes twice as far.
        if correction.overslept:
            smallest = SMALLEST_STEP_NS / expected_ns
            correction.step = min(correction.step * 2, max(correction.wake / 2, smallest))
        correction.overslept = True
        correction.wake = max(correction.wake - (1 - LATE_SHARE) * correction.step, 0.0)

    def polled(self, stream: object, expected_ns: int, polled_ns: int) -> None:
        """Done so long after the first look, which is known, as there were other looks between."""
        if expected_ns <= 0:
            return
        correction = self._of(stream, expected_ns)
        correction.overslept = False
        # One operation that was held up says little about the next.
        polled = min(polled_ns / expected_ns, 4 * correction.step)
        correction.wake += LATE_SHARE * polled
        correction.step += (polled - correction.step) / 4
        correction.step = max(correction.step, SMALLEST_STEP_NS / expected_ns)

    def _of(self, stream: object, expected_ns: int) -> _Correction:
        key = _key(stream, expected_ns)
        correction = self._corrections.get(key)
        if correction is None:
            if len(self._corrections) >= KEPT:
                del self._corrections[next(iter(self._corrections))]
            correction = self._corrections[key] = _Correction()
        return correction


def _key(stream: object, expected_ns: int) -> tuple[int, int]:
    """Names stream and size without keeping the stream alive.

    Another stream may come to have the same hash; then it starts from a wrong correction, and
    learns.
    """
    return hash(stream), expected_ns.bit_length()
