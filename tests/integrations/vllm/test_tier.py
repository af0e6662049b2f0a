"""The host tier behind a vLLM that is played, see ``played.py``: it checks all that its model reads."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from aiokv.errors import DeviceError
from aiokv.offload.events import BlocksRemoved, BlocksStored

SIZE = 32

Make = Callable[..., Any]


@pytest.fixture
def make(played: ModuleType) -> Iterator[Make]:
    """Makes instances with a tier, by default of 64 blocks, and closes them."""
    made = []

    def one(name: str = "one", *, tier: int | None = 64, **more: object) -> Any:
        if tier is not None:
            more["host_tier"] = tier * played.BLOCK_BYTES
        made.append(played.Played(name, **more))
        return made[-1]

    yield one
    for each in made:
        each.close()


def prompt(seed: int, tokens: int) -> list[int]:
    drawn = random.Random(seed)
    return [drawn.randrange(50) for _ in range(tokens)]


ASKED = prompt(1, 5 * SIZE + 7)


def test_what_the_small_cache_lost_comes_back(make: Make, played: ModuleType) -> None:
    one = make()
    assert one.answer(ASKED) == played.answer(ASKED, 4)
    one.flood()
    computed = one.computed
    assert one.answer(ASKED) == played.answer(ASKED, 4)
    assert one.computed - computed == 7 + 3  # what fills no block, and the answer
    assert one.recalled == 5
    assert not any(one.users)


def test_all_of_a_prompt_comes_back(make: Make, played: ModuleType) -> None:
    """Its last token is computed all the same, since vLLM needs what comes of it."""
    one = make()
    one.answer(ASKED[: 4 * SIZE])
    one.flood()
    assert one.answer(ASKED[: 4 * SIZE]) == played.answer(ASKED[: 4 * SIZE], 4)
    assert one.recalled == 4


def test_what_is_computed_is_found_before_its_request_is_over(make: Make) -> None:
    one = make(budget=SIZE)
    one.add("long", ASKED, 15 * SIZE)
    while one.worker.tier_statistics().stored_blocks < 5:
        one.step()
    assert "long" in one.requests
    one.abort("long")


def test_answers_are_kept_too(make: Make, played: ModuleType) -> None:
    """The next turn of a conversation finds what the one before has said."""
    one = make()
    said = one.answer(ASKED, 2 * SIZE)
    one.flood()
    assert one.answer(ASKED + said) == played.answer(ASKED + said, 4)
    assert one.recalled == (len(ASKED) + len(said) - 1) // SIZE


def test_blocks_are_free_at_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that doesn't end holds no block of vLLM's, nor up a reset (vllm#57727)."""
    one = make()
    never = asyncio.Event()

    async def store(*args: object, **named: object) -> int:
        await never.wait()
        return 0

    monkeypatch.setattr(one.worker._tiering.tier, "store", store)
    request = one.add("a", ASKED)
    while not request.over:
        one.step()
    assert not any(one.users)
    assert one.half.pending
    assert one.reset()


