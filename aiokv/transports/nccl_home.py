"""What all links of one NCCL transport share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiokv.device.base import StagingDevice
from aiokv.device.poller import CompletionPoller
from aiokv.transports.nccl_calls import Calls, Current
from aiokv.transports.nccl_staging import Pool

if TYPE_CHECKING:
    from aiokv.transports.nccl_end import NcclEnd

__all__ = ["Home"]


@dataclass(eq=False, slots=True)
class Home:
    """What all links of one transport share."""

    calls: Calls
    device: StagingDevice
    poller: CompletionPoller
    #: Memory to gather in, and to receive into.
    outgoing: Pool
    incoming: Pool
    #: How long a communicator is kept that is not used, in seconds.
    idle_s: float
    #: Makes the device the calling thread's.
    current: Current = nullcontext
    #: Names that no communicator was made under: NCCL waits under each until somebody comes.
    names: list[bytes] = field(default_factory=list)
    #: Ends that are not lost.
    ends: dict[NcclEnd[Any], None] = field(default_factory=dict)
    #: Threads that make or abort communicators of links that are over.
    lingering: int = 0
    #: Called when one of them has ended.
    ended: Callable[[], None] = lambda: None

    def leave(self, change: int) -> None:
        """So many threads more, or fewer, are at work."""
        self.lingering += change
        if change < 0:
            self.ended()
