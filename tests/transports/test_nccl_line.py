"""What is said between two ends: the wire stays as it is."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Callable

import pytest

from aiokv.proto.plan import Chunk
from aiokv.transports.nccl_line import (
    Announced,
    Credit,
    Dead,
    Line,
    Make,
    Nudge,
    Rest,
    Wake,
    Yield,
    decode,
    encode,
)

GOLDEN = {
    Wake(1): "0100000001",
    Make(2, b"n" * 16, 4 << 20, b"u" * 128): "0200000002" + "6e" * 16 + "00400000" + "75" * 128,
    Announced(b"t" * 16, Chunk(3, 2, 1, 4, 6, 96), (96,)): "03" + "74" * 16
    + "00000003" + "00000002" + "00000001"
    + "0000000000000004" + "0000000000000006" + "0000000000000060" + "01" + "00000060",
    Announced(b"t" * 16, Chunk(0, 1, 0, 0, 2, 20), (4, 16)): "03" + "74" * 16
    + "00000000" + "00000001" + "00000000"
    + "0000000000000000" + "0000000000000002" + "0000000000000014" + "02" + "00000004" + "00000010",
    Rest(5): "0400000005",
    Credit(6, 8): "05000000060008",
    Nudge(): "06",
    Yield(9): "0800000009",
    Dead(7): "0700000007",
}  # fmt: skip


@pytest.mark.asyncio
async def test_all_is_heard_of_an_end_that_was_cut_off(cut_off: Callable[[bytes], socket.socket]) -> None:
    """And that it was: also where a loop says once only that there is something to read."""
    here = cut_off(encode(Credit(6, 8)) * 12_000)
    heard: list[object] = []
    broken = asyncio.get_running_loop().create_future()
    line = Line(here, asyncio.get_running_loop(), heard.extend, broken.set_result)
    async with asyncio.timeout(20):
        assert "the connection broke" in await broken
    assert len(heard) == 12_000
    line.close()


@pytest.mark.parametrize(("said", "wire"), GOLDEN.items(), ids=lambda each: type(each).__name__)
def test_golden(said, wire: str) -> None:
    assert encode(said).hex() == wire
    assert decode(bytes.fromhex(wire)) == ([said], b"")


def test_in_pieces_of_any_size(seed: int) -> None:
    rng = random.Random(seed)
    said = rng.choices(list(GOLDEN), k=200)
    data, found, left = b"".join(map(encode, said)), [], b""
    while data or left:
        size = rng.randint(1, 90)
        more, left = decode(left + data[:size])
        data = data[size:]
        found += more
        if not data and not more:
            break
    assert (found, left) == (said, b"")


@pytest.mark.parametrize(
    "data", [b"\0", b"\x09", b"\x03" + bytes(52) + b"\0", b"\x03" + bytes(52) + b"\x21", b"\xff" * 9]
)
def test_what_neither_end_says(data: bytes) -> None:
    with pytest.raises(ValueError):
        decode(data)


@pytest.mark.asyncio
async def test_a_line_says_all_of_it_and_hears_the_end() -> None:
    ours, theirs = socket.socketpair()
    for sock in (ours, theirs):
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    heard: list = []
    ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    loop = asyncio.get_running_loop()
    here = Line(ours, loop, heard.extend, print)
    there = Line(theirs, loop, heard.extend, ended.set_result)
    said = [Announced(bytes(16), Chunk(0, 1, 0, number, number + 1, 4), (4,)) for number in range(3000)]
    here.say(*said)
    async with asyncio.timeout(20):
        while len(heard) < len(said):  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.001)
    assert heard == said
    here.close()
    here.close()
    here.say(Nudge())
    assert "closed" in await ended
    there.close()


@pytest.mark.asyncio
async def test_a_line_ends_at_nonsense() -> None:
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    Line(theirs, asyncio.get_running_loop(), print, ended.set_result)
    ours.send(b"\xff")
    assert "must not" in await ended
    ours.close()
