from __future__ import annotations

import copy

import pytest

from aiokv.integrations.vllm.news import Emptied, Gone, Kept, Missed, News, Wanted
from aiokv.integrations.vllm.orders import (
    Blocks,
    Keep,
    Load,
    Orders,
    Queued,
    Recall,
    Refusal,
    Release,
    Send,
    Ticket,
    Watch,
    behind,
    listed,
)

BLOCKS = Blocks(32, (5, 6))


def test_blocks_that_matter() -> None:
    assert listed([5, 6, 7, 8], 32, 0, 100) == Blocks(0, (5, 6, 7, 8))
    assert listed([5, 6, 7, 8], 32, 64, 96) == Blocks(64, (7,))
    assert listed([0, 0, 7, 8], 32, 0, 100) == Blocks(64, (7, 8))  # behind a sliding window
    assert listed([5], 32, 0, 100) == Blocks(0, (5,))


def test_blocks_behind_a_token() -> None:
    assert behind(Blocks(32, (5, 6, 7)), 32, 0) == Blocks(32, (5, 6, 7))
    assert behind(Blocks(32, (5, 6, 7)), 32, 95) == Blocks(64, (6, 7))
    assert behind(Blocks(32, (5, 6, 7)), 32, 500) == Blocks(128, ())


def test_what_chunks_are_called() -> None:
    ticket = Ticket("t", 1, 2.5)
    assert [ticket.chunk(number).transfer for number in range(3)] == ["t", "t#1", "t#2"]
    assert ticket.chunk(0) is ticket
    assert (ticket.chunk(2).attempt, ticket.chunk(2).deadline) == (1, 2.5)
    assert ticket.divisible
    assert not Ticket("x" * 250).divisible


@pytest.mark.parametrize(
    "orders",
    [
        Orders(reset=0),
        Orders(recalls=[Recall("r", (b"a", b"b"), 0, (BLOCKS,))]),
        Orders(keeps=[Keep(1, (b"a", b"b"), ((5, 6),), None)]),
        Orders(watches=[Watch("r", Ticket("t"), 0)]),
        Orders(sends=[Send("r", Ticket("t"), (BLOCKS,), 96)]),
        Orders(loads=[Load("r", Ticket("t"), ("there",), (BLOCKS,), 32, 96)]),
        Orders(releases=[Release(Ticket("t"), ("there",))]),
        Orders(queued=[Queued(Ticket("t"), ("there",), 30.0)]),
        Orders(refusals=[Refusal(Ticket("t"))]),
        Orders(aborts=["r"]),
        Orders(lost=["r"]),
        Orders(held=["r"]),
    ],
)
def test_a_step_is_needed_for_any_of_them(orders: Orders) -> None:
    assert orders
    assert not Orders(fences={1})  # what writes is a step anyway
    assert copy.deepcopy(orders) == orders  # vLLM carries them to other processes


def test_news_are_carried_to_other_processes() -> None:
    news = News(1, (Kept(1, 2), Gone((b"a",)), Gone(None), Emptied(3), Missed("r"), Wanted("r", 1, 64)))
    assert copy.deepcopy(news) == news
