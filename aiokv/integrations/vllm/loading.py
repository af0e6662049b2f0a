"""What a worker fetches: whole prompts, or chunk by chunk while the prefill side computes them."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from aiokv.engine.arguments import Window
from aiokv.engine.engine import TransferEngine
from aiokv.engine.transfer import Fetch
from aiokv.errors import AiokvError
from aiokv.integrations.vllm.orders import Blocks, Load, Release, behind
from aiokv.integrations.vllm.sending import lasts, windows
from aiokv.integrations.vllm.settings import ConnectorSettings
from aiokv.integrations.vllm.tiering import Tiering

__all__ = ["Loading"]

_log = logging.getLogger("aiokv")

#: Seconds that the last chunk's fetch gets at least, so that it says what is wrong.
_LEAST = 0.001


@dataclass(slots=True)
class _Course:
    """One load. ``fetch`` is the chunk under way; None before the first."""

    fetch: Fetch | None = None
    given_up: bool = False


class Loading:
    """Belongs to the loop's thread.

    Args:
        engine: The transfer engine.
        settings: How it is set up.
        unit: Tokens that are moved together.
        tiering: The host tier, copies to which may read the blocks; None: there is none.
    """

    def __init__(
        self, engine: TransferEngine, settings: ConnectorSettings, unit: int, tiering: Tiering | None
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._unit = unit
        self._tiering = tiering
        self._courses: dict[str, _Course] = {}

    async def load(self, load: Load, stream: object | None) -> tuple[int, tuple[Blocks, ...]]:
        """Fetch what is to be had; gives the bytes that were moved, and the blocks that hold nothing.

        Raises:
            AiokvError, TypeError, ValueError: Nothing could be had.
        """
        course = self._courses[load.request] = _Course()
        try:
            if self._tiering is not None:
                await self._tiering.unread(load.blocks)
            return await self._chunks(load, course, stream)
        finally:
            del self._courses[load.request]

    async def _chunks(
        self, load: Load, course: _Course, stream: object | None
    ) -> tuple[int, tuple[Blocks, ...]]:
        """One fetch after the other, each for what those before it did not bring, until there is no more.

        The prefill side decides how far each goes, and offers a chunk once it is asked for. So the next is
        asked for at once, and who gives the load up always gives up what the prefill side would do next.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + lasts(load.ticket, self._settings.load_timeout)
        moved, first, number = 0, load.first, 0
        while True:
            try:
                fetch = course.fetch = self._fetch(load, number, first, until - loop.time(), stream)
                fetch.start()
                if course.given_up:
                    fetch.cancel("the request was aborted")
                await fetch.wait()
            except AiokvError as error:
                if not number:
                    raise
                _log.warning("request %s was loaded up to token %d: %s", load.request, first, error)
                return moved, self._behind(load, first)
            moved += fetch.progress.bytes_moved
            if not load.chunked or not 0 <= fetch.tokens < load.tokens:
                return moved, ()
            first, number = max(first, fetch.tokens), number + 1
            if not fetch.more:
                _log.warning(
                    "request %s: the other side has %d of %d tokens", load.request, first, load.tokens
                )
                return moved, self._behind(load, first)
            if loop.time() >= until:  # a fetch may be quicker than the least that it gets
                _log.warning("request %s was loaded up to token %d in its time", load.request, first)
                return moved, self._behind(load, first)

    def _fetch(self, load: Load, number: int, first: int, seconds: float, stream: object | None) -> Fetch:
        ticket = load.ticket.chunk(number)
        return self._engine.fetch(
            ticket.transfer,
            windows(self._behind(load, first)),
            sources=load.sources or None,
            parts=None if load.sources else load.parts,
            first_token=first // self._unit * self._unit,
            tokens=None if load.chunked else -(-load.tokens // self._unit) * self._unit,
            attempt=ticket.attempt,
            deadline=max(_LEAST, seconds),
            stream=stream,
        )

    def _behind(self, load: Load, first: int) -> tuple[Blocks, ...]:
        groups = zip(load.blocks, self._engine.cache.layout.groups, strict=True)
        return tuple(behind(blocks, group.block_size, first) for blocks, group in groups)

    def give_up(self, name: str) -> None:
        """Nobody waits for this request's load any more; nothing if there is none."""
        course = self._courses.get(name)
        if course is not None:
            course.given_up = True
            if course.fetch is not None:
                course.fetch.cancel("the request was aborted")

    async def release(self, release: Release) -> None:
        """Fetch nothing: the other side then knows that it is done."""
        nothing = [Window(0, ()) for _ in self._engine.cache.layout.groups]
        try:
            fetch = self._engine.fetch(
                release.ticket.transfer,
                nothing,
                sources=release.sources or None,
                parts=None if release.sources else release.parts,
                tokens=0,
                attempt=release.ticket.attempt,
                deadline=self._settings.load_timeout,
            )
            fetch.start()
            await fetch.wait()
        except (AiokvError, TypeError, ValueError) as error:
            _log.info(
                "transfer %s: the other side holds it until its time is over: %s",
                release.ticket.transfer,
                error,
            )
