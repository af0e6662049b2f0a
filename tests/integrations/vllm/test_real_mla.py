"""Real vLLMs with a model of latent attention (MLA): prefill and decode, and a host tier.

What vLLM's reference backend for CPUs answers depends on what is computed beside it, and on how a prompt is
cut. So it is the cache that is compared, not the answers.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

#: Of a block, which is all that the backend does.
SIZE = 16
drawn = random.Random(1)
PROMPTS = [[drawn.randrange(3, 512) for _ in range(tokens)] for tokens in (5, 16, 17, 100, 300)]


@pytest.fixture(scope="module")
def latent(real: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> str:
    made: str = real.make_latent(tmp_path_factory.mktemp("latent"))
    return made


@pytest.fixture(scope="module")
def pair(real: ModuleType, latent: str) -> Iterator[tuple[Any, Any]]:
    """The prefill side, and a decode side with a host tier, whose own cache keeps no prefixes."""
    tiered = real.transfer(host_tier="16MiB")
    with (
        real.started(latent, real.transfer()) as left,
        real.started(latent, tiered, disable_log_stats=False) as right,
    ):
        yield left, right


def content(instance: Any, name: str, count: int) -> list[str]:
    instance.tell("content", name=name, count=count)
    found: list[str] = instance.hear(event="content")["blocks"]
    assert len(found) == count
    return found


def test_what_is_fetched_is_what_was_computed(pair: tuple[Any, Any]) -> None:
    left, right = pair
    assert right.reset(connector=True)
    before = right.figures()
    for prompt in PROMPTS:
        first = left.add(prompt, 1, {"do_remote_decode": True})
        then = right.add(prompt, params=left.over(first)["params"])
        assert len(right.over(then)["tokens"]) == 16
        count = (len(prompt) - 1) // SIZE  # not those that the last token, and the answer, are written to
        assert content(left, first, count) == content(right, then, count)
        left.until_free()
        right.until_free()
    assert right.figures()["load_seconds_count"] - before["load_seconds_count"] == len(PROMPTS)


def test_what_is_recalled_is_what_was_computed(pair: tuple[Any, Any]) -> None:
    _, right = pair
    assert right.reset(connector=True)
    before = right.figures()
    for prompt in PROMPTS:
        found = []
        for _ in range(2):
            name = right.add(prompt)
            right.over(name)
            found.append(content(right, name, (len(prompt) - 1) // SIZE))
            right.until_free()
        assert found[0] == found[1]
    assert right.figures()["tier_load_seconds_count"] - before["tier_load_seconds_count"] == 4
