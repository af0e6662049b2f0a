"""A model-like loop, and ways to have transfers beside it in one process."""

from __future__ import annotations

import asyncio
import queue
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, NamedTuple, Protocol

import uvloop

from aiokv.bench.cuda.gpu import Gpu
from aiokv.bench.cuda.llama import LAYERS
from aiokv.bench.cuda.traffic import NBYTES, LoopThread, Memory, Moved, Traffic
from aiokv.proto.plan import GroupBlocks, Side, plan_copy

__all__ = ["Model", "OwnThread", "Pumped", "Seen", "Shared", "ThreeThreads", "Way"]

#: Kernels of a step.
_KERNELS = 200
_BLOCKING_WITHOUT_TIMING = 3  # cudaEventBlockingSync, cudaEventDisableTiming
#: Turns that a loop is given between two steps.
_TURNS = 3


class Model:
    """Launches small kernels from Python, and waits for them at the end of each step, as decoding does."""

    def __init__(self, gpu: Gpu) -> None:
        torch: Any = gpu.torch
        self._torch = torch
        self._stream = torch.cuda.Stream()
        self._state = torch.zeros(8192, device="cuda")

    def step(self) -> None:
        """One step."""
        with self._torch.cuda.stream(self._stream):
            add = self._state.add_
            for _ in range(_KERNELS):
                add(1.0)
        self._stream.synchronize()

    def run(self, seconds: float) -> list[int]:
        """Steps for so long; how long each took, in nanoseconds."""
        found = []
        last = time.monotonic_ns()
        until = last + int(seconds * 1e9)
        while last < until:
            self.step()
            now = time.monotonic_ns()
            found.append(now - last)
            last = now
        return found


class Seen(NamedTuple):
    """What a while came to: steps in nanoseconds (none without a model), and what moved (None without)."""

    steps: list[int]
    moved: Moved | None


class Way(Protocol):
    """A way to have both in one process; a context manager."""

    def measure(self, model: Model | None, seconds: float, rate: float) -> Seen:
        """The model for a while, if there is one, with transfers beside it, if the rate is not 0."""


class OwnThread:
    """The loop has a thread of its own; the model has the main one."""

    def __init__(self, memory: Memory) -> None:
        self._stack = ExitStack()
        self._thread = self._stack.enter_context(LoopThread())

        async def made() -> Traffic:
            return await Traffic(memory).__aenter__()

        self._traffic = self._thread.call(made())
        self._stack.callback(lambda: self._thread.call(self._traffic.__aexit__()))

    def measure(self, model: Model | None, seconds: float, rate: float) -> Seen:
        """See ``Way``."""
        moving = self._thread.start(self._traffic.run(seconds, rate)) if rate else None
        steps = model.run(seconds) if model is not None else []
        return Seen(steps, moving.result() if moving is not None else None)

    def close(self) -> None:
        """End it."""
        self._stack.close()


class _OnMainThread:
    """The loop has the main thread, as far as the model lets it."""

    def __init__(self, memory: Memory) -> None:
        self.loop = uvloop.new_event_loop()

        async def made() -> Traffic:
            return await Traffic(memory).__aenter__()

        self.traffic = self.loop.run_until_complete(made())

    def close(self) -> None:
        """End it."""
        self.loop.run_until_complete(self.traffic.__aexit__())
        self.loop.close()


class Shared(_OnMainThread):
    """The server's loop is aiokv's, too, and awaits each step, which an executor runs."""

    def __init__(self, memory: Memory) -> None:
        super().__init__(memory)
        self._executor = ThreadPoolExecutor(1)

    def measure(self, model: Model | None, seconds: float, rate: float) -> Seen:
        """See ``Way``."""
        return self.loop.run_until_complete(self._measure(model, seconds, rate))

    async def _measure(self, model: Model | None, seconds: float, rate: float) -> Seen:
        moving = asyncio.ensure_future(self.traffic.run(seconds, rate)) if rate else None
        steps: list[int] = []
        if model is not None:
            last = time.monotonic_ns()
            until = last + int(seconds * 1e9)
            while last < until:
                await self.loop.run_in_executor(self._executor, model.step)
                now = time.monotonic_ns()
                steps.append(now - last)
                last = now
        return Seen(steps, await moving if moving is not None else None)

    def close(self) -> None:
        """End it."""
        super().close()
        self._executor.shutdown()


