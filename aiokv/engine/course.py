"""The course of a transfer: what the engine notes of it while it runs, and its handle reads.

The engine keeps it until the transfer is over, the caller's handle for as long as the caller likes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from aiokv.device.base import Event, Stream
from aiokv.engine.bell import Bell
from aiokv.engine.leases import Lease
from aiokv.proto.parts import State
from aiokv.proto.transfers import Offering, Part, Transfer

__all__ = ["Course", "FetchCourse"]

_log = logging.getLogger("aiokv")


class Course:
    """A transfer of either role, from its beginning until its blocks are the caller's again.

    Args:
        transfer: The table's record.

    Attributes:
        transfer: As given.
        bell: Rung whenever something has happened that a waiter may wait for.
        over: The table resolved it, and the engine gave its blocks back.
        observed: Somebody saw how it ended.
        bytes_moved: Bytes in place, or handed over, so far.
        bytes_total: Bytes that it moves in all, as far as is known.
        lease: The blocks that it holds; None before it begins and once they were given back.
        unsure: A part of it never became quiet, so they won't be.
        after: A fetch's: point on the caller's stream that its writes wait for; None where there is none.
    """

    def __init__(self, transfer: Transfer) -> None:
        self.transfer = transfer
        self.bell = Bell()
        self.over = False
        self.observed = False
        self.bytes_moved = 0
        self.bytes_total = 0
        self.lease: Lease | None = None
        self.unsure = False
        self.after: Event | None = None

    def __del__(self) -> None:
        # As asyncio does for a task whose exception nobody retrieved.
        if not self.observed and self.transfer.error is not None:
            kind = "Offer" if isinstance(self.transfer, Offering) else "Fetch"
            _log.error("%s of %s failed and nobody saw: %s", kind, self.transfer, self.transfer.error)

    def changed(self) -> None:
        """Something has happened that a waiter may wait for."""
        self.bell.ring()

    def end(self) -> None:
        """The blocks are the caller's again."""
        self.over = True
        self.bell.ring()

    async def quiet(self) -> None:
        """Wait until nothing in flight touches the transfer's blocks, however it ended."""
        while not self.over:
            await self.bell.wait()


class FetchCourse(Course):
    """The course of a fetch, whose caller's stream may be ordered after what lands.

    Args:
        transfer: The table's record.
        stream: What the caller enqueues on it later sees what landed.
    """

    def __init__(self, transfer: Transfer, stream: Stream) -> None:
        super().__init__(transfer)
        self.stream = stream
        #: What covers the copies of each layer of a part that are all enqueued.
        self._enqueued: dict[Part, dict[int, Event]] = {}

    def submitted(self, part: Part, layers: Sequence[int], event: Event) -> None:
        """The last copy of each of these layers of a part was enqueued, with the event that covers it."""
        # The stream isn't the fetch's alone: it waits for no more than what its owner asks for.
        self._enqueued.setdefault(part, {}).update(dict.fromkeys(layers, event))
        self.changed()

    def ordered(self, layer: int) -> bool:
        """Whether a layer has landed, or can be waited for on the stream, from all sources."""
        return all(
            self._there(part, layer) or layer in self._enqueued.get(part, ()) for part in self.transfer.parts
        )

    def order(self, layer: int) -> None:
        """What the stream gets next comes after the copies of a layer that is ``ordered``.

        Raises:
            DeviceError: They failed, or the device did.
        """
        for part in self.transfer.parts:
            if not self._there(part, layer):  # what the host knows to be there comes before all it enqueues
                self.stream.wait(self._enqueued[part][layer])

    def end(self) -> None:
        """The blocks are the caller's again."""
        self._enqueued.clear()
        super().end()

    @staticmethod
    def _there(part: Part, layer: int) -> bool:
        return part.state is State.LANDED or bool(part.landed >> layer & 1)
