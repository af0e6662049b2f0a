"""What a worker sends: offers of what requests left, or of what they compute at the moment."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from typing import Any

from aiokv.engine.arguments import Window
from aiokv.engine.engine import TransferEngine
from aiokv.engine.transfer import Offer
from aiokv.errors import AiokvError
from aiokv.integrations.vllm.orders import Blocks, Refusal, Send, Ticket
from aiokv.integrations.vllm.settings import ConnectorSettings

__all__ = ["Sending", "Work", "lasts", "windows"]

_log = logging.getLogger("aiokv")

#: Seconds after which whoever waits for a push hears that it doesn't come.
_TO_REFUSE = 1.0

#: How many bytes an order moved, and which blocks hold nothing.
Work = Coroutine[Any, Any, tuple[int, tuple[Blocks, ...]]]


class Sending:
    """Belongs to the loop's thread, but for ``written`` and ``computed``, which are for vLLM's.

    Args:
        engine: The transfer engine.
        settings: How it is set up.
        readers: Ranks that fetch.
        unit: Tokens that are moved together.

    Attributes:
        announcing: What this step computes; vLLM's thread alone.
    """

    def __init__(self, engine: TransferEngine, settings: ConnectorSettings, readers: int, unit: int) -> None:
        self._engine = engine
        self._settings = settings
        self._readers = readers
        self._unit = unit
        #: Sends of requests that aren't over.
        self._early: dict[str, Offer] = {}
        self.announcing: list[Offer] = []
        #: The layers of this step that are computed; vLLM's thread alone.
        self._written: set[int] = set()

    # -- vLLM's thread

    def written(self, layer: int, stream: Callable[[], object | None]) -> None:
        """A layer is computed, as of what is enqueued on a stream now. Never blocks."""
        if self.announcing and layer not in self._written:
            self._written.add(layer)
            for offer in self.announcing:
                offer.layer_ready(layer, stream=stream())

    def computed(self, stream: Callable[[], object | None]) -> None:
        """All layers are. Never blocks."""
        if self.announcing:
            for layer in range(self._engine.cache.layout.layers):
                self.written(layer, stream)
            self.announcing = []
            self._written.clear()

    # -- the loop's thread

    def begin(self, send: Send) -> Offer:
        """Offer what is computed now; raises where that can't be."""
        offer = self._offer(send)
        offer.start()
        self._early[send.request] = offer
        return offer

    async def until_sent(self, send: Send, offer: Offer) -> tuple[int, tuple[Blocks, ...]]:
        """Wait for the end of it; gives the bytes that were moved."""
        try:
            await offer.wait()
        finally:
            del self._early[send.request]
        return offer.progress.bytes_moved, ()

    async def lose(self, names: Iterable[str]) -> None:
        """Give these requests' sends up, and wait until their blocks are quiet."""
        for name in names:
            offer = self._early.get(name)
            if offer is not None:
                offer.cancel("its blocks were taken for other requests")
                with suppress(AiokvError):
                    await offer.wait()

    def _offer(self, send: Send) -> Offer:
        return self._engine.offer(
            send.ticket.transfer,
            windows(send.blocks),
            tokens=-(-send.tokens // self._unit) * self._unit,
            readers=None if send.to else self._readers,
            to=send.to,
            attempt=send.ticket.attempt,
            deadline=lasts(send.ticket, self._settings.hold_at_most),
            hold=self._settings.hold,
        )

    async def send(self, send: Send, stream: object | None) -> tuple[int, tuple[Blocks, ...]]:
        """Offer what a request left, and wait for the end of it; gives the bytes that were moved."""
        offer = self._offer(send)
        offer.start()
        for layer in range(self._engine.cache.layout.layers):
            offer.layer_ready(layer, stream=stream)
        await offer.wait()
        return offer.progress.bytes_moved, ()

    async def refuse(self, refusal: Refusal) -> None:
        """Offer something and take it back: who waits for it, or asks later, is told so."""
        some, ticket = [Window(0, (0,)) for _ in self._engine.cache.layout.groups], refusal.ticket
        try:
            offer = self._engine.offer(
                ticket.transfer,
                some,
                tokens=1,
                readers=None if refusal.to else self._readers,
                to=refusal.to,
                attempt=ticket.attempt,
                deadline=_TO_REFUSE if refusal.to else self._settings.hold,
            )
            offer.start()
            if not refusal.to:  # whoever it is to be pushed to hears of it once there is contact
                offer.cancel("the request was aborted before its KV was there")
            await offer.wait()
        except AiokvError as error:
            _log.debug("transfer %s: %s", ticket.transfer, error)


def lasts(ticket: Ticket, at_most: float) -> float:
    """Seconds that a transfer may take."""
    return at_most if ticket.deadline is None else min(ticket.deadline, at_most)


def windows(blocks: Sequence[Blocks]) -> list[Window]:
    """Block lists as the engine takes them."""
    return [Window(group.start, group.ids) for group in blocks]
