"""The router's ear: what it does when its clock stands still or jumps, and whom it asks where they are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from aiokv.control.memory import MemoryNetwork
from aiokv.router.discovery import Discovery
from aiokv.router.messages import Bye, Heard, Load, Report, decode_from_router, encode
from aiokv.router.registry import Member, Registry

S = 1_000_000_000
WHO = b"w" * 16


class Played:
    """A discovery with a clock that the test turns, and an instance's end of the channel."""

    def __init__(self) -> None:
        self.now = 1000 * S
        self.network = MemoryNetwork()
        self.registry = Registry()
        self.gone: list[str] = []
        self.heard: asyncio.Queue[Any] = asyncio.Queue()
        self.asked = 0
        self.answers: list[str] = []
        self.discovery = Discovery(
            self.network.channel("memory://router"),
            self.registry,
            ask=self.ask,
            gone=lambda member, why: self.gone.append(why),
            clock=lambda: self.now,
        )
        self.channel = self.network.channel("memory://instance")
        self.number = 0

    async def ask(self, member: Member) -> str:
        self.asked += 1
        return self.answers.pop(0) if self.answers else ""

    async def report(self, **more: Any) -> Heard:
        """Say it, and wait for the answer."""
        self.number += 1
        fields: dict[str, Any] = {
            "incarnation": WHO,
            "number": self.number,
            "role": "decode",
            "address": "memory://instance",
            "http": "http://127.0.0.1:1",
            "engines": (),
            "models": ("m",),
            "fingerprint": "",
            "context": 0,
            "interval": 1.0,
            "draining": False,
            "token": "",
            "probe": "",
            "load": Load(),
            **more,
        }
        self.say(Report(**fields))
        heard: Heard = await self.heard.get()
        return heard

    def say(self, message: Report | Bye) -> None:
        self.channel.open("memory://router").send(encode(message))


@asynccontextmanager
async def played() -> AsyncIterator[Played]:
    made = Played()
    await made.channel.start(lambda frame: made.heard.put_nowait(decode_from_router(frame)))
    async with made.discovery:
        yield made
    await made.channel.aclose()


@pytest.mark.asyncio
async def test_it_is_up_once_it_was_found_where_it_says() -> None:
    async with played() as it:
        assert (await it.report()).state == "joining"
        assert (await it.heard.get()).state == "up"
        assert (await it.report()).state == "up"
        assert it.asked == 1


@pytest.mark.asyncio
async def test_it_is_asked_again_after_each_report_until_it_is_there() -> None:
    async with played() as it:
        it.answers = ["nobody is there", "nobody is there"]
        await it.report()
        refused = await it.heard.get()
        assert (refused.state, refused.why) == ("refused", "nobody is there")
        await it.report()
        await it.heard.get()
        await it.report()
        assert (await it.heard.get()).state == "up"
        assert it.asked == 3


@pytest.mark.asyncio
async def test_silence_for_three_intervals_is_the_end_and_nothing_is_scheduled_then() -> None:
    async with played() as it:
        await it.report()
        it.now += 3 * S
        it.discovery._on_timer()
        assert it.gone == ["it was silent for three intervals"]
        assert it.discovery._timer is None
        assert it.registry.members == {} and it.discovery._lines == {}


@pytest.mark.asyncio
async def test_a_router_that_stood_still_holds_it_against_nobody() -> None:
    async with played() as it:
        await it.report()
        it.now += 100 * S  # as after SIGSTOP, or a suspended machine
        it.discovery._on_timer()
        assert it.gone == []
        it.discovery._sweep()  # once what lay unread was read
        assert it.gone == []
        assert it.registry.next_at() == it.now + 3 * S
        assert it.discovery.lag == pytest.approx(97)
        for _ in range(20):  # and in time it is forgotten
            it.discovery._timer_at = it.now
            it.discovery._on_timer()
        assert it.discovery.lag == 0


@pytest.mark.asyncio
async def test_a_clock_that_goes_back_ends_nobody() -> None:
    async with played() as it:
        await it.report()
        it.now -= 500 * S
        it.discovery._on_timer()
        assert it.gone == []
        await it.report()
        assert len(it.registry.members) == 1


@pytest.mark.asyncio
async def test_goodbye_ends_it_at_once() -> None:
    async with played() as it:
        await it.report()
        it.say(Bye(WHO))
        while not it.gone:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert it.gone == ["it said goodbye"]


@pytest.mark.asyncio
async def test_a_refusal_says_why() -> None:
    async with played() as it:
        heard = await it.report(http="nowhere")
        assert heard.state == "refused" and "nowhere" in heard.why
        assert it.registry.members == {}
        for port, closing in list(it.discovery._refusals.items()):
            closing.cancel()
            it.discovery._refused(port)
