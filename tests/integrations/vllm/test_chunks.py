"""Chunks of a prompt that are sent before its last is computed, by vLLMs that are played."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from aiokv.integrations.vllm.leaving import Leaving
from aiokv.integrations.vllm.news import Wanted
from aiokv.integrations.vllm.orders import Blocks, Orders, Refusal, Send, Ticket, Watch

SIZE = 32
ASKED = [7 * token % 50 for token in range(5 * SIZE + 7)]

Make = Callable[..., Any]


def told(left: Any, name: str = "t") -> tuple[dict[str, Any], dict[str, Any]]:
    """What a router that mints ids says to both sides."""
    there = {"do_remote_prefill": True, "transfer_id": name, "remote_addresses": [left.worker.address]}
    return {"do_remote_decode": True, "transfer_id": name}, there


def until(reached: Callable[[], object], *sides: Any) -> None:
    """Step until something is so."""
    pause = threading.Event()
    while not reached():
        for side in sides:
            side.step()
        pause.wait(0.0005)


def asked_for(left: Any) -> bool:
    """Whether the decode side waits for the next chunk of all prompts, as the scheduler knows, or will."""
    if left.worker._wanted or any(news for *_, news in left.unheard):
        return True
    return all(each.ranks for each in left.half.leaving._growing.values() if each.watched)


def offered(left: Any) -> list[tuple[str, int, int]]:
    """What will be offered: its id, the tokens up to which it goes, and those that were computed before."""
    found: list[tuple[str, int, int]] = []
    begin = left.worker._sending.begin

    def noted(send: Send) -> Any:
        found.append((send.ticket.transfer, send.tokens, left.computed))
        return begin(send)

    left.worker._sending.begin = noted
    return found


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("budget", [16, 40])
def test_chunks_are_there_before_the_last_is_computed(
    make: Make, played: ModuleType, layerwise: bool, ahead: bool, budget: int
) -> None:
    left, right = make("left", layerwise=layerwise, ahead=ahead, budget=budget), make("right")
    here, there = told(left)
    request = right.add("b", ASKED, 4, there)
    sends = offered(left)
    left.add("a", ASKED, 1, here)
    for _ in range(-(-len(ASKED) // budget)):
        left.step()
        until(lambda: asked_for(left), right)
    right.settle(left)
    assert [name for name, _, _ in sends] == ["t", *(f"t#{number}" for number in range(1, len(sends)))]
    assert len(sends) > (2 if budget == 16 else 1)
    ends = [tokens for _, tokens, _ in sends]
    assert ends == sorted(set(ends))
    assert ends[-1] == len(ASKED)
    assert all(tokens % SIZE == 0 for tokens in ends[:-1])
    assert all(computed < len(ASKED) for _, _, computed in sends[:-1])
    assert request.answered == played.answer(ASKED, 4)
    assert right.computed == 1 + 3  # the last token, and the answer
    assert not any(left.users)
    nothing_is_kept(left, right)


def nothing_is_kept(*sides: Any) -> None:
    for side in sides:
        leaving, worker = side.half.leaving, side.worker
        kept = [leaving._growing, leaving._early, leaving._lost, worker._sending._courses, worker._watches]
        reports = [getattr(worker._reports, name) for name in ("_sends", "_held", "_lost", "_unread")]
        assert not any([*kept, *reports, worker._loading._courses, worker._recalls, worker._wanted])


@pytest.mark.parametrize("settings", [{"chunks": False}, {}])
def test_who_comes_late_finds_it_in_one(make: Make, played: ModuleType, settings: dict[str, bool]) -> None:
    left, right = make("left", **settings), make("right")
    here, there = told(left)
    sends = offered(left)
    left.add("a", ASKED, 1, here)
    until(lambda: "a" not in left.requests or left.requests["a"].over, left)
    request = right.add("b", ASKED, 4, there)
    right.settle(left)
    assert [name for name, _, _ in sends] == ["t"]
    assert request.answered == played.answer(ASKED, 4)
    assert right.computed == 1 + 3
    nothing_is_kept(left, right)


def test_nobody_comes(make: Make) -> None:
    """It is held no longer than what isn't computed in chunks."""
    left = make("left", hold=0.1)
    left.add("a", ASKED, 1, told(left)[0])
    left.settle()
    assert not any(left.users)
    nothing_is_kept(left)


