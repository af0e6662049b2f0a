"""NCCL as cupy has it: the calls that the transport makes, with errors made ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiokv.errors import DeviceError

__all__ = ["Calls", "Communicator", "Current", "load"]

#: Makes a context manager within which a GPU is the calling thread's.
Current = Callable[[], AbstractContextManager[object]]

_OLDEST_CUPY = 14  # the first whose unique ids are bytes
_OLDEST_NCCL = 21900
#: What cupy raises: NcclError and CUDA's are RuntimeErrors, and a status that it can't name is a KeyError.
_ERRORS = (RuntimeError, KeyError, OSError)
_MEND = "pip install 'aiokv[cuda13]' (or aiokv[cuda12], for a driver of CUDA 12)"


class Communicator:
    """One end of a communicator of two ranks. For one thread at a time.

    Args:
        nccl: cupy's module.
        made: cupy's communicator.
        peer: Rank of the other end.
        current: Makes the GPU the calling thread's, within it. NCCL would do that by itself, and go back to
            whatever GPU was current before, if nobody ever used that.
    """

    def __init__(
        self,
        nccl: Any,  # noqa: ANN401 - cupy has no types
        made: Any,  # noqa: ANN401
        peer: int,
        current: Current = nullcontext,
    ) -> None:
        self._nccl = nccl
        self._made = made
        self._peer = peer
        self._current = current

    def send(self, ranges: Sequence[tuple[int, int]], stream: int) -> None:
        """Enqueue sends of these ranges (address, bytes), as one group.

        Raises:
            DeviceError: NCCL didn't take them; what it did take is unknown, so the communicator is of no use.
        """
        self._post(self._made.send, ranges, stream)

    def recv(self, ranges: Sequence[tuple[int, int]], stream: int) -> None:
        """Enqueue receives into these ranges; see ``send``."""
        self._post(self._made.recv, ranges, stream)

    def _post(self, post: Callable[..., None], ranges: Sequence[tuple[int, int]], stream: int) -> None:
        # A group belongs to its thread, and whatever else NCCL is told by it meanwhile: no await in here.
        try:
            with self._current():
                self._nccl.groupStart()
                try:
                    for address, nbytes in ranges:
                        post(address, nbytes, self._nccl.NCCL_UINT8, self._peer, stream)
                finally:
                    self._nccl.groupEnd()
        except _ERRORS as error:
            raise DeviceError(f"NCCL refused {len(ranges)} operations: {error!r}") from error

    def to_itself(self, address: int, nbytes: int, stream: int) -> None:
        """Where there is one rank only: send so many bytes at ``address`` to behind them.

        Raises:
            DeviceError: NCCL didn't take it.
        """
        nccl = self._nccl
        try:
            nccl.groupStart()
            try:
                self._made.send(address, nbytes, nccl.NCCL_UINT8, self._peer, stream)
                self._made.recv(address + nbytes, nbytes, nccl.NCCL_UINT8, self._peer, stream)
            finally:
                nccl.groupEnd()
        except _ERRORS as error:
            raise DeviceError(f"NCCL doesn't work here: {error!r}") from error

    def error(self) -> str:
        """What went wrong with what was enqueued; empty as long as nothing did. Never blocks."""
        try:
            self._made.check_async_error()
        except _ERRORS as error:
            return f"NCCL: {error!r}"
        return ""

    def destroy(self) -> None:
        """Free all, once what is enqueued is done. Blocks, for less than ``abort``; nothing may follow."""
        self._made.destroy()

    def abort(self) -> None:
        """End what is enqueued, whatever the other end does, and free all. Blocks; nothing may follow.

        Events of what was enqueued are then done, as if the bytes had come.

        Raises:
            DeviceError: NCCL can't.
        """
        try:
            self._made.abort()
        except _ERRORS as error:
            raise DeviceError(f"a communicator can't be aborted: {error!r}") from error


class Calls:
    """The calls of ``cupy.cuda`` that make and prove communicators; all but ``check`` block.

    Args:
        cuda: That module, or what stands for it.
        kind: The kind of device whose memory it sends.
    """

    def __init__(self, cuda: Any, *, kind: str = "cuda") -> None:  # noqa: ANN401 - cupy has no types
        self._cuda = cuda
        self.kind = kind

    def check(self) -> None:
        """Raise DeviceError if this NCCL is too old."""
        if (version := self._cuda.nccl.get_version()) < _OLDEST_NCCL:
            raise DeviceError(f"NCCL {version} is older than {_OLDEST_NCCL}, which is needed: {_MEND}")

    def use(self, ordinal: int) -> None:
        """Make this GPU the calling thread's, for as long as that lives.

        Raises:
            DeviceError: It can't be used.
        """
        try:
            self._cuda.runtime.setDevice(ordinal)
        except _ERRORS as error:
            raise DeviceError(f"GPU {ordinal} can't be used: {error!r}") from error

    def unique_id(self, ordinal: int) -> bytes:
        """A name under which two ranks find each other: 128 bytes.

        Args:
            ordinal: The GPU, which is made the thread's: NCCL may look at whichever is current.

        Raises:
            DeviceError: NCCL has no network to be found at.
        """
        self.use(ordinal)
        try:
            return bytes(self._cuda.nccl.get_unique_id())
        except _ERRORS as error:
            raise DeviceError(f"NCCL has no unique id: {error!r}") from error

    def communicator(
        self, name: bytes, rank: int, ranks: int = 2, *, current: Current = nullcontext
    ) -> Communicator:
        """This end of a communicator; returns when the other ends have come, which may be never.

        Raises:
            DeviceError: It can't be made.
        """
        nccl = self._cuda.nccl
        try:
            made = nccl.NcclCommunicator(ranks, name, rank)
        except _ERRORS as error:
            raise DeviceError(f"NCCL made no communicator: {error!r}") from error
        return Communicator(nccl, made, (rank + 1) % ranks, current)

    def rehearse(self, ordinal: int, address: int, stream: int) -> None:
        """Have NCCL load what sending from this GPU takes, by sending 64 bytes at ``address`` to behind them.

        What is loaded while another communicator waits for its peer can wait for that.

        Raises:
            DeviceError: NCCL doesn't work here.
        """
        alone = self.communicator(self.unique_id(ordinal), 0, 1)
        try:
            alone.to_itself(address, 64, stream)
            self._cuda.runtime.streamSynchronize(stream)
        except _ERRORS as error:
            raise DeviceError(f"NCCL doesn't work here: {error!r}") from error
        finally:
            alone.destroy()

    def put(self, address: int, data: bytes, stream: int) -> None:
        """Enqueue the writing of some bytes to the device."""
        runtime, source = self._cuda.runtime, np.frombuffer(data, np.uint8)
        runtime.memcpyAsync(
            address, source.ctypes.data, len(data), runtime.memcpyHostToDevice, stream
        )  # from pageable memory, which was read when it returns

    def get(self, address: int, nbytes: int, stream: int) -> NDArray[np.uint8]:
        """Enqueue the reading of some bytes from the device; they are there when the stream gets there."""
        runtime, target = self._cuda.runtime, np.empty(nbytes, np.uint8)
        runtime.memcpyAsync(target.ctypes.data, address, nbytes, runtime.memcpyDeviceToHost, stream)
        return target


def load() -> Calls:
    """Import cupy, and with it NCCL. Takes its time.

    Raises:
        DeviceError: One of them is missing or too old; the message says how to mend that.
    """
    try:
        import cupy
        from cupy.cuda import nccl
    except ImportError as error:
        raise DeviceError(f"nccl: cupy with NCCL can't be imported ({error}): {_MEND}") from error
    if not getattr(nccl, "available", True):
        raise DeviceError(f"nccl: this cupy was built without NCCL, or finds no libnccl.so.2: {_MEND}")
    if int(cupy.__version__.partition(".")[0]) < _OLDEST_CUPY:
        raise DeviceError(f"nccl: cupy {cupy.__version__} is older than {_OLDEST_CUPY}: {_MEND}")
    calls = Calls(cupy.cuda)
    calls.check()
    return calls
