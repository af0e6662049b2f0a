"""A kernel that keeps a stream busy until it is told to end, or for so long at most."""

from __future__ import annotations

from typing import Any

import numpy as np

_CODE = r"""
extern "C" __global__ void hold(volatile int* open, long long limit) {
    long long begin = clock64();
    while (!*open && clock64() - begin < limit) {}
}
"""
#: At least as fast as any GPU's clock, in Hz.
_CLOCK = 2_500_000_000


class Gate:
    """Holds what comes after it on ``stream`` until ``open`` is called.

    Args:
        device: The GPU.
        seconds: After which it opens by itself.
        stream: To hold; a new one by default.
    """

    def __init__(self, device: Any, seconds: float = 10.0, stream: Any = None) -> None:
        import cupy

        self.stream = stream or device.stream()
        self._word = cupy.cuda.alloc_pinned_memory(4)
        self._flag = np.frombuffer(self._word, np.int32, 1)
        self._flag[0] = 0
        kernel = cupy.RawKernel(_CODE, "hold")
        with cupy.cuda.ExternalStream(self.stream.handle):
            kernel((1,), (1,), (np.uint64(self._word.ptr), np.int64(seconds * _CLOCK)))

    def open(self) -> None:
        self._flag[0] = 1
