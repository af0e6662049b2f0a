"""Real vLLMs with a model that has several KV cache groups, of which some keep a sliding window alone."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def hybrid(real: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> str:
    return real.make_hybrid(tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(scope="module")
def pair(real: ModuleType, hybrid: str) -> Iterator[tuple[Any, Any]]:
    with real.started(hybrid, real.transfer()) as left, real.started(hybrid, real.transfer()) as right:
        yield left, right


@pytest.fixture(scope="module")
def small(real: ModuleType, hybrid: str, pair: object) -> Iterator[Any]:
    """One with a host tier; its own cache has 40 blocks, which are too few for what it is asked."""
    config = real.transfer(host_tier="24MiB")
    with real.started(hybrid, config, num_gpu_blocks_override=41, disable_log_stats=False) as instance:
        yield instance


def prompts(seed: int) -> list[list[int]]:
    drawn = random.Random(seed)
    return [[drawn.randrange(3, 512) for _ in range(tokens)] for tokens in (100, 128, 300, 450, 700)]


def test_answers_are_those_of_one(pair: tuple[Any, Any]) -> None:
    left, right = pair
    assert left.state()["groups"] > 1
    alone = left.answers(prompts(1), [None] * 5)
    assert left.reset()
    assert right.answers(prompts(1), left.prefill(prompts(1))) == alone
    left.until_free()
    right.until_free()


def test_a_load_that_fails_is_computed(pair: tuple[Any, Any]) -> None:
    left, right = pair
    alone = left.answers(prompts(2), [None] * 5)
    params = [
        left.prefill([one], transfer_id=uuid.uuid4().hex)[0] if number % 2 else None
        for number, one in enumerate(prompts(2))
    ]
    lost = {"do_remote_prefill": True, "remote_addresses": ["tcp://127.0.0.1:1"]}
    given = [each or {**lost, "transfer_id": uuid.uuid4().hex} for each in params]
    assert right.answers(prompts(2), given) == alone
    left.until_free()
    right.until_free()


def test_a_host_tier(pair: tuple[Any, Any], small: Any) -> None:
    """What the small cache lost comes back, as far as the windows reach; the tier's 48 blocks don't do."""
    asked = [each for seed in range(3, 8) for each in prompts(seed)]
    alone = pair[0].answers(asked, [None] * len(asked))
    assert [small.answers([each], [None])[0] for each in asked] == alone
    before = small.figures()
    # The last first: what was asked for long ago has gone from the tier.
    again = [small.answers([each], [None])[0] for each in reversed(asked)]
    assert again[::-1] == alone
    after = small.figures()
    loads = after["tier_load_seconds_count"] - before["tier_load_seconds_count"]
    assert 5 < loads < len(asked)
    assert after["tier_evicted_blocks_total"]
    assert after["tier_loads_failed_total"] == 0
    # Each load brings two layers of all blocks, and two of those in the window.
    assert after["tier_load_bytes_sum"] % (128 * 2048) == 0
    assert small.answers(asked, [None] * len(asked)) == alone
    small.until_free()


def test_a_host_tier_beside_a_prefill_side(pair: tuple[Any, Any], small: Any) -> None:
    left, _ = pair
    asked = prompts(20)
    alone = left.answers(asked, [None] * 5)
    assert left.reset()
    assert small.reset(connector=True)
    for each in asked:
        small.answers([each[:256]], [None])
    small.answers(prompts(21), [None] * 5)
    before = small.figures()
    params = left.prefill(asked)
    assert [small.answers([each], [said])[0] for each, said in zip(asked, params, strict=True)] == alone
    after = small.figures()
    assert after["tier_load_seconds_count"] > before["tier_load_seconds_count"]
    assert after["load_bytes_sum"] > before["load_bytes_sum"]
    left.until_free()
    small.until_free()
