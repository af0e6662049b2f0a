"""Reduction by gloo, between processes on CPUs.

By one exchange, in which each rank sends its vector to each other one, and not by gloo's all_reduce, which
passes pieces round a ring in 2 (n - 1) steps: for vectors this short steps are all that counts, and on a ring
only the neighbours of a rank that died hear of it, while the others wait for those until the end of time.
"""

from __future__ import annotations

import datetime as dt
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from aiokv.errors import ClosedError, DeviceError
from aiokv.ranks.vector import LENGTH

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

__all__ = ["GlooCollective"]


class _Exchange:
    """One reduction that is on its way."""

    __slots__ = ("_all", "_done", "_vector", "_work")

    def __init__(self, work: Work, everybody: NDArray[np.int32], vector: NDArray[np.int32]) -> None:
        self._work = work
        self._all = everybody
        self._vector = vector
        self._done = False

    def done(self) -> bool:
        """Whether the vectors of all ranks are here; the first time that they are, reduces them.

        Raises:
            DeviceError: The exchange failed.
        """
        if self._done:
            return True
        if not self._work.is_completed():
            return False
        try:
            self._work.wait()  # returns at once, or raises what went wrong
        except Exception as error:
            raise DeviceError(f"gloo: {error}") from error
        self._all.min(axis=0, out=self._vector)
        self._done = True
        return True


class GlooCollective:
    """Vectors in host memory, exchanged by gloo's own native threads.

    The works of gloo keep the tensors that they write to alive themselves.

    Args:
        group: A group with a gloo backend for CPUs, that this process is in, and that nothing else is sent by
            meanwhile.
    """

    guard: AbstractContextManager[object] | None = None

    def __init__(self, group: ProcessGroup) -> None:
        import torch
        from torch.distributed import distributed_c10d, get_backend

        self.rank = int(group.rank())
        self.size = int(group.size())
        self._group: ProcessGroup | None = group
        self._registered = get_backend
        # One copy for each rank: that is what the exchange takes.
        self._outgoing = torch.zeros(self.size, LENGTH, dtype=torch.int32)
        self._incoming = torch.zeros(self.size, LENGTH, dtype=torch.int32)
        self._copies: NDArray[np.int32] = self._outgoing.numpy()
        self._arrived: NDArray[np.int32] = self._incoming.numpy()
        self.vector: NDArray[np.int32] = np.zeros(LENGTH, np.int32)
        self._options: Any = distributed_c10d.AllToAllOptions()
        self._timeout_s = 0.0

    def reduce(self, timeout_s: float) -> _Exchange:
        """Begin; see ``Collective.reduce``."""
        if self._group is None:
            raise ClosedError("the group was let go of")
        try:
            self._registered(self._group)
        except ValueError as error:
            raise ClosedError(f"the process group was destroyed: {error}") from error
        if timeout_s != self._timeout_s:
            self._options.timeout = dt.timedelta(seconds=timeout_s)
            self._timeout_s = timeout_s
        self._copies[:] = self.vector
        try:
            work = self._group.alltoall_base(self._incoming, self._outgoing, [], [], self._options)
        except Exception as error:
            raise DeviceError(f"gloo: {error}") from error
        return _Exchange(work, self._arrived, self.vector)

    def close(self) -> None:
        """Let go of the group."""
        self._group = None
