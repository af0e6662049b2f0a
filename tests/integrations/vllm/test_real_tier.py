"""A real vLLM with a host tier; its own cache has 16 blocks, which are too few for what it is asked."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

BLOCK = 128


def prompt(seed: int, tokens: int) -> list[int]:
    drawn = random.Random(seed)
    return [drawn.randrange(3, 512) for _ in range(tokens)]


PROMPTS = {
    # 25 blocks: more than vLLM's cache, less than the tier's 48
    "some": [prompt(seed, 5 * BLOCK + 20 * seed) for seed in range(5)],
    # 60 blocks: more than the tier
    "more": [prompt(10 + seed, 6 * BLOCK) for seed in range(10)],
    # whole and partial hits
    "shared": [prompt(0, 3 * BLOCK) + prompt(100 + seed, 60 * seed) for seed in range(8)],
    # they grow while they decode, and are preempted
    "grow": [prompt(200 + seed, 120) for seed in range(24)],
}


@pytest.fixture(scope="module")
def one(real: ModuleType, model: str) -> Iterator[Any]:
    config, options = real.transfer(host_tier="24MiB"), {"num_gpu_blocks_override": 17}
    with real.started(model, config, disable_log_stats=False, **options) as instance:
        yield instance


@pytest.fixture(autouse=True)
def nothing_held(one: Any, real: ModuleType) -> Iterator[None]:
    with real.left_free(one, connector=True):
        yield


def one_by_one(one: Any, prompts: list[list[int]]) -> list[list[int]]:
    return [one.answers([each], [None])[0] for each in prompts]


def test_what_the_small_cache_lost_comes_back(one: Any, alone: dict[str, list[list[int]]]) -> None:
    assert one_by_one(one, PROMPTS["some"]) == alone["some"]
    before = one.figures()
    assert one_by_one(one, PROMPTS["some"]) == alone["some"]
    after = one.figures()
    assert after["tier_load_seconds_count"] - before["tier_load_seconds_count"] == 5
    assert after["tier_loads_failed_total"] == before["tier_loads_failed_total"]
    # 128 tokens of 4 layers, K and V of 2 heads of 64 elements of 4 bytes
    assert (after["tier_load_bytes_sum"] - before["tier_load_bytes_sum"]) % (128 * 4096) == 0


def test_all_at_once(one: Any, alone: dict[str, list[list[int]]]) -> None:
    for _ in range(2):
        for key, prompts in PROMPTS.items():
            assert one.answers(prompts, [None] * len(prompts)) == alone[key]
    assert one.state()["preempted"]
    assert one.figures()["tier_evicted_blocks_total"]


def test_prefixes(one: Any, alone: dict[str, list[list[int]]]) -> None:
    one_by_one(one, PROMPTS["some"])
    assert one_by_one(one, PROMPTS["shared"]) == alone["shared"]


def test_events(one: Any) -> None:
    """A router that goes by them knows what is in the tier: whole blocks of prompts, and no more of them."""
    one_by_one(one, PROMPTS["more"])
    one.until_free()
    one.tell("told")
    blocks = one.hear(event="told")["blocks"]
    known = [each[at : at + BLOCK] for each in PROMPTS["more"] for at in range(0, 6 * BLOCK, BLOCK)]
    assert 40 <= len(blocks) <= 48
    assert all(block in known for block in blocks)
    assert one.reset(connector=True)
    one.answers([prompt(999, 10)], [None])
    one.tell("told")
    assert one.hear(event="told")["blocks"] == []


def test_a_reset_empties_it(one: Any, alone: dict[str, list[list[int]]]) -> None:
    one_by_one(one, PROMPTS["some"])
    assert one.reset(connector=True)  # also right after: no copy holds a block
    before = one.figures()
    assert one_by_one(one, PROMPTS["some"][:1]) == alone["some"][:1]
    assert one.figures()["tier_load_seconds_count"] == before["tier_load_seconds_count"]


def test_given_up_at_any_time(one: Any, alone: dict[str, list[list[int]]]) -> None:
    for _ in range(2):
        names = [one.add(each) for each in PROMPTS["some"] * 2]
        for name in names[::2]:
            one.tell("abort", name=name)
        found = [one.over(name)["tokens"] for name in names[1::2]]
        assert found == (alone["some"] * 2)[1::2]
        one.until_free()


def test_beside_a_prefill_side(
    one: Any, alone: dict[str, list[list[int]]], real: ModuleType, model: str
) -> None:
    """The tier's share comes from there, the rest is fetched."""
    left = real.Instance(model, real.transfer())
    left.hear(event="up")
    one_by_one(one, [each[: 3 * BLOCK] for each in PROMPTS["some"]])
    one_by_one(one, PROMPTS["more"][:3])
    params = left.prefill(PROMPTS["some"])
    before = one.figures()
    names = [one.add(each, params=said) for each, said in zip(PROMPTS["some"], params, strict=True)]
    assert [one.over(name)["tokens"] for name in names] == alone["some"]
    after = one.figures()
    assert after["tier_load_seconds_count"] > before["tier_load_seconds_count"]
    fetched = after["load_bytes_sum"] - before["load_bytes_sum"]
    assert 0 < fetched < sum(-(-len(each) // BLOCK) for each in PROMPTS["some"]) * BLOCK * 4096
    left.until_free()
    left.close()