class Pumped(_OnMainThread):
    """One thread for all: between two steps the loop gets a few turns, and none during a step."""

    def measure(self, model: Model | None, seconds: float, rate: float) -> Seen:
        """See ``Way``."""
        moving = self.loop.create_task(self.traffic.run(seconds, rate)) if rate else None
        steps: list[int] = []
        if model is not None:
            last = time.monotonic_ns()
            until = last + int(seconds * 1e9)
            while last < until:
                model.step()
                if moving is not None:
                    for _ in range(_TURNS):
                        self.loop.call_soon(self.loop.stop)
                        self.loop.run_forever()
                now = time.monotonic_ns()
                steps.append(now - last)
                last = now
        return Seen(steps, self.loop.run_until_complete(moving) if moving is not None else None)


class ThreeThreads:
    """No aiokv and no loop: one thread hears of requests, one sends, one waits in the driver for each layer.

    They copy the same blocks by the same copy engine, and tell a peer of each layer by a datagram.
    """

    def __init__(self, memory: Memory, gpu: Gpu) -> None:
        self._memory, self._runtime = memory, gpu.runtime
        self._stream = memory.device.stream()
        sides = [
            Side(layout=cache.layout, placement=cache.placement, blocks=(GroupBlocks(0, ids),))
            for cache, ids in ((memory.llama.cache, _array(memory.there)), (memory.host, _array(memory.here)))
        ]
        self._plan = plan_copy(*sides, first_token=0, tokens=NBYTES // _token(memory), heads=(0, 8))
        self._chunks = [list(self._plan.chunks((layer,), 16 << 20)) for layer in range(LAYERS)]
        self._requested: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._sent: queue.SimpleQueue[tuple[int, bool]] = queue.SimpleQueue()
        self._begin: queue.SimpleQueue[tuple[float, float]] = queue.SimpleQueue()
        self._over: queue.SimpleQueue[Moved] = queue.SimpleQueue()
        self._landed = threading.Semaphore(0)
        self._events = [gpu.runtime.eventCreateWithFlags(_BLOCKING_WITHOUT_TIMING) for _ in range(LAYERS)]
        self._peer = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._peer.bind(("127.0.0.1", 0))
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.connect(self._peer.getsockname())
        for serve in (self._listen, self._send, self._wait):
            threading.Thread(target=serve, daemon=True).start()

    def measure(self, model: Model | None, seconds: float, rate: float) -> Seen:
        """See ``Way``."""
        if rate:
            self._begin.put((seconds, rate))
        steps = model.run(seconds) if model is not None else []
        return Seen(steps, self._over.get() if rate else None)

    def _listen(self) -> None:
        while True:
            seconds, rate = self._begin.get()
            began = time.monotonic()
            due, moved = began, 0
            while (now := time.monotonic()) < began + seconds:
                if now < due:
                    time.sleep(due - now)  # in place of a socket that a peer's request comes to
                self._requested.put(0)
                self._landed.acquire()
                moved += NBYTES
                due += NBYTES / rate
            self._over.put(Moved(moved, time.monotonic() - began))

    def _send(self) -> None:
        memory, device = self._memory, self._memory.device
        src, dst = memory.llama.cache.buffers, memory.host.buffers
        while True:
            self._requested.get()
            for layer, event in enumerate(self._events):
                for chunk in self._chunks[layer]:
                    device.copy(self._plan, chunk, src, dst, stream=self._stream)
                self._runtime.eventRecord(event, self._stream.ptr)
                self._sent.put((event, layer == LAYERS - 1))

    def _wait(self) -> None:
        while True:
            event, last = self._sent.get()
            self._runtime.eventSynchronize(event)
            self._socket.send(b"a layer ")
            if last:
                self._landed.release()

    def close(self) -> None:
        """Its threads end with the process."""
        self._socket.close()
        self._peer.close()


def _array(ids: list[int]) -> Any:  # noqa: ANN401
    import numpy as np

    return np.array(ids, dtype=np.int64)


def _token(memory: Memory) -> int:
    return sum(group.token_bytes * len(group.layers) for group in memory.layout.groups)
