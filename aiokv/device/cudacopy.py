"""The copy engine: what moves a chunk, and how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aiokv.device.base import Buffer, Stream
from aiokv.device.cudakernels import Kernels, Shape, Side
from aiokv.device.cudamemory import CudaBuffer, PinnedBuffer
from aiokv.device.cudaoffsets import OffsetStore
from aiokv.device.cudastream import CudaContext, CudaStream
from aiokv.errors import ClosedError, DeviceError
from aiokv.proto.plan import Chunk, Copy, CopyPlan

__all__ = ["CopyEngine"]

#: Thread blocks for each multiprocessor where the GPU's own memory is the limit.
_BLOCKS_PER_PROCESSOR = 4
#: Thread blocks where PCIe is: enough to reach it, and little taken from the model.
_BLOCKS_TO_HOST = 8


@dataclass(frozen=True, slots=True)
class _Packed:
    """A chunk's bytes in plan order."""

    buffer: Buffer
    offset: int


class CopyEngine:
    """Carries out the chunks of plans on one GPU. Belongs to the loop's thread.

    Args:
        context: The GPU.
        offsets_bytes: Memory for offsets.
    """

    def __init__(self, context: CudaContext, *, offsets_bytes: int) -> None:
        self._context = context
        self._offsets = OffsetStore(context, offsets_bytes)
        self._kernels = Kernels(context, self._offsets.address)

    def copy(
        self, plan: CopyPlan, chunk: Chunk, src: Sequence[Buffer], dst: Sequence[Buffer], stream: Stream
    ) -> None:
        """See ``CudaDevice.copy``."""
        copy = _checked(plan, chunk)
        self._move(copy, chunk, _buffer(src, copy.src_buffer), _buffer(dst, copy.dst_buffer), stream)

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
        copy = _checked(plan, chunk)
        self._move(copy, chunk, _buffer(src, copy.src_buffer), _Packed(staging, offset), stream)

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
        copy = _checked(plan, chunk)
        self._move(copy, chunk, _Packed(staging, offset), _buffer(dst, copy.dst_buffer), stream)

    def close(self) -> None:
        """Give the memory back."""
        self._offsets.close()

    def _move(
        self, copy: Copy, chunk: Chunk, source: Buffer | _Packed, target: Buffer | _Packed, stream: Stream
    ) -> None:
        if not isinstance(stream, CudaStream) or stream.ordinal != self._context.ordinal:
            raise DeviceError(f"{stream!r} is no stream of CUDA device {self._context.ordinal}")
        self._context.check()
        section = copy.section
        here = _reached(source, copy.src_base + section.src_reach, chunk)
        there = _reached(target, copy.dst_base + section.dst_reach, chunk)
        if isinstance(there, PinnedBuffer) and there.readonly:
            raise DeviceError(f"{there!r} can only be read")
        with self._context.current():
            uploaded = self._offsets.upload(section, stream)
            if uploaded is None:
                raise DeviceError("no room for offsets")
            shape = Shape.of(section)
            src = (
                shape.packed(here.address + source.offset)
                if isinstance(source, _Packed)
                else Side(
                    here.address + copy.src_base,
                    uploaded.src + 8 * chunk.lo,
                    section.src_strides,
                    (here.address + copy.src_base) | uploaded.src_bits,
                )
            )
            dst = (
                shape.packed(there.address + target.offset)
                if isinstance(target, _Packed)
                else Side(
                    there.address + copy.dst_base,
                    uploaded.dst + 8 * chunk.lo,
                    section.dst_strides,
                    (there.address + copy.dst_base) | uploaded.dst_bits,
                )
            )
            on_host = isinstance(here, PinnedBuffer) or isinstance(there, PinnedBuffer)
            blocks = _BLOCKS_TO_HOST if on_host else _BLOCKS_PER_PROCESSOR * self._kernels.processors
            stream.gate = None
            self._kernels.move(shape, chunk.hi - chunk.lo, src, dst, blocks=blocks, stream=stream)


def _checked(plan: CopyPlan, chunk: Chunk) -> Copy:
    try:
        plan.check(chunk)
    except ValueError as error:
        raise DeviceError(f"no such chunk: {error}") from error
    return plan.copies(chunk.layer)[chunk.copy]


def _buffer(buffers: Sequence[Buffer], number: int) -> Buffer:
    try:
        return buffers[number]
    except IndexError:
        raise DeviceError(f"there is no buffer {number}, there are {len(buffers)}") from None


def _reached(end: Buffer | _Packed, reach: int, chunk: Chunk) -> CudaBuffer | PinnedBuffer:
    """The memory of one end, once it is known to hold the chunk."""
    start = 0
    buffer = end
    if isinstance(end, _Packed):
        buffer, start, reach = end.buffer, end.offset, end.offset + chunk.nbytes
    if not isinstance(buffer, CudaBuffer | PinnedBuffer):
        raise DeviceError(f"a GPU can't access {buffer!r}; host memory has to be pinned: CudaDevice.pin")
    if buffer.closed:
        raise DeviceError(f"{buffer!r} can't be copied") from ClosedError("the buffer was closed")
    if start < 0 or reach > buffer.nbytes:
        raise DeviceError(f"{chunk} reaches to {reach}, beyond {buffer!r}")
    return buffer
