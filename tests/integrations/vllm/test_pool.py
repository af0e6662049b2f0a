"""Instances of a vLLM that is played, see ``played.py``, over one pool of the host."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from aiokv.blocking.thread import LoopThread
from aiokv.errors import PeerLostError
from aiokv.offload.events import BlocksRemoved, BlocksStored
from aiokv.offload.sharing import lookout
from aiokv.offload.sharing.owner import HostPool

SIZE = 32

Make = Callable[..., Any]


class Owner:
    """A pool, in a thread of its own."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self.path = str(path)
        self.nbytes = nbytes
        self.thread = LoopThread("pool")
        self.open()

    def open(self) -> None:
        self.pool = HostPool(self.path, self.nbytes, segment_bytes=1 << 20)
        self.thread.run(self.pool.__aenter__())

    def close(self) -> None:
        self.thread.run(self.pool.aclose())


@pytest.fixture
def owner(played: ModuleType, tmp_path: Path) -> Iterator[Owner]:
    """A pool of 64 blocks."""
    found = Owner(tmp_path / "pool", 64 * played.BLOCK_BYTES)
    yield found
    found.close()
    found.thread.close()


@pytest.fixture
def make(played: ModuleType, owner: Owner) -> Iterator[Make]:
    """Makes instances that share the pool, and closes them."""
    made = []

    def one(name: str = "one", **more: object) -> Any:
        made.append(played.Played(name, host_pool=owner.path, **more))
        return made[-1]

    yield one
    for each in made:
        each.close()


def prompt(seed: int, tokens: int) -> list[int]:
    drawn = random.Random(seed)
    return [drawn.randrange(50) for _ in range(tokens)]


ASKED = prompt(1, 5 * SIZE + 7)


def until(side: Any, reached: Callable[[], bool]) -> None:
    """Step until something holds."""
    pause = threading.Event()
    while not reached():
        side.step()
        pause.wait(0.0005)


@pytest.mark.parametrize("ahead", [False, True])
def test_what_one_computed_the_other_loads(make: Make, played: ModuleType, ahead: bool) -> None:
    one, other = make("one", ahead=ahead), make("other", ahead=ahead)
    assert one.answer(ASKED) == played.answer(ASKED, 4)
    assert other.answer(ASKED) == played.answer(ASKED, 4)
    assert other.recalled == 5
    assert other.computed <= 7 + 3 + ahead
    longer = ASKED + prompt(2, 3 * SIZE)
    assert other.answer(longer) == played.answer(longer, 4)  # what is known is not asked for again
    assert other.recalled == 5
    one.flood()
    assert one.answer(longer) == played.answer(longer, 4)
    assert one.recalled == len(longer) // SIZE
    assert not any(one.users) and not any(other.users)


def test_many_at_once(make: Make, played: ModuleType) -> None:
    one, other = make("one"), make("other", blocks=64)
    asked = [prompt(seed, 3 * SIZE + seed) for seed in range(12)]
    for each in asked:
        one.answer(each)
    requests = [other.add(str(number), each) for number, each in enumerate(asked)]
    other.settle()
    assert [each.answered for each in requests] == [played.answer(each, 4) for each in asked]
    assert other.recalled == 3 * 12


def test_others_weights_are_not_shared(make: Make, played: ModuleType) -> None:
    one, other = make("one", named=b"one"), make("other", named=b"other")
    one.answer(ASKED)
    other.weights = 2
    assert other.answer(ASKED) == played.answer(ASKED, 4, 2)
    assert not other.recalled
    one.flood()
    assert one.answer(ASKED) == played.answer(ASKED, 4)
    assert one.recalled == 5


def test_a_reset_by_one_empties_it_for_all(make: Make, played: ModuleType) -> None:
    one, other = make("one"), make("other", events=True)
    one.answer(ASKED)
    other.answer(ASKED)
    other.flood()
    other.half.take_changes()
    assert one.reset()
    one.step()
    until(other, lambda: any(isinstance(each.event, BlocksRemoved) for each in other.half.take_changes()))
    one.weights = other.weights = 2
    assert other.reset(connector=False)
    assert other.answer(ASKED) == played.answer(ASKED, 4, 2)
    assert one.answer(ASKED) == played.answer(ASKED, 4, 2)
    assert (other.recalled, one.recalled) == (5, 5)


def test_what_was_found_is_told_as_kv_events(make: Make) -> None:
    one, other = make("one"), make("other", events=True)
    request = one.add("a", ASKED, 1)
    one.settle()
    other.answer(ASKED, 1)
    (event,) = [each.event for each in other.half.take_changes()]
    assert isinstance(event, BlocksStored)
    assert list(event.hashes) == request.block_hashes
    assert (list(event.tokens or ()), event.parent) == (ASKED[: 5 * SIZE], None)


