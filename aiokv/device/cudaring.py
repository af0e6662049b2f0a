"""Staging memory of a GPU, taken in turn: what was taken first is free first."""

from __future__ import annotations

from collections import deque

from aiokv.device.cudastream import CudaEvent, CudaStream

__all__ = ["Ring"]


class Ring:
    """Ranges of some memory, handed out one after another. Whoever gets one waits for who had it.

    Only streams that are not held up by others may take part: then each range becomes free by
    itself, and nobody waits here for what somebody else still has to enqueue.

    Args:
        nbytes: Size of the memory.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._next = 0
        #: What is in use: start, end, and the event of its last use; oldest first.
        self._used: deque[tuple[int, int, CudaEvent]] = deque()

    def take(self, nbytes: int, stream: CudaStream) -> int:
        """Offset of so many bytes, which ``stream`` may write from now on.

        Raises:
            DeviceError: What used them failed.
        """
        start = self._next
        wrapped = start + nbytes > self.nbytes
        if wrapped:
            start = 0
        end = start + -(-nbytes // 256) * 256
        passed = 0
        for number, (first, last, _) in enumerate(self._used, 1):
            # Whoever turns back to the start passes by what is behind it, too.
            if (first < end and start < last) or (wrapped and first >= self._next):
                passed = number
        for _ in range(passed):
            _, _, event = self._used.popleft()
            stream.follow(event)
        self._next = end
        return start

    def used(self, start: int, nbytes: int, event: CudaEvent) -> None:
        """The range taken last is free when ``event`` is done."""
        self._used.append((start, start + nbytes, event))
