"""The one kernel: moves pieces of some tensors between two strided sides, either of which may be packed.

Gather, scatter and copy are the same loop. A side is where each tensor begins, the offset of each piece
from there, and the strides of the loops inside a piece; a packed side has no offsets, and its pieces lie
one after another in the order of the plan. Each side may be memory of any GPU, or pinned memory of the
host. All layers of a model are one launch: what a launch costs is the CPU's time, and the GIL's.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from aiokv.device.cudastream import CudaContext, CudaStream

__all__ = ["Kernels", "Offsets", "Shape", "Side"]

#: Threads of a block, and units that each thread has under way at a time.
THREADS = 512
UNROLLED = 4
#: Units of one launch: index arithmetic is of 32 bits.
MOST_UNITS = 1 << 30

#: Loops inside a piece: tokens, heads, and K and V; ``minimal`` leaves no more.
LOOPS = 3

#: Tensors of one launch; a kernel's arguments have 4 KiB.
TENSORS = 128

#: Words of 64 bits in the kernel's only argument: those before the tensors', and all.
WORDS_BEFORE = 6 + 3 * LOOPS
WORDS = WORDS_BEFORE + 2 * TENSORS

_SOURCE = (
    r"""
struct Job {
    long long src_at, dst_at;    // addresses of the pieces' offsets; 0: packed
    long long piece;             // bytes of one piece
    long long units;             // of all pieces of a tensor
    long long run;               // units that adjoin on both sides
    long long loops;
    long long shape[LOOPS];
    long long src_step[LOOPS];
    long long dst_step[LOOPS];
    long long tensors[2 * TENSORS];  // address at the source, address at the destination
};

template <typename T>
__device__ __forceinline__ void locate(
    const Job& job, long long source, long long target, unsigned unit, const T*& from, T*& to
) {
    unsigned rest = unit / (unsigned)job.run;
    long long src = (long long)(unit - rest * (unsigned)job.run) * (long long)sizeof(T);
    long long dst = src;
    #pragma unroll
    for (int loop = LOOPS - 1; loop >= 0; --loop) {
        if (loop < (int)job.loops) {
            unsigned size = (unsigned)job.shape[loop];
            unsigned over = rest / size;
            unsigned step = rest - over * size;
            src += step * job.src_step[loop];
            dst += step * job.dst_step[loop];
            rest = over;
        }
    }
    src += job.src_at ? ((const long long*)job.src_at)[rest] : rest * job.piece;
    dst += job.dst_at ? ((const long long*)job.dst_at)[rest] : rest * job.piece;
    from = (const T*)(source + src);
    to = (T*)(target + dst);
}

template <typename T>
__device__ __forceinline__ void move(const Job& job) {
    const long long source = job.tensors[2 * blockIdx.y], target = job.tensors[2 * blockIdx.y + 1];
    const unsigned units = (unsigned)job.units;
    const unsigned tile = THREADS * UNROLLED;
    T held[UNROLLED];
    T* to[UNROLLED];
    // A block moves a tile that adjoins, and then the next that no other block has.
    for (unsigned base = blockIdx.x * tile + threadIdx.x; base < units; base += gridDim.x * tile) {
        #pragma unroll
        for (int i = 0; i < UNROLLED; ++i) {
            const T* from;
            if (base + i * THREADS < units) {
                locate<T>(job, source, target, base + i * THREADS, from, to[i]);
                held[i] = *from;
            }
        }
        #pragma unroll
        for (int i = 0; i < UNROLLED; ++i) {
            if (base + i * THREADS < units) *to[i] = held[i];
        }
    }
}

// The argument stays where the launch put it: which tensor it is depends on the block.
#define KERNEL(name, type) \
    extern "C" __global__ void __launch_bounds__(THREADS) name(const __grid_constant__ Job job) { \
        move<type>(job); \
    }