@pytest.mark.parametrize("layerwise", [False, True])
def test_prefixes_on_both_sides(make: Make, played: ModuleType, layerwise: bool) -> None:
    """What the decode side has is not sent, and what the prefill side had is with the first chunk."""
    left, right = make("left", layerwise=layerwise), make("right")
    left.answer(ASKED[: 2 * SIZE + 1], 1)
    right.answer(ASKED[: 3 * SIZE + 1], 1)
    here, there = told(left)
    before = right.computed
    request = right.add("b", ASKED, 4, there)
    sends = offered(left)
    right.step()
    left.budget = SIZE
    left.add("a", ASKED, 1, here)
    while not left.requests["a"].over:
        left.step()
        until(lambda: asked_for(left), right)
    right.settle(left)
    assert sends[0][1] > 3 * SIZE
    assert len(sends) > 1
    assert request.answered == played.answer(ASKED, 4)
    assert right.computed - before == 1 + 3
    nothing_is_kept(left, right)


def test_all_of_it_is_there(make: Make, played: ModuleType) -> None:
    left, right = make("left"), make("right")
    asked = ASKED[: 4 * SIZE]
    right.answer(asked, 1)
    here, there = told(left)
    request = right.add("b", asked, 4, there)
    right.step()
    left.add("a", asked, 1, here)
    right.settle(left)
    assert request.answered == played.answer(asked, 4)
    nothing_is_kept(left, right)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
def test_given_up_at_any_time(
    make: Make, played: ModuleType, seed: int, side: str, layerwise: bool, ahead: bool
) -> None:
    """One report, no block held for longer, and nothing is written into blocks of others."""
    left, right = make("left", layerwise=layerwise, ahead=ahead, budget=24), make("right")
    drawn = random.Random(seed)
    for number in range(10):
        here, there = told(left, str(number))
        asked = [number, *ASKED]
        request = right.add(f"b{number}", asked, 2, there)
        left.add(f"a{number}", asked, 1, here)
        for _ in range(drawn.randrange(12)):
            right.step()
            left.step()
            if drawn.random() < 0.5:
                until(lambda: asked_for(left), right)
        if side == "left" and any(not each.over for each in left.requests.values()):
            left.abort(f"a{number}")
        elif side == "right" and not request.over:
            right.abort(f"b{number}")
        left.settle(right)
        assert not any(left.users)
        assert side == "right" or request.answered == played.answer(asked, 2)
    nothing_is_kept(left, right)


def test_given_up_between_two_chunks_the_rest_is_computed(make: Make, played: ModuleType) -> None:
    """What was sent so far is of use."""
    left, right = make("left", budget=SIZE), make("right")
    here, there = told(left)
    request = right.add("b", ASKED, 4, there)
    sends = offered(left)
    right.step()
    left.add("a", ASKED, 1, here)
    while len(sends) < 2:
        left.step()
        until(lambda: asked_for(left), right)
    left.abort("a")
    right.settle(left)
    assert request.answered == played.answer(ASKED, 4)
    assert right.computed == len(ASKED) - sends[-1][1] + 3
    nothing_is_kept(left, right)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("layerwise", [False, True])
def test_preempted_at_any_time(
    make: Make, played: ModuleType, seed: int, layerwise: bool, ahead: bool
) -> None:
    """It costs its reader a computation at most, and never a wrong byte."""
    left = make("left", blocks=12, budget=40, layerwise=layerwise, ahead=ahead)
    right = make("right", blocks=40)
    drawn = random.Random(seed)
    asked = [[drawn.randrange(50) for _ in range(4 * SIZE + 20)] for _ in range(6)]
    ours = []
    for number, each in enumerate(asked):
        here, there = told(left, str(number))
        ours.append((each, right.add(f"b{number}", each, 2, there)))
        left.add(f"a{number}", each, 2 * SIZE if number % 2 else 1, here)
    until(lambda: left.preempted, left, right)
    left.settle(right)
    assert all(request.answered == played.answer(each, 2) for each, request in ours)
    assert not any(left.users)
    nothing_is_kept(left, right)


@pytest.mark.parametrize("dies", ["left", "right"])
def test_one_side_is_gone_between_chunks(make: Make, played: ModuleType, dies: str) -> None:
    left, right = make("left", budget=SIZE, hold=1), make("right")
    here, there = told(left)
    request = right.add("b", ASKED, 4, there)
    sends = offered(left)
    right.step()
    left.add("a", ASKED, 1, here)
    while len(sends) < 2:
        left.step()
        until(lambda: asked_for(left), right)
    gone, other = (left, right) if dies == "left" else (right, left)
    gone.worker.close()
    other.settle()
    assert not any(other.users)
    if dies == "left":
        assert request.answered == played.answer(ASKED, 4)
    nothing_is_kept(other)


# -- the scheduler's side alone ---------------------------------------------------------------------


