"""Reduction by NCCL, between GPUs: on a side stream, with one copy each way through pinned memory.

What is reduced is brought from pinned memory and back there by the stream itself; an event says when it is,
and the loop's poller asks for that. Nothing waits, but for the first time: then NCCL connects, off the loop.

Memory, streams and events are torch's. Its allocators know on which streams memory is used, and hand none of
it out again before those are through, whoever let go of it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from aiokv.device.base import Event
from aiokv.device.cudalibrary import CaptureMode, DriverCalls
from aiokv.device.offloop import off_loop
from aiokv.errors import AiokvError, ClosedError, DeviceError
from aiokv.ranks.vector import LENGTH

if TYPE_CHECKING:
    import asyncio

    from torch.distributed import ProcessGroup

__all__ = ["NcclCollective"]


class NcclCollective:
    """A vector in pinned memory, reduced in the memory of the group's own GPU.

    Making one allocates both, and blocks. The group's time-out stays its own: torch's watchdog ends the
    process of whoever exceeds it.

    Args:
        group: A group with an NCCL backend, that this process is in, and that nothing else is sent by
            meanwhile.
        torch: The module.
        guard: Is entered while events are looked at; by default, what keeps that from breaking a capture of
            a CUDA graph in another thread.

    Raises:
        DeviceError: The GPU can't be used.
    """

    def __init__(
        self,
        group: ProcessGroup,
        *,
        torch: object | None = None,
        guard: AbstractContextManager[object] | None = None,
    ) -> None:
        from torch.distributed import distributed_c10d

        self._torch: Any = import_module("torch") if torch is None else cast("Any", torch)
        self._c10d: Any = distributed_c10d
        self.rank = int(group.rank())
        self.size = int(group.size())
        self._group: ProcessGroup | None = group
        try:
            bound = group.bound_device_id
            #: The group's own GPU: the one that it was bound to when it was made, else the current one.
            self.place = f"cuda:{self._torch.cuda.current_device() if bound is None else bound.index}"
            self.guard = guard or CaptureMode(DriverCalls())
            self._stream = self._torch.cuda.Stream(device=self.place)
            self._event = self._torch.cuda.Event()
            self._pinned = self._torch.zeros(LENGTH, dtype=self._torch.int32, pin_memory=True)
            self._tensor = self._torch.zeros(LENGTH, dtype=self._torch.int32, device=self.place)
        except (RuntimeError, AssertionError, OSError) as error:  # torch asserts that it was built for GPUs
            raise DeviceError(f"the GPU of an NCCL group can't be used: {error}") from error
        self._tensor.record_stream(self._stream)
        # What fills the tensor was enqueued on the current stream.
        self._stream.wait_stream(self._torch.cuda.current_stream(self.place))
        self.vector: NDArray[np.int32] = self._pinned.numpy()
        self._options: Any = self._c10d.AllreduceOptions()
        self._options.reduceOp = self._c10d.ReduceOp.MIN
        # On the stream that is current, and not on one of torch's own that ours would have to wait for.
        self._options.asyncOp = False
        self._connected = False

    def reduce(self, timeout_s: float) -> Event:
        """Begin; see ``Collective.reduce``. The group's own time-out holds."""
        group = self._group
        if group is None:
            raise ClosedError("the group was let go of")
        try:
            self._c10d.get_backend(group)
        except ValueError as error:
            raise ClosedError(f"the process group was destroyed: {error}") from error
        if self._connected:
            self._enqueue(group)
            return _Reduction(self, self._event)
        self._connected = True
        return _Connecting(self, self._event, off_loop(lambda: self._enqueue(group), "aiokv-ranks-nccl"))

    def check(self) -> None:
        """Raise DeviceError where NCCL knows of an error. For what waits."""
        group = self._group
        if group is None:
            raise DeviceError("the group was let go of")
        backend = group._get_backend(self._torch.device(self.place))  # noqa: SLF001 - it has no other name
        state = backend.get_error().name
        if state != "SUCCESS":
            raise DeviceError(f"NCCL reports {state.lower().replace('_', ' ')}")

    def close(self) -> None:
        """Let go of the group."""
        self._group = None

    def _enqueue(self, group: ProcessGroup) -> None:
        """Have the stream bring the vector, reduce it and bring it back, and then pass the event.

        Raises:
            DeviceError: CUDA or NCCL failed.
        """
        try:
            with self._torch.cuda.stream(self._stream):
                self._tensor.copy_(self._pinned, non_blocking=True)
                work = group.allreduce([self._tensor], self._options)
                if work is not None:
                    work.wait()  # orders the stream, and returns
                self._pinned.copy_(self._tensor, non_blocking=True)
                self._event.record(self._stream)
        except RuntimeError as error:
            raise DeviceError(f"NCCL: {error}") from error


class _Reduction:
    """One that is enqueued."""

    __slots__ = ("_collective", "_event")

    def __init__(self, collective: NcclCollective, event: Any) -> None:  # noqa: ANN401 - torch's, or a fake
        self._collective = collective
        self._event = event

    def done(self) -> bool:
        """Whether the result is in the vector.

        Raises:
            DeviceError: NCCL or the GPU failed.
        """
        # The deadline and who begins look, too, and not only the poller, which enters it once for all.
        try:
            with self._collective.guard:
                done = cast("bool", self._event.query())
        except RuntimeError as error:
            raise DeviceError(f"CUDA: {error}") from error
        # After the event: those of a communicator that was aborted come as if the data had.
        self._collective.check()
        return done


class _Connecting(_Reduction):
    """The first one, which another thread enqueues once NCCL has connected."""

    __slots__ = ("_enqueuing",)

    def __init__(
        self,
        collective: NcclCollective,
        event: Any,  # noqa: ANN401
        enqueuing: asyncio.Future[None],
    ) -> None:
        super().__init__(collective, event)
        self._enqueuing = enqueuing

    def done(self) -> bool:
        """Whether the result is in the vector.

        Raises:
            DeviceError: NCCL or the GPU failed.
        """
        if not self._enqueuing.done():
            return False
        failure = self._enqueuing.exception()
        if failure is not None and not isinstance(failure, AiokvError):
            raise DeviceError(f"NCCL: {failure}") from failure
        if failure is not None:
            raise failure
        return super().done()