KERNEL(move16, uint4)
KERNEL(move4, unsigned int)
KERNEL(move1, unsigned char)
""".replace("UNROLLED", str(UNROLLED))
    .replace("LOOPS", str(LOOPS))
    .replace("TENSORS", str(TENSORS))
    .replace("THREADS", str(THREADS))
)

#: Kernels by the bytes that a thread moves at a time, widest first.
UNITS = (16, 4, 1)


class Offsets(NamedTuple):
    """Where the bytes of a tensor's pieces are, from where it begins.

    Attributes:
        at: Address, readable by the GPU, of the offset of the first piece; 0: packed.
        steps: Byte strides of the loops inside a piece.
        bits: All of this that is added up to a run's address, or-ed together: tells what is aligned.
    """

    at: int
    steps: tuple[int, ...]
    bits: int


class Side(NamedTuple):
    """One end of a move: the address of each tensor, and where its pieces are."""

    addresses: Sequence[int]
    offsets: Offsets


class Shape:
    """What a section's pieces look like to the kernel.

    Attributes:
        loops: How often, outermost first.
        run: Bytes that adjoin on both sides.
        piece: Bytes of a piece.
        dense: Strides of a piece that is packed.
        packed: Pieces that lie one after another.
    """

    __slots__ = ("dense", "loops", "packed", "piece", "run")

    def __init__(self, loops: tuple[int, ...], run: int) -> None:
        self.loops = loops
        self.run = run
        self.piece = prod(loops) * run
        self.dense = tuple(prod(loops[i + 1 :]) * run for i in range(len(loops)))
        self.packed = Offsets(0, self.dense, run)


class Kernels:
    """The kernels of one GPU, compiled, loaded and launched once. Making it blocks.

    Raises:
        DeviceError: They can't be compiled or run.
    """

    def __init__(self, context: CudaContext, scratch: int) -> None:
        self._context = context
        self._words = np.zeros(WORDS, dtype=np.int64)
        # Passed by value: the launch copies it. cupy makes the same of an array of one element, in 5 us.
        self._job = context.cuda.cupy.cuda.function.CPointer(self._words.ctypes.data)
        try:
            with context.current(), context.cuda.quiet:
                attributes = context.cuda.runtime.getDeviceProperties(context.ordinal)
                #: Streaming multiprocessors of the GPU.
                self.processors = int(attributes["multiProcessorCount"])
                module = context.cuda.cupy.RawModule(code=_SOURCE, options=("-std=c++17",))
                self._functions = {unit: module.get_function(f"move{unit}").kernel for unit in UNITS}
                # A kernel is loaded at its first launch, which must not come behind one that spins.
                stream = CudaStream(context, context.stream(), own=True)
                shape = Shape((), 16)
                here, there = Side([scratch], shape.packed), Side([scratch + 16], shape.packed)
                for unit in UNITS:
                    self._launch(unit, shape, 1, here, there, 1, stream)
                context.cuda.runtime.streamSynchronize(stream.ptr)
        except context.cuda.errors as error:
            raise context.failed(error, "the copy kernels can't be run") from error
        except Exception as error:
            raise context.failed(0, f"the copy kernels can't be compiled: {error}") from error

    def move(
        self, shape: Shape, pieces: int, src: Side, dst: Side, *, blocks: int, stream: CudaStream
    ) -> None:
        """Enqueue the move of some pieces; this GPU is the thread's current one.

        Args:
            shape: Of each piece.
            pieces: How many.
            src: Where they are.
            dst: Where they go.
            blocks: The most thread blocks to use: what it takes from a model's kernels.
            stream: What orders it.

        Raises:
            DeviceError: It could not be launched.
        """
        bits = src.offsets.bits | dst.offsets.bits | shape.run
        for addresses in (src.addresses, dst.addresses):
            for address in addresses:
                bits |= address
        unit = 1 if bits & 3 else 4 if bits & 15 else 16
        most = max(1, MOST_UNITS * unit // shape.piece)
        try:
            if pieces <= most and len(src.addresses) <= TENSORS:
                self._launch(unit, shape, pieces, src, dst, blocks, stream)
                return
            for lo in range(0, len(src.addresses), TENSORS):
                for first in range(0, pieces, most):
                    here, there = (_part(side, shape, lo, first) for side in (src, dst))
                    self._launch(unit, shape, min(most, pieces - first), here, there, blocks, stream)
        except self._context.cuda.errors as error:
            raise self._context.failed(error, "a copy kernel can't be launched") from error

    def _launch(
        self, unit: int, shape: Shape, pieces: int, src: Side, dst: Side, blocks: int, stream: CudaStream
    ) -> None:
        loops, words, tensors = len(shape.loops), self._words, len(src.addresses)
        units = pieces * shape.piece // unit
        words[:6] = (src.offsets.at, dst.offsets.at, shape.piece, units, shape.run // unit, loops)
        if loops:
            words[6 : 6 + loops] = shape.loops
            words[6 + LOOPS : 6 + LOOPS + loops] = src.offsets.steps
            words[6 + 2 * LOOPS : 6 + 2 * LOOPS + loops] = dst.offsets.steps
        end = WORDS_BEFORE + 2 * tensors
        words[WORDS_BEFORE:end:2] = src.addresses
        words[WORDS_BEFORE + 1 : end : 2] = dst.addresses
        grid = max(1, min(-(-blocks // tensors), -(-units // (THREADS * UNROLLED))))
        self._functions[unit]((grid, tensors), (THREADS,), (self._job,), stream=stream)


def _part(side: Side, shape: Shape, first: int, pieces: int) -> Side:
    """The same side from a tensor on, no more of them than one launch takes, and from a piece on."""
    addresses, offsets = side.addresses[first : first + TENSORS], side.offsets
    if not pieces:
        return Side(addresses, offsets)
    if offsets.at:
        return Side(addresses, offsets._replace(at=offsets.at + 8 * pieces))
    return Side([address + pieces * shape.piece for address in addresses], offsets)
