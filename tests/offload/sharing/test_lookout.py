"""A pool's owner asked by a thread that has no loop: what is there, and owners that are lost."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest

from aiokv.offload.sharing import lookout
from aiokv.offload.sharing.door import bound
from aiokv.offload.sharing.form import digest_of
from aiokv.offload.sharing.lookout import Lookout
from aiokv.offload.sharing.messages import LENGTH, Done, Found, Look, Refusal, There, frame, from_guest
from aiokv.offload.sharing.owner import HostPool
from aiokv.testing.tiers import BLOCK, LAYOUT, names, tier_on

MINE, OTHERS = digest_of(LAYOUT), digest_of(LAYOUT, b"other weights")


class Clock:
    """Time that passes when it is told to, and a little whenever somebody looks."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 1e-4
        return self.now


class Owner:
    """One that is played: it hears everything, and says what it is told to."""

    def __init__(self, path: Path) -> None:
        self.listening = bound(os.fspath(path))
        #: Who has come; None until then.
        self.line: socket.socket | None = None
        self.heard: list[object] = []

    def hear(self) -> list[object]:
        if self.line is None:
            self.line, _ = self.listening.accept()
        data = self.line.recv(1 << 20)
        while data:
            end = LENGTH + int.from_bytes(data[:LENGTH], "big")
            self.heard.append(from_guest(data[LENGTH:end]))
            data = data[end:]
        return self.heard

    def say(self, data: bytes) -> None:
        assert self.line is not None
        self.line.sendall(data)

    def close(self) -> None:
        self.listening.close()
        if self.line is not None:
            self.line.close()


@pytest.fixture
def owner(tmp_path: Path) -> Owner:
    return Owner(tmp_path / "pool")


async def asked(out: Lookout, keys: list[str]) -> int:
    """Ask, as from another thread: the owner's loop goes on."""

    def ask() -> int:
        number = out.ask(keys)
        while (found := out.answer(number)) is None:
            pass
        return found

    return await asyncio.to_thread(ask)


