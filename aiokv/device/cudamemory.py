"""Memory that a GPU copies from and to: its own, and pinned memory of the host."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from aiokv.device.cudastream import CudaContext
from aiokv.device.host import HostBuffer
from aiokv.errors import CapacityError, ClosedError, DeviceError

if TYPE_CHECKING:
    import torch

__all__ = ["CudaBuffer", "PinnedBuffer", "allocate", "pin"]

#: Bytes pinned in one call, which holds the driver for some 20 ms; hundreds of gigabytes in one call fail
#: (vllm#51080). No DMA may go across the border of two.
PIECE = 32 << 20

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every GPU
_READ_ONLY = 8  # cudaHostRegisterReadOnly


class _Allocation:
    """Memory of aiokv's own on a GPU, given back when nobody refers to it any more."""

    __slots__ = ("_context", "address")

    def __init__(self, context: CudaContext, address: int) -> None:
        self._context = context
        self.address = address

    def __del__(self) -> None:
        # The device may be lost, or the process at its end.
        with contextlib.suppress(Exception), self._context.current(), self._context.cuda.quiet:
            self._context.cuda.runtime.free(self.address)


class CudaBuffer:
    """A range of GPU memory, kept alive by this object. Whoever makes it closes it.

    Args:
        context: The GPU.
        address: Of the first byte.
        nbytes: Size.
        owner: What keeps the memory alive; let go of by ``close``.
    """

    __slots__ = ("_address", "_nbytes", "_owner", "context")

    def __init__(self, context: CudaContext, address: int, nbytes: int, owner: object) -> None:
        self.context = context
        self._address = address
        self._nbytes = nbytes
        self._owner: object = owner

    def __repr__(self) -> str:
        state = " closed" if self.closed else ""
        return f"<CudaBuffer of {self._nbytes} bytes on device {self.context.ordinal}{state}>"

    @property
    def address(self) -> int:
        """Address of the first byte, on the device and in this process.

        Raises:
            ClosedError: The buffer was closed.
        """
        if self._owner is None:
            raise ClosedError("this CUDA buffer was closed")
        return self._address

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self._nbytes

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._owner is None

    @property
    def owner(self) -> object:
        """What keeps the memory alive: a storage, for tensors that were registered; None once closed."""
        return self._owner

    def tensor(self) -> torch.Tensor:
        """All of it as a flat tensor of bytes, which keeps the memory alive, also after ``close``.

        Raises:
            ClosedError: The buffer was closed.
        """
        span = _Span(self.address, self._nbytes, self._owner)
        found: torch.Tensor = self.context.cuda.torch.as_tensor(span, device=f"cuda:{self.context.ordinal}")
        return found

    def close(self) -> None:
        """Let go of the memory, which is freed once no tensor refers to it. May be called twice.

        Freeing waits for all work of the device, so it is nothing to do on a loop that moves data.
        """
        self._owner = None


class _Span:
    """Memory in the form that torch takes arrays of others in."""

    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (nbytes,),
            "strides": None,
            "typestr": "|u1",
            "version": 3,
            "stream": None,  # nothing is pending on it
        }


class PinnedBuffer:
    """Host memory that the GPU copies from and to by itself. Use ``CudaDevice.pinned`` or ``pin``.

    Whoever makes it closes it, which closes the host buffer, too.

    It is pinned in pieces of 32 MiB, and CUDA refuses one DMA across the border of two (invalid argument).
    The device's own copies are cut there. Whoever copies by other means, such as torch's ``copy_`` of a
    tensor over ``view``, stays within a multiple of ``piece`` from the start; kernels may go across.
    """

    def __init__(self, context: CudaContext, host: HostBuffer, *, readonly: bool = False) -> None:
        self._context = context
        self.host = host
        self.readonly = readonly
        self._address = host.address
        self._pinned: list[int] = []
        #: No DMA may go across a multiple of so many bytes from the start.
        self.piece = PIECE
        flags = _PORTABLE | (_READ_ONLY if readonly else 0)
        runtime = context.cuda.runtime
        try:
            with context.current(), context.cuda.quiet:
                for offset in range(0, host.nbytes, PIECE):
                    size = min(PIECE, host.nbytes - offset)
                    runtime.hostRegister(self._address + offset, size, flags)
                    self._pinned.append(self._address + offset)
        except context.cuda.errors as error:
            self._unpin()
            raise context.cuda.translated(error, f"{host.nbytes} bytes can't be pinned") from error

    def __repr__(self) -> str:
        return f"<PinnedBuffer of {self.nbytes} bytes{' closed' if self.closed else ''}>"

    def __del__(self) -> None:
        if hasattr(self, "_pinned"):
            self._unpin()

    @property
    def address(self) -> int:
        """Address of the first byte, for the host and the device alike."""
        return self._address

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.host.nbytes

    @property
    def view(self) -> memoryview:
        """All of it as a flat memoryview of bytes.

        Raises:
            ClosedError: The buffer was closed.
        """
        return self.host.view

    @property
    def fd(self) -> int | None:
        """Descriptor of the memory, as that of ``HostBuffer``."""
        return self.host.fd

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return not self._pinned

    def close(self) -> None:
        """Unpin the memory and give it back. May be called twice. Nothing may be in flight.

        It takes some milliseconds for each 100 MiB: nothing to do on a loop that moves data.
        """
        self._unpin()
        self.host.close()

    def _unpin(self) -> None:
        pinned, self._pinned = self._pinned, []
        if not pinned:
            return
        context = self._context
        with contextlib.suppress(Exception), context.current(), context.cuda.quiet:  # the device may be lost
            for address in pinned:
                context.cuda.runtime.hostUnregister(address)


def allocate(context: CudaContext, nbytes: int, *, zeroed: bool = True) -> CudaBuffer:
    """New memory of the GPU, apart from torch's. Blocks.

    Raises:
        CapacityError: There isn't so much.
        DeviceError: The device failed.
    """
    if nbytes <= 0:
        raise ValueError(f"a buffer needs at least one byte, got {nbytes}")
    runtime = context.cuda.runtime
    try:
        with context.current(), context.cuda.quiet:
            free, _ = runtime.memGetInfo()
            if nbytes > free:
                raise CapacityError(f"{nbytes} bytes of CUDA device {context.ordinal}: only {free} are free")
            address = runtime.malloc(nbytes)
            owner = _Allocation(context, address)
            if zeroed:
                stream = context.stream()
                runtime.memsetAsync(address, 0, nbytes, stream)
                runtime.streamSynchronize(stream)
                context.give_stream(stream)
    except context.cuda.errors as error:
        raise context.cuda.translated(error, f"{nbytes} bytes of CUDA device {context.ordinal}") from error
    return CudaBuffer(context, address, nbytes, owner)


def pin(context: CudaContext, host: HostBuffer, *, readonly: bool = False) -> PinnedBuffer:
    """Pin memory that there is. Blocks; the buffer then belongs to what is returned.

    Raises:
        CapacityError: So much can't be pinned.
        DeviceError: It can't be pinned at all.
    """
    if host.nbytes <= 0:
        raise DeviceError("there is nothing to pin")
    return PinnedBuffer(context, host, readonly=readonly)
