"""What a worker sends: offers of what requests left, or of what they compute at the moment.

What a request leaves may be sent in chunks, each by an offer of its own. One that fails takes the others with
it, also those that are ordered later: whoever misses a chunk has no use for the rest.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
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

#: Seconds within which a chunk is asked for: somebody waited for it when it was ordered.
_AT_ONCE = 1.0

#: How many bytes an order moved, and which blocks hold nothing.
Work = Coroutine[Any, Any, tuple[int, tuple[Blocks, ...]]]


@dataclass(slots=True)
class _Course:
    """What is sent of one request.

    Attributes:
        offers: Those under way.
        failed: One of them failed.
        complete: No more will be ordered.
    """

    offers: set[Offer] = field(default_factory=set)
    failed: bool = False
    complete: bool = False


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
        #: By request; those of which something is under way, or to come.
        self._courses: dict[str, _Course] = {}
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
        """Offer something, of which no layer is announced yet; raises where that can't be."""
        course = self._courses.setdefault(send.request, _Course())
        course.complete = course.complete or send.last
        try:
            offer = self._offer(send)
            offer.start()
        except BaseException:
            self._fail(send.request, course)
            raise
        course.offers.add(offer)
        if course.failed:  # offered all the same, since there may be others that wait for it, who are told
            offer.cancel("a chunk before it was not sent")
        return offer

    async def until_sent(self, send: Send, offer: Offer) -> tuple[int, tuple[Blocks, ...]]:
        """Wait for the end of it; gives the bytes that were moved."""
        course = self._courses[send.request]
        try:
            await offer.wait()
        except AiokvError:
            course.offers.discard(offer)
            self._fail(send.request, course)
            raise
        course.offers.discard(offer)
        self._forget(send.request, course)
        return offer.progress.bytes_moved, ()

    def _fail(self, name: str, course: _Course) -> None:
        course.failed = True
        for offer in course.offers:
            offer.cancel("another chunk was not sent")
        self._forget(name, course)

    def _forget(self, name: str, course: _Course) -> None:
        if course.complete and not course.offers and self._courses.get(name) is course:
            del self._courses[name]

    def give_up(self, name: str) -> None:
        """Nothing more will be ordered of this request, and what is under way is not wanted any more."""
        course = self._courses.get(name)
        if course is not None:
            course.complete = True
            for offer in course.offers:
                offer.cancel("the request was aborted")
            self._forget(name, course)

    async def lose(self, names: Iterable[str]) -> None:
        """The same where blocks were taken for other requests: wait until they are quiet."""
        for name in names:
            course = self._courses.get(name)
            offers = [] if course is None else list(course.offers)
            self.give_up(name)
            for offer in offers:
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
            hold=self._settings.hold if send.last else _AT_ONCE,
            more=not send.last,
        )

    async def send(self, send: Send, stream: object | None) -> tuple[int, tuple[Blocks, ...]]:
        """Offer what is computed, and wait for the end of it; gives the bytes that were moved."""
        offer = self.begin(send)
        for layer in range(self._engine.cache.layout.layers):
            offer.layer_ready(layer, stream=stream)
        return await self.until_sent(send, offer)

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
