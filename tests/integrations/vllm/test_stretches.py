"""What a block of the host tier is, where KV cache groups have blocks of several sizes, and windows."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from aiokv.integrations.vllm.keeping import Keeping
from aiokv.integrations.vllm.news import Kept, News
from aiokv.integrations.vllm.orders import Blocks, Keep, Orders, Recall
from aiokv.integrations.vllm.stretches import Stretches


@dataclass
class Request:
    tokens: int
    request_id: str = "r"
    num_computed_tokens: int = 0
    lora_request: None = None
    block_hashes: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.block_hashes = [b"%d" % (at + 1) for at in range(self.tokens // 4)]

    @property
    def all_token_ids(self) -> list[int]:
        return list(range(self.tokens))


def test_one_group_is_as_it_was() -> None:
    found = Stretches([16])
    hashes = [b"a", b"b"]
    assert found.hashes(hashes) is hashes
    assert found.filled([[1, 2]], 40) == 2
    assert found.filled([[1, 2, 3]], 40) == 2
    assert found.blocks([[1, 2, 3]], 1, 3) == ((2, 3),)
    assert found.reached([[1, 2, 3]], 0, 1000)


def test_the_last_hash_of_a_stretch_names_it() -> None:
    found = Stretches([8, 4], hash_size=4)
    assert found.tokens == 8
    assert found.hashes([b"1", b"2", b"3", b"4", b"5"]) == [b"2", b"4"]
    assert found.filled([[1], [2, 3, 4]], 12) == 1
    assert found.blocks([[1, 2], [5, 6, 7, 8]], 1, 2) == ((2,), (7, 8))
    assert found.written([[1, 2], [5, 6, 7, 8]], 9) == [2, 7, 8]


def test_blocks_that_a_window_does_not_reach() -> None:
    found = Stretches([4, 4], [0, 9])
    lists = [[1, 2, 3, 4], [0, 6, 7, 8]]
    assert not found.reached(lists, 0, 0)
    assert found.reached(lists, 1, 15)
    assert not found.reached(lists, 1, 16)  # of token 16 the window begins with 8
    assert found.listed(lists, 0, 4) == (Blocks(0, (1, 2, 3, 4)), Blocks(4, (6, 7, 8)))
    assert found.listed([[1, 2], [0, 0]], 0, 2) == (Blocks(0, (1, 2)), Blocks(8, ()))


def test_a_window_that_never_reaches_all_of_a_stretch() -> None:
    Stretches([32, 4], [0, 30])
    with pytest.raises(ValueError, match=r"host_tier: .*32 tokens.*group 1 keeps the last 29.*--block-size"):
        Stretches([32, 4], [0, 29])


def test_blocks_of_several_sizes_are_kept_and_recalled(seed: int) -> None:
    """In chunks of any length: what is kept is what vLLM has not given up, and nothing is left out."""
    drawn = random.Random(seed)
    sizes, windows = (16, 8), (0, 40)
    tier = Keeping(Stretches(sizes, windows, 4))
    request, new = Request(200), [iter(range(1, 100)), iter(range(101, 200))]
    lists: list[list[int]] = [[], []]
    tier.begun(request, lists)
    keeps: list[Keep] = []
    while request.num_computed_tokens < request.tokens:
        tokens = min(drawn.randint(1, 50), request.tokens - request.num_computed_tokens)
        # As vLLM does it: what the window of the next token doesn't reach goes, then there is more.
        for at in range(max(0, request.num_computed_tokens - windows[1] + 1) // sizes[1]):
            lists[1][at] = 0
        fresh = [
            [next(ids) for _ in range(-(-(request.num_computed_tokens + tokens) // size) - len(there))]
            for ids, size, there in zip(new, sizes, lists, strict=True)
        ]
        for there, more in zip(lists, fresh, strict=True):
            there.extend(more)
        orders = Orders()
        tier.scheduled("r", tokens, fresh, orders)
        for keep in orders.keeps:
            assert all(block in there for there, ids in zip(lists, keep.blocks, strict=True) for block in ids)
        keeps += orders.keeps
        request.num_computed_tokens += tokens
    hashes = [b"%d" % (4 * at) for at in range(1, 13)]
    assert [block for keep in keeps for block in keep.hashes] == hashes
    assert [block for keep in keeps for block in keep.blocks[0]] == lists[0][:12]
    assert [block for keep in keeps for block in keep.blocks[1]] == list(range(101, 125))
    for keep in keeps:
        tier.told(News(0, (Kept(keep.number, len(keep.hashes)),)))
    other = Request(192, "other")
    assert tier.found(other, 0) == 11 * 16  # its last token is computed, so that the last block is, too
    assert tier.found(other, 8) == 0  # vLLM's hits end with a stretch
    blocks = [list(range(1, 12)), [0] * 17 + list(range(18, 23))]
    assert tier.recall(other, blocks, 16, 176) == Recall(
        "other", tuple(hashes[1:11]), 16, (Blocks(16, tuple(range(2, 12))), Blocks(136, tuple(range(18, 23))))
    )


def test_what_a_hit_has_no_blocks_for_is_not_kept() -> None:
    tier = Keeping(Stretches([4, 4], [0, 9]))
    request, orders = Request(24, num_computed_tokens=16), Orders()
    tier.begun(request, [[1, 2, 3, 4, 5, 6], [0, 0, 13, 14, 15, 16]])
    tier.scheduled("r", 8, (), orders)
    assert [(keep.hashes, keep.blocks) for keep in orders.keeps] == [
        ((b"3", b"4", b"5", b"6"), ((3, 4, 5, 6), (13, 14, 15, 16)))
    ]
