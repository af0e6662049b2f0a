"""Staging memory of a GPU, taken in turn: what was taken first is free first."""

from __future__ import annotations

from collections import deque

from aiokv.device.cudastream import CudaEvent, CudaStream

__all__ = ["Ring"]

_ALIGN = 256


class Ring:
    """Ranges of some memory, handed out one after another. Whoever gets one waits for who had it.

    Only streams that are not held up by others may take part: then each range becomes free by
    itself, and nobody waits here for what somebody else still has to enqueue.

    Args:
        nbytes: Size of the memory.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        #: Bytes handed out so far, and skipped where a range would have gone across the end.
        self._taken = 0
        #: Where the range taken last begins, in the same count.
        self._start = 0
        #: What may be in use, oldest first: from where to where in that count, and the event of its last use.
        self._used: deque[tuple[int, int, CudaEvent]] = deque()

    def take(self, nbytes: int, stream: CudaStream) -> int:
        """Offset of so many bytes, which ``stream`` may write from now on; to be followed by ``used``.

        Raises:
            DeviceError: What used them failed.
        """
        start = first = self._taken
        if start % self.nbytes + nbytes > self.nbytes:
            start += self.nbytes - start % self.nbytes
        # An old range is of interest until all of it went to others: each of them follows its event.
        while self._used and self._used[0][1] + self.nbytes <= first:
            self._used.popleft()
        # What is skipped goes along with this range, so that it is handed on, too.
        for begin, _, event in self._used:
            if begin + self.nbytes >= start + nbytes:
                break
            stream.follow(event)
        self._start = start
        return start % self.nbytes

    def used(self, nbytes: int, event: CudaEvent) -> None:
        """The range taken last, of so many bytes, is free when ``event`` is done."""
        end = self._start + -(-nbytes // _ALIGN) * _ALIGN
        self._used.append((self._taken, end, event))
        self._taken = end
