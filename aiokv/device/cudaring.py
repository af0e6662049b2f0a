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
        #: What is in use, oldest first: the bytes handed out before it, and the event of its last use.
        self._used: deque[tuple[int, CudaEvent]] = deque()

    def take(self, nbytes: int, stream: CudaStream) -> int:
        """Offset of so many bytes, which ``stream`` may write from now on; to be followed by ``used``.

        Raises:
            DeviceError: What used them failed.
        """
        start = self._taken
        if start % self.nbytes + nbytes > self.nbytes:
            start += self.nbytes - start % self.nbytes
        self._taken = start
        while self._used and self._used[0][0] + self.nbytes < start + nbytes:
            stream.follow(self._used.popleft()[1])
        return start % self.nbytes

    def used(self, nbytes: int, event: CudaEvent) -> None:
        """The range taken last, of so many bytes, is free when ``event`` is done."""
        self._used.append((self._taken, event))
        self._taken += -(-nbytes // _ALIGN) * _ALIGN
