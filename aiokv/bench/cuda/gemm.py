"""Matrix products that copies go on beside: those that compute, and those that read weights, as decoding."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from aiokv.bench.cuda.gpu import Gpu, Named

__all__ = ["Gemm"]

#: Copies that are enqueued and not over, at most.
_AHEAD = 3


class Gemm:
    """Some products in bfloat16 on random data, as one CUDA graph: launching them takes no time of the host.

    Args:
        gpu: The GPU.
        rows: Of the left side; the right one has 8192 rows and columns.
        weights: How many right sides are taken in turn: more than the GPU's cache holds.
        times: Products in all.
    """

    def __init__(self, gpu: Gpu, rows: int, *, weights: int, times: int) -> None:
        self._gpu = gpu
        torch: Any = gpu.torch
        self._stream = torch.cuda.Stream()
        with torch.cuda.stream(self._stream):
            options = {"dtype": torch.bfloat16, "device": "cuda"}
            left = torch.randn(rows, 8192, **options)
            rights = [torch.randn(8192, 8192, **options) for _ in range(weights)]
            out = torch.empty(rows, 8192, **options)
            torch.mm(left, rights[0], out=out)
        gpu.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=self._stream):
            for number in range(times):
                torch.mm(left, rights[number % weights], out=out)
        self._kept = (left, rights, out)
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def run(self, copy: Callable[[], None] | None, stream: Named, nbytes: int) -> tuple[float, float]:
        """All products twice, with copies beside them from the beginning to the end; the second time counts.

        By then the GPU's clock is what it is under this load: after a rest it is higher for a while.

        Args:
            copy: Enqueues one; None: there are none.
            stream: Where it does so.
            nbytes: What one moves.

        Returns:
            Seconds that the products took, and bytes a second that were copied meanwhile.
        """
        torch: Any = self._gpu.torch
        on = torch.cuda.ExternalStream(stream.ptr)
        pending: deque[Any] = deque()
        copied = 0
        began = time.perf_counter_ns()
        with torch.cuda.stream(self._stream):
            self._graph.replay()
            self._begin.record()
            self._graph.replay()
            self._end.record()
        while not self._end.query():
            if copy is None:
                time.sleep(1e-3)
                continue
            while pending and pending[0].query():
                pending.popleft()
            if len(pending) < _AHEAD:
                copy()
                copied += nbytes
                event = torch.cuda.Event()
                event.record(on)
                pending.append(event)
        self._gpu.synchronize()
        took = time.perf_counter_ns() - began
        return self._begin.elapsed_time(self._end) / 1e3, copied / took * 1e9
