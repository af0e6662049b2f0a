"""From slots to a GPU's memory: what a consumer's end does with chunks, wherever they came from."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from aiokv.device.base import Buffer, Event, Stream
from aiokv.errors import DeviceError
from aiokv.proto.plan import Chunk, CopyPlan
from aiokv.transports.staging import Pending, Ring, Staging

__all__ = ["Scatterer"]


class Scatterer:
    """Copies slots of one ring to where parts want them, and knows of each part what is in flight.

    Args:
        staging: The transport's.
        ring: The link's.
        freed: Called when a slot is free again.
        broke: Called when the device failed; told how.
    """

    def __init__(
        self, staging: Staging, ring: Ring, freed: Callable[[int], None], broke: Callable[[str], None]
    ) -> None:
        self.ring = ring
        self._staging = staging
        self._freed = freed
        self._broke = broke
        # One loads while the other's copies end.
        self._streams: tuple[Stream, ...] = (staging.stream(), staging.stream())
        self._turn = 0
        #: By tag, what was submitted and not seen done.
        self._flying: dict[bytes, dict[Event, None]] = {}

    def scatter(
        self,
        tag: bytes,
        plan: CopyPlan,
        chunk: Chunk,
        dst: Sequence[Buffer],
        slot: int,
        landed: Callable[[Chunk], None],
    ) -> None:
        """Copy a chunk from ``slot``; then call ``landed``, and free the slot."""
        self._turn ^= 1
        stream = self._streams[self._turn]
        failure: DeviceError | None = None
        try:
            self._staging.device.scatter(
                plan, chunk, self.ring.memory, self.ring.offset(slot), dst, stream=stream
            )
        except DeviceError as error:  # a part of it may have been enqueued, and is in flight
            failure = error
        try:
            event = stream.record()
        except DeviceError as error:  # then nothing runs on the device any more
            self._broke(f"a chunk can't be copied to the device: {failure or error}")
            return
        self._flying.setdefault(tag, {})[event] = None
        self.ring.watch(event, stream, partial(self._scattered, tag, chunk, event, slot, landed, failure))
        if failure is not None:
            self._broke(f"a chunk can't be copied to the device: {failure}")

    def _scattered(
        self,
        tag: bytes,
        chunk: Chunk,
        event: Event,
        slot: int,
        landed: Callable[[Chunk], None],
        failure: DeviceError | None,
        error: DeviceError | None,
    ) -> None:
        flying = self._flying[tag]
        del flying[event]
        if not flying:
            del self._flying[tag]
        if failure is not None or error is not None:
            self._broke(f"a chunk was not copied to the device: {failure or error}")
            return
        try:
            landed(chunk)
        except Exception as raised:  # noqa: BLE001 - one part's mistake stops no other part's bytes
            context = {"message": f"callback for {chunk} failed: {landed!r}", "exception": raised}
            asyncio.get_running_loop().call_exception_handler(context)
        self._freed(slot)

    def stop(self) -> None:
        """Nothing more will be scattered: others may have the streams, once nothing is on them."""
        # The link and this know each other, so that they live until the collector comes by.
        self._streams = ()

    def quiet(self, tag: bytes) -> Event | None:
        """An event for the end of all that is in flight of a part; None when nothing is."""
        if tag not in self._flying:
            return None
        pending = Pending(len(self._flying[tag]))
        for event in self._flying[tag]:
            pending.add(event)
        try:
            return None if pending.done() else pending
        except DeviceError:  # then nothing is in flight any more
            return None