def test_evicted_after_it_was_found(make: Make, played: ModuleType) -> None:
    """It is computed, and asked for no more than once."""
    one, other = make("one"), make("other")
    one.answer(ASKED)
    request = other.add("a", ASKED)
    while (found := other.half.matched(request, 0)) is None:
        pass
    assert found == 5 * SIZE
    tier = one.worker._tiering.tier
    assert one.worker._thread.run(tier.delete(request.block_hashes[2:])) == 3
    other.settle()
    assert request.answered == played.answer(ASKED, 4)
    assert not any(other.users)


def test_an_owner_that_is_lost_means_misses(make: Make, played: ModuleType, owner: Owner) -> None:
    one, other = make("one"), make("other")
    one.answer(ASKED)
    other.answer(ASKED)
    owner.close()
    for each in (one, other):
        until(each, lambda each=each: not each.worker.tier_statistics().attached)
        each.flood()
        recalled = each.recalled
        assert each.answer(ASKED) == played.answer(ASKED, 4)
        assert each.recalled == recalled
    owner.open()
    for each in (one, other):
        until(each, lambda each=each: each.worker.tier_statistics().attached)
        until(each, lambda each=each: each.half._tier.asking._pool._again < lookout.time.monotonic())
    one.flood()
    other.flood()
    longer = prompt(3, 4 * SIZE + 1)
    assert one.answer(longer) == other.answer(longer) == played.answer(longer, 4)
    assert other.recalled == 5 + 4


def test_an_owner_that_is_silent_holds_nothing_up_for_long(
    make: Make, played: ModuleType, owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookout, "_SILENCE_S", 0.05)
    one, other = make("one"), make("other")
    one.answer(ASKED)
    stopped, again = threading.Event(), threading.Event()

    def stop() -> None:
        stopped.set()
        again.wait()

    owner.thread.post(stop)
    stopped.wait()
    request = other.add("a", ASKED)
    until(other, lambda: request.over)
    assert request.answered == played.answer(ASKED, 4)
    assert not other.recalled
    again.set()
    other.settle()


@pytest.mark.parametrize("ahead", [False, True])
def test_given_up_at_any_time(make: Make, seed: int, ahead: bool) -> None:
    one, other = make("one"), make("other", ahead=ahead)
    drawn = random.Random(seed)
    for number in range(12):
        asked = prompt(drawn.randrange(1000), 4 * SIZE)
        one.answer(asked)
        other.add(f"x{number}", asked)
        for _ in range(drawn.randrange(4)):
            other.step()
        if f"x{number}" in other.requests:
            other.abort(f"x{number}")
        other.settle()
        assert not any(other.users)
        assert not other.half._tier.asking._questions


def test_never_a_wrong_byte(make: Make, played: ModuleType, seed: int) -> None:
    """Conversations that share beginnings go from one to the other, in too small caches and a small pool."""
    drawn = random.Random(seed)
    sides = [make("one", blocks=16), make("other", blocks=16, ahead=True)]
    for turn in range(15):
        requests = []
        for number in range(6):
            asked = prompt(drawn.randrange(4), 3 * SIZE) + prompt(
                drawn.randrange(8), drawn.randrange(3 * SIZE)
            )
            side = drawn.choice(sides)
            requests.append((side, side.add(f"{turn}.{number}", asked, drawn.randrange(1, SIZE))))
        for _ in range(drawn.randrange(12)):
            drawn.choice(sides).step()
        for side, request in requests[:: drawn.randrange(2, 4)]:
            if request.request_id in side.requests and not request.over:
                side.abort(request.request_id)
        sides[0].settle(sides[1])
        for side, request in requests:
            assert request.answered == played.answer(request.prompt, len(request.answered), side.weights)
            assert not any(side.users)
        if turn % 5 == 4:
            for side in sides:
                assert side.reset()
                side.weights += 1
            for side in sides:
                side.settle()
                side.step()
    assert all(side.recalled for side in sides)


def test_a_model_with_sliding_windows(owner: Owner, windows: ModuleType) -> None:
    one, other = (windows.Windows(name, host_pool=owner.path, blocks=32) for name in ("one", "other"))
    try:
        said = one.answer(ASKED, SIZE)
        assert said == windows.answer(ASKED, SIZE)
        longer = ASKED + said + prompt(2, SIZE)
        assert other.answer(longer) == windows.answer(longer, 4)
        assert other.recalled == 6
    finally:
        one.close()
        other.close()


def test_nobody_there(make: Make, owner: Owner) -> None:
    owner.path += " of somebody else"
    with pytest.raises(PeerLostError, match="python -m aiokv pool") as raised:
        make("one")
    assert "host_pool" in raised.value.__notes__[0]
