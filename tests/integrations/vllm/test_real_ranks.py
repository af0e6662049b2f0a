"""A real vLLM of two ranks, which are processes of their own, with a host tier; and one of one rank."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

BLOCK = 128


def prompt(seed: int, tokens: int) -> list[int]:
    drawn = random.Random(seed)
    return [drawn.randrange(3, 512) for _ in range(tokens)]


#: 25 blocks; the caches have 16 each.
PROMPTS = {"some": [prompt(seed, 5 * BLOCK + 20 * seed) for seed in range(5)]}


@pytest.fixture(scope="module")
def two(real: ModuleType, model: str) -> Iterator[Any]:
    config = real.transfer(host_tier="24MiB", decode_ranks=1, layerwise=True)
    options = {"num_gpu_blocks_override": 17, "tensor_parallel_size": 2, "max_num_batched_tokens": 256}
    with real.started(model, config, disable_log_stats=False, **options) as instance:
        yield instance


@pytest.fixture(scope="module")
def one(real: ModuleType, model: str, two: object) -> Iterator[Any]:
    config, options = real.transfer(decode_ranks=2), {"max_num_batched_tokens": 256}
    with real.started(model, config, disable_log_stats=False, **options) as instance:
        yield instance


@pytest.fixture(autouse=True)
def nothing_held(one: Any, two: Any, real: ModuleType) -> Iterator[None]:
    with real.left_free(one, two, connector=True):
        yield


def loads(instance: Any, kind: str) -> float:
    found: float = instance.figures()[f"{kind}_seconds_count"]
    return found


def test_each_rank_brings_its_share_back(two: Any, alone: dict[str, list[list[int]]]) -> None:
    before = loads(two, "tier_load")
    for times in (0, 2):  # each rank tells of its own
        assert [two.answers([each], [None])[0] for each in PROMPTS["some"]] == alone["some"]
        assert loads(two, "tier_load") - before == times * len(PROMPTS["some"])


def test_from_two_ranks_to_one(two: Any, one: Any, alone: dict[str, list[list[int]]]) -> None:
    before = loads(one, "load")
    for each, answer in zip(PROMPTS["some"], alone["some"], strict=True):
        assert one.answers([each], two.prefill([each])) == [answer]
    assert loads(one, "load") - before == len(PROMPTS["some"])


def test_from_one_rank_to_two(two: Any, one: Any, alone: dict[str, list[list[int]]]) -> None:
    before = loads(two, "load")
    for each, answer in zip(PROMPTS["some"], alone["some"], strict=True):
        assert two.answers([each], one.prefill([each])) == [answer]
    assert loads(two, "load") - before == 2 * len(PROMPTS["some"])


@pytest.mark.parametrize("ranks", [2, 1])
def test_chunks_of_all_ranks_go_as_far(
    two: Any, one: Any, alone: dict[str, list[list[int]]], ranks: int
) -> None:
    """A decode side that asks several ranks would refuse what doesn't fit together."""
    left, right = (two, one) if ranks == 2 else (one, two)
    (said,) = left.prefill([prompt(999, 10)])
    right.answers([prompt(999, 10)], [said])
    before, loaded = left.state()["chunks"], loads(right, "load")
    for each, answer in zip(PROMPTS["some"], alone["some"], strict=True):
        tid = uuid.uuid4().hex
        where = {"do_remote_prefill": True, "remote_addresses": said["remote_addresses"], "transfer_id": tid}
        name = right.add(each, params=where)
        right.until(lambda state: state["held"] > 0)
        left.add(each, 1, {"do_remote_decode": True, "transfer_id": tid})
        assert right.over(name)["tokens"] == answer
        right.until_free()
    assert left.state()["chunks"] - before >= len(PROMPTS["some"])
    assert loads(right, "load") - loaded == len(PROMPTS["some"]) * (1 if ranks == 2 else 2)
