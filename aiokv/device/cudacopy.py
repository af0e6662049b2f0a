"""The copy engine: carries out chunks of plans on one GPU, each in the way that costs least.

Within the GPU's memory, and from GPU to GPU, one kernel moves a chunk. Between a GPU and the host
there are four ways, and which is best depends on the fragments and on the machine: see ``cudacosts``.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from types import MappingProxyType

import numpy as np

from aiokv.device.base import Buffer, Stream
from aiokv.device.cudacosts import PATHS, CopyCosts
from aiokv.device.cudaends import End, Extents, Fragments, Move, checked, packed, strided
from aiokv.device.cudakernels import Kernels, Offsets, Side
from aiokv.device.cudamemory import CudaBuffer, PinnedBuffer, allocate
from aiokv.device.cudaoffsets import OffsetStore
from aiokv.device.cudaring import Ring
from aiokv.device.cudastream import CudaContext, CudaStream
from aiokv.errors import DeviceError
from aiokv.proto.plan import Chunk, Copy, CopyPlan, Section

__all__ = ["CopyEngine"]

#: Thread blocks for each multiprocessor where the GPU's own memory is the limit: more than are on it
#: at a time, so that they end soon and a model's kernels come in between.
_BLOCKS_PER_PROCESSOR = 16
#: Thread blocks that gather into staging memory: faster than PCIe by far, and few.
_BLOCKS_STAGING = 32
#: Thread blocks that reach through PCIe by themselves.
_BLOCKS_TO_HOST = 8
#: Handles up to this one are default streams, which batches can't be enqueued on.
_DEFAULT_STREAMS = 2
#: cudaMemcpyKind by whether the source and the destination are on the host.
_KINDS = MappingProxyType({(True, True): 0, (True, False): 1, (False, True): 2, (False, False): 3})


class CopyEngine:
    """Belongs to the loop's thread. Making it blocks.

    Args:
        context: The GPU.
        offsets_bytes: Memory for the offsets of plans.
        staging_bytes: GPU memory that is gathered into and sent from.
        costs: What ways of copying cost.
        path: The way to go wherever it can be gone, whatever it costs; None: the cheapest.
    """

    def __init__(
        self,
        context: CudaContext,
        *,
        offsets_bytes: int,
        staging_bytes: int,
        costs: CopyCosts,
        path: str | None = None,
    ) -> None:
        self._context = context
        self.costs = costs
        self.path = path
        #: Bytes by the way that was chosen for them, the same for all of a chunk.
        self.moved = dict.fromkeys(PATHS, 0)
        self._offsets = OffsetStore(context, offsets_bytes)
        self.kernels = Kernels(context, self._offsets.address)
        self._staging = allocate(context, staging_bytes, zeroed=False)
        self._ring = Ring(staging_bytes)
        #: The most of it that one gather fills, so that the next can go on while this is sent.
        self._part = staging_bytes // 3
        self._fragments: weakref.WeakKeyDictionary[Section, Fragments] = weakref.WeakKeyDictionary()

    def copy(
        self, plan: CopyPlan, chunk: Chunk, src: Sequence[Buffer], dst: Sequence[Buffer], stream: Stream
    ) -> None:
        """See ``CudaDevice.copy``."""
        copy = checked(plan, chunk)
        here = strided(src, copy.src, copy.section.src_reach)
        there = strided(dst, copy.dst, copy.section.dst_reach)
        self._move(copy, chunk, here, there, stream)

    def gather(
        self,
        plan: CopyPlan,
        chunk: Chunk,
        src: Sequence[Buffer],
        staging: Buffer,
        offset: int,
        stream: Stream,
    ) -> None:
        """See ``CudaDevice.gather``."""
        copy = checked(plan, chunk)
        here = strided(src, copy.src, copy.section.src_reach)
        self._move(copy, chunk, here, packed(staging, offset, len(copy.src), chunk.nbytes), stream)

    def scatter(
        self,
        plan: CopyPlan,
        chunk: Chunk,
        staging: Buffer,
        offset: int,
        dst: Sequence[Buffer],
        stream: Stream,
    ) -> None:
        """See ``CudaDevice.scatter``."""
        copy = checked(plan, chunk)
        there = strided(dst, copy.dst, copy.section.dst_reach)
        self._move(copy, chunk, packed(staging, offset, len(copy.dst), chunk.nbytes), there, stream)

    def close(self) -> None:
        """Give the memory back."""
        self._offsets.close()
        self._staging.close()

    # -- which way

    def _move(self, copy: Copy, chunk: Chunk, src: End, dst: End, stream: Stream) -> None:
        if not isinstance(stream, CudaStream) or stream.ordinal != self._context.ordinal:
            raise DeviceError(f"{stream!r} is no stream of CUDA device {self._context.ordinal}")
        if dst.on_host:
            for memory in dst.memory:
                if isinstance(memory, PinnedBuffer) and memory.readonly:
                    raise DeviceError(f"{memory!r} can only be read")
        self._context.check()
        section = copy.section
        fragments = self._fragments.get(section)
        if fragments is None:
            fragments = self._fragments[section] = Fragments(section)
        self.run(Move(section, chunk.lo, chunk.hi, src, dst, fragments), stream)

    def run(self, move: Move, stream: CudaStream, path: str | None = None) -> None:
        """Enqueue a move.

        Args:
            move: What and where.
            stream: What orders it.
            path: The way; None: the cheapest.

        Raises:
            DeviceError: It could not be submitted, or not all of it: what was is over when an event
                recorded afterwards on ``stream`` is done.
        """
        if path is None:
            path = self._chosen(move, stream)
            self.moved[path] += move.nbytes
        with self._context.current():
            if path == "staged":
                self._run_staged(move, stream)
                return
            stream.gate = None
            if path == "kernel" and self._run_kernel(move, stream):
                return
            if move.src.on_host and move.dst.on_host:
                raise DeviceError(
                    "there is no room for the offsets of a copy within the host's memory "
                    f"({self._offsets.free} bytes are free), and by DMA the loop would wait for it"
                )
            # DMA is also what is left when there is no room for offsets.
            extents = move.extents()
            if path == "batch":
                self._run_batch(move, extents, stream)
            else:
                self._run_plain(move, extents, stream)

    def allowed(self, move: Move, stream: CudaStream) -> set[str]:
        """The ways that can be gone."""
        found = {"kernel", "plain"}
        if move.src.on_host == move.dst.on_host:
            # The host can't be asked to copy within its own memory without waiting for it.
            return {"kernel"} if move.src.on_host else found
        if self._context.cuda.calls.batches and stream.ptr > _DEFAULT_STREAMS:
            found.add("batch")
        # Staging memory is for what moves by itself: a stream that is held up would keep it from all others.
        if move.section.piece_bytes <= self._part and not stream.held:
            found.add("staged")
        return found

    def _chosen(self, move: Move, stream: CudaStream) -> str:
        allowed = self.allowed(move, stream)
        if self.path in allowed:
            return self.path
        if move.src.on_host == move.dst.on_host:
            return "plain" if "plain" in allowed and move.ranges == 1 else "kernel"
        direction = "to_device" if move.src.on_host else "to_host"
        return self.costs.best(direction, move.ranges, move.host_count, move.nbytes, allowed)

    # -- the ways

    def _run_kernel(self, move: Move, stream: CudaStream) -> bool:
        on_host = move.src.on_host or move.dst.on_host
        blocks = _BLOCKS_TO_HOST if on_host else _BLOCKS_PER_PROCESSOR * self.kernels.processors
        return self._launch(move, blocks, stream)

    def _launch(self, move: Move, blocks: int, stream: CudaStream) -> bool:
        """Move by a kernel; False if there is no room for the offsets."""
        section, lo, hi, src, dst, fragments = move
        shape = fragments.shape
        uploaded = self._offsets.upload(section, stream)
        if uploaded is None:
            return False
        here = there = None
        if not src.packed:
            here = Offsets(uploaded.src + 8 * lo, section.src_strides, fragments.src_bits)
        if not dst.packed:
            there = Offsets(uploaded.dst + 8 * lo, section.dst_strides, fragments.dst_bits)
        sides = Side(src.addresses, here or shape.packed), Side(dst.addresses, there or shape.packed)
        self.kernels.move(shape, hi - lo, *sides, blocks=blocks, stream=stream)
        return True

    def _run_staged(self, move: Move, stream: CudaStream) -> None:
        """Through staging memory, a part at a time, on two streams: one goes ahead of the other.

        To the host the companion gathers and ``stream`` sends; from the host the companion fetches and
        ``stream`` scatters. So whatever comes after on ``stream`` comes after all of it. The companion
        follows ``stream`` once, and not again as long as nothing but copies of the same direction was
        enqueued there: those don't touch what it reads.
        """
        ahead = stream.companion
        if ahead is None:
            ahead = stream.companion = CudaStream(self._context, self._context.stream(), own=True)
        direction = "to_device" if move.src.on_host else "to_host"
        if stream.gate != direction:
            ahead.follow(stream.record())
            stream.gate = direction
        for part in move.cut(self._part):
            nbytes, tensors = part.nbytes, part.tensors
            start = self._ring.take(nbytes, ahead)
            staging = End.at(self._staging, start, packed=True, tensors=tensors, nbytes=nbytes // tensors)
            last = ahead
            try:
                self._half(part._replace(dst=staging), ahead)
                stream.follow(ahead.record())
                last = stream
                self._half(part._replace(src=staging), stream)
            except DeviceError:
                # What was enqueued ahead is over, too, when ``stream`` is through.
                with suppress(DeviceError):
                    stream.follow(ahead.record())
                raise
            finally:
                self._ring.used(nbytes, last.record())

    def _half(self, move: Move, stream: CudaStream) -> None:
        """Between staging memory and the GPU's by a kernel, or between it and the host's by DMA."""
        if move.src.packed and move.dst.packed:
            self._in_one(move, 0, move.src.addresses[0], move.dst.addresses[0], move.nbytes, stream)
        elif (move.src.on_host or move.dst.on_host) and move.host_count == move.tensors:
            # As blocks in a row are; numpy would take as long as their bytes do.
            section, each = move.section, move.nbytes // move.tensors
            past = 0 if move.src.packed else int(section.src[move.lo])
            later = 0 if move.dst.packed else int(section.dst[move.lo])
            for number, (source, target) in enumerate(
                zip(move.src.addresses, move.dst.addresses, strict=True)
            ):
                self._in_one(move, number, source + past, target + later, each, stream)
        elif move.src.on_host or move.dst.on_host or not self._launch(move, _BLOCKS_STAGING, stream):
            self._run_plain(move, move.extents(), stream)

    def _in_one(
        self, move: Move, number: int, source: int, target: int, nbytes: int, stream: CudaStream
    ) -> None:
        """One range of a tensor, in as few DMA as what was pinned at a time allows."""
        host = move.src if move.src.on_host else move.dst
        at = source if host is move.src else target
        for size in _sizes(host.memory[number], at, nbytes):
            self._dma(source, target, size, move, stream)
            source, target = source + size, target + size

    def _dma(self, source: int, target: int, nbytes: int, move: Move, stream: CudaStream) -> None:
        kind = _KINDS[move.src.on_host, move.dst.on_host]
        try:
            self._context.cuda.runtime.memcpyAsync(target, source, nbytes, kind, stream.ptr)
        except self._context.cuda.errors as error:
            raise self._context.failed(error, "a DMA can't be enqueued") from error

    def _run_plain(self, move: Move, extents: Extents, stream: CudaStream) -> None:
        """One DMA for each range."""
        src, dst, lengths = (array.tolist() for array in _within_pieces(move, extents))
        for source, target, length in zip(src, dst, lengths, strict=True):
            self._dma(source, target, length, move, stream)

    def _run_batch(self, move: Move, extents: Extents, stream: CudaStream) -> None:
        src, dst, lengths = (np.ascontiguousarray(array) for array in _within_pieces(move, extents))
        status = self._context.cuda.calls.batch(dst, src, lengths, stream.ptr)
        if status:
            raise self._context.failed(status, "a batch of DMA can't be enqueued")


def _sizes(memory: CudaBuffer | PinnedBuffer, address: int, nbytes: int) -> Iterator[int]:
    """Bytes from ``address`` on, cut where what was pinned at a time ends."""
    if not isinstance(memory, PinnedBuffer):
        yield nbytes
        return
    at = address - memory.address
    while nbytes:
        size = min(nbytes, memory.piece - at % memory.piece)
        yield size
        at, nbytes = at + size, nbytes - size


def _within_pieces(move: Move, extents: Extents) -> Extents:
    """The same ranges, none of which goes across the border of what was pinned at a time."""
    end = move.src if move.src.on_host else move.dst
    if not end.on_host:
        return extents
    src, dst, lengths = extents
    at, each = (src if end is move.src else dst), len(lengths) // move.tensors
    crossed = False
    for number, memory in enumerate(end.memory):
        if isinstance(memory, PinnedBuffer) and memory.nbytes > memory.piece:
            own = slice(number * each, (number + 1) * each)
            first = (at[own] - memory.address) // memory.piece
            crossed |= bool((first != (at[own] + lengths[own] - 1 - memory.address) // memory.piece).any())
    if not crossed:
        return extents
    owners = [memory for memory in end.memory for _ in range(each)]
    rows = []
    for owner, a, b, left in zip(owners, src.tolist(), dst.tolist(), lengths.tolist(), strict=True):
        done = 0
        for size in _sizes(owner, (a if end is move.src else b), left):
            rows.append((a + done, b + done, size))
            done += size
    table = np.array(rows, dtype=np.int64)
    return table[:, 0], table[:, 1], table[:, 2]
