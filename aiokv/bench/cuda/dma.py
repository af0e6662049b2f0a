"""Ways to copy scattered fragments between a GPU and pinned memory: aiokv's, and what it is compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from aiokv.bench.cuda.gpu import Gpu, Named
from aiokv.bench.cuda.plans import plan_of, side_of
from aiokv.device.base import Buffer

__all__ = ["CONTIGUOUS", "DIRECTIONS", "OURS", "Direction", "Fragments", "Memory", "Ways"]

Direction = Literal["d2h", "h2d"]
DIRECTIONS: tuple[Direction, ...] = ("d2h", "h2d")
OURS, CONTIGUOUS = "aiokv", "contiguous, one DMA"

_KINDS: Mapping[Direction, int] = MappingProxyType({"d2h": 2, "h2d": 1})
#: Bytes of a chunk of aiokv's: what an engine submits at a time.
_CHUNK = 16 << 20
#: Thread blocks of the kernel that reaches through PCIe: few, and one for each processor.
_FEW, _MANY = 8, 132
_THREADS = 512

_SOURCE = r"""
extern "C" __global__ void __launch_bounds__(512) fragments(
    const long long* from, const long long* to, unsigned units, unsigned each
) {
    const unsigned stride = gridDim.x * blockDim.x;
    for (unsigned unit = blockIdx.x * blockDim.x + threadIdx.x; unit < units; unit += 4 * stride) {
        uint4 held[4];
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            const unsigned at = unit + i * stride;
            if (at < units) held[i] = ((const uint4*)from[at / each])[at % each];
        }
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            const unsigned at = unit + i * stride;
            if (at < units) ((uint4*)to[at / each])[at % each] = held[i];
        }
    }
}
"""


class Memory:
    """What is copied from and to, twice as much on the GPU as moves at a time.

    Args:
        gpu: The GPU.
        nbytes: Bytes that move at a time.
    """

    def __init__(self, gpu: Gpu, nbytes: int) -> None:
        self.gpu, self.nbytes = gpu, nbytes
        self.there = gpu.device.allocate(2 * nbytes)
        #: Pinned by aiokv, and as CUDA pins by itself, for the others.
        self.ours = gpu.pinned(nbytes)
        self.theirs = gpu.host_memory(nbytes)
        self.stream = gpu.stream()
        self.our_stream = gpu.device.stream()
        (self.kernel,) = gpu.kernels(_SOURCE, "fragments")

    def close(self) -> None:
        """Give back what aiokv made."""
        self.ours.close()
        self.there.close()


class Fragments:
    """Fragments of one size: scattered over the GPU's memory, one after another in the host's.

    Args:
        memory: Where they are.
        size: Bytes of one.
        seed: Decides the order.
    """

    def __init__(self, memory: Memory, size: int, seed: int) -> None:
        self.size, self.count = size, memory.nbytes // size
        #: Where each is on the GPU, as a multiple of its size.
        self.ids = np.random.default_rng(seed).permutation(2 * self.count)[: self.count].astype(np.int64)
        there = memory.there.address + self.ids * size
        here = memory.theirs + np.arange(self.count, dtype=np.int64) * size
        self.ends = {"d2h": (there, here), "h2d": (here, there)}
        torch: Any = memory.gpu.torch
        self.on_gpu = {
            direction: tuple(torch.from_numpy(end).cuda() for end in ends)
            for direction, ends in self.ends.items()
        }
        gpu_side = side_of(2 * self.count, size, self.ids)
        host_side = side_of(self.count, size, np.arange(self.count, dtype=np.int64))
        self.plans = {"d2h": plan_of(gpu_side, host_side), "h2d": plan_of(host_side, gpu_side)}
        self.chunks = {direction: list(plan.chunks((0,), _CHUNK)) for direction, plan in self.plans.items()}


class Ways:
    """Each enqueues the copy of all fragments in one direction."""

    def __init__(self, memory: Memory, fragments: Fragments) -> None:
        self._memory, self._fragments = memory, fragments
        self._runtime, self._calls = memory.gpu.runtime, memory.gpu.cuda.calls
        self.by_name: dict[str, Callable[[Direction], None]] = {
            OURS: self._ours,
            CONTIGUOUS: self._contiguous,
            "cudaMemcpyAsync for each": self._each,
            f"kernel, {_FEW} blocks": lambda direction: self._kernel(direction, _FEW),
            f"kernel, {_MANY} blocks": lambda direction: self._kernel(direction, _MANY),
        }
        if self._calls.batches:
            self.by_name["cudaMemcpyBatchAsync"] = self._batch

    def stream_of(self, name: str) -> Named:
        """Where a way enqueues."""
        return Named(self._memory.our_stream.ptr) if name == OURS else self._memory.stream

    def _ours(self, direction: Direction) -> None:
        memory, device = self._memory, self._memory.gpu.device
        here: tuple[Buffer] = (memory.ours,)
        there: tuple[Buffer] = (memory.there,)
        src, dst = (there, here) if direction == "d2h" else (here, there)
        plan = self._fragments.plans[direction]
        for chunk in self._fragments.chunks[direction]:
            device.copy(plan, chunk, src, dst, stream=memory.our_stream)

    def _contiguous(self, direction: Direction) -> None:
        memory = self._memory
        ends = memory.there.address, memory.theirs
        src, dst = ends if direction == "d2h" else ends[::-1]
        self._runtime.memcpyAsync(dst, src, memory.nbytes, _KINDS[direction], memory.stream.ptr)

    def _each(self, direction: Direction) -> None:
        src, dst = self._fragments.ends[direction]
        copy, size, kind, stream = (
            self._runtime.memcpyAsync,
            self._fragments.size,
            _KINDS[direction],
            self._memory.stream.ptr,
        )
        for source, target in zip(src.tolist(), dst.tolist(), strict=True):
            copy(target, source, size, kind, stream)

    def _batch(self, direction: Direction) -> None:
        src, dst = self._fragments.ends[direction]
        sizes = np.full(len(src), self._fragments.size, np.int64)
        status = self._calls.batch(dst, src, sizes, self._memory.stream.ptr)
        if status:
            raise RuntimeError(f"cudaMemcpyBatchAsync failed: {status}")

    def _kernel(self, direction: Direction, blocks: int) -> None:
        src, dst = self._fragments.on_gpu[direction]
        units, each = self._memory.nbytes // 16, self._fragments.size // 16
        arguments = (src.data_ptr(), dst.data_ptr(), np.uint32(units), np.uint32(each))
        self._memory.kernel((blocks,), (_THREADS,), arguments, stream=self._memory.stream)

    def check(self, name: str, direction: Direction) -> None:
        """Copy fresh random bytes, and compare.

        Raises:
            RuntimeError: Others arrived.
        """
        memory, gpu, fragments = self._memory, self._memory.gpu, self._fragments
        there = gpu.bytes_of(memory.there)
        here = gpu.bytes_of(memory.ours) if name == OURS else gpu.bytes_at(memory.theirs, memory.nbytes)
        fresh = gpu.torch.empty(memory.nbytes, dtype=gpu.torch.uint8, device="cuda").random_()
        ids = gpu.torch.from_numpy(fragments.ids).cuda()
        table = there.view(-1, fragments.size)
        contiguous = name == CONTIGUOUS
        if direction == "d2h":
            there.zero_()
            if contiguous:
                there[: memory.nbytes] = fresh
            else:
                table[ids] = fresh.view(-1, fragments.size)
            here.zero_()
        else:
            there.zero_()
            here.copy_(fresh.cpu())
        gpu.synchronize()
        self.by_name[name](direction)
        gpu.synchronize()
        if direction == "d2h":
            # aiokv pins piece by piece, and torch would copy across the borders.
            found = here.clone().cuda()
        else:
            found = there[: memory.nbytes] if contiguous else table[ids].reshape(-1)
        if not gpu.torch.equal(found, fresh):
            raise RuntimeError(f"{name} did not move the bytes ({direction}, {fragments.size} each)")
