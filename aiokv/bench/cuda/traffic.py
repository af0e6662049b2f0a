"""Transfers from a GPU's memory to pinned memory at a given rate, beside a model in the same process.

Both engines are of this process and on one loop: whoever receives has no GPU's memory, and the model pays
for the Python of both sides.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import AsyncExitStack
from selectors import DefaultSelector, SelectorKey
from typing import Any, NamedTuple, TypeVar

import uvloop

import aiokv
from aiokv.bench.cuda.gpu import Gpu
from aiokv.bench.cuda.llama import LAYERS, Llama, block_ids, layout_of, token_bytes
from aiokv.device.cuda import CudaDevice
from aiokv.proto.placement import Placement
from aiokv.transports.memory import MemoryHub, MemoryTransport

__all__ = ["NBYTES", "CountingSelector", "LoopThread", "Memory", "Moved", "Traffic"]

_TOKENS = 2048
_BLOCKS = _TOKENS // 16
#: Bytes of a transfer: 256 MiB.
NBYTES = _TOKENS * token_bytes()
_SEED = 9

T = TypeVar("T")


class Moved(NamedTuple):
    """What a while of transfers came to."""

    nbytes: int
    seconds: float

    @property
    def rate(self) -> float:
        """Bytes a second."""
        return self.nbytes / self.seconds


class Memory:
    """A cache on the GPU, blocks that lie anywhere in it, and as many on the host.

    Args:
        gpu: The GPU.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        #: Copies belong to one thread: each has its own device.
        self.device = CudaDevice(gpu.device.ordinal, costs=gpu.device.costs, cuda=gpu.cuda)
        self.llama = Llama(gpu, _BLOCKS * 5 // 4, device=self.device)
        self.layout = layout_of(_BLOCKS)
        self.pinned = gpu.pinned(Placement.dense(self.layout).buffers[0])
        self.host = aiokv.KVCache(self.layout, Placement.dense(self.layout), self.device, (self.pinned,))
        self.there = block_ids(_TOKENS, self.llama.blocks, _SEED, scattered=True)
        self.here = list(range(_BLOCKS))
        self.llama.fill(_SEED)

    def check(self) -> None:
        """See that all came, and forget it.

        Raises:
            RuntimeError: It didn't.
        """
        torch = self._gpu.torch
        self._gpu.synchronize()
        planes = self._gpu.bytes_of(self.pinned)[:NBYTES].view(LAYERS, 2, _BLOCKS, -1)
        for layer, tensor in enumerate(self.llama.tensors):
            sent = tensor.flatten(2).view(torch.uint8)[:, self.there]
            if not torch.equal(planes[layer].cuda(), sent):
                raise RuntimeError(f"layer {layer} did not come")
        planes.zero_()

    def close(self) -> None:
        """Give back what is not torch's."""
        self.host.close()
        self.llama.cache.close()
        self.device.close()


class Traffic:
    """Transfers by a pair of engines; an asynchronous context manager of the loop that they are on."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._stack = AsyncExitStack()
        hub = MemoryHub()
        # ``memory`` is made for host memory, where a chunk holds the loop for as long as it takes. Here it
        # doesn't: a chunk is a quarter of the layers, and a whole transfer may be in flight.
        settings = aiokv.Settings(chunk_bytes=NBYTES // 4, window_bytes=NBYTES)
        self._producer, self._consumer = (
            aiokv.TransferEngine(cache, transports=[MemoryTransport(hub)], settings=settings)
            for cache in (memory.llama.cache, memory.host)
        )
        #: Where the layers are written, and what waits for them: nothing is on either.
        self._writing, self._reading = memory.device.stream(), memory.device.stream()
        self._count = 0

    async def __aenter__(self) -> Traffic:
        await self._stack.enter_async_context(self._producer)
        await self._stack.enter_async_context(self._consumer)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def move(self) -> None:
        """One transfer, all layers written."""
        memory = self._memory
        self._count += 1
        tid = f"t{self._count}"
        async with self._producer.offer(tid, memory.there) as offer:
            for layer in range(LAYERS):
                offer.layer_ready(layer, stream=self._writing)
            fetch = self._consumer.fetch(
                tid, memory.here, sources=[self._producer.address], stream=self._reading
            )
            async with fetch:
                await fetch.wait()

    async def run(self, seconds: float, rate: float) -> Moved:
        """One after another for so long, at so many bytes a second if it can be done."""
        began = time.monotonic()
        due, moved = began, 0
        while (now := time.monotonic()) < began + seconds:
            if now < due:
                await asyncio.sleep(due - now)
            await self.move()
            moved += NBYTES
            due += NBYTES / rate
        return Moved(moved, time.monotonic() - began)

    async def cost(self, times: int) -> float:
        """Seconds of the loop's thread that one transfer takes of a CPU, one after another."""
        began = time.thread_time_ns()
        for _ in range(times):
            await self.move()
        return (time.thread_time_ns() - began) / 1e9 / times


class CountingSelector(DefaultSelector):
    """Counts returns from what may have slept; turns of a loop that polls don't, and count with the first."""

    def __init__(self) -> None:
        super().__init__()
        self.wakeups = 0

    def select(self, timeout: float | None = None) -> list[tuple[SelectorKey, int]]:
        """As that of the system's."""
        found = super().select(timeout)
        if timeout is None or timeout > 0:
            self.wakeups += 1
        return found


class LoopThread:
    """An event loop in a thread of its own; a context manager.

    Args:
        make: Makes the loop.
    """

    def __init__(self, make: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop) -> None:
        self._loop = make()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> LoopThread:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run something there."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run something there, and wait for it."""
        return self.start(coroutine).result()
