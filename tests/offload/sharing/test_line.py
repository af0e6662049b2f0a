"""The connection of a pool's owner and one that shares it."""

from __future__ import annotations

import asyncio
import socket

import pytest

from aiokv.offload.sharing.line import Line
from aiokv.offload.sharing.messages import LENGTH

BODY = bytes(50_000)
FRAME = len(BODY).to_bytes(LENGTH, "big") + BODY
#: Both ends have far more to say than a socket takes, and than an owner lets wait.
COUNT = 100


def lines(lost: list[str]) -> tuple[Line, Line, list[int]]:
    """Owner and guest, and how many messages came to each."""
    ours, theirs = socket.socketpair()
    counts = [0, 0]

    def came(end: int) -> None:
        counts[end] += 1

    for sock in (ours, theirs):
        sock.setblocking(False)
    owner = Line(ours, lambda _: came(0), lost.append)
    return owner, Line(theirs, lambda _: came(1), lost.append, descriptors=True), counts


@pytest.mark.asyncio
async def test_both_ends_may_say_much_at_a_time() -> None:
    owner, guest, counts = lines([])
    for _ in range(COUNT):
        owner.send(FRAME)
        guest.send(FRAME)
    async with asyncio.timeout(20):
        while counts != [COUNT, COUNT]:  # noqa: ASYNC110 - what the lines do by themselves
            await asyncio.sleep(0)
    owner.close()
    guest.close()


@pytest.mark.asyncio
async def test_an_owner_reads_no_more_while_much_waits_to_be_sent() -> None:
    owner, guest, counts = lines([])
    for _ in range(COUNT):
        owner.send(FRAME)
    guest.send(FRAME)
    assert owner._paused
    async with asyncio.timeout(20):
        while counts[1] < COUNT or not counts[0]:  # noqa: ASYNC110 - what the lines do by themselves
            await asyncio.sleep(0)
    assert not owner._paused
    owner.close()
    guest.close()


@pytest.mark.asyncio
async def test_idle_is_told_once_all_is_out() -> None:
    owner, guest, _ = lines([])
    for _ in range(COUNT):
        guest.send(FRAME)
    out = asyncio.Event()
    guest.on_idle(out.set)
    assert not out.is_set()
    async with asyncio.timeout(20):
        await out.wait()
    again: list[int] = []
    guest.on_idle(lambda: again.append(1))
    assert again
    guest.close()
    owner.close()


@pytest.mark.asyncio
async def test_an_end_that_can_send_nothing_any_more_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the kernel's reason: who waits for answers would wait for ever."""
    lost: list[str] = []
    owner, guest, _ = lines(lost)

    class Short:
        def __init__(self, sock: socket.socket) -> None:
            self._sock = sock

        def sendmsg(self, *_: object) -> int:
            raise OSError(109, "too many references: cannot splice")

        def __getattr__(self, name: str) -> object:
            return getattr(self._sock, name)

    monkeypatch.setattr(owner, "_sock", Short(owner._sock))
    owner.send(FRAME)
    async with asyncio.timeout(20):
        while not lost:  # noqa: ASYNC110 - what the lines do by themselves
            await asyncio.sleep(0)
    assert owner.closed
    guest.close()
