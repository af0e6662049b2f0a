from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from aiokv.errors import DeviceError
from aiokv.offload.begun import Begun, BegunSteps


@pytest.mark.asyncio
async def test_cancelled_before_it_ran_it_comes_to_its_first_wait_first() -> None:
    seen: list[object] = []
    waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def going() -> None:
        seen.append("begun")
        try:
            await waiter
        except asyncio.CancelledError:
            seen.append("cancelled")
            await asyncio.sleep(0)
            seen.append("quiet")
            raise

    task = asyncio.ensure_future(Begun(going()))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == ["begun", "cancelled", "quiet"]


@pytest.mark.asyncio
async def test_what_has_nothing_to_wait_for_is_cancelled_all_the_same() -> None:
    async def going() -> int:
        return 1

    task = asyncio.ensure_future(Begun(going()))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await Begun(going()) == 1
    assert await asyncio.ensure_future(Begun(going())) == 1


@pytest.mark.asyncio
async def test_its_own_error_comes_first() -> None:
    async def going() -> None:
        raise DeviceError("this")

    task = asyncio.ensure_future(Begun(going()))
    task.cancel()
    with pytest.raises(DeviceError):
        await task


def test_closed_it_is_over() -> None:
    async def going() -> None:
        await asyncio.sleep(0)

    begun = Begun(going())
    begun.send(None)
    begun.close()
    with pytest.raises(RuntimeError, match="already"):
        begun.send(None)


@pytest.mark.asyncio
async def test_a_step_that_was_cancelled_before_it_ran_is_none() -> None:
    seen: list[str] = []

    async def steps() -> AsyncGenerator[int, None]:
        try:
            yield 1
        finally:
            seen.append("left by itself")

    async def leave() -> None:
        seen.append("left")

    begun = BegunSteps(steps(), leave)
    task = asyncio.ensure_future(begun.asend(None))
    task.cancel()
    await asyncio.wait([task])
    await begun.aclose()
    assert seen == ["left"]
    run = BegunSteps(steps(), leave)
    assert await asyncio.ensure_future(run.asend(None)) == 1
    await run.aclose()
    assert seen == ["left", "left by itself"]
