"""What a caller holds of a transfer: the producer's ``Offer`` and the consumer's ``Fetch``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Protocol

from aiokv.engine.arguments import checked_stream, layer_index
from aiokv.engine.course import Course, FetchCourse
from aiokv.engine.handle import Handle, Pump
from aiokv.errors import LocalProtocolError
from aiokv.proto.parts import State
from aiokv.proto.transfers import Fetching, Offering

__all__ = ["Fetch", "Offer"]


class OfferPump(Pump, Protocol):
    """What an offer needs of its engine's core besides."""

    def layer_ready(self, course: Course, layer: int, stream: object | None) -> None:
        """From any thread: a layer is written, as of what is enqueued on the stream."""


class Offer(Handle):
    """The producer's side of a transfer; made by ``TransferEngine.offer``."""

    _core: OfferPump
    _transfer: Offering

    def __init__(self, core: OfferPump, course: Course, begin: Callable[[], None]) -> None:
        super().__init__(core, course, begin)
        #: Layers announced so far, as a bit mask; may be written from the model's thread.
        self._announced = 0

    def layer_ready(self, layer: int, *, stream: object | None = None) -> None:
        """Say that a layer of all blocks is written, as of what is enqueued on ``stream`` now.

        May be called from any thread, in any order of layers. Never blocks. Does nothing once the
        transfer is over, be it by the failure of its readers: ``error`` tells of that, and it is
        raised by ``wait`` and at the end of the ``async with``.

        Args:
            layer: Model-wide index of the layer.
            stream: The stream that writes it: anything with ``__cuda_stream__``; by default the
                calling thread's current stream.

        Raises:
            TypeError: The layer is no integer, or the stream no stream.
            IndexError: There is no such layer.
            LocalProtocolError: The layer was announced before.
            DeviceError: The stream belongs to another device.
        """
        layer = layer_index(layer, self._core.layout.layers)
        checked_stream(stream)
        if self._transfer.resolved:
            return
        if self._announced >> layer & 1:
            raise LocalProtocolError(f"layer {layer} of transfer {self._transfer} was announced before")
        self._core.layer_ready(self._course, layer, stream)  # where that raises it can be said again
        self._announced |= 1 << layer

    @property
    def tokens(self) -> int:
        """Tokens offered."""
        return self._transfer.tokens

    def _layers(self) -> int:
        return self._transfer.ready

    def _complete(self) -> None:
        # Whoever leaves the body normally has written everything.
        for layer in range(self._core.layout.layers):
            if not self._announced >> layer & 1:
                self.layer_ready(layer)


class Fetch(Handle):
    """The consumer's side of a transfer; made by ``TransferEngine.fetch``."""

    _transfer: Fetching
    _course: FetchCourse

    def __init__(self, core: Pump, course: FetchCourse, begin: Callable[[], None]) -> None:
        super().__init__(core, course, begin)

    @property
    def tokens(self) -> int:
        """Tokens that the transfer moves up to; -1 while that isn't known."""
        return max((part.tokens for part in self._transfer.parts), default=-1)

    @property
    def more(self) -> bool:
        """Whether the producer said that the rest of it is offered apart; so far as it has answered."""
        return any(part.more for part in self._transfer.parts)

    async def layer(self, layer: int) -> None:
        """Wait until a layer is in place, from all sources.

        It is then also ordered before whatever ``stream`` (of the fetch) gets next.

        Raises:
            TypeError: The layer is no integer.
            IndexError: There is no such layer.
            LocalProtocolError: It was not begun.
            AiokvError: The transfer failed before.
        """
        await self._until(layer, self._landed)

    async def layer_ordered(self, layer: int) -> None:
        """Wait until a layer's copies are ordered before what ``stream`` (of the fetch) gets next.

        Returns earlier than ``layer``, since the copies need not have completed: the stream waits for
        them from here on. What is computed on the layer may be trusted only once the transfer has
        ended well.

        Raises:
            TypeError: The layer is no integer.
            IndexError: There is no such layer.
            LocalProtocolError: It was not begun.
            AiokvError: The transfer failed before.
        """
        await self._until(layer, self._course.ordered)
        self._course.order(layer)

    async def _until(self, layer: int, reached: Callable[[int], bool]) -> None:
        layer = layer_index(layer, self._core.layout.layers)
        if not self._begun:
            raise LocalProtocolError(f"transfer {self._transfer} was not begun")
        while True:
            if self._transfer.error is not None:
                self._raise()
            if reached(layer):
                return
            await self._course.bell.wait()

    async def layers(self) -> AsyncIterator[int]:
        """The layers as they land, each once, in the order in which they do.

        Raises:
            LocalProtocolError: It was not begun.
            AiokvError: The transfer failed; layers yielded before are in place all the same.
        """
        if not self._begun:
            raise LocalProtocolError(f"transfer {self._transfer} was not begun")
        seen = 0
        everything = (1 << self._core.layout.layers) - 1
        while seen != everything:
            new = self._layers() & ~seen
            if not new:
                if self._transfer.error is not None:
                    self._raise()
                await self._course.bell.wait()
                continue
            lowest = new & -new
            seen |= lowest
            yield lowest.bit_length() - 1

    def _layers(self) -> int:
        if not self._begun:
            return 0  # it has no parts yet that could lack some
        landed = (1 << self._core.layout.layers) - 1
        for part in self._transfer.parts:
            if part.state is not State.LANDED:
                landed &= part.landed
        return landed

    def _landed(self, layer: int) -> bool:
        return bool(self._layers() >> layer & 1)
