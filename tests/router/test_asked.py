"""What is read of a body."""

from __future__ import annotations

import json
import tracemalloc

import pytest

from aiokv.router.asked import read
from aiokv.router.faults import Fault


def asked(prompt: object) -> bytes:
    return json.dumps({"model": "m", "prompt": prompt}).encode()


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [("", 0), ("text", 0), (["a", "b"], 0), ([7], 1), ([1, 2, 3], 3), ([[1], [1, 2]], 2)],
)
def test_tokens_are_counted_where_they_are_given(prompt: object, tokens: int) -> None:
    found = read(asked(prompt), chat=False)
    assert found.tokens == tokens
    assert json.loads(found.prompt) == prompt


@pytest.mark.parametrize("prompt", [None, 7, [], {}, [None], [1.5], [True], [1, "a"], [[1], 2], [[1.5]]])
def test_prompts_that_are_none(prompt: object) -> None:
    with pytest.raises(Fault) as caught:
        read(asked(prompt), chat=False)
    assert caught.value.param == "prompt"


def test_the_body_is_held_once() -> None:
    body = asked("x" * 1_000_000)
    tracemalloc.start()
    try:
        found = read(body, chat=False)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 100_000
    assert len(found.prompt) == 1_000_002
