"""What all ranks of a group come to, where each keeps its share of the same blocks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from functools import partial
from hashlib import sha256
from typing import Any

from aiokv.errors import AiokvError
from aiokv.offload.begun import Begun, BegunSteps
from aiokv.offload.outlasting import until_over
from aiokv.offload.policies import Key
from aiokv.ranks import Blocks, Hit, Miss, Outcome, RankGroup, Turn

__all__ = ["Jointly", "at_once"]


class Jointly:
    """Calls of a tier that all ranks make in the same order; each gives the same on all of them.

    Every call takes its turn at once, and is entered whatever becomes of it: refused, failed or cancelled.

    Args:
        ranks: The group.
    """

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks

    def turn(self, what: str, keys: Sequence[Key] = ()) -> Turn:
        """The turn of a call.

        Args:
            what: Which call it is; ranks that make another one are told so.
            keys: What it is about, the same on all ranks.

        Raises:
            AiokvError: As of ``RankGroup.turn``.
        """
        digest = sha256(what.encode())
        for key in keys:
            digest.update(b";")
            digest.update(key if isinstance(key, bytes) else repr(key).encode())
        return self._ranks.turn(keys=[digest.digest()])

    async def least(self, turn: Turn, own: int) -> int:
        """What all ranks have, who have ``own`` here.

        Raises:
            AiokvError: As of ``RankGroup.agree``; or another rank failed.
        """
        ours: Outcome = Hit(Blocks(own)) if own else Miss()
        match (await turn.enter([ours]))[0]:
            case Hit(held=Blocks(count=count)):
                return count
            case Miss():
                return 0
            case other:
                raise AiokvError(f"another rank of the group failed: {other}")

    def counted(
        self, what: str, keys: Sequence[Key], begin: Callable[[], Coroutine[Any, Any, int]]
    ) -> Coroutine[Any, Any, int]:
        """Make a call that gives a count; what it gives on all ranks.

        It begins, and takes its turn, now, and goes on also if nobody ever waits. Who waits and is cancelled
        waits until the call is over, and the other ranks are told.
        """
        turn = self.turn(what, keys)
        try:
            going = begin()
        except BaseException as error:
            turn.fail(error)
            raise
        return Begun(_awaited(asyncio.ensure_future(Begun(self._brought(turn, going)))))

    async def _brought(self, turn: Turn, going: Coroutine[Any, Any, int]) -> int:
        try:
            own = await going
        except BaseException as error:
            turn.fail(error)
            raise
        return await self.least(turn, own)


def at_once(going: Coroutine[Any, Any, int]) -> AsyncGenerator[int, None]:
    """A count as the only step, if there is anything."""
    return BegunSteps(_step(going), partial(_left, going))


async def _step(going: Coroutine[Any, Any, int]) -> AsyncGenerator[int, None]:
    if count := await going:
        yield count


async def _left(going: Coroutine[Any, Any, int]) -> None:
    if (cancelled := await _given_up(asyncio.ensure_future(going))) is not None:
        raise cancelled


async def _awaited(task: asyncio.Task[int]) -> int:
    try:
        return await task
    except asyncio.CancelledError:
        await _given_up(task)  # it knows already, unless whoever waits was cancelled before it did
        raise


async def _given_up(task: asyncio.Task[int]) -> asyncio.CancelledError | None:
    """Cancel a task and wait until it is over, also when this is cancelled meanwhile, which it then gives."""
    task.cancel()
    cancelled = await until_over(task)
    if not task.cancelled():
        task.exception()  # seen: it would be logged else
    return cancelled
