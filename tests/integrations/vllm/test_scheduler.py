"""The scheduler's half alone: what it orders, and what it holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from aiokv.integrations.vllm.leaving import Leaving
from aiokv.integrations.vllm.orders import Blocks, Load, Queued, Refusal, Release, Send, Ticket
from aiokv.integrations.vllm.scheduler import SchedulerHalf

HERE, THERE = "tcp://10.0.0.1:7000", "tcp://10.0.0.2:7000"


@dataclass
class Request:
    request_id: str = "r"
    num_prompt_tokens: int = 100
    num_computed_tokens: int = 100
    kv_transfer_params: dict[str, Any] | None = None


@pytest.fixture
def half() -> SchedulerHalf:
    made = SchedulerHalf([32], Leaving([32], "engine", lambda: "minted"))
    made.leaving.addresses = (HERE,)
    return made


def pulling(**more: object) -> Request:
    said = {"do_remote_prefill": True, "transfer_id": "t", "remote_addresses": [THERE], **more}
    return Request(kv_transfer_params=said)


def test_a_load(half: SchedulerHalf) -> None:
    request = pulling()
    for _ in range(2):  # it may ask again
        assert half.matched(request, 32) == 68
    assert not half.orders()
    half.allocated(request, [[4, 5, 6, 7]], 68)
    half.allocated(request, [[4, 5, 6, 7]], 0)  # vLLM says so again once it is loaded
    load = Load("r", Ticket("t"), (THERE,), (Blocks(32, (5, 6, 7)),), 32, 100, chunked=True)
    assert half.orders().loads == [load]
    assert not half.orders()
    half.reported(["r"])
    assert half.finished(request, [[4, 5, 6, 7]], complete=True) == (False, None)
    assert not half.orders()


@pytest.mark.parametrize("more", [{"remote_tokens": 100}, {"push": True}, {"transfer_id": "x" * 250}])
def test_what_comes_in_one(half: SchedulerHalf, more: dict[str, object]) -> None:
    """It is known how much there is, the prefill side comes by itself, or its id is too long."""
    request = pulling(**more)
    half.allocated(request, [[4, 5, 6, 7]], half.matched(request, 0))
    (load,) = half.orders().loads
    assert not load.chunked


def test_what_will_be_loaded_is_held_meanwhile(half: SchedulerHalf) -> None:
    half.added(pulling(remote_hold=20.0))
    half.added(Request("another"))
    assert half.pending
    assert half.orders().queued == [Queued(Ticket("t"), (THERE,), 20.0)]


def test_no_more_than_is_there(half: SchedulerHalf) -> None:
    assert half.matched(pulling(remote_tokens=64), 0) == 64
    assert SchedulerHalf([32], Leaving([32], "engine")).matched(pulling(remote_tokens=1000), 0) == 100


def test_all_of_it_is_here(half: SchedulerHalf) -> None:
    request = pulling()
    assert half.matched(request, 100) == 0
    half.allocated(request, [[4, 5, 6, 7]], 0)
    half.allocated(request, [[4, 5, 6, 7]], 0)
    assert half.orders().releases == [Release(Ticket("t"), (THERE,))]
    assert not half.pending


def test_preempted_or_failed_it_is_computed(half: SchedulerHalf) -> None:
    request = pulling()
    half.matched(request, 0)
    half.allocated(request, [[4, 5, 6, 7]], 100)
    half.orders()
    half.reported(["r"])
    assert half.matched(request, 0) == 0
    half.allocated(request, [[8, 9, 10, 11]], 0)
    assert not half.orders()


def test_given_up_in_the_queue(half: SchedulerHalf) -> None:
    request = pulling()
    assert half.finished(request, [[]], complete=False) == (False, None)
    assert half.orders().releases == [Release(Ticket("t"), (THERE,))]


def test_given_up_while_it_loads(half: SchedulerHalf) -> None:
    request = pulling()
    half.matched(request, 0)
    half.allocated(request, [[4, 5, 6, 7]], 100)
    half.orders()
    half.finished(request, [[4, 5, 6, 7]], complete=False)
    orders = half.orders()
    assert (orders.aborts, orders.releases) == (["r"], [])


def test_what_is_left_is_held(half: SchedulerHalf) -> None:
    request = Request(num_computed_tokens=101, kv_transfer_params={"do_remote_decode": True})
    held, said = half.finished(request, [[4, 5, 6, 7]], complete=True)
    assert held
    assert half.pending
    assert half.orders().sends == [Send("r", Ticket("minted"), (Blocks(0, (4, 5, 6, 7)),), 100)]
    # The decode side reads it.
    assert said is not None
    other = SchedulerHalf([32], Leaving([32], "other"))
    assert other.matched(Request(kv_transfer_params=said), 0) == 100


@pytest.mark.parametrize(("complete", "computed"), [(False, 100), (True, 64)])
def test_nothing_is_left_of_what_was_given_up(half: SchedulerHalf, complete: bool, computed: int) -> None:
    request = Request(num_computed_tokens=computed, kv_transfer_params={"do_remote_decode": True})
    assert half.finished(request, [[4, 5, 6, 7]], complete=complete) == (False, None)
    assert not half.orders()  # nobody was told of it
    request.kv_transfer_params = {"do_remote_decode": True, "transfer_id": "t"}
    assert half.finished(request, [[4, 5, 6, 7]], complete=complete) == (False, None)
    assert half.orders().refusals == [Refusal(Ticket("t"))]  # somebody may wait for it


def test_parameters_that_mean_nothing(half: SchedulerHalf) -> None:
    request = pulling(transfer_id=None)
    assert half.matched(request, 0) == 0
    half.allocated(request, [[4]], 0)
    request.kv_transfer_params = {"do_remote_decode": True, "transfer_id": 7}
    assert half.finished(request, [[4]], complete=True) == (False, None)
    assert not half.orders()


def test_nothing_is_kept_of_requests_that_are_over(half: SchedulerHalf) -> None:
    for number in range(10):
        request = pulling()
        request.request_id = str(number)
        half.matched(request, 0)
        if number % 2:
            half.allocated(request, [[4, 5, 6, 7]], 100)
        half.finished(request, [[4, 5, 6, 7]], complete=False)
    half.orders()
    kept = [getattr(half, name) for name in ("_pulls", "_computed", "_loading", "_served")]
    assert not any(kept)
