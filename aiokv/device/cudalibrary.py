"""CUDA's libraries as aiokv uses them: torch and cupy, and what the driver has beyond them.

Nothing here is imported before a CUDA cache is made, and a library that is missing or too old is
named together with the command that mends it.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from importlib import import_module
from types import ModuleType, TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiokv.errors import AiokvError, CapacityError, DeviceError

__all__ = ["CaptureMode", "Cuda", "DriverCalls", "load"]

#: The oldest cupy whose stubs, kernels and CUDA versions fit.
_CUPY = (14, 0)
_TORCH = (2, 11)

_OUT_OF_MEMORY = 2
_NOT_READY = 600
#: Errors after which every call of the process on this device fails: illegal addresses and
#: instructions, hardware stack errors, misaligned addresses, traps, lost devices, ECC.
_STICKY = frozenset({214, 220, 226, 700, 702, 710, 713, 714, 715, 716, 717, 718, 719, 721, 999})

_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes: how the sources of a batch are read, hints of no use here, flags."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source_hint", ctypes.c_int * 2),
        ("target_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


class DriverCalls:
    """What cupy has no function for. Short calls hold the GIL, as cupy's do; a batch copy gives it up.

    Args:
        path: Of the driver's library.

    Raises:
        OSError: There is no driver.
    """

    def __init__(self, path: str = "libcuda.so.1") -> None:
        short, long = ctypes.PyDLL(path), ctypes.CDLL(path)
        #: Changes the calling thread's graph capture mode for the one in a C integer, which gets the old one.
        self.exchange: Callable[[object], int] = short.cuThreadExchangeStreamCaptureMode
        self._batch: Any = getattr(long, "cuMemcpyBatchAsync_v2", None)
        self._batch_tells = False
        if self._batch is None:
            # CUDA 12.8 and 12.9: with one more argument, the index of what failed.
            self._batch = getattr(long, "cuMemcpyBatchAsync", None)
            self._batch_tells = True

    @property
    def batches(self) -> bool:
        """Whether the driver can be given many copies in one call."""
        return self._batch is not None

    def batch(
        self, targets: NDArray[np.int64], sources: NDArray[np.int64], sizes: NDArray[np.int64], stream: int
    ) -> int:
        """Enqueue many copies, unordered among themselves; returns the status."""
        attributes = _Attributes(source_order=1)  # in stream order
        first = ctypes.c_size_t(0)
        failed = ctypes.c_size_t(0)
        tells = (ctypes.byref(failed),) if self._batch_tells else ()
        status: int = self._batch(
            ctypes.c_void_p(targets.ctypes.data),
            ctypes.c_void_p(sources.ctypes.data),
            ctypes.c_void_p(sizes.ctypes.data),
            ctypes.c_size_t(len(sizes)),
            ctypes.byref(attributes),
            ctypes.byref(first),
            ctypes.c_size_t(1),
            *tells,
            ctypes.c_void_p(stream),
        )
        return status


class CaptureMode:
    """A context in which the calling thread can break no graph capture of another's.

    While a thread captures in the global mode, which is the default, CUDA forbids every thread to query
    events or to allocate, and the capture fails if one does (pytorch#104555); but not a thread that is
    in the thread-local mode, and so it is here. May be entered by several threads, and again within.
    """

    def __init__(self, calls: DriverCalls) -> None:
        self._exchange = calls.exchange
        self._thread = _Mode()

    def __enter__(self) -> None:
        thread = self._thread
        if not thread.depth:
            self._exchange(thread.reference)
        thread.depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        thread = self._thread
        thread.depth -= 1
        if not thread.depth:
            self._exchange(thread.reference)


class _Mode(threading.local):
    """One thread's mode: the thread-local one outside the context, what was there before within it."""

    def __init__(self) -> None:
        self.depth = 0
        self.word = ctypes.c_int(_THREAD_LOCAL)
        self.reference = ctypes.byref(self.word)


class Cuda:
    """The libraries, once they are known to be there and new enough.

    Attributes:
        cupy: The module.
        torch: The module.
        calls: What cupy has no function for.
        runtime: Functions of the CUDA runtime, by cupy.
        driver: Functions of the CUDA driver, by cupy.
        errors: What cupy raises when CUDA fails.
        quiet: Enter it to break no graph capture.
    """

    def __init__(self, cupy: ModuleType, torch: ModuleType, calls: DriverCalls) -> None:
        self.cupy = cupy
        self.torch = torch
        self.calls = calls
        self.runtime: ModuleType = cupy.cuda.runtime
        self.driver: ModuleType = cupy.cuda.driver
        self.errors: tuple[type[Exception], ...] = (
            self.runtime.CUDARuntimeError,
            self.driver.CUDADriverError,
        )
        self.quiet = CaptureMode(calls)

    def translated(self, error: Exception | int, what: str) -> AiokvError:
        """An error of CUDA's as one of ours: CapacityError where memory ran out."""
        told = self.runtime.CUDARuntimeError(error) if isinstance(error, int) else error
        kind = CapacityError if getattr(told, "status", 0) == _OUT_OF_MEMORY else DeviceError
        found = kind(f"{what}: {told}")
        found.__cause__ = told
        return found


def pending(status: int) -> bool:
    """Whether a query says that the work goes on."""
    return status == _NOT_READY


def sticky(error: BaseException | int | None) -> bool:
    """Whether an error means that the device can't be used any more in this process."""
    if isinstance(error, BaseException):
        error = getattr(error, "status", None)
    return error in _STICKY


def load(
    imported: Callable[[str], ModuleType] = import_module, calls: Callable[[], DriverCalls] = DriverCalls
) -> Cuda:
    """Import torch and cupy, and find the driver.

    Args:
        imported: Imports a module by its name.
        calls: Finds the driver.

    Raises:
        DeviceError: One is missing, too old, or there is no GPU; the message says what mends it.
    """
    torch = _imported(imported, "torch", "pip install torch")
    extra = extra_of(torch)
    mend = f"pip install 'aiokv[{extra}]'"
    cupy = _imported(imported, "cupy", mend)
    check_versions(torch, cupy, mend)
    try:
        found = calls()
        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:
        raise DeviceError(f"there is no usable CUDA driver: {error}") from error
    if not count:
        raise DeviceError("there is no CUDA device")
    return Cuda(cupy, torch, found)


def extra_of(torch: ModuleType) -> str:
    """The extra that brings the cupy which fits a torch."""
    built = str(getattr(torch.version, "cuda", None) or "13")
    return "cuda12" if built.startswith("12") else "cuda13"


def check_versions(torch: ModuleType, cupy: ModuleType, mend: str) -> None:
    """Refuse a torch without CUDA, and what is too old.

    Raises:
        DeviceError: With what mends it.
    """
    if getattr(torch.version, "cuda", None) is None:
        raise DeviceError(
            f"torch {torch.__version__} was built without CUDA; "
            "pip install --force-reinstall --index-url https://pypi.org/simple torch"
        )
    if _version(torch) < _TORCH:
        raise DeviceError(f"torch {torch.__version__} is too old, 2.11 is needed: pip install -U torch")
    if _version(cupy) < _CUPY:
        raise DeviceError(f"cupy {cupy.__version__} is too old, 14.0 is needed: {mend}")


def _version(module: ModuleType) -> tuple[int, ...]:
    parts = str(module.__version__).split(".")[:2]
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in parts)


def _imported(imported: Callable[[str], ModuleType], name: str, mend: str) -> ModuleType:
    try:
        return imported(name)
    except Exception as error:  # a broken build raises anything
        raise DeviceError(f"CUDA caches need {name}, which can't be imported ({error!r}): {mend}") from error