def test_what_is_read_is_not_written(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that others get wait for the copy that reads them; a slow one is given up."""
    one = make(tier=60)
    tier = one.worker._tiering.tier
    gate = asyncio.Event()
    store = tier.store

    async def slow(*args: Any, **named: Any) -> int:
        await gate.wait()
        return await store(*args, **named)

    monkeypatch.setattr(tier, "store", slow)
    request = one.add("a", ASKED)
    while not request.over:
        one.step()
    one.add("b", prompt(2, 20 * SIZE), 1)  # it gets the same blocks
    for _ in range(20):
        one.step()
    one.worker._thread.post(gate.set)
    one.settle()
    one.reset(connector=False)
    one.answer(ASKED)  # what was copied too late would be found now
    one.answer(prompt(2, 20 * SIZE), 1)


def test_fifty_requests_share_one_load(make: Make, played: ModuleType) -> None:
    """Those that ask for what is on its way find it in vLLM's cache (vllm#44294)."""
    one = make(blocks=64, tier=80)
    one.answer(ASKED)
    one.flood()
    requests = [one.add(str(number), [*ASKED, number]) for number in range(50)]
    one.settle()
    assert [each.answered for each in requests] == [
        played.answer([*ASKED, number], 4) for number in range(50)
    ]
    assert one.recalled == 5


def test_a_list_that_is_late_costs_a_computation(make: Make, played: ModuleType) -> None:
    """Evicted after it was found (vllm#39702): the request computes, and the list is right again."""
    one = make()
    one.answer(ASKED)
    one.flood()
    tiering = one.worker._tiering
    hashes = one.add("x", ASKED).block_hashes
    one.abort("x")
    one.settle()
    assert one.worker._thread.run(tiering.tier.delete(hashes[2:])) == 3
    one.worker._thread.run(asyncio.sleep(0))
    tiering.changes.clear()  # the news is lost
    assert one.answer(ASKED) == played.answer(ASKED, 4)
    assert one.recalled == 5
    one.flood()
    assert one.answer(ASKED) == played.answer(ASKED, 4)  # they were stored again
    assert one.recalled == 10


def test_a_copy_that_fails_costs_a_computation(
    make: Make, played: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing stops for it (vllm#39732)."""
    one = make()
    one.answer(ASKED)
    one.flood()

    async def load(*args: object, **named: object) -> int:
        raise DeviceError("a copy failed")

    with monkeypatch.context() as patched:
        patched.setattr(one.worker._tiering.tier, "load", load)
        assert one.answer(ASKED) == played.answer(ASKED, 4)
    one.flood()
    assert one.answer(ASKED) == played.answer(ASKED, 4)
    assert one.recalled == 10


@pytest.mark.parametrize("ahead", [False, True])
def test_given_up_at_any_time(make: Make, seed: int, ahead: bool) -> None:
    """Whatever the moment: one report, and no block held (vllm#46283, vllm#49118)."""
    one = make(ahead=ahead)
    one.answer(ASKED)
    drawn = random.Random(seed)
    for number in range(20):
        one.flood()
        one.add(f"x{number}", ASKED)
        for _ in range(drawn.randrange(4)):
            one.step()
        if f"x{number}" in one.requests:
            one.abort(f"x{number}")
        one.settle()
        assert not any(one.users)


@pytest.mark.parametrize("ahead", [False, True])
def test_preempted_requests_come_back(make: Make, played: ModuleType, ahead: bool) -> None:
    """Also while their copies go on (vllm#46014)."""
    one = make(blocks=12, ahead=ahead)
    asked = [prompt(10 + number, SIZE + 20) for number in range(6)]
    requests = [one.add(str(number), each, 2 * SIZE) for number, each in enumerate(asked)]
    one.settle()
    assert one.preempted
    assert one.recalled
    assert [each.answered for each in requests] == [played.answer(each, 2 * SIZE) for each in asked]


def test_a_reset_empties_it(make: Make, played: ModuleType) -> None:
    one = make(events=True)
    one.answer(ASKED)
    assert one.reset()
    one.weights = 2
    assert one.answer(ASKED) == played.answer(ASKED, 4, 2)
    assert not one.recalled
    one.flood()
    assert one.answer(ASKED) == played.answer(ASKED, 4, 2)  # and it is used again
    assert one.recalled == 5
    removed = [each.event for each in one.half.take_changes() if isinstance(each.event, BlocksRemoved)]
    assert [(event.why, len(event.hashes)) for event in removed] == [("reset", 5)]


def test_a_reset_says_when_requests_wait_for_what_was_there(make: Make) -> None:
    one = make()
    one.answer(ASKED)
    one.flood()
    one.add("x", ASKED)
    one.step()
    assert not one.reset()
    assert one.half.reset() is False
    one.settle()
    assert one.reset()


def test_without_a_tier_a_reset_says_nothing(make: Make) -> None:
    assert make(tier=None).half.reset() is None


def test_events(make: Make) -> None:
    one = make(tier=6, events=True)
    request = one.add("a", ASKED, 1)
    one.settle()
    changes = [each.event for each in one.half.take_changes()]
    assert all(isinstance(event, BlocksStored) for event in changes)
    assert [block for event in changes for block in event.hashes] == request.block_hashes
    assert [token for event in changes for token in event.tokens] == ASKED[: 5 * SIZE]
    assert changes[0].parent is None
    assert changes[-1].parent == request.block_hashes[-len(changes[-1].hashes) - 1]
    one.answer(prompt(2, 5 * SIZE), 1)
    removed = [each.event for each in one.half.take_changes() if isinstance(each.event, BlocksRemoved)]
    assert sum(len(event.hashes) for event in removed) == 4
    assert not one.half.take_changes()


def test_beside_a_prefill_side(make: Make, played: ModuleType) -> None:
    """What the tier has is not fetched; what it hasn't is, at the same time."""
    left, right = make("left", tier=None), make("right")
    right.answer(ASKED[: 3 * SIZE], 1)
    right.flood()
    for tokens, recalled in ((len(ASKED), 3), (3 * SIZE, 3)):
        done = left.add("a", ASKED[:tokens], 1, {"do_remote_decode": True})
        while done.said is None:
            left.step()
        request = right.add("b", ASKED[:tokens], 4, done.said)
        before = right.recalled
        right.settle(left)
        assert request.answered == played.answer(ASKED[:tokens], 4)
        assert right.recalled - before == recalled
        right.flood()
        right.worker._thread.run(right.worker._tiering.tier.delete(request.block_hashes[3:]))
    assert not any(left.users)


def test_a_peer_that_is_gone_costs_what_the_tier_hasnt(make: Make, played: ModuleType) -> None:
    right = make("right")
    right.answer(ASKED[: 3 * SIZE], 1)
    right.flood()
    lost = {"do_remote_prefill": True, "transfer_id": "t", "remote_addresses": ["tcp://127.0.0.1:1"]}
    computed = right.computed
    request = right.add("b", ASKED, 4, lost)
    right.settle()
    assert request.answered == played.answer(ASKED, 4)
    assert right.computed - computed == len(ASKED) - 3 * SIZE + 3


def test_after_it_was_closed_everything_is_reported(make: Make, played: ModuleType) -> None:
    one = make()
    one.answer(ASKED)
    one.flood()
    one.worker.close()
    assert one.answer(ASKED) == played.answer(ASKED, 4)
    assert not any(one.users)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_never_a_wrong_byte(
    make: Make, played: ModuleType, seed: int, policy: str, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Conversations that share beginnings, in too small a cache and tier; aborts, resets and slow copies."""
    drawn = random.Random(seed)
    one = make(tier=20, blocks=16, host_tier_policy=policy, ahead=ahead)
    store = one.worker._tiering.tier.store

    async def slow(*args: Any, **named: Any) -> int:
        await asyncio.sleep(drawn.choice([0, 0.002, 0.01]))
        return await store(*args, **named)

    monkeypatch.setattr(one.worker._tiering.tier, "store", slow)
    for turn in range(25):
        requests = []
        for number in range(4):
            asked = prompt(drawn.randrange(3), 3 * SIZE) + prompt(
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
            assert request.answered == played.answer(request.prompt, len(request.answered), one.weights)
        assert not any(one.users)
        if turn % 5 == 4:
            assert one.reset()
            one.weights += 1
    assert one.recalled
