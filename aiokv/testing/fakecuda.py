"""CUDA played by host memory: what ``CudaDevice`` is built on, for tests without a GPU.

Streams are queues that are worked off as soon as nothing holds them, in the calling thread. Memory
of the "GPU" is memory of the host, and every access is checked against what was allocated or pinned;
one that goes astray makes the device lost, as it would on a GPU. It is stricter than CUDA in one thing:
whatever allocates, frees, enqueues or records fails unless the calling thread's current device is the one
that it is about, also where CUDA would take it and only make a context on another GPU::

    fake = FakeCuda()
    device = CudaDevice(0, cuda=fake.libraries())
    with fake.held(stream.handle):
        ...  # what is enqueued there stays
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from aiokv.device.cudakernels import LOOPS, WORDS, WORDS_BEFORE
from aiokv.device.cudalibrary import Cuda, DriverCalls
from aiokv.device.cudastream import CudaStream

__all__ = ["FakeCuda", "FakeError"]

_ILLEGAL_ADDRESS = 700
_OUT_OF_MEMORY = 2
_INVALID_CONTEXT = 201
_NOT_READY = 600
#: Bytes of a run below which runs are moved all at once.
_FEW = 256
_CONTEXT = 0x1000  # handle of the first device's context


class FakeError(RuntimeError):
    """What cupy raises when CUDA fails."""

    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(f"cudaError{status}: made up")


class _Span(Protocol):
    """What torch makes tensors of."""

    __cuda_array_interface__: dict[str, Any]


class _Ticket:
    """One recording of an event."""

    __slots__ = ("done",)

    def __init__(self) -> None:
        self.done = False


class _Thread(threading.local):
    """What CUDA keeps for each thread."""

    #: Handle of the context that is current; 0: none.
    current = 0


class FakeCuda:
    """The CUDA of one process with some GPUs.

    Args:
        devices: How many.
        memory: Bytes of each.
    """

    def __init__(self, devices: int = 1, *, memory: int = 1 << 30) -> None:
        self.devices = devices
        self.memory = memory
        #: The status that every call has from now on; 0: they work.
        self.status = 0
        #: Calls so far, by name, and what was copied how.
        self.calls: list[str] = []
        #: Statuses that the next calls of these names have.
        self.failing: dict[str, int] = {}
        #: Kernels as they were launched: bytes a thread moves at a time, blocks, stream.
        self.launches: list[tuple[int, int, int]] = []
        #: Sizes of the copies by DMA, and of the batches.
        self.copies: list[int] = []
        self.batches: list[int] = []
        self._memory: dict[int, Any] = {}
        self._ranges: dict[int, int] = {}
        self._used = 0
        self._thread = _Thread()
        self._queues: dict[int, deque[tuple[_Ticket | None, Callable[[], None]]]] = {0: deque()}
        self._streams_of: dict[int, int] = {}
        self._events: dict[int, _Ticket | None] = {}
        #: The context that each event, and each range that was allocated, belongs to.
        self._homes: dict[int, int] = {}
        self._held: set[int] = set()
        self._next = 0x10000

    def libraries(self) -> Cuda:
        """What a device is made with."""
        runtime = SimpleNamespace(CUDARuntimeError=FakeError)
        driver = SimpleNamespace(CUDADriverError=FakeError)
        for name in dir(self):
            if name.startswith("_runtime_"):
                setattr(runtime, name.removeprefix("_runtime_"), self._called(name))
            elif name.startswith("_driver_"):
                setattr(driver, name.removeprefix("_driver_"), self._called(name))
        cupy = SimpleNamespace(
            __version__="14.2.0",
            cuda=SimpleNamespace(
                runtime=runtime, driver=driver, function=SimpleNamespace(CPointer=lambda address: address)
            ),
            RawModule=lambda code, options: SimpleNamespace(get_function=self._function),
        )
        torch = SimpleNamespace(
            __version__="2.11.0",
            version=SimpleNamespace(cuda="13.0"),
            cuda=SimpleNamespace(
                current_stream=lambda ordinal: SimpleNamespace(__cuda_stream__=lambda: (0, 0)),
                synchronize=lambda ordinal: None,
                Stream=self._torch_stream,
            ),
            as_tensor=_as_tensor,
        )
        runtime.eventQuery, runtime.streamQuery = self._query, self._stream_query
        calls = SimpleNamespace(batches=True, exchange=lambda mode: 0, batch=self._batch)
        return Cuda(cast(ModuleType, cupy), cast(ModuleType, torch), cast(DriverCalls, calls))

    @contextlib.contextmanager
    def held(self, *streams: int) -> Iterator[None]:
        """Nothing runs on these streams before the end."""
        self._held.update(streams)
        try:
            yield
        finally:
            self._held.difference_update(streams)
            self._pump()

    @property
    def allocated(self) -> int:
        """Ranges that are allocated or pinned."""
        return len(self._ranges)

    def _torch_stream(self, device: str) -> SimpleNamespace:
        before, self._current = self._current, _CONTEXT + int(device.removeprefix("cuda:"))
        handle = self._runtime_streamCreateWithFlags(1)
        self._current = before
        return SimpleNamespace(__cuda_stream__=lambda: (0, handle))

    # -- how it works

    def _called(self, name: str) -> Callable[..., object]:
        method, short = getattr(self, name), name.split("_", 2)[2]

        def call(*args: int) -> object:
            self.calls.append(short)
            status = self.failing.pop(short, 0) or (self.status if "ctx" not in short else 0)
            if status:
                raise FakeError(status)
            return method(*args)

        return call

    def _handle(self) -> int:
        self._next += 16
        return self._next

    def _push(self, stream: int, work: Callable[[], None], after: _Ticket | None = None) -> None:
        self._queues[stream].append((after, work))
        self._pump()

    def _pump(self) -> None:
        moved = True
        while moved:
            moved = False
            for stream, queue in self._queues.items():
                while queue and stream not in self._held and (queue[0][0] is None or queue[0][0].done):
                    queue.popleft()[1]()
                    moved = True

    @property
    def _current(self) -> int:
        return self._thread.current

    @_current.setter
    def _current(self, context: int) -> None:
        self._thread.current = context

    def ordinal_of(self, address: int) -> int:
        """The GPU that memory was allocated on, by its first byte."""
        return self._homes[address] - _CONTEXT

    def _here(self, *things: int) -> None:
        """See that the thread's device is the one that these streams, events or ranges belong to."""
        homes = {self._homes.get(each, self._streams_of.get(each, self._current)) for each in things}
        if not self._current or homes - {self._current}:
            raise FakeError(_INVALID_CONTEXT)

    def _check(self, address: int, nbytes: int) -> NDArray[np.uint8]:
        """The memory that a range is in, and from where on; the device is lost if it is in none."""
        for start, size in self._ranges.items():
            if start <= address and address + nbytes <= start + size:
                return _array(start, size, np.uint8)
        self.status = _ILLEGAL_ADDRESS
        return np.zeros(0, np.uint8)

    def _take(self, nbytes: int) -> int:
        memory = (ctypes.c_uint8 * (nbytes + 256))()
        address = -(-ctypes.addressof(memory) // 256) * 256
        self._memory[address], self._ranges[address] = memory, nbytes
        return address

    def _copy(self, target: int, source: int, nbytes: int) -> None:
        self._check(target, nbytes)
        self._check(source, nbytes)
        if not self.status:
            ctypes.memmove(target, source, nbytes)

    # -- what cupy has of the driver

    def _driver_ctxGetCurrent(self) -> int:  # noqa: N802
        return self._current

    def _driver_ctxSetCurrent(self, context: int) -> None:  # noqa: N802
        self._current = context

    def _driver_streamGetCtx(self, stream: int) -> int:  # noqa: N802
        return self._streams_of.get(stream, self._current)

    # -- what cupy has of the runtime

    def _runtime_setDevice(self, ordinal: int) -> None:  # noqa: N802
        if not 0 <= ordinal < self.devices:
            raise FakeError(101)
        self._current = _CONTEXT + ordinal

    def _runtime_memGetInfo(self) -> tuple[int, int]:  # noqa: N802
        return self.memory - self._used, self.memory

    def _runtime_getDeviceProperties(self, ordinal: int) -> dict[str, int]:  # noqa: N802
        return {"multiProcessorCount": 4}

    def _runtime_malloc(self, nbytes: int) -> int:
        if nbytes > self.memory - self._used:
            raise FakeError(_OUT_OF_MEMORY)
        self._here()
        self._used += nbytes
        address = self._take(nbytes)
        self._homes[address] = self._current
        return address

    def _runtime_free(self, address: int) -> None:
        self._here(address)
        del self._homes[address]
        self._used -= self._ranges.pop(address)
        del self._memory[address]

    def _runtime_hostAlloc(self, nbytes: int, flags: int) -> int:  # noqa: N802
        self._here()
        return self._take(nbytes)

    def _runtime_freeHost(self, address: int) -> None:  # noqa: N802
        self._here()
        del self._memory[address], self._ranges[address]

    def _runtime_hostRegister(self, address: int, nbytes: int, flags: int) -> None:  # noqa: N802
        self._here()
        self._ranges[address] = nbytes

    def _runtime_hostUnregister(self, address: int) -> None:  # noqa: N802
        self._here()
        del self._ranges[address]

    def _runtime_eventCreateWithFlags(self, flags: int) -> int:  # noqa: N802
        self._here()
        handle = self._handle()
        self._events[handle], self._homes[handle] = None, self._current
        return handle

    def _runtime_eventDestroy(self, event: int) -> None:  # noqa: N802
        self._here(event)
        del self._events[event], self._homes[event]

    def _runtime_eventRecord(self, event: int, stream: int) -> None:  # noqa: N802
        self._here(event, stream)
        ticket = self._events[event] = _Ticket()
        self._push(stream, lambda: setattr(ticket, "done", True))

    def _runtime_streamCreateWithFlags(self, flags: int) -> int:  # noqa: N802
        self._here()
        handle = self._handle()
        self._queues[handle] = deque()
        self._streams_of[handle] = self._current
        return handle

    def _runtime_streamDestroy(self, stream: int) -> None:  # noqa: N802
        self._here(stream)
        del self._queues[stream]

    def _runtime_streamSynchronize(self, stream: int) -> None:  # noqa: N802
        self._here(stream)
        if self._queues[stream]:
            raise RuntimeError("this would wait for ever")

    def _runtime_streamWaitEvent(self, stream: int, event: int) -> None:  # noqa: N802
        self._here(stream)
        self._push(stream, lambda: None, self._events[event])

    def _runtime_memcpyAsync(self, target: int, source: int, nbytes: int, kind: int, stream: int) -> None:  # noqa: N802
        self._here(stream)
        self.copies.append(nbytes)
        self._push(stream, lambda: self._copy(target, source, nbytes))

    def _runtime_memsetAsync(self, address: int, value: int, nbytes: int, stream: int) -> None:  # noqa: N802
        self._here(stream)
        self._push(stream, lambda: cast(None, ctypes.memset(address, value, nbytes)))

    # -- what it hasn't

    def _query(self, event: int) -> int:
        ticket = self._events[event]
        return self.status or (0 if ticket is None or ticket.done else _NOT_READY)

    def _stream_query(self, stream: int) -> int:
        return self.status or (_NOT_READY if self._queues[stream] else 0)

    def _batch(
        self, targets: NDArray[np.int64], sources: NDArray[np.int64], sizes: NDArray[np.int64], stream: int
    ) -> int:
        if status := self.failing.pop("batch", 0) or self.status:
            return status
        self._here(stream)
        self.batches.append(len(sizes))
        rows = list(zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True))

        def run() -> None:
            for row in rows:
                self._copy(*row)

        self._push(stream, run)
        return 0

    # -- kernels

    def _function(self, name: str) -> SimpleNamespace:
        unit = int(name.removeprefix("move"))

        def launch(grid: tuple[int, int], block: tuple[int], args: tuple[int], *, stream: CudaStream) -> None:
            if status := self.failing.pop("launch", 0) or self.status:
                raise FakeError(status)
            self._here(stream.ptr)
            self.launches.append((unit, grid[0], stream.ptr))
            words = list((ctypes.c_int64 * WORDS).from_address(args[0]))
            tensors = words[WORDS_BEFORE : WORDS_BEFORE + 2 * grid[1]]

            def run() -> None:
                for src, dst in zip(tensors[::2], tensors[1::2], strict=True):
                    self._move(unit, words, src, dst)

            self._push(stream.ptr, run)

        return SimpleNamespace(kernel=launch)

    def _move(self, unit: int, words: list[int], src: int, dst: int) -> None:
        src_at, dst_at, piece, units, run, loops = words[:6]
        shape = words[6 : 6 + loops]
        src_steps = words[6 + LOOPS : 6 + LOOPS + loops]
        dst_steps = words[6 + 2 * LOOPS : 6 + 2 * LOOPS + loops]
        if units * unit % piece:
            raise AssertionError(f"a launch of {units} units for pieces of {piece} bytes")
        count = units * unit // piece
        here = src + self._starts(src_at, count, piece, shape, src_steps)
        there = dst + self._starts(dst_at, count, piece, shape, dst_steps)
        if len(here) * run * unit != units * unit:
            raise AssertionError(f"{len(here)} runs of {run} units are not {units}")
        if (here % unit).any() or (there % unit).any():
            raise AssertionError(f"{unit} bytes at a time, but not aligned")
        self._scatter(there, here, run * unit)

    def _starts(
        self, at: int, count: int, piece: int, shape: list[int], steps: list[int]
    ) -> NDArray[np.int64]:
        """Offsets of all runs of a launch, in order."""
        found = np.arange(count, dtype=np.int64) * piece
        if at:
            self._check(at, 8 * count)
            found = _array(at, 8 * count, np.int64).copy()
        for size, step in zip(shape, steps, strict=True):
            found = np.add.outer(found, np.arange(size, dtype=np.int64) * step).ravel()
        return found

    def _scatter(self, targets: NDArray[np.int64], sources: NDArray[np.int64], nbytes: int) -> None:
        """Move runs of so many bytes; all sources are in one memory, and all targets."""
        target, source = (
            self._check(int(starts.min()), int(starts.max() - starts.min()) + nbytes)
            for starts in (targets, sources)
        )
        if self.status:
            return
        to, of = targets - target.ctypes.data, sources - source.ctypes.data
        if nbytes < _FEW:
            inside = np.arange(nbytes)
            target[np.add.outer(to, inside)] = source[np.add.outer(of, inside)]
            return
        for there, here in zip(to.tolist(), of.tolist(), strict=True):
            target[there : there + nbytes] = source[here : here + nbytes]


def _array(address: int, nbytes: int, dtype: Any) -> NDArray[Any]:  # noqa: ANN401 - of numpy's
    """Memory as an array."""
    memory: Any = (ctypes.c_uint8 * nbytes).from_address(address)
    return np.frombuffer(memory, dtype)


def _as_tensor(span: _Span, device: str) -> object:
    import torch

    interface = span.__cuda_array_interface__
    memory = (ctypes.c_uint8 * interface["shape"][0]).from_address(interface["data"][0])
    memory.owner = span  # what torch keeps, too
    return torch.from_numpy(np.frombuffer(memory, dtype=np.uint8))
