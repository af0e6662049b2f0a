"""Offsets of plans on the GPU: uploaded once, kept until no kernel can read them any more."""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiokv.device.cudamemory import CudaBuffer, allocate
from aiokv.device.cudastream import CudaContext, CudaEvent, CudaStream
from aiokv.proto.plan import Section

__all__ = ["OffsetStore", "Ranges", "Uploaded"]

_TO_DEVICE = 1  # cudaMemcpyHostToDevice


class Ranges:
    """Free ranges of an arena. First fit; neighbours are joined."""

    def __init__(self, size: int) -> None:
        self._free = [(0, size)]

    @property
    def free(self) -> int:
        """Bytes that are free, in all."""
        return sum(size for _, size in self._free)

    def take(self, nbytes: int) -> int | None:
        """Offset of so many bytes; None if there is no such range."""
        for index, (start, size) in enumerate(self._free):
            if size >= nbytes:
                if size == nbytes:
                    del self._free[index]
                else:
                    self._free[index] = (start + nbytes, size - nbytes)
                return start
        return None

    def give(self, offset: int, nbytes: int) -> None:
        """Such a range is free again."""
        joined: list[tuple[int, int]] = []
        for start, size in sorted([*self._free, (offset, nbytes)]):
            if joined and sum(joined[-1]) == start:
                joined[-1] = (joined[-1][0], joined[-1][1] + size)
            else:
                joined.append((start, size))
        self._free = joined


@dataclass(eq=False, slots=True)
class Uploaded:
    """One section's offsets on the GPU.

    Attributes:
        src: Address of the source's offsets on the GPU.
        dst: Address of the destination's.
        start: Where they are in the arena.
        nbytes: How much of it they take.
        ready: Done when they have arrived; None once that was seen.
        streams: Those that kernels were enqueued on that read them.
    """

    src: int
    dst: int
    start: int
    nbytes: int
    ready: CudaEvent | None = None
    streams: dict[CudaStream, None] = field(default_factory=dict)


class OffsetStore:
    """Holds the offsets of the sections in use, in memory taken once. Belongs to the loop's thread.

    Args:
        context: The GPU.
        nbytes: Memory for them, as much on the GPU as pinned on the host. Blocks.

    Raises:
        CapacityError: There isn't so much memory.
    """

    def __init__(self, context: CudaContext, nbytes: int) -> None:
        self._context = context
        self._ranges = Ranges(nbytes)
        self._there: CudaBuffer = allocate(context, nbytes, zeroed=False)
        try:
            with context.current(), context.cuda.quiet:
                self._here = int(context.cuda.runtime.hostAlloc(nbytes, 0))
        except context.cuda.errors as error:
            raise context.cuda.translated(error, f"{nbytes} bytes of pinned memory") from error
        memory: Any = (ctypes.c_uint8 * nbytes).from_address(self._here)
        self._words: NDArray[np.int64] = np.frombuffer(memory, dtype=np.int64)
        #: Offsets are uploaded here, so that they never wait behind what holds up one plan's stream.
        self._uploads = CudaStream(context, context.stream(), own=True)
        self._known: dict[int, tuple[weakref.ref[Section], Uploaded]] = {}
        #: Those whose section is gone, to be freed once nothing reads them. The collector adds to it,
        #: in any thread.
        self._gone: deque[Uploaded] = deque()
        self._draining: deque[tuple[Uploaded, list[CudaEvent]]] = deque()

    @property
    def free(self) -> int:
        """Bytes that are free."""
        return self._ranges.free

    @property
    def address(self) -> int:
        """Of the memory on the GPU."""
        return self._there.address

    def upload(self, section: Section, stream: CudaStream) -> Uploaded | None:
        """The offsets of a section, ordered before what is enqueued on ``stream`` from now on.

        This GPU is the thread's current one.

        Returns:
            None if there is no room for them now.
        """
        entry = self._known.get(id(section))
        if entry is None:
            placed = self._place(section)
            if placed is None:
                return None
            found = placed
        else:
            found = entry[1]
        if found.ready is not None:
            if found.ready.done():
                found.ready = None
            elif stream not in found.streams:
                stream.follow(found.ready)
        found.streams.setdefault(stream)
        return found

    def __del__(self) -> None:
        if hasattr(self, "_words"):
            self.close()

    def close(self) -> None:
        """Give the memory back; nothing may be in flight."""
        self._known.clear()
        here, self._here = self._here, 0
        self._there.close()
        if here:
            self._words = self._words[:0]
            # The device may be lost.
            with contextlib.suppress(*self._context.cuda.errors), self._context.current():
                self._context.cuda.runtime.freeHost(here)

    def _place(self, section: Section) -> Uploaded | None:
        self._sweep()
        count = len(section.src)
        nbytes = -(-16 * count // 128) * 128
        start = self._ranges.take(nbytes)
        if start is None:
            return None
        at = start // 8
        self._words[at : at + count] = section.src
        self._words[at + count : at + 2 * count] = section.dst
        there = self._there.address + start
        try:
            self._context.cuda.runtime.memcpyAsync(
                there, self._here + start, 16 * count, _TO_DEVICE, self._uploads.ptr
            )
        except self._context.cuda.errors as error:
            self._ranges.give(start, nbytes)
            raise self._context.failed(error, "offsets can't be uploaded") from error
        found = Uploaded(
            there,
            there + 8 * count,
            start,
            nbytes,
            self._uploads.record(),
        )
        number, gone, known = id(section), self._gone, self._known

        def forget(_: object) -> None:
            entry = known.pop(number, None)
            if entry is not None:
                gone.append(entry[1])

        self._known[number] = (weakref.ref(section, forget), found)
        return found

    def _sweep(self) -> None:
        """Free what belonged to sections that are gone, where no kernel reads it any more."""
        while self._gone:
            found = self._gone.popleft()
            self._draining.append((found, [stream.record() for stream in found.streams]))
        for _ in range(len(self._draining)):
            found, events = self._draining.popleft()
            if all(event.done() for event in events):
                self._ranges.give(found.start, found.nbytes)
            else:
                self._draining.append((found, events))
