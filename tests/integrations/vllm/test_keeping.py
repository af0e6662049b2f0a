"""The host tier's side of the scheduler alone, with two ranks; with one it is played in ``test_tier.py``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from aiokv.integrations.vllm.asking import Asking
from aiokv.integrations.vllm.keeping import Keeping
from aiokv.integrations.vllm.news import Emptied, Gone, Kept, Missed, News
from aiokv.integrations.vllm.orders import Blocks, Keep, Orders, Recall
from aiokv.integrations.vllm.stretches import Stretches

SIZE = 4


@dataclass
class Request:
    request_id: str = "r"
    num_computed_tokens: int = 0
    all_token_ids: list[int] = field(default_factory=lambda: list(range(14)))
    block_hashes: list[bytes] = field(default_factory=lambda: [b"a", b"b", b"c"])
    lora_request: None = None


@pytest.fixture
def tier() -> Keeping:
    return Keeping(Stretches([SIZE]), 2)


def step(tier: Keeping, request: Request, blocks: list[int], tokens: int) -> Orders:
    """A step in which a request that was given blocks computes tokens."""
    orders = Orders()
    tier.begun(request, [blocks])
    tier.scheduled(request.request_id, tokens, [], orders)
    request.num_computed_tokens += tokens
    return orders


def kept(tier: Keeping, number: int, count: int, ranks: tuple[int, ...] = (0, 1)) -> None:
    for rank in ranks:
        tier.told(News(rank, (Kept(number, count),)))


def test_what_a_step_fills_is_kept(tier: Keeping) -> None:
    request, orders = Request(), Orders()
    tier.begun(request, [[5]])
    tier.scheduled("r", 3, [], orders)
    assert not orders.keeps
    request.num_computed_tokens = 3
    tier.scheduled("r", 6, [[6, 7]], orders)
    assert orders.keeps == [Keep(1, (b"a", b"b"), ((5, 6),), None)]
    request.num_computed_tokens = 9
    orders = Orders()
    tier.scheduled("r", 5, [[8]], orders)
    assert orders.keeps == [Keep(2, (b"c",), ((7,),), b"b")]


def test_it_is_found_once_all_ranks_have_it(tier: Keeping) -> None:
    step(tier, Request(), [5, 6, 7, 8], 14)
    other = Request("other")
    kept(tier, 1, 3, (0,))
    assert tier.pending
    assert tier.found(other, 0) == 0
    kept(tier, 1, 2, (1,))
    assert not tier.pending
    assert tier.found(other, 0) == 2 * SIZE
    assert tier.found(other, SIZE) == SIZE
    assert tier.found(other, 2 * SIZE) == 0
    assert tier.found(other, 3) == 0  # vLLM's hits end with a block


def test_what_is_there_or_on_its_way_is_not_kept_again(tier: Keeping) -> None:
    step(tier, Request(), [5, 6, 7, 8], 2 * SIZE)
    assert step(tier, Request("other"), [15, 16, 17, 18], 14).keeps == [Keep(2, (b"c",), ((17,),), b"b")]
    kept(tier, 1, 1)  # b had no room
    kept(tier, 2, 1)
    assert step(tier, Request("third"), [25, 26, 27, 28], 14).keeps == [Keep(3, (b"b",), ((26,),), b"a")]


def test_a_recall(tier: Keeping) -> None:
    step(tier, Request(), [5, 6, 7, 8], 14)
    kept(tier, 1, 3)
    one, two = Request("one"), Request("two")
    assert tier.recall(one, [[9, 10, 11, 12]], SIZE, 3 * SIZE) == Recall(
        "one", (b"b", b"c"), 4, (Blocks(4, (10, 11)),)
    )
    assert tier.recalled("one") == 2 * SIZE
    assert tier.found(two, 0) is None  # it will be in vLLM's cache
    tier.loaded("one")
    assert tier.found(two, 0) == 3 * SIZE
    assert tier.recall(two, [[1, 2]], 0, 2 * SIZE) == Recall("two", (b"a", b"b"), 0, (Blocks(0, (1, 2)),))
    assert tier.recall(Request("three"), [[1]], 3 * SIZE, 3 * SIZE) is None


def test_who_missed_something_computes(tier: Keeping) -> None:
    step(tier, Request(), [5, 6, 7, 8], 14)
    kept(tier, 1, 3)
    one = Request("one")
    tier.recall(one, [[9, 10, 11]], 0, 3 * SIZE)
    tier.begun(one, [[9, 10, 11]])
    tier.told(News(1, (Missed("one"), Gone((b"b", b"c")))))
    tier.loaded("one")
    assert tier.found(one, 0) == 0
    assert tier.found(Request("two"), 0) == SIZE
    tier.finished("one")
    assert tier.found(one, 0) == SIZE  # another request of this name
    tier.told(News(1, (Missed("nobody"),)))
    assert not tier._missed


def test_blocks_that_are_read_are_fenced(tier: Keeping) -> None:
    step(tier, Request(), [5, 6, 7, 8], 14)
    orders = step(tier, Request("other", block_hashes=[]), [1, 7, 2], 5)
    assert orders.fences == {1}
    kept(tier, 1, 3, (0,))
    reader = Request("reader", num_computed_tokens=8, block_hashes=[b"a", b"b"])
    assert step(tier, reader, [5, 6, 2], 1).fences == set()  # it only reads them
    kept(tier, 1, 3, (1,))
    assert step(tier, Request("third", block_hashes=[]), [5, 6, 7], 12).fences == set()


def test_a_reset(tier: Keeping) -> None:
    step(tier, Request(), [5, 6, 7, 8], 2 * SIZE)
    kept(tier, 1, 2)
    step(tier, Request("late"), [5, 6, 7, 8], 14)
    assert tier.reset() == (1, True)
    assert tier.found(Request("one"), 0) == 0
    kept(tier, 2, 1)  # of before
    assert tier.found(Request("one", block_hashes=[b"c"]), 0) == 0
    assert [keep.number for keep in step(tier, Request("new"), [5, 6, 7, 8], 14).keeps] == [3]
    for rank in range(2):
        tier.told(News(rank, (Emptied(1), Kept(3, 3))))
    assert tier.found(Request("one"), 0) == 3 * SIZE
    tier.recall(Request("one"), [[1, 2, 3]], 0, 3 * SIZE)
    assert tier.reset() == (2, False)


def test_a_worker_that_lost_count(tier: Keeping) -> None:
    step(tier, Request(), [5, 6, 7, 8], 14)
    kept(tier, 1, 3)
    tier.told(News(0, (Gone(None),)))
    assert tier.found(Request("one"), 0) == 0
    assert step(tier, Request("two"), [5, 6, 7, 8], 14).keeps  # offered again
    kept(tier, 1, 3)  # said twice
    assert tier.take_changes() == []


class Pool:
    """What others have stored, as they say it."""

    def __init__(self) -> None:
        self.asked: list[list[bytes]] = []
        self.said: dict[int, int] = {}
        self.open = True

    def ask(self, keys: Sequence[bytes]) -> int:
        self.asked.append(list(keys))
        return len(self.asked)

    def answer(self, number: int) -> int | None:
        return self.said.pop(number, None)

    def forget(self, number: int) -> None:
        self.said[number] = -1

    def close(self) -> None:
        self.open = False


def test_what_others_stored_is_asked_for_once(tier: Keeping) -> None:
    pool = Pool()
    tier.asking = Asking(pool, clock=lambda: 0.0)
    one = Request("one")
    tier.arrived(one)
    tier.arrived(Request("short", block_hashes=[]))
    assert pool.asked == [[b"a", b"b", b"c"]]
    assert tier.found(Request("short", block_hashes=[]), 0) == 0
    assert tier.found(one, 0) is None
    pool.said[1] = 2
    assert tier.found(one, 0) == tier.found(one, 0) == 2 * SIZE
    assert tier.found(one, SIZE) == SIZE
    assert tier.recall(one, [[9, 10, 11]], SIZE, 2 * SIZE) == Recall("one", (b"b",), 4, (Blocks(4, (10,)),))
    tier.loaded("one")
    assert pool.asked[1:] == []
    # The next one knows that much, and asks for the rest; what went is not there any more.
    tier.told(News(1, (Gone((b"b",)),)))
    two = Request("two")
    assert tier.found(two, 0) is None
    assert pool.asked[1:] == [[b"b", b"c"]]
    pool.said[2] = 0
    assert tier.found(two, 0) == SIZE
    # What all ranks have stored here needs no question.
    step(tier, Request(), [5, 6, 7, 8], 14)
    kept(tier, 1, 2)
    tier.arrived(Request("three"))
    assert tier.found(Request("three"), 0) == 3 * SIZE
    assert len(pool.asked) == 2


def test_who_is_over_has_no_question(tier: Keeping) -> None:
    pool = Pool()
    tier.asking = Asking(pool, clock=lambda: 0.0)
    tier.arrived(Request("one"))
    tier.finished("one")
    tier.finished("one")
    assert pool.said == {1: -1}
    tier.asking.close()
    assert not pool.open


def test_what_was_there_before_a_reset_is_not_whatever_is_answered(tier: Keeping) -> None:
    pool = Pool()
    tier.asking = Asking(pool, clock=lambda: 0.0)
    one, two = Request("one"), Request("two")
    tier.arrived(one)
    tier.arrived(two)
    pool.said.update({1: 3, 2: 3})
    assert tier.found(one, 0) == 3 * SIZE
    tier.reset()
    assert tier.found(one, 0) == tier.found(two, 0) == 0
    assert pool.said == {2: -1}  # forgotten


def test_what_others_stored_is_told_of_once_all_ranks_have_it() -> None:
    tier, pool = Keeping(Stretches([SIZE]), 2, events=True), Pool()
    tier.asking = Asking(pool, clock=lambda: 0.0)
    tier.begun(Request("before"), [[5, 6, 7]])
    orders = Orders()
    tier.scheduled("before", 4, [], orders)
    tier.told(News(1, (Kept(1, 1),)))  # one rank has the first already
    one = Request("one")
    assert tier.found(one, 0) is None
    pool.said[1] = 2
    assert tier.found(one, 0) == 2 * SIZE
    changes = [change.event for change in tier.take_changes()]
    assert [block for event in changes for block in event.hashes] == [b"a", b"b"]


def test_long_prompts_in_a_pool_are_told_of_at_once() -> None:
    """By sets of all blocks for each block it took seconds."""
    looked = 0

    class Hash(bytes):
        def __hash__(self) -> int:
            nonlocal looked
            looked += 1
            return super().__hash__()

    tier, pool, count = Keeping(Stretches([SIZE]), events=True), Pool(), 500
    tier.asking = Asking(pool, clock=lambda: 0.0)
    hashes: list[bytes] = [Hash(number.to_bytes(4, "big")) for number in range(count)]
    one = Request("one", all_token_ids=list(range(SIZE * count)), block_hashes=hashes)
    assert tier.found(one, 0) is None
    pool.said[1] = count
    assert tier.found(one, 0) == SIZE * count
    assert looked < 20 * count


def test_who_has_waited_is_asked_for_once_more(tier: Keeping) -> None:
    """Under load requests wait for long, and others store, and evict, meanwhile."""
    pool, now = Pool(), [0.0]
    tier.asking = Asking(pool, clock=lambda: now[0])
    one, two = Request("one"), Request("two")
    tier.arrived(one)
    tier.arrived(two)
    pool.said.update({1: 0, 2: 3, 3: 2, 4: 0})
    now[0] = 5.0
    assert tier.found(one, 0) == 2 * SIZE
    assert tier.found(two, 0) == 2 * SIZE
    assert pool.asked[2:] == [[b"a", b"b", b"c"], [b"c"]]
    # That is the last time, however long the answer takes.
    three = Request("three")
    tier.arrived(three)
    now[0] = 10.0
    pool.said[5] = 1
    assert tier.found(three, 0) is None
    now[0] = 20.0
    pool.said[6] = 0
    assert tier.found(three, 0) == 2 * SIZE
    assert len(pool.asked) == 6