@pytest.mark.asyncio
async def test_what_others_stored_is_there_for_those_that_can_load_it(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "pool"
    async with HostPool(path, 32 * BLOCK, segment_bytes=16 * BLOCK) as pool:
        mine, both = Lookout(pool.path, [MINE, MINE]), Lookout(pool.path, [MINE, OTHERS])
        assert await asked(mine, names("a", 3)) == 0
        async with (
            tier_on("host", seed, pool=path) as one,
            tier_on("host", seed, pool=path, salt=b"other weights") as other,
        ):
            assert await one.tier.store(names("a", 5), list(range(5))) == 5
            assert await other.tier.exists(names("a", 5)) == 0
            assert await asked(mine, names("a", 9)) == 5
            assert await asked(mine, names("b", 2)) == 0
            assert await asked(both, names("a", 5)) == 0
            assert await other.tier.store(names("a", 2), [1, 2]) == 2
            assert await asked(both, names("a", 5)) == 2
            assert pool.statistics().places_pinned == 0
            assert pool.statistics().guests == 2
        mine.close()
        both.close()
        assert mine.answer(mine.ask(names("a", 5))) == 0


@pytest.mark.asyncio
async def test_what_is_being_written_or_can_not_be_used_is_not_there(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "pool"
    async with HostPool(path, 32 * BLOCK) as pool, tier_on("mocked", seed, pool=path, stepping=False) as kit:
        out = Lookout(pool.path, [MINE])
        storing = asyncio.ensure_future(kit.tier.store(names("a", 3), [0, 1, 2]))
        while not pool.statistics().places_pending:  # noqa: ASYNC110 - it says nothing
            await asyncio.sleep(0)
        assert await asked(out, names("a", 3)) == 0
        while not storing.done():
            kit.device.step()
            await asyncio.sleep(0)
        assert await asked(out, names("a", 3)) == 3
        (guest,) = pool.shares.guests
        guest.limit, limit = 2, guest.limit
        assert await asked(out, names("a", 3)) == 2
        guest.limit = limit
        async with tier_on("host", seed, pool=path):
            newest = list(pool.shares.guests)[-1]
            newest.limit = 0  # it has yet to map what there is
            assert await asked(out, names("a", 3)) == 3
        out.close()


def test_questions_that_wait_are_answered_in_any_order(owner: Owner) -> None:
    clock = Clock()
    out = Lookout(owner.listening.getsockname(), [MINE], clock=clock)
    one, two, three = (out.ask(names(each, 2)) for each in "abc")
    clock.now += 1e-2  # nobody waits any more
    assert out.answer(one) is None
    look, *questions = owner.hear()
    assert look == Look(1)
    assert [type(question) for question in questions] == [There] * 3
    out.forget(two)
    answers = frame(Done(three, 2, 0)) + frame(Done(two, 1, 0)) + frame(Done(one, 0, 0))
    owner.say(answers[:-3])
    assert out.answer(three) == 2
    assert out.answer(one) is None
    owner.say(answers[-3:])
    assert out.answer(one) == 0
    assert out.answer(two) == 0
    assert not out._answers
    out.close()
    owner.close()


def test_an_owner_that_is_silent_is_taken_for_lost(owner: Owner) -> None:
    """Nothing waits for it for ever, nor for long each time."""
    clock = Clock()
    out = Lookout(owner.listening.getsockname(), [MINE], clock=clock)
    one, two = out.ask(names("a", 2)), out.ask(names("b", 2))
    clock.now += lookout._SILENCE_S - 0.1
    assert out.answer(one) is None
    clock.now += 0.2
    assert out.answer(one) == out.answer(two) == 0
    assert out.answer(out.ask(names("a", 2))) == 0, "it is not asked for a while"
    clock.now += lookout._FIRST_S
    three = out.ask(names("a", 2))
    assert out.answer(three) is None
    owner.listening.accept()[0].close()  # the line that was given up
    assert len(owner.hear()) == 2
    owner.say(frame(Done(three, 2, 0)))
    assert out.answer(three) == 2
    out.close()
    owner.close()


@pytest.mark.parametrize(
    "said",
    [
        frame(Refusal("refused", "no")),
        frame(Found(1, [1], 0)),
        b"\xff\xff\xff\xff",
        b"\0\0\0\1\xc1",
        b"",
    ],
)
def test_what_an_owner_must_not_say_ends_it(owner: Owner, said: bytes) -> None:
    out = Lookout(owner.listening.getsockname(), [MINE], clock=Clock())
    number = out.ask(names("a", 2))
    owner.hear()
    if said:
        owner.say(said)
    else:
        owner.close()
    assert out.answer(number) == 0
    assert out._sock is None
    owner.close()


def test_nobody_there(tmp_path: Path) -> None:
    clock = Clock()
    out = Lookout(os.fspath(tmp_path / "pool"), [MINE], clock=clock)
    for _ in range(3):
        assert out.answer(out.ask(names("a", 2))) == 0
    delay = out._delay
    clock.now += lookout._LAST_S
    assert out.answer(out.ask(names("a", 2))) == 0
    assert out._delay == 2 * delay == 4 * lookout._FIRST_S
    out.close()


@pytest.mark.asyncio
async def test_of_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with HostPool(tmp_path / "pool", 32 * BLOCK) as pool:
        monkeypatch.setattr(lookout, "VERSION", 2)
        out = Lookout(pool.path, [MINE])
        assert await asked(out, names("a", 2)) == 0
        assert out._sock is None


@pytest.mark.asyncio
async def test_who_looks_may_do_nothing_else(tmp_path: Path) -> None:
    async with HostPool(tmp_path / "pool", 32 * BLOCK) as pool:
        for first in (There(1, [MINE], []), Look(1)):
            reader, writer = await asyncio.open_unix_connection(pool.path)
            writer.write(frame(first) + frame(Look(1)))
            assert await reader.read() == b""
            writer.close()
