"""What ``cuda_ipc`` asks of the CUDA driver. Every call may block: they are made off the loop.

The driver's library is called directly, since those calls give up the GIL: opening a handle takes
10 ms, in which the loop goes on. Nothing is imported for it, and it is there wherever a GPU is.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

from aiokv.errors import DeviceError

__all__ = ["HANDLE_BYTES", "Allocation", "CudaIpcDriver", "IpcDriver"]

#: Size of a handle that names an allocation to other processes.
HANDLE_BYTES = 64

_LAZY_ENABLE_PEER_ACCESS = 1
_STREAM_NON_BLOCKING = 1
_CAPTURE_RELAXED = 2
#: Attributes of a pointer: whether it can be shared by a handle, and the memory pool it is from.
_IPC_CAPABLE, _MEMPOOL = 10, 17
#: And the number of the device that it is on.
_ORDINAL = 9
#: What the driver answers when it was asked before.
_ALREADY_ENABLED = 704


@dataclass(frozen=True, slots=True)
class Allocation:
    """One allocation of device memory."""

    base: int
    nbytes: int


class IpcDriver(Protocol):
    """The calls, for one device of this process. Each raises DeviceError when it fails."""

    def find(self, address: int) -> Allocation:
        """The allocation that ``address`` is in."""

    def refusal(self, address: int) -> str:
        """Why the memory at ``address`` can't be shared, and what mends it; empty when it can."""

    def export(self, base: int) -> bytes:
        """The handle of the allocation that begins at ``base``: ``HANDLE_BYTES`` bytes."""

    def open(self, handle: bytes) -> Allocation:
        """Map another process's allocation; to be closed by its base, once for each time it was opened."""

    def close(self, base: int) -> None:
        """Unmap what was opened. Nothing may be reading it."""

    def allocate(self, data: bytes) -> int:
        """New memory that nothing else shares an allocation with, beginning with ``data``; its base."""

    def free(self, base: int) -> None:
        """Give back what ``allocate`` made."""

    def read(self, address: int, nbytes: int) -> bytes:
        """What is in device memory now."""

    def reach(self, address: int) -> None:
        """See to it that the device copies from this process's own memory, whichever device that is on."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


#: Allocations of the driver's own granularity share no memory with others.
_GRANULE = 2 << 20


class CudaIpcDriver:
    """``libcuda`` for one device, in the context that torch and cupy use. From any thread.

    Args:
        ordinal: Number of the device in this process.
        library: The driver's library; by default the one that is installed.

    Raises:
        DeviceError: There is no CUDA driver, or no such device.
    """

    def __init__(self, ordinal: int, library: ctypes.CDLL | None = None) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1") if library is None else library
        except OSError as error:
            raise DeviceError(f"the CUDA driver can't be loaded: {error}") from error
        self._ordinal = ordinal
        pointer, address, size = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t
        for name, arguments in (
            ("cuIpcOpenMemHandle_v2", (pointer, _Handle, ctypes.c_uint)),
            ("cuIpcGetMemHandle", (pointer, address)),
            ("cuIpcCloseMemHandle", (address,)),
            ("cuMemGetAddressRange_v2", (pointer, pointer, address)),
            ("cuPointerGetAttribute", (pointer, ctypes.c_int, address)),
            ("cuMemAlloc_v2", (pointer, size)),
            ("cuMemFree_v2", (address,)),
            ("cuMemcpyHtoDAsync_v2", (address, pointer, size, pointer)),
            ("cuMemcpyDtoHAsync_v2", (pointer, address, size, pointer)),
        ):
            getattr(self._library, name).argtypes = arguments
        self._call("cuInit", ctypes.c_uint(0))
        self._device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(self._device), ctypes.c_int(ordinal))

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            what = text.value.decode() if text.value else "unknown error"
            raise DeviceError(f"{name}: {what} ({code})")

    @contextmanager
    def _current(self) -> Iterator[None]:
        """The device's primary context in this thread, and no graph capture of other threads disturbed."""
        context, mode = ctypes.c_void_p(), ctypes.c_int(_CAPTURE_RELAXED)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device)
        try:
            self._call("cuCtxPushCurrent_v2", context)
            try:
                self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
                try:
                    yield
                finally:
                    self._library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
            finally:
                self._library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
        finally:
            self._library.cuDevicePrimaryCtxRelease_v2(self._device)

    @contextmanager
    def _stream(self) -> Iterator[ctypes.c_void_p]:
        """A stream of its own, in the context, and waited for in the end."""
        stream = ctypes.c_void_p()
        with self._current():
            self._call("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(_STREAM_NON_BLOCKING))
            try:
                yield stream
                self._call("cuStreamSynchronize", stream)
            finally:
                self._library.cuStreamDestroy_v2(stream)

    def find(self, address: int) -> Allocation:
        """The allocation that ``address`` is in."""
        base, nbytes = ctypes.c_uint64(), ctypes.c_size_t()
        with self._current():
            self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(nbytes), address)
        return Allocation(base.value, nbytes.value)

    def refusal(self, address: int) -> str:
        """Why the memory at ``address`` can't be shared, and what mends it; empty when it can."""
        capable, pool = ctypes.c_uint(), ctypes.c_void_p()
        with self._current():
            self._call("cuPointerGetAttribute", ctypes.byref(capable), _IPC_CAPABLE, address)
            if capable.value:
                return ""
            self._call("cuPointerGetAttribute", ctypes.byref(pool), _MEMPOOL, address)
        if pool.value:
            return (
                "lies in a CUDA memory pool (cudaMallocAsync), which has no IPC handle; set "
                "PYTORCH_CUDA_ALLOC_CONF=backend:native before the process starts"
            )
        return (
            "lies in an expandable segment of torch's allocator (or other virtual memory), which has no IPC "
            "handle; set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False before the process starts, or "
            "make the cache with KVCache.allocate"
        )

    def export(self, base: int) -> bytes:
        """The handle of the allocation that begins at ``base``."""
        handle = _Handle()
        with self._current():
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), base)
        return bytes(handle)

    def open(self, handle: bytes) -> Allocation:
        """Map another process's allocation, on this device or one that this reaches."""
        base = ctypes.c_uint64()
        with self._current():
            flags = _LAZY_ENABLE_PEER_ACCESS
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(base), _Handle.from_buffer_copy(handle), flags)
        try:
            return self.find(base.value)
        except BaseException:
            self.close(base.value)
            raise

    def close(self, base: int) -> None:
        """Unmap what was opened."""
        with self._current():
            self._call("cuIpcCloseMemHandle", base)

    def allocate(self, data: bytes) -> int:
        """New memory that begins with ``data``; an allocation alone, so that no other is shared with it."""
        base = ctypes.c_uint64()
        try:
            with self._stream() as stream:
                self._call("cuMemAlloc_v2", ctypes.byref(base), -(-len(data) // _GRANULE) * _GRANULE)
                self._call("cuMemcpyHtoDAsync_v2", base.value, data, len(data), stream)
        except BaseException:
            if base.value:
                with suppress(DeviceError):
                    self.free(base.value)
            raise
        return base.value

    def free(self, base: int) -> None:
        """Give back what ``allocate`` made."""
        with self._current():
            self._call("cuMemFree_v2", base)

    def read(self, address: int, nbytes: int) -> bytes:
        """What is in device memory now."""
        data = ctypes.create_string_buffer(nbytes)
        with self._stream() as stream:
            self._call("cuMemcpyDtoHAsync_v2", data, address, nbytes, stream)
        return data.raw

    def reach(self, address: int) -> None:
        """See to it that the device copies from this process's own memory, whichever device that is on."""
        ordinal, device, context = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
        with self._current():
            self._call("cuPointerGetAttribute", ctypes.byref(ordinal), _ORDINAL, address)
            if ordinal.value == self._ordinal:
                return
            self._call("cuDeviceGet", ctypes.byref(device), ordinal)
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            try:
                code = self._library.cuCtxEnablePeerAccess(context, ctypes.c_uint(0))
            finally:  # whoever made the memory keeps the context
                self._library.cuDevicePrimaryCtxRelease_v2(device)
            if code not in (0, _ALREADY_ENABLED):
                raise DeviceError(
                    f"memory of GPU {ordinal.value} can't be reached from GPU {self._ordinal} "
                    f"(cuCtxEnablePeerAccess: {code})"
                )
