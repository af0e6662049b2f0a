"""What all links of one NCCL transport share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from aiokv.device.base import Buffer, Device, Stream
from aiokv.device.poller import CompletionPoller
from aiokv.proto.plan import Chunk, CopyPlan
from aiokv.transports.nccl_calls import Calls, Current
from aiokv.transports.nccl_staging import Pool

if TYPE_CHECKING:
    from aiokv.transports.nccl_end import NcclEnd

__all__ = ["Home", "StagingDevice"]


class StagingDevice(Device, Protocol):
    """A device that packs chunks into staging memory, and unpacks them."""

    @property
    def ordinal(self) -> int:
        """CUDA's number of the device."""

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
        """Enqueue the packing of a chunk, in plan order, to ``staging`` from ``offset`` on."""

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
        """Enqueue the mirror image of ``gather``."""


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
