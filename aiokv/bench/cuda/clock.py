"""The GPU's clock by the host's: operations that end at a known time of the host's clock.

A kernel of one thread spins for a given time by the GPU's clock and then writes that clock to pinned
memory. The two clocks are brought together by questions and answers through pinned memory while nothing else
goes on, before and after what is measured: the quickest answer tells the difference to half of the time that
it took, and the two differences tell how fast the one clock goes by the other.
"""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass

from aiokv.bench.cuda.gpu import Gpu
from aiokv.device.cuda import CudaEvent, CudaStream

__all__ = ["GpuClock", "Reading", "host_times"]

_SOURCE = r"""
__device__ __forceinline__ long long now() {
    long long found;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(found));
    return found;
}

extern "C" __global__ void spin(long long duration, volatile long long* ended) {
    const long long begin = now();
    long long at = begin;
    while (at - begin < duration) at = now();
    *ended = at;
}

extern "C" __global__ void answer(volatile long long* asked, volatile long long* told, long long count) {
    const long long begin = now();
    for (long long number = 1; number <= count; ++number) {
        while (*asked < number)
            if (now() - begin > 2000000000LL) return;  // nobody asks any more
        told[1] = now();
        __threadfence_system();
        told[0] = number;
    }
}

extern "C" __global__ void resolution(volatile long long* least) {
    long long found = 1000000000;
    for (int i = 0; i < 20; ++i) {
        const long long before = now();
        long long after = before;
        while (after == before) after = now();
        if (after - before < found) found = after - before;
    }
    *least = found;
}
"""

_QUESTIONS = 300
#: Operations whose end is remembered at a time.
_KEPT = 1 << 16
#: Words before those: question, answer and time, a cache line each.
_FIRST = 16


@dataclass(frozen=True, slots=True)
class Reading:
    """Both clocks at one time, in nanoseconds."""

    host: float
    gpu: int
    #: How long the answer took: the two may be apart by half of it.
    round_trip: int


class GpuClock:
    """Operations of given durations, and when they ended.

    Args:
        gpu: Where.

    Attributes:
        resolution_ns: By how much the GPU's clock goes on at a time.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._memory = gpu.host_memory(8 * (_FIRST + _KEPT))
        self._words = (ctypes.c_int64 * (_FIRST + _KEPT)).from_address(self._memory)
        self._spin, self._answer, resolution = gpu.kernels(_SOURCE, "spin", "answer", "resolution")
        self._asking = gpu.stream()
        self._gpu = gpu
        self._launched = 0
        resolution((1,), (1,), (self._memory,), stream=self._asking)
        gpu.runtime.streamSynchronize(self._asking.ptr)
        self.resolution_ns: int = self._words[0]
        self.read()

    def launch(self, duration_ns: int, stream: CudaStream) -> tuple[CudaEvent, int]:
        """Enqueue an operation, and an event behind it; the number is for ``ended_ns``."""
        number = self._launched = (self._launched + 1) % _KEPT
        ended = self._memory + 8 * (_FIRST + number)
        self._spin((1,), (1,), (duration_ns, ended), stream=stream)
        return stream.record(), number

    def ended_ns(self, number: int) -> int:
        """When an operation ended, by the GPU's clock; kept for the last 65,536."""
        return self._words[_FIRST + number]

    def read(self) -> Reading:
        """Both clocks now; takes a millisecond or two, in which nothing else may go on on the GPU."""
        words, clock = self._words, time.monotonic_ns
        words[0] = words[8] = 0
        self._answer((1,), (1,), (self._memory, self._memory + 64, _QUESTIONS), stream=self._asking)
        best = Reading(0, 0, 1 << 62)
        for number in range(1, _QUESTIONS + 1):
            asked = clock()
            words[0] = number
            while words[8] < number:
                if clock() - asked > 1_000_000_000:
                    raise RuntimeError("the GPU doesn't answer")
            answered = clock()
            if answered - asked < best.round_trip:
                best = Reading((asked + answered) / 2, words[9], answered - asked)
        self._gpu.runtime.streamSynchronize(self._asking.ptr)
        return best


def host_times(before: Reading, after: Reading, times: list[int]) -> list[float]:
    """Times of the GPU's clock by the host's, from a reading before them and one after."""
    rate = (after.host - before.host) / (after.gpu - before.gpu)
    return [before.host + (at - before.gpu) * rate for at in times]
