"""One NVIDIA GPU as a device: streams, events, memory and copies in the order of streams.

Making a device takes a second or more (libraries, kernels, pinned memory), all of it before anything
moves; afterwards nothing here allocates, synchronizes or loads a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from aiokv.device.base import Buffer, Stream
from aiokv.device.cudacopy import CopyEngine
from aiokv.device.cudacosts import PATHS, TYPICAL, CopyCosts
from aiokv.device.cudalibrary import CaptureMode, Cuda, load
from aiokv.device.cudameasure import measured
from aiokv.device.cudamemory import CudaBuffer, PinnedBuffer, allocate, pin
from aiokv.device.cudastream import CudaContext, CudaEvent, CudaStream, adopted
from aiokv.device.gate import Gate, gated
from aiokv.device.host import HostBuffer
from aiokv.device.offloop import off_loop
from aiokv.errors import DeviceError
from aiokv.proto.plan import Chunk, CopyPlan

__all__ = ["CudaBuffer", "CudaDevice", "CudaEvent", "CudaStream", "PinnedBuffer"]


class CudaDevice:
    """A GPU of this process. Making one blocks; make it where no loop waits.

    Copies belong to one thread, the loop's; streams and events may be used from any.

    Args:
        ordinal: CUDA's number of the GPU.
        staging_bytes: GPU memory that small fragments are gathered in on their way to the host and back.
        offsets_bytes: GPU memory, and as much pinned memory, for the block lists of plans in flight.
        costs: What ways of copying cost; measured in a fraction of a second by default.
        path: The way of copying between GPU and host, one of ``cudacosts.PATHS``, wherever it can be
            gone; None: the cheapest.
        cuda: The libraries; found by default.

    Raises:
        DeviceError: torch, cupy, the driver or the GPU can't be used; says what mends it.
        CapacityError: There isn't so much memory.
    """

    kind = "cuda"
    #: How long submitting copies may hold the event loop in one turn, in seconds.
    budget_s = 0.0005

    def __init__(
        self,
        ordinal: int = 0,
        *,
        staging_bytes: int = 96 << 20,
        offsets_bytes: int = 8 << 20,
        costs: CopyCosts | None = None,
        path: str | None = None,
        cuda: Cuda | None = None,
    ) -> None:
        if path is not None and path not in PATHS:
            raise ValueError(f"path is one of {', '.join(PATHS)}, not {path!r}")
        self.ordinal = ordinal
        self.context = CudaContext(cuda or load(), ordinal)
        #: Keeps what waits for the whole GPU apart from what waits on it for other processes.
        self.gate = Gate()
        #: Where its memory is, as torch names it.
        self.place = f"cuda:{ordinal}"
        try:
            self._prepare_torch()
            self._engine = CopyEngine(
                self.context,
                offsets_bytes=offsets_bytes,
                staging_bytes=staging_bytes,
                costs=costs or TYPICAL,
                path=path,
            )
            if costs is None:
                self._engine.costs = measured(self.context, self._engine)
        except BaseException:
            self.context.close()
            raise

    def _prepare_torch(self) -> None:
        """Ask torch for a stream: the first time takes a while, and should not be a fetch's on a loop."""
        try:
            with self.context.current():
                self.context.cuda.torch.cuda.current_stream(self.ordinal)
        except RuntimeError as error:
            raise DeviceError(f"torch can't use CUDA device {self.ordinal}: {error}") from error

    def __repr__(self) -> str:
        return f"<CudaDevice {self.ordinal}{' lost' if self.lost else ''}>"

    @property
    def lost(self) -> DeviceError | None:
        """Why nothing works on this GPU any more in this process; None while it does."""
        return self.context.lost

    @property
    def costs(self) -> CopyCosts:
        """What ways of copying between this GPU and the host cost; its text is a table."""
        return self._engine.costs

    @property
    def moved(self) -> Mapping[str, int]:
        """Bytes that were copied by each way (``cudacosts.PATHS``), as it was chosen."""
        return self._engine.moved

    @property
    def quiet(self) -> CaptureMode:
        """A context in which the calling thread breaks no CUDA graph capture of another thread's."""
        return self.context.cuda.quiet

    def on_lost(self, callback: Callable[[DeviceError], None]) -> Callable[[], None]:
        """Have ``callback`` called once, in whichever thread finds out, when the device is lost.

        Returns:
            What takes that back.
        """
        return self.context.on_lost(callback)

    # -- memory

    def allocate(self, nbytes: int) -> CudaBuffer:
        """New zeroed memory of the GPU, apart from torch's. Blocks. The caller closes it.

        Raises:
            CapacityError: There isn't so much.
        """
        return allocate(self.context, nbytes)

    def register(self, address: int, nbytes: int, owner: object) -> CudaBuffer:
        """Memory that there is, as a buffer that keeps its owner alive until it is closed.

        Args:
            address: Of the first byte: of this GPU, or of another that this one can reach.
            nbytes: Size.
            owner: What keeps the memory: a tensor's storage, a mapping of another process's memory.
        """
        return CudaBuffer(self.context, address, nbytes, owner)

    async def pinned(self, nbytes: int) -> PinnedBuffer:
        """New pinned memory of the host, made off the loop and piece by piece. The caller closes it.

        Copies that aren't this device's own must not go across its pieces: see ``PinnedBuffer``.

        On Linux other processes can be given it by descriptor, as any ``HostBuffer``.

        Raises:
            CapacityError: There isn't so much, or so much can't be pinned.
        """
        return await off_loop(gated(self, partial(self._pinned, nbytes)), "aiokv-pin")

    async def pin(self, host: HostBuffer, *, readonly: bool = False) -> PinnedBuffer:
        """Pin host memory that there is, off the loop. It then belongs to what is returned.

        Args:
            host: The memory.
            readonly: It is mapped to be read only.

        Raises:
            CapacityError: So much can't be pinned.
            DeviceError: It can't be pinned.
        """
        return await off_loop(gated(self, partial(self.pin_now, host, readonly=readonly)), "aiokv-pin")

    def pin_now(self, host: HostBuffer, *, readonly: bool = False) -> PinnedBuffer:
        """The same, at once; blocks."""
        return pin(self.context, host, readonly=readonly)

    def _pinned(self, nbytes: int) -> PinnedBuffer:
        host = HostBuffer.allocate(nbytes)
        try:
            return self.pin_now(host)
        except BaseException:
            host.close()
            raise

    # -- streams

    def stream(self) -> CudaStream:
        """A side stream that nothing is on, never the default one.

        Raises:
            DeviceError: The device failed.
        """
        self.context.check()
        return CudaStream(self.context, self.context.stream(), own=True)

    def adopt(self, stream: object | None) -> CudaStream:
        """The caller's stream, of torch, cupy or anything with ``__cuda_stream__``. From any thread.

        Args:
            stream: None is torch's current stream of this GPU in the calling thread.

        Raises:
            TypeError: It is no stream.
            DeviceError: It is another GPU's, or the per-thread default stream.
        """
        return adopted(self.context, stream)

    # -- copies

    def copy(
        self,
        plan: CopyPlan,
        chunk: Chunk,
        src: Sequence[Buffer],
        dst: Sequence[Buffer],
        *,
        stream: Stream,
    ) -> None:
        """Enqueue the copy of one chunk between memory of GPUs and pinned memory, in any combination.

        The caller keeps the buffers until an event recorded afterwards is done, also after an error:
        a part may have been enqueued before it. So it is with ``gather`` and ``scatter``.

        Raises:
            DeviceError: Chunk, buffers or stream don't fit, or the device failed.
        """
        self._engine.copy(plan, chunk, src, dst, stream)

    def gather(
        self,
        plan: CopyPlan,
        chunk: Chunk,
        src: Sequence[Buffer],
        staging: Buffer,
        offset: int,
        *,
        stream: Stream,
    ) -> None:
        """Enqueue the packing of one chunk to ``staging[offset : offset + chunk.nbytes]``, in plan order.

        Args:
            plan: The plan.
            chunk: Of the plan.
            src: The source's buffers.
            staging: Memory of a GPU, or pinned memory.
            offset: Where in it, in bytes.
            stream: What orders it.

        Raises:
            DeviceError: Chunk, buffers or stream don't fit, or the device failed.
        """
        self._engine.gather(plan, chunk, src, staging, offset, stream)

    def scatter(
        self,
        plan: CopyPlan,
        chunk: Chunk,
        staging: Buffer,
        offset: int,
        dst: Sequence[Buffer],
        *,
        stream: Stream,
    ) -> None:
        """Enqueue the unpacking of ``staging[offset : offset + chunk.nbytes]``; the mirror of ``gather``.

        Raises:
            DeviceError: Chunk, buffers or stream don't fit, or the device failed.
        """
        self._engine.scatter(plan, chunk, staging, offset, dst, stream)

    def close(self) -> None:
        """Give back what the device took for itself; nothing may be in flight. Blocks."""
        self._engine.close()
        self.context.close()
