"""The contract of what reduces a vector over the ranks of a group: the seam between aiokv and a backend."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from aiokv.device.base import Event

__all__ = ["Collective"]


@runtime_checkable
class Collective(Protocol):
    """Reduces one vector at a time, in place. Its buffers are allocated once, when it is made.

    Belongs to one ``RankGroup`` and to the thread of its loop. Nothing but making it may block.
    """

    @property
    def rank(self) -> int:
        """Of this process, within the group."""

    @property
    def size(self) -> int:
        """Ranks of the group."""

    @property
    def vector(self) -> NDArray[np.int32]:
        """``int32[LENGTH]``: what this rank brings before ``reduce``, and what came of it afterwards.

        In between it belongs to the backend; after a reduction that failed, or that nobody waits for any
        more, for ever.
        """

    @property
    def guard(self) -> AbstractContextManager[object] | None:
        """Is entered while events are looked at, as the poller's; None where there is no need."""

    def reduce(self, timeout_s: float) -> Event:
        """Begin to take the minimum over all ranks of each lane of the vector. Never blocks.

        Every rank has to call this as many times, in the same order.

        Args:
            timeout_s: After so long (s) the backend may give it up. Whoever waits has a deadline of its
                own, and that is earlier.

        Returns:
            Done when the result is in the vector. Where a rank was lost it raises DeviceError, once this is
            known, or is never done.

        Raises:
            DeviceError: The group is no more, or won't take it.
        """

    def close(self) -> None:
        """Let go of the group and the buffers. What is in flight keeps what it writes to."""
