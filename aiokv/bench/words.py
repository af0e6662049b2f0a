"""A device whose events are words in shared memory, set by another process that notes the clock.

It stands for a GPU that writes a rising number behind each operation of a stream. Unlike a GPU's, the time
at which an operation ended is known exactly, by the clock of the process that waits for it.
"""

from __future__ import annotations

import heapq
import mmap
import os
import time
from types import TracebackType
from typing import Self

__all__ = ["WordEvent", "WordStream", "Words", "operate"]

STREAMS = 8
#: Operations of one stream whose end is remembered, and operations on their way to the device.
KEPT = 4096
RING = 16384

# In words of 8 bytes: how many were submitted, the last one done on each stream, when the last ones ended on
# each, and the submitted ones, each as its stream, its duration and when it was submitted.
_SUBMITTED = 0
_DONE = 8
_ENDED = _DONE + STREAMS
_RING = _ENDED + STREAMS * KEPT
_WORDS = _RING + 3 * RING
SIZE = 8 * _WORDS

#: How close to the end of an operation the other process begins to look at the clock all the time, and how
#: long it sleeps at most, in seconds.
_SPIN_S = 150e-6
_SLEEP_S = 300e-6


class Words:
    """The shared memory, at the side that submits; a context manager."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("aiokv-bench-words", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, SIZE)
        self._mapping = mmap.mmap(self.fd, SIZE)
        self.words = memoryview(self._mapping).cast("q")
        self.streams = [WordStream(self.words, number) for number in range(STREAMS)]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for stream in self.streams:
            stream.close()
        self.words.release()
        self._mapping.close()
        os.close(self.fd)


class WordStream:
    """Operations of given durations, one after another."""

    __slots__ = ("_number", "_words", "launched")

    def __init__(self, words: memoryview[int], number: int) -> None:
        self._words = words[:]
        self._number = number
        #: Operations enqueued so far.
        self.launched = 0

    def launch(self, duration_ns: int) -> WordEvent:
        """Enqueue an operation, and record an event behind it."""
        words, self.launched = self._words, self.launched + 1
        submitted = words[_SUBMITTED]
        at = _RING + 3 * (submitted % RING)
        words[at], words[at + 1], words[at + 2] = self._number, duration_ns, time.monotonic_ns()
        words[_SUBMITTED] = submitted + 1
        return WordEvent(self._words, self._number, self.launched)

    def close(self) -> None:
        """Let go of the memory."""
        self._words.release()


class WordEvent:
    """An operation of a stream, as ``aiokv.device.base.Event`` has it."""

    __slots__ = ("_at", "_count", "_number", "_words")

    def __init__(self, words: memoryview[int], number: int, count: int) -> None:
        self._words = words
        self._number = number
        self._at = _DONE + number
        self._count = count

    def done(self) -> bool:
        """Whether the word has come so far."""
        return self._words[self._at] >= self._count

    @property
    def ended_ns(self) -> int:
        """When the other process set the word, by ``time.monotonic_ns``; kept for the last few thousand."""
        return self._words[_ENDED + self._number * KEPT + self._count % KEPT]


def operate(fd: int) -> None:
    """The other process: ends operations when they are due, until it is killed."""
    words = memoryview(mmap.mmap(fd, SIZE)).cast("q")
    clock = time.monotonic_ns
    taken = 0
    #: Durations and submission times of what waits on each stream, and the end of the running ones.
    queues: list[list[tuple[int, int]]] = [[] for _ in range(STREAMS)]
    heads, done = [0] * STREAMS, [0] * STREAMS
    running: list[tuple[int, int]] = []
    while True:
        while taken < words[_SUBMITTED]:
            at = _RING + 3 * (taken % RING)
            stream, duration, submitted = words[at], words[at + 1], words[at + 2]
            taken += 1
            queues[stream].append((duration, submitted))
            if len(queues[stream]) - heads[stream] == 1:
                heapq.heappush(running, (submitted + duration, stream))
        now = clock()
        while running and running[0][0] <= now:
            _, stream = heapq.heappop(running)
            heads[stream] += 1
            done[stream] += 1
            words[_ENDED + stream * KEPT + done[stream] % KEPT] = now = clock()
            words[_DONE + stream] = done[stream]
            if heads[stream] < len(queues[stream]):
                duration, submitted = queues[stream][heads[stream]]
                heapq.heappush(running, (max(submitted, now) + duration, stream))
            else:
                queues[stream].clear()
                heads[stream] = 0
        idle = (running[0][0] - clock()) * 1e-9 - _SPIN_S if running else _SLEEP_S
        if idle > 0:
            time.sleep(min(idle, _SLEEP_S))