def growing(played: ModuleType, leaving: Leaving, **more: object) -> Any:
    request = played.Request("a", ASKED, kv_transfer_params={**told_nobody(), **more})
    leaving.begun(request, [[1, 2]])
    return request


def told_nobody() -> dict[str, object]:
    return {"do_remote_decode": True, "transfer_id": "t"}


def scheduled(leaving: Leaving, request: Any, tokens: int, new: list[int]) -> Orders:
    orders = Orders()
    leaving.scheduled(request.request_id, tokens, new, orders)
    request.num_computed_tokens += tokens
    return orders


def test_all_ranks_offer_the_same(played: ModuleType) -> None:
    """Each chunk goes as far at all of them: a decode side that asks several would refuse it otherwise."""
    leaving = Leaving([SIZE], "engine", chunks=True, ranks=2)
    request = growing(played, leaving)
    assert scheduled(leaving, request, 40, []).watches == [Watch("a", Ticket("t"), 0)]
    leaving.wanted(0, Wanted("a", 0, 0))
    leaving.wanted(0, Wanted("a", 0, 0))
    assert not scheduled(leaving, request, 40, [3])
    leaving.wanted(1, Wanted("a", 0, 0))
    leaving.wanted(1, Wanted("b", 0, 0))
    orders = scheduled(leaving, request, 40, [4])
    assert orders.sends == [Send("a", Ticket("t"), (Blocks(0, (1, 2)),), 64, last=False)]
    assert orders.watches == [Watch("a", Ticket("t#1"), 1)]
    leaving.wanted(0, Wanted("a", 0, 0))  # of before
    orders = Orders()
    assert leaving.finished(request, [[1, 2, 3, 4]], orders, complete=False) == (True, None)
    assert (orders.held, orders.aborts, orders.refusals) == (["a"], ["a"], [Refusal(Ticket("t#1"))])


def test_nothing_is_offered_that_the_decode_side_has(played: ModuleType) -> None:
    leaving = Leaving([SIZE], "engine", chunks=True, layerwise=True)
    request = growing(played, leaving)
    scheduled(leaving, request, 32, [])
    leaving.wanted(0, Wanted("a", 0, 2**40))
    assert not scheduled(leaving, request, 64, [3])
    orders = scheduled(leaving, request, len(ASKED) - 96, [4, 5, 6])
    held = (Blocks(0, (1, 2, 3, 4, 5, 6)),)
    assert orders.sends == [Send("a", Ticket("t"), held, len(ASKED), early=True)]


@pytest.mark.parametrize("more", [{"transfer_id": None}, {"transfer_id": "x" * 250}, {"push": True}])
def test_what_is_sent_in_one(played: ModuleType, more: dict[str, object]) -> None:
    """Nobody can wait for it, its id is too long, or the prefill side comes by itself."""
    leaving = Leaving([SIZE], "engine", chunks=True)
    request = growing(played, leaving, remote_addresses=["tcp://10.0.0.1:7000"], **more)
    assert not scheduled(leaving, request, 64, [])


def test_several_groups_wait_for_the_end(played: ModuleType) -> None:
    leaving = Leaving([SIZE, SIZE], "engine", chunks=True)
    leaving.begun(played.Request("a", ASKED, kv_transfer_params=told_nobody()), [[1], [2]])
    assert not leaving.follows


def test_preempted_before_anything_was_sent_it_goes_on(played: ModuleType) -> None:
    leaving = Leaving([SIZE], "engine", chunks=True)
    request = growing(played, leaving)
    scheduled(leaving, request, 40, [])
    orders = Orders()
    leaving.preempted(["a"], orders)
    assert not orders
    request.num_computed_tokens = 0
    leaving.begun(request, [[7, 8]])
    leaving.wanted(0, Wanted("a", 0, 0))
    scheduled(leaving, request, 40, [])
    orders = scheduled(leaving, request, 40, [9])
    assert orders.sends == [Send("a", Ticket("t"), (Blocks(0, (7,)),), 32, last=False)]
    # Who asks for the next one has the first.
    leaving.wanted(0, Wanted("a", 1, 32))
    leaving.preempted(["a"], orders := Orders())
    assert not orders
    leaving.begun(request, [[4, 5, 6]])
    request.num_computed_tokens = 70
    assert scheduled(leaving, request, 8, []).sends == [
        Send("a", Ticket("t#1"), (Blocks(32, (5,)),), 64, last=False)
    ]
    # It may be on its way now.
    leaving.preempted(["a"], orders := Orders())
    assert (orders.lost, orders.refusals) == (["a"], [Refusal(Ticket("t#2"))])
    assert leaving.finished(request, [[4, 5, 6]], Orders(), complete=True) == (False, None)
    assert not leaving.follows
