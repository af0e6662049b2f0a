"""What all links of one NCCL transport share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiokv.device.base import StagingDevice
from aiokv.device.gate import Gate
from aiokv.device.poller import CompletionPoller
from aiokv.transports.nccl_calls import Calls, Current
from aiokv.transports.nccl_staging import Pool

if TYPE_CHECKING:
    from aiokv.transports.nccl_end import NcclEnd

__all__ = ["Home"]

#: How long a communicator is used at least before it gives way to others, in seconds: for less, making it is
#: not worth while.
_TURN_S = 0.5


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
    #: Of the device: closed while somebody makes a call that may wait for all that is in flight on it.
    gate: Gate
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

    #: The end of a turn, while somebody waits for memory.
    turn: asyncio.TimerHandle | None = None

    def relieve(self) -> None:
        """Somebody waits for memory: who needs none of his gives it back, others when their turn is over."""
        for end in list(self.ends):
            end.relieve()
        self._take_turns()

    def _take_turns(self) -> None:
        if self.turn is None and (self.outgoing.short or self.incoming.short) and self.ends:
            self.turn = asyncio.get_running_loop().call_later(_TURN_S, self._over)

    def _over(self) -> None:
        """A turn is over. Whoever has most slots goes first; one that doesn't give them up delays nobody."""
        self.turn = None
        since = asyncio.get_running_loop().time() - _TURN_S
        for pool in (self.outgoing, self.incoming):
            wanted = pool.short
            holders = {end: count for end in self.ends if (count := end.holds(pool, since))}
            for end in sorted(holders, key=holders.__getitem__, reverse=True):
                if wanted <= 0:
                    break
                wanted -= holders[end]
                end.hand_over()
        self._take_turns()

    def leave(self, change: int) -> None:
        """So many threads more, or fewer, are at work."""
        self.lingering += change
        if change < 0:
            self.ended()
