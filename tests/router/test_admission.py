"""Places and the queue for them."""

from __future__ import annotations

import asyncio

import pytest

from aiokv.router.admission import Admission
from aiokv.router.faults import Fault


async def stay(admission: Admission, go: asyncio.Event, until: float | None = None) -> None:
    async with admission.enter(until if until is not None else asyncio.get_running_loop().time() + 60):
        await go.wait()


@pytest.mark.asyncio
async def test_first_come_first_served() -> None:
    admission, goes = Admission(1, 2), [asyncio.Event() for _ in range(3)]
    tasks = [asyncio.ensure_future(stay(admission, go)) for go in goes]
    await asyncio.sleep(0)
    assert (admission.inside, admission.waiting) == (1, 2)
    with pytest.raises(Fault) as caught:
        async with admission.enter(1e9):
            pass
    assert caught.value.status == 429
    for go, task in zip(goes, tasks, strict=True):
        go.set()
        await task
    assert admission.inside == 0
    await admission.wait_idle()


@pytest.mark.asyncio
async def test_who_gives_up_waiting_leaves_no_hole() -> None:
    admission, go = Admission(1, 5), asyncio.Event()
    first = asyncio.ensure_future(stay(admission, go))
    await asyncio.sleep(0)
    second, third = (asyncio.ensure_future(stay(admission, go)) for _ in range(2))
    await asyncio.sleep(0)
    second.cancel()
    go.set()  # in the same turn in which the place is handed on
    await asyncio.gather(first, third)
    with pytest.raises(asyncio.CancelledError):
        await second
    assert (admission.inside, admission.waiting) == (0, 0)


@pytest.mark.asyncio
async def test_a_place_handed_to_one_that_is_cancelled_is_handed_on() -> None:
    admission, gone, go = Admission(1, 5), asyncio.Event(), asyncio.Event()
    first = asyncio.ensure_future(stay(admission, gone))
    await asyncio.sleep(0)
    second, third = (asyncio.ensure_future(stay(admission, go)) for _ in range(2))
    await asyncio.sleep(0)
    gone.set()
    await first
    second.cancel()  # it was given the place and has not run since
    go.set()
    await third
    await asyncio.gather(second, return_exceptions=True)
    assert (admission.inside, admission.waiting) == (0, 0)


def test_no_more_arrive_than_may_be_inside_and_wait() -> None:
    admission = Admission(1, 1)
    with admission.arrive():
        with admission.arrive():
            with pytest.raises(Fault) as caught, admission.arrive():
                pass
            assert caught.value.status == 429
        with admission.arrive():
            pass


@pytest.mark.asyncio
async def test_waiting_ends_at_the_deadline() -> None:
    admission, go = Admission(1, 5), asyncio.Event()
    first = asyncio.ensure_future(stay(admission, go))
    await asyncio.sleep(0)
    with pytest.raises(Fault) as caught:
        await stay(admission, go, asyncio.get_running_loop().time())
    assert caught.value.status == 504
    assert admission.waiting == 0
    go.set()
    await first
