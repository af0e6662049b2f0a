"""Torch's CUDA and NCCL, played by host memory: streams that stand still until somebody looks."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch.distributed import ReduceOp

from aiokv.testing.ranks import MemoryRanks


class FakeStream:
    """What is enqueued, and done when an event is looked at; each step says whether it is over."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.queue: deque[Callable[[], bool]] = deque()
        self.held = False

    def wait_stream(self, other: FakeStream) -> None:
        assert other.device == self.device

    def pump(self) -> None:
        while not self.held and self.queue and self.queue[0]():
            self.queue.popleft()


class FakeEvent:
    """Recorded again and again."""

    def __init__(self) -> None:
        self.stream: FakeStream | None = None
        self.done = True

    def record(self, stream: FakeStream) -> None:
        self.stream, self.done = stream, False

        def reached() -> bool:
            self.done = True
            return True

        stream.queue.append(reached)

    def query(self) -> bool:
        assert self.stream is not None
        self.stream.pump()
        return self.done


class FakeTensor:
    """Memory of the GPU, or pinned memory."""

    def __init__(self, torch: FakeTorch, count: int, place: str) -> None:
        self.array = np.zeros(count, np.int32)
        self.place = place
        self.streams: list[FakeStream] = []
        self._torch = torch

    def numpy(self) -> Any:
        assert self.place == "pinned"
        return self.array

    def record_stream(self, stream: FakeStream) -> None:
        self.streams.append(stream)

    def copy_(self, other: FakeTensor, *, non_blocking: bool) -> None:
        assert non_blocking, "the loop would wait"
        assert "pinned" in (self.place, other.place)

        def copy() -> bool:
            self.array[:] = other.array
            return True

        self._torch.current.queue.append(copy)


class FakeTorch:
    """The module, as far as it is used."""

    int32 = np.int32

    def __init__(self) -> None:
        self.cuda = SimpleNamespace(
            current_device=lambda: 3,
            current_stream=FakeStream,
            Stream=self._stream,
            Event=FakeEvent,
            stream=self._within,
        )
        self.streams: list[FakeStream] = []
        self.tensors: list[FakeTensor] = []
        self._threads = threading.local()

    @property
    def current(self) -> FakeStream:
        """The stream that this thread enqueues on."""
        stream: FakeStream = self._threads.stream
        return stream

    def zeros(self, count: int, *, dtype: object, device: str = "", pin_memory: bool = False) -> FakeTensor:
        assert dtype is np.int32
        assert pin_memory != bool(device)
        self.tensors.append(FakeTensor(self, count, device or "pinned"))
        return self.tensors[-1]

    def device(self, place: str) -> str:
        return place

    def _stream(self, device: str) -> FakeStream:
        self.streams.append(FakeStream(device))
        return self.streams[-1]

    @contextmanager
    def _within(self, stream: FakeStream) -> Iterator[None]:
        self._threads.stream = stream
        try:
            yield
        finally:
            del self._threads.stream


class FakeGroup:
    """One rank's process group; the ranks meet in memory, on the stream that is current."""

    def __init__(self, torch: FakeTorch, ranks: MemoryRanks, rank: int, bound: int | None = None) -> None:
        self.bound_device_id = None if bound is None else SimpleNamespace(index=bound)
        #: What NCCL knows of.
        self.state = "SUCCESS"
        #: What the next call raises; None for nothing.
        self.failing: Exception | None = None
        #: Threads that enqueued something.
        self.threads: list[int] = []
        self._torch = torch
        self._ranks = ranks
        self._rank = rank
        self._number = 0

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._ranks.size

    def allreduce(self, tensors: list[FakeTensor], options: Any) -> SimpleNamespace:
        self.threads.append(threading.get_ident())
        if self.failing is not None:
            raise self.failing
        assert options.reduceOp == ReduceOp.MIN
        assert not options.asyncOp
        (tensor,) = tensors
        number = self._number
        self._number += 1
        came = False

        def reduce() -> bool:
            nonlocal came
            if not came:
                came = True
                self._ranks.come(number, self._rank, tensor.array)
            if self.state != "SUCCESS":
                return True  # an aborted communicator's kernels end, and leave what was there
            result = self._ranks.result(number, self._rank)
            if result is None:
                return False
            tensor.array[:] = result
            return True

        self._torch.current.queue.append(reduce)
        return SimpleNamespace(wait=lambda: None)

    def _get_backend(self, device: str) -> SimpleNamespace:
        assert device == self._torch.streams[0].device
        return SimpleNamespace(get_error=lambda: SimpleNamespace(name=self.state))
