"""Two real vLLMs in processes of their own over one pool, which is a third."""

from __future__ import annotations

import itertools
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

BLOCK = 128


def prompt(seed: int, tokens: int) -> list[int]:
    drawn = random.Random(seed)
    return [drawn.randrange(3, 512) for _ in range(tokens)]


#: 25 blocks; the caches have 16 each.
PROMPTS = {"some": [prompt(seed, 5 * BLOCK + 20 * seed) for seed in range(5)]}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pool") / "pool"


@pytest.fixture(scope="module")
def owner(path: Path) -> Iterator[subprocess.Popen[str]]:
    """``python -m aiokv pool``."""
    command = [sys.executable, "-m", "aiokv", "pool", str(path), "--capacity", "64MiB"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"pool: {path}\n"
        yield process
        process.send_signal(signal.SIGCONT)
        process.terminate()


@pytest.fixture(scope="module")
def pair(real: ModuleType, model: str, path: Path, owner: object) -> Iterator[tuple[Any, Any]]:
    config, options = real.transfer(host_pool=str(path)), {"num_gpu_blocks_override": 17}
    with (
        real.started(model, config, **options, disable_log_stats=False) as left,
        real.started(model, config, **options, disable_log_stats=False) as right,
    ):
        yield left, right


@pytest.fixture(autouse=True)
def nothing_held(pair: tuple[Any, Any], real: ModuleType) -> Iterator[None]:
    with real.left_free(*pair, connector=True):
        for each in pair:  # a step that carries it out: it empties the pool for the other, too
            each.answers([prompt(99, 10)], [None])
        yield


def loads(instance: Any) -> float:
    found: float = instance.figures()["tier_load_seconds_count"]
    return found


def computed(instance: Any, alone: dict[str, list[list[int]]]) -> None:
    """Have the answers computed, and what was computed stored."""
    before = instance.figures()["tier_stored_bytes_total"]
    assert one_by_one(instance, PROMPTS["some"]) == alone["some"]
    while instance.figures()["tier_stored_bytes_total"] - before < 25 * BLOCK * 4096:
        time.sleep(0.02)


def one_by_one(instance: Any, prompts: list[list[int]]) -> list[list[int]]:
    return [instance.answers([each], [None])[0] for each in prompts]


def test_what_one_computed_the_other_loads(pair: tuple[Any, Any], alone: dict[str, list[list[int]]]) -> None:
    left, right = pair
    before = loads(left), loads(right)
    computed(left, alone)
    assert loads(left) == before[0]
    assert one_by_one(right, PROMPTS["some"]) == alone["some"]
    assert loads(right) - before[1] == len(PROMPTS["some"])
    # At once some of them preempt others, whose lost blocks come a second time.
    assert left.answers(PROMPTS["some"], [None] * len(PROMPTS["some"])) == alone["some"]
    assert loads(left) > before[0]
    right.tell("told")
    told = {tuple(block) for block in right.hear(event="told")["blocks"]}
    assert tuple(PROMPTS["some"][0][:BLOCK]) in told


def test_a_reset_by_one_empties_it_for_all(pair: tuple[Any, Any], alone: dict[str, list[list[int]]]) -> None:
    left, right = pair
    computed(left, alone)
    assert left.reset(connector=True)
    left.answers([prompt(99, 10)], [None])  # a step that carries it out
    before = loads(right)
    assert one_by_one(right, PROMPTS["some"][:1]) == alone["some"][:1]
    assert loads(right) == before


def test_an_owner_that_is_stopped_holds_nothing_up(
    pair: tuple[Any, Any], alone: dict[str, list[list[int]]], owner: subprocess.Popen[str]
) -> None:
    """Its blocks are computed; it is asked again once it goes on."""
    left, right = pair
    computed(left, alone)
    before = loads(right)
    owner.send_signal(signal.SIGSTOP)
    assert right.answers(PROMPTS["some"][:2], [None] * 2) == alone["some"][:2]
    assert loads(right) == before
    owner.send_signal(signal.SIGCONT)
    for seed in itertools.count(1000):
        fresh = [prompt(seed, 2 * BLOCK)]
        assert left.answers(fresh, [None]) == right.answers(fresh, [None])
        if loads(right) > before:
            break
