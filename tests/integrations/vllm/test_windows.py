"""The host tier of a model with sliding windows, behind a vLLM that is played, see ``windows.py``."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

SIZE = 32
#: Of a block of both layers, which is one of the tier.
NBYTES = 2 * 2 * SIZE * 16 * 4

Make = Callable[..., Any]


@pytest.fixture
def make(windows: ModuleType) -> Iterator[Make]:
    """Makes instances with a tier of some blocks, and closes them."""
    made = []

    def one(name: str = "one", *, tier: int = 64, **more: object) -> Any:
        made.append(windows.Windows(name, host_tier=tier * NBYTES, **{"blocks": 32, **more}))
        return made[-1]

    yield one
    for each in made:
        each.close()


@pytest.fixture
def answer(windows: ModuleType) -> Callable[..., list[int]]:
    """What the model answers."""
    return windows.answer


def prompt(seed: int, tokens: int) -> list[int]:
    drawn = random.Random(seed)
    return [drawn.randrange(50) for _ in range(tokens)]


ASKED = prompt(1, 7 * SIZE + 7)


@pytest.mark.parametrize("ahead", [False, True])
def test_what_the_small_cache_lost_comes_back(
    make: Make, answer: Callable[..., list[int]], ahead: bool
) -> None:
    one = make(ahead=ahead)
    assert one.answer(ASKED) == answer(ASKED, 4)
    one.flood()
    computed = one.computed
    assert one.answer(ASKED) == answer(ASKED, 4)
    assert one.computed - computed <= 7 + 3 + ahead
    assert one.recalled == 7
    assert not any(one.users)


def test_only_what_the_window_reaches_is_brought_back(make: Make) -> None:
    one = make()
    one.answer(ASKED)
    one.flood()
    before = one.worker.tier_statistics().bytes_loaded
    one.answer(ASKED)
    block = NBYTES // 2
    # 69 tokens before the last: of two blocks, and one more token.
    assert one.worker.tier_statistics().bytes_loaded - before == (7 + 3) * block


def test_a_longer_and_a_shorter_prompt(make: Make, answer: Callable[..., list[int]]) -> None:
    """What is at the end of one is in the middle of another, where the window needs other blocks."""
    one = make(tier=128)
    said = one.answer(ASKED, 2 * SIZE)
    for tokens in (3 * SIZE, 5 * SIZE + 1, len(ASKED), SIZE, 2 * SIZE - 1):
        one.flood()
        assert one.answer(ASKED[:tokens]) == answer(ASKED[:tokens], 4)
    one.flood()
    assert one.answer(ASKED + said) == answer(ASKED + said, 4)


def test_all_of_a_prompt_but_its_last_block(make: Make, answer: Callable[..., list[int]]) -> None:
    """The window of the last token, which is computed in any case, begins a token earlier."""
    one = make()
    one.answer(ASKED[: 4 * SIZE])
    one.flood()
    assert one.answer(ASKED[: 4 * SIZE]) == answer(ASKED[: 4 * SIZE], 4)
    assert one.recalled == 3


def test_what_can_not_be_had_in_full_is_computed(make: Make, answer: Callable[..., list[int]]) -> None:
    """vLLM has no blocks for the window of a shorter prefix."""
    one = make()
    one.answer(ASKED)
    one.flood()
    tiering = one.worker._tiering
    hashes = one.add("x", ASKED).block_hashes
    one.abort("x")
    one.settle()
    assert one.worker._thread.run(tiering.tier.delete(hashes[5:])) == 2
    one.worker._thread.run(asyncio.sleep(0))
    tiering.changes.clear()  # the news is lost
    computed, before = one.computed, tiering.tier.statistics().bytes_loaded
    assert one.answer(ASKED) == answer(ASKED, 4)
    assert one.computed - computed == len(ASKED) + 3
    assert tiering.tier.statistics().bytes_loaded == before
    one.flood()
    assert one.answer(ASKED) == answer(ASKED, 4)  # they were stored again
    assert one.recalled == 2 * 7


def test_what_is_read_is_not_written_by_a_recall(
    make: Make, answer: Callable[..., list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever group it reads a block for: the memory is the same."""
    one = make(blocks=20)
    one.answer(ASKED)
    one.flood()
    tier = one.worker._tiering.tier
    gate, store = asyncio.Event(), tier.store

    async def slow(*args: Any, **named: Any) -> int:
        await gate.wait()
        return await store(*args, **named)

    monkeypatch.setattr(tier, "store", slow)
    other = prompt(2, 7 * SIZE)
    request = one.add("other", other)
    while not request.over:
        one.step()
    one.add("asked", ASKED)  # it gets the same blocks
    for _ in range(20):
        one.step()
    one.worker._thread.post(gate.set)
    one.settle()
    one.reset(connector=False)
    assert one.answer(other) == answer(other, 4)


@pytest.mark.parametrize("ahead", [False, True])
def test_given_up_at_any_time(make: Make, seed: int, ahead: bool) -> None:
    one = make(ahead=ahead)
    one.answer(ASKED)
    drawn = random.Random(seed)
    for number in range(15):
        one.flood()
        one.add(f"x{number}", ASKED)
        for _ in range(drawn.randrange(4)):
            one.step()
        if f"x{number}" in one.requests:
            one.abort(f"x{number}")
        one.settle()
        assert not any(one.users)


@pytest.mark.parametrize("ahead", [False, True])
def test_never_a_wrong_byte(
    make: Make,
    answer: Callable[..., list[int]],
    seed: int,
    ahead: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Conversations that share beginnings, in too small a cache and tier; aborts, resets and slow copies."""
    drawn = random.Random(seed)
    one = make(tier=24, blocks=24, ahead=ahead)
    store = one.worker._tiering.tier.store

    async def slow(*args: Any, **named: Any) -> int:
        await asyncio.sleep(drawn.choice([0, 0.002, 0.01]))
        return await store(*args, **named)

    monkeypatch.setattr(one.worker._tiering.tier, "store", slow)
    for turn in range(20):
        requests = []
        for number in range(4):
            asked = prompt(drawn.randrange(3), 4 * SIZE) + prompt(
                drawn.randrange(6), drawn.randrange(3 * SIZE)
            )
            requests.append(one.add(f"{turn}.{number}", asked, drawn.randrange(1, SIZE)))
        for _ in range(drawn.randrange(12)):
            one.step()
        for request in requests[:: drawn.randrange(1, 4)]:
            if request.request_id in one.requests and not request.over:
                one.abort(request.request_id)
        one.settle()
        for request in requests:
            assert request.answered == answer(request.prompt, len(request.answered), one.weights)
        assert not any(one.users)
        if turn % 5 == 4:
            assert one.reset()
            one.weights += 1
    assert one.recalled
