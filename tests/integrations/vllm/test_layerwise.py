"""What is sent while it is computed, by vLLMs that are played: see ``played.py``."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

SIZE = 32
ASKED = [7 * token % 50 for token in range(5 * SIZE + 7)]

Make = Callable[..., Any]


def pair(make: Make, **more: object) -> tuple[Any, Any]:
    return make("left", layerwise=True, **more), make("right")


def told(left: Any, name: str = "t") -> tuple[dict[str, Any], dict[str, Any]]:
    """What a router that mints ids says to both sides."""
    there = {"do_remote_prefill": True, "transfer_id": name, "remote_addresses": [left.worker.address]}
    return {"do_remote_decode": True, "transfer_id": name}, there


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("budget", [16, 64, 1000])
def test_it_is_offered_in_the_step_that_computes_the_last_of_it(
    make: Make, played: ModuleType, budget: int, ahead: bool
) -> None:
    left, right = pair(make, budget=budget, ahead=ahead, chunks=False)
    here, there = told(left)
    request = right.add("b", ASKED, 4, there)
    right.step()
    left.add("a", ASKED, 1, here)
    begun = []
    begin = left.worker._sending.begin
    left.worker._sending.begin = lambda send: begun.append(left.computed) or begin(send)
    right.settle(left)
    assert begun == [(len(ASKED) - 1) // budget * budget]  # before the last chunk
    assert request.answered == played.answer(ASKED, 4)
    assert right.computed == 1 + 3  # the last token, and the answer
    assert not any(left.users)


@pytest.mark.parametrize("layerwise", [False, True])
def test_by_the_answer_of_the_prefill_side(make: Make, played: ModuleType, layerwise: bool) -> None:
    left, right = make("left", layerwise=layerwise), make("right")
    done = left.add("a", ASKED, 1, {"do_remote_decode": True})
    while done.said is None:
        left.step()
    request = right.add("b", ASKED, 4, done.said)
    right.settle(left)
    assert request.answered == played.answer(ASKED, 4)
    assert right.computed == 4


@pytest.mark.parametrize("layerwise", [False, True])
def test_one_that_is_late_holds_up_no_other(make: Make, played: ModuleType, layerwise: bool) -> None:
    """A load that nobody serves yet costs the steps of others nothing (vllm#30794)."""
    left, right = make("left", layerwise=layerwise), make("right")
    here, there = told(left)
    late = right.add("late", ASKED, 4, there)
    other = right.add("other", ASKED[1:], 4)
    steps = 0
    while not other.over:
        right.step()
        steps += 1
    assert steps == -(-len(ASKED[1:]) // right.budget) + 3  # as if it were alone
    assert other.answered == played.answer(ASKED[1:], 4)
    assert not late.answered
    left.add("a", ASKED, 1, here)
    right.settle(left)
    assert late.answered == played.answer(ASKED, 4)


def test_a_request_that_goes_on_is_not_reported_before_it_is_over(make: Make, played: ModuleType) -> None:
    left, right = pair(make)
    here, there = told(left)
    fetched = right.add("b", ASKED, 4, there)
    request = left.add("a", ASKED, 2 * SIZE, here)
    while "b" in right.requests:
        if not request.answered:
            left.step()
        right.step()
    assert not request.over
    left.settle()
    assert fetched.answered == played.answer(ASKED, 4)
    assert request.answered == played.answer(ASKED, 2 * SIZE)
    assert not any(left.users)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("fetched", [False, True])
def test_given_up_at_any_time(make: Make, played: ModuleType, seed: int, fetched: bool, ahead: bool) -> None:
    """Blocks are held until nobody reads them, and reported once."""
    left, right = pair(make, ahead=ahead)
    drawn = random.Random(seed)
    for number in range(10):
        here, there = told(left, str(number))
        asked = [number, *ASKED]
        request = right.add(f"b{number}", asked, 2, there) if fetched else None
        left.add(f"a{number}", asked, 2 * SIZE, here)
        for _ in range(drawn.randrange(8)):
            right.step()
            left.step()
        left.abort(f"a{number}")
        left.settle(right)
        assert not any(left.users)
        assert request is None or request.answered == played.answer(asked, 2)


@pytest.mark.parametrize("ahead", [False, True])
def test_blocks_that_are_taken_away_are_quiet_before_they_are_written(
    make: Make, played: ModuleType, seed: int, ahead: bool
) -> None:
    """A request that is preempted while it is sent costs its reader a computation, and never a wrong byte."""
    left, right = pair(make, blocks=14, ahead=ahead)
    drawn = random.Random(seed)
    asked = [[drawn.randrange(50) for _ in range(2 * SIZE + 20)] for _ in range(5)]
    ours = []
    for number, each in enumerate(asked):
        here, there = told(left, str(number))
        if number % 2:
            ours.append((each, right.add(f"b{number}", each, 2, there)))
        left.add(f"a{number}", each, 2 * SIZE, {**here, "deadline": 0.1})
    lost = []
    lose = left.worker._sending.lose

    async def losing(names: list[str]) -> None:
        lost.extend(names)
        await lose(names)

    left.worker._sending.lose = losing
    left.settle(right)
    assert lost
    assert all(request.answered == played.answer(each, 2) for each, request in ours)
    assert not any(left.users)
    assert not left.half.leaving._early
    assert not left.worker._reports._sends
    assert not left.worker._sending._courses


def test_several_groups_wait_for_the_end(played: ModuleType) -> None:
    leaving = played.Leaving([SIZE, SIZE], "engine", layerwise=True)
    request = played.Request("a", ASKED, kv_transfer_params={"do_remote_decode": True})
    leaving.begun(request, [[1], [2]])
    assert not leaving._growing


def test_after_it_was_closed_everything_is_reported(make: Make) -> None:
    left, _ = pair(make)
    left.worker.close()
    left.add("a", ASKED, 2, told(left)[0])
    left.settle()
    assert not any(left.users)
