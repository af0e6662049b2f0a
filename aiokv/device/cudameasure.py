"""Measures what copies between a GPU and the host cost, when a device is made."""

from __future__ import annotations

import time

import numpy as np

from aiokv.device.cudacopy import CopyEngine
from aiokv.device.cudacosts import DIRECTIONS, PATHS, CopyCosts, Cost
from aiokv.device.cudaends import End, Fragments, Move
from aiokv.device.cudamemory import CudaBuffer, PinnedBuffer, allocate
from aiokv.device.cudastream import CudaContext, CudaStream
from aiokv.device.host import HostBuffer
from aiokv.proto.plan import Section

__all__ = ["measured"]

#: Sizes of fragments, and how many of them at a time: enough to tell the three costs apart.
_SAMPLES = ((4 << 10, 512), (32 << 10, 128), (256 << 10, 32), (2 << 20, 4))
_BYTES = max(size * count for size, count in _SAMPLES)
#: Each is timed so often, and the best counts; the GPU's clocks are low at first.
_ROUNDS = 6


def measured(context: CudaContext, engine: CopyEngine) -> CopyCosts:
    """Time each way of copying on this GPU. Blocks for a fraction of a second.

    Raises:
        CapacityError: There isn't the memory to try it.
        DeviceError: The device failed.
    """
    there = allocate(context, _BYTES, zeroed=False)
    here = PinnedBuffer(context, HostBuffer.allocate(_BYTES))
    stream = CudaStream(context, context.stream(), own=True)
    try:
        tables = {}
        for direction in DIRECTIONS:
            samples: dict[str, list[tuple[int, int, float]]] = {}
            for size, count in _SAMPLES:
                move = _move(there, here, size, count, to_host=direction == "to_host")
                for path in PATHS:
                    if path in engine.allowed(move, stream):
                        took = min(_timed(context, engine, move, stream, path) for _ in range(_ROUNDS))
                        samples.setdefault(path, []).append((count, size * count, took))
            tables[direction] = {path: Cost.fitted(rows) for path, rows in samples.items()}
        return CopyCosts(to_host=tables["to_host"], to_device=tables["to_device"])
    finally:
        here.close()
        there.close()


def _move(there: CudaBuffer, here: PinnedBuffer, size: int, count: int, *, to_host: bool) -> Move:
    """Scattered fragments on the GPU, from or to contiguous memory of the host."""
    scattered = np.random.default_rng(0).permutation(count).astype(np.int64) * size
    dense = np.arange(count, dtype=np.int64) * size
    src, dst = (scattered, dense) if to_host else (dense, scattered)
    section = Section(src, dst, (), (), (), size)
    gpu = End.at(there, 0, packed=False)
    host = End.at(here, 0, packed=True)
    ends = (gpu, host) if to_host else (host, gpu)
    return Move(section, 0, count, *ends, Fragments(section))


def _timed(context: CudaContext, engine: CopyEngine, move: Move, stream: CudaStream, path: str) -> float:
    """Nanoseconds that the copy takes, and those that submitting it takes once more: they hold the loop."""
    began = time.perf_counter_ns()
    engine.run(move, stream, path)
    submitted = time.perf_counter_ns()
    with context.current():
        context.cuda.runtime.streamSynchronize(stream.ptr)
    return time.perf_counter_ns() - began + submitted - began
