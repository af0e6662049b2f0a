"""A kernel that holds a CUDA stream until a test lets it go: proves what waits, and what doesn't."""

from __future__ import annotations

import ctypes
from types import TracebackType
from typing import Self

from aiokv.device.cuda import CudaDevice

__all__ = ["Holder"]

_SOURCE = r"""
extern "C" __global__ void hold(volatile int* word, long long limit) {
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    do {
        __nanosleep(2000);
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (*word == 0 && now - begin < limit);
}
"""


class Holder:
    """Makes kernels that spin on one multiprocessor until they are released. A context manager.

    Everything is loaded and allocated when this is made: a first launch behind a kernel that spins
    would wait for it.

    Args:
        device: The GPU.
        most: How many streams can be held before this is closed.
        seconds: After which each kernel ends by itself, so that a test that fails doesn't hang.
    """

    def __init__(self, device: CudaDevice, most: int = 64, seconds: float = 20.0) -> None:
        self._context = device.context
        self._limit = int(seconds * 1e9)
        cuda = self._context.cuda
        with self._context.current():
            self._memory: int = cuda.runtime.hostAlloc(4 * most, 0)
            self._words = (ctypes.c_int32 * most).from_address(self._memory)
            self._kernel = cuda.cupy.RawModule(code=_SOURCE).get_function("hold").kernel
            self._next = 0
            self._words[0] = 1
            stream = device.stream()
            self._kernel((1,), (1,), (self._memory, self._limit), stream=stream)
            cuda.runtime.streamSynchronize(stream.ptr)
        self._words[0] = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
        runtime = self._context.cuda.runtime
        with self._context.current():
            runtime.deviceSynchronize()
            self._words = (ctypes.c_int32 * 0)()
            runtime.freeHost(self._memory)

    def hold(self, stream: object) -> int:
        """Enqueue a kernel on a stream, which runs until the number returned is released.

        Args:
            stream: Anything with ``__cuda_stream__``.
        """
        _, handle = stream.__cuda_stream__()  # type: ignore[attr-defined]
        number, self._next = self._next, self._next + 1
        self._words[number] = 0
        with self._context.current():
            self._kernel((1,), (1,), (self._memory + 4 * number, self._limit), stream=_Named(handle))
        return number

    def release(self, number: int | None = None) -> None:
        """Let one go, or all."""
        for each in range(self._next) if number is None else (number,):
            self._words[each] = 1


class _Named:
    """A stream as cupy's launch wants it."""

    def __init__(self, handle: int) -> None:
        self.ptr = handle
