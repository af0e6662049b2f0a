"""Ways to wait for CUDA events on an event loop besides polling: what the driver and threads offer."""

from __future__ import annotations

import asyncio
import queue
import threading
from functools import partial
from typing import Any

from aiokv.bench.cuda.gpu import Gpu
from aiokv.bench.waiters import Waiter, waiters
from aiokv.device.base import Event

__all__ = ["HostFunctions", "SynchronizingThreads", "cuda_waiters"]

_BLOCKING_WITHOUT_TIMING = 3  # cudaEventBlockingSync, cudaEventDisableTiming


def _ring(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class HostFunctions:
    """A Python function that the driver calls when the stream comes to it. It rings the loop."""

    def __init__(self, gpu: Gpu) -> None:
        self._runtime = gpu.runtime

    def wait(self, event: Event, stream: Any, *, expected_ns: int = 0) -> asyncio.Future[None]:  # noqa: ANN401
        """A future that is resolved when the stream has come to where it is now."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def called(argument: int) -> None:
            loop.call_soon_threadsafe(_ring, future)

        self._runtime.launchHostFunc(stream.ptr, called, 0)
        return future

    def close(self) -> None:
        """Nothing is left to do."""


class SynchronizingThreads:
    """A thread for each stream, which sleeps in the driver until an event is done, and rings the loop.

    The events are such that the driver sleeps, too: else each thread would take a core.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._runtime = gpu.runtime
        self._loop = asyncio.get_running_loop()
        self._queues: dict[int, queue.SimpleQueue[tuple[int, asyncio.Future[None]] | None]] = {}
        self._events: list[int] = []

    def wait(self, event: Event, stream: Any, *, expected_ns: int = 0) -> asyncio.Future[None]:  # noqa: ANN401
        """A future that is resolved when the stream has come to where it is now."""
        if stream.ptr not in self._queues:
            waiting: queue.SimpleQueue[tuple[int, asyncio.Future[None]] | None] = queue.SimpleQueue()
            self._queues[stream.ptr] = waiting
            threading.Thread(target=self._serve, args=(waiting,), daemon=True).start()
        future: asyncio.Future[None] = self._loop.create_future()
        made = (
            self._events.pop()
            if self._events
            else self._runtime.eventCreateWithFlags(_BLOCKING_WITHOUT_TIMING)
        )
        self._runtime.eventRecord(made, stream.ptr)
        self._queues[stream.ptr].put((made, future))
        return future

    def _serve(self, waiting: queue.SimpleQueue[tuple[int, asyncio.Future[None]] | None]) -> None:
        while (next_one := waiting.get()) is not None:
            event, future = next_one
            self._runtime.eventSynchronize(event)
            self._loop.call_soon_threadsafe(partial(self._over, event, future))

    def _over(self, event: int, future: asyncio.Future[None]) -> None:
        self._events.append(event)
        _ring(future)

    def close(self) -> None:
        """End the threads, once nothing is waited for."""
        for waiting in self._queues.values():
            waiting.put(None)


def cuda_waiters(gpu: Gpu) -> dict[str, Waiter]:
    """One of each, on the running loop."""
    return {
        **waiters(),
        "launch_host_func": HostFunctions(gpu),
        "thread in event.synchronize()": SynchronizingThreads(gpu),
    }
