"""Choosing the data path: the best that both have and that proves itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from aiokv.engine.linking import open_link
from aiokv.errors import DeviceError, PeerLostError, Refused
from aiokv.proto.placement import Placement
from aiokv.testing.pairs import LAYOUT, virtual_time
from aiokv.testing.virtual import VirtualLoop
from aiokv.transports.base import PeerInfo

PEER = PeerInfo("memory://peer", b"p" * 16, Placement.dense(LAYOUT))


class Scripted:
    """A transport that only connects, and only as it is told."""

    def __init__(self, name: str, connect: Callable[[], Any] = lambda: None) -> None:
        self.name = name
        self.tried: list[bytes] = []
        self.peer = PEER
        self._connect = connect

    async def connect(self, description: bytes, peer: PeerInfo) -> str:
        assert peer == PEER
        self.peer = peer
        self.tried.append(description)
        result = self._connect()
        if asyncio.iscoroutine(result):
            await result
        return f"link by {self.name}"


def fails(error: Exception) -> Callable[[], None]:
    def connect() -> None:
        raise error

    return connect


async def opened(*transports: Scripted, offered: str = "one two", within: float = 1.0) -> tuple[str, str]:
    found = {name: name.encode() for name in offered.split()}
    transport, link = await open_link(transports, found, PEER, within)
    return transport.name, link


@pytest.mark.asyncio
async def test_the_first_that_both_have_is_taken() -> None:
    first, second = Scripted("one"), Scripted("two")
    assert await opened(first, second) == ("one", "link by one")
    assert first.tried == [b"one"]
    assert second.tried == []
    assert await opened(Scripted("three"), second, first) == ("two", "link by two")


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "error", [PeerLostError("x"), DeviceError("x"), ConnectionResetError("x"), OSError()]
)
async def test_one_that_does_not_prove_itself_gives_way_to_the_next(error: Exception) -> None:
    assert await opened(Scripted("one", fails(error)), Scripted("two")) == ("two", "link by two")


@pytest.mark.asyncio
async def test_if_none_works_it_says_for_each_why() -> None:
    with pytest.raises(PeerLostError) as caught:
        await opened(
            Scripted("zero"),
            Scripted("one", fails(PeerLostError("on another host"))),
            offered="one two three",
        )
    assert str(caught.value) == (
        "no data path to memory://peer: zero: not offered there; one: on another host; "
        "not allowed here: three, two"
    )


@pytest.mark.asyncio
async def test_none_in_common_is_a_refusal_for_trying_again_changes_nothing() -> None:
    missing = "no data path to memory://peer: one: not offered there; not allowed here: two$"
    with pytest.raises(Refused, match=missing):
        await opened(Scripted("one"), offered="two")


@virtual_time
async def test_one_that_does_not_answer_costs_its_time_and_no_more() -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    silent = Scripted("one", lambda: asyncio.sleep(1000))
    assert await opened(silent, Scripted("two"), within=2.0) == ("two", "link by two")
    assert loop.time() - began == pytest.approx(2.0)
    with pytest.raises(PeerLostError, match="one: no answer within 2 s"):
        await opened(silent, offered="one", within=2.0)
    assert len(silent.tried) == 2


@virtual_time
async def test_one_that_answered_may_take_longer_but_not_for_ever() -> None:
    loop = asyncio.get_running_loop()

    async def slow() -> None:
        await asyncio.sleep(1)
        transport.peer.answered(10.0)
        await asyncio.sleep(lasts)

    transport, lasts = Scripted("one", slow), 9
    assert await opened(transport, within=2.0) == ("one", "link by one")
    lasts, began = 1000, loop.time()
    with pytest.raises(PeerLostError, match="one: it answered, but there was no path within 10 s"):
        await opened(transport, offered="one", within=2.0)
    assert loop.time() - began == pytest.approx(11.0)


@virtual_time
@pytest.mark.parametrize("stood_s", [1, 2, 10])
async def test_time_in_which_this_side_stood_still_is_not_held_against_it(stood_s: int) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    waits = [1000.0, 0.5]
    late = Scripted("one", lambda: asyncio.sleep(waits.pop(0)))
    loop.call_soon(loop.virtual.advance, stood_s * 10**9)
    assert await opened(late, within=2.0) == ("one", "link by one")
    assert len(late.tried) == 2


@virtual_time
async def test_giving_up_waiting_ends_the_attempt() -> None:
    ended = []

    async def wait() -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            ended.append(True)

    task = asyncio.ensure_future(opened(Scripted("one", wait), Scripted("two"), within=100.0))
    await asyncio.sleep(1)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert ended == [True]
