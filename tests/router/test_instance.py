"""``Instance``: reports, aborts and draining, against a router that is played."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from aiokv import BusyError, ClosedError, TransferAborted
from aiokv.control.memory import MemoryNetwork
from aiokv.router import Instance, Load
from aiokv.router.messages import Abort, Aborted, Bye, Heard, Report, decode_from_instance, encode

GOOD: dict[str, Any] = {
    "role": "prefill",
    "http": "http://127.0.0.1:80",
    "models": ["m"],
    "fingerprint": "f",
    "engine": "tcp://127.0.0.1:1",
}


class Played:
    """The router's end."""

    def __init__(self) -> None:
        self.heard: asyncio.Queue[Any] = asyncio.Queue()
        self.network = MemoryNetwork()
        self.channel = self.network.channel("memory://router")

    def receive(self, frame: bytes) -> None:
        self.heard.put_nowait(decode_from_instance(frame))

    def say(self, message: Heard | Abort) -> None:
        self.channel.open("memory://instance").send(encode(message))

    async def next(self, kind: type) -> Any:
        """The next message of a kind."""
        while not isinstance(found := await self.heard.get(), kind):
            pass
        return found


@asynccontextmanager
async def played(**more: Any) -> AsyncIterator[tuple[Played, Instance]]:
    router = Played()
    await router.channel.start(router.receive)
    instance = Instance(
        "memory://router",
        channel=router.network.channel("memory://instance"),
        **{**GOOD, "interval": 0.05, **more},
    )
    try:
        async with instance:
            yield router, instance
        assert isinstance(await router.next(Bye), Bye)
    finally:
        await router.channel.aclose()


@pytest.mark.asyncio
async def test_reports_are_numbered_and_tell_the_load() -> None:
    loads = iter(range(100))
    async with played(load=lambda: Load(running=next(loads))) as (router, instance):
        reports: list[Report] = [await router.next(Report) for _ in range(3)]
    assert [each.number for each in reports] == [1, 2, 3]
    assert [each.load.running for each in reports] == [0, 1, 2]
    assert reports[0].address == "memory://instance"
    assert {each.incarnation for each in reports} == {instance.incarnation}


@pytest.mark.asyncio
async def test_a_load_that_cannot_be_told_stops_no_report() -> None:
    def load() -> Load:
        raise ZeroDivisionError

    async with played(load=load) as (router, _):
        for _ in range(3):
            await router.next(Report)


@pytest.mark.asyncio
async def test_an_abort_cancels_the_request_and_is_answered_when_it_is_over() -> None:
    async with played() as (router, instance):
        began, may_end, order = asyncio.Event(), asyncio.Event(), []

        async def answer() -> None:
            with instance.request("id", 1):
                began.set()
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    await may_end.wait()
                    order.append("over")
                    raise

        task = asyncio.ensure_future(answer())
        await began.wait()
        for _ in range(2):  # once more, as after a report that crossed the answer
            router.say(Abort(instance.incarnation, "id", 1, "nobody wants it"))
        await asyncio.sleep(0.05)
        may_end.set()
        assert await router.next(Aborted) == Aborted(instance.incarnation, "id", 1)
        assert order == ["over"]
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        await instance.wait_idle()


@pytest.mark.asyncio
async def test_an_abort_that_comes_first_is_remembered() -> None:
    async with played() as (router, instance):
        router.say(Abort(instance.incarnation, "id", 1, "the client is gone"))
        assert await router.next(Aborted) == Aborted(instance.incarnation, "id", 1)
        with pytest.raises(TransferAborted, match="the client is gone"), instance.request("id", 1):
            pass
        with instance.request("id", 2):  # another attempt is another request
            pass


@pytest.mark.asyncio
async def test_words_for_another_incarnation_change_nothing() -> None:
    async with played() as (router, instance):
        router.say(Abort(b"x" * 16, "id", 1))
        router.say(Heard(b"r" * 16, b"x" * 16, 1, "refused", "not you"))
        router.channel.open("memory://instance").send(b"garbage")
        router.say(Heard(b"r" * 16, instance.incarnation, 1, "up"))
        await instance.wait_up()
        with instance.request("id", 1):
            pass


@pytest.mark.asyncio
async def test_draining_is_told_at_once_and_takes_nothing_new() -> None:
    async with played(interval=60) as (router, instance):
        with instance.request("id", 1):
            instance.drain()
            instance.drain()
            assert not (await router.next(Report)).draining
            assert (await router.next(Report)).draining
            with pytest.raises(ClosedError, match="draining"), instance.request("other", 1):
                pass
            assert not instance._idle.is_set()
        await instance.wait_idle()


@pytest.mark.asyncio
async def test_one_request_at_a_time_by_each_name() -> None:
    async with played() as (_, instance):
        with instance.request("id", 1), pytest.raises(BusyError), instance.request("id", 1):
            pass


@pytest.mark.asyncio
async def test_a_refusal_is_raised() -> None:
    async with played() as (router, instance):
        router.say(Heard(b"r" * 16, instance.incarnation, 1, "refused", "there are 3 already"))
        with pytest.raises(ConnectionRefusedError, match="there are 3 already"):
            await instance.wait_up()


def test_the_router_shows_its_token() -> None:
    instance = Instance("memory://router", channel=MemoryNetwork().channel("memory://i"), **GOOD)
    assert instance.authorized(f"Bearer {instance.token}")
    for wrong in (None, "", "Bearer ", instance.token, "Bearer \u00e9"):
        assert not instance.authorized(wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"role": "both"},
        {"engine": ""},
        {"models": []},
        {"models": "m"},
        {"http": "127.0.0.1:80"},
        {"interval": 0},
        {"interval": 1e9},
        {"fingerprint": "x" * 999},
        {"bind": "nowhere"},
        {"probe": "health"},
        {"bind": "tcp://0.0.0.0:0"},
    ],
)
def test_what_cannot_be_meant_is_refused_when_it_is_made(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Instance("tcp://127.0.0.1:1", **{**GOOD, **wrong})
