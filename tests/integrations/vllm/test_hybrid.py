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
def pair(real: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    model = real.make_hybrid(tmp_path_factory.mktemp("hybrid"))
    with real.started(model, real.transfer()) as left, real.started(model, real.transfer()) as right:
        yield left, right


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
