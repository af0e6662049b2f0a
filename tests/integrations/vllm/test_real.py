"""Real vLLMs, prefill and decode in processes of their own: answers are those of one vLLM alone.

The prefill side computes in chunks of 96 tokens, so that most chunks bring no new block of 128, and sends
layer by layer; the decode side has 40 blocks, so that requests are preempted, and sends a chunk at a time.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

# Starting three takes a minute on two cores.
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

BLOCK = 128
NOWHERE = "tcp://127.0.0.1:1"


def prompt(seed: int, tokens: int) -> list[int]:
    drawn = random.Random(seed)
    return [drawn.randrange(3, 512) for _ in range(tokens)]


PROMPTS = {
    # 32 of all lengths: whole blocks, one more, one less, a single token
    "many": [prompt(seed, tokens) for seed, tokens in enumerate([1, 2, 127, 128, 129, 256, 300, 511] * 4)],
    # short ones, which grow a second block while they decode
    "grow": [prompt(100 + seed, 120) for seed in range(32)],
    "few": [prompt(200 + seed, 300) for seed in range(8)],
    "long": [prompt(300, 2 * BLOCK) + prompt(301 + seed, 50 * seed) for seed in range(3)],
}


@pytest.fixture(scope="module")
def pair(real: ModuleType, model: str, alone: object) -> Iterator[tuple[Any, Any]]:
    """The prefill side and the decode side."""
    config = real.transfer("fail", transports=["cma", "tcp"], layerwise=True)
    with real.started(model, config, max_num_batched_tokens=96) as left:
        config = real.transfer(load_timeout=20)
        options = {"num_gpu_blocks_override": 41, "max_num_batched_tokens": 256}
        with real.started(model, config, disable_log_stats=False, **options) as right:
            for one, other in ((left, right), (right, left)):
                said = one.prefill([prompt(999, 10)])
                one.addresses = said[0]["remote_addresses"]
                other.answers([prompt(999, 10)], said)
            yield left, right


@pytest.fixture(autouse=True)
def nothing_held(pair: tuple[Any, Any], real: ModuleType) -> Iterator[None]:
    with real.left_free(*pair):
        yield


def test_many_at_once(pair: tuple[Any, Any], alone: dict[str, list[list[int]]]) -> None:
    left, right = pair
    params = left.prefill(PROMPTS["many"])
    assert right.answers(PROMPTS["many"], params) == alone["many"]


def test_preempted_requests(pair: tuple[Any, Any], alone: dict[str, list[list[int]]]) -> None:
    left, right = pair
    params = left.prefill(PROMPTS["grow"])
    before = right.state()["preempted"]
    assert right.answers(PROMPTS["grow"], params) == alone["grow"]
    assert right.state()["preempted"] > before


def test_prefixes_that_are_there(pair: tuple[Any, Any], alone: dict[str, list[list[int]]]) -> None:
    left, right = pair
    params = left.prefill(PROMPTS["long"])
    found = [right.answers([one], [each])[0] for one, each in zip(PROMPTS["long"], params, strict=True)]
    assert found == alone["long"]
    # All whole blocks of this one are there: nothing is loaded, and the other side lets go (vllm#56640).
    again = left.prefill(PROMPTS["long"][:1])
    assert right.answers(PROMPTS["long"][:1], again) == alone["long"][:1]


def test_router_that_mints_ids(pair: tuple[Any, Any], alone: dict[str, list[list[int]]]) -> None:
    left, right = pair
    host, port = left.addresses[0].removeprefix("tcp://").split(":")
    ids = [uuid.uuid4().hex for _ in PROMPTS["few"]]
    where = {"do_remote_prefill": True, "remote_bootstrap_addr": f"http://{host}:{port}"}
    # The decode side comes first, and waits.
    names = [
        right.add(one, params={**where, "transfer_id": each})
        for one, each in zip(PROMPTS["few"], ids, strict=True)
    ]
    for one, each in zip(PROMPTS["few"], ids, strict=True):
        left.add(one, 1, {"do_remote_decode": True, "transfer_id": each})
    assert [right.over(name)["tokens"] for name in names] == alone["few"]
    assert left.state()["layers"] >= 4 * len(ids)
    assert not right.state()["layers"]


@pytest.mark.parametrize("layerwise", [True, False])
def test_chunks_are_sent_before_the_last_is_computed(
    pair: tuple[Any, Any], lone: Any, layerwise: bool
) -> None:
    """To a decode side that waits already; the prompts take ten steps each, or four."""
    left, right = pair if layerwise else pair[::-1]
    both = [(prompt(700 + number, 900), uuid.uuid4().hex) for number in range(2)]
    where = {"do_remote_prefill": True, "remote_addresses": left.addresses}
    names = [right.add(one, params={**where, "transfer_id": each}) for one, each in both]
    right.until(lambda state: state["held"] == 8 * len(both))
    before = left.state()["chunks"]
    for one, each in both:
        left.add(one, 1, {"do_remote_decode": True, "transfer_id": each})
    found = [right.over(name)["tokens"] for name in names]
    assert found == lone.answers([one for one, _ in both], [None] * len(both))
    assert left.state()["chunks"] - before >= len(both)


def test_aborted_between_chunks(pair: tuple[Any, Any], lone: Any) -> None:
    """On either side: what is there is of use, and nothing is held."""
    left, right = pair
    both = [(prompt(800 + number, 900), uuid.uuid4().hex) for number in range(2)]
    where = {"do_remote_prefill": True, "remote_addresses": left.addresses}
    names = [right.add(one, params={**where, "transfer_id": each}) for one, each in both]
    right.until(lambda state: state["held"] == 8 * len(both))
    before = left.state()["chunks"]
    behind = [left.add(one, 1, {"do_remote_decode": True, "transfer_id": each}) for one, each in both]
    left.until(lambda state: state["chunks"] > before)
    left.tell("abort", name=behind[0])
    right.tell("abort", name=names[1])
    assert right.over(names[0])["tokens"] == lone.answers([both[0][0]], [None])[0]


def test_pushed(pair: tuple[Any, Any], alone: dict[str, list[list[int]]]) -> None:
    """The router tells the prefill side where to."""
    left, right = pair
    where = right.prefill([prompt(998, 10)])[0]
    there = {"push": True, "remote_addresses": where["remote_addresses"]}
    ids = [uuid.uuid4().hex for _ in PROMPTS["few"]]
    names = [
        right.add(one, params={"do_remote_prefill": True, "push": True, "transfer_id": each})
        for one, each in zip(PROMPTS["few"], ids, strict=True)
    ]
    for one, each in zip(PROMPTS["few"], ids, strict=True):
        left.add(one, 1, {"do_remote_decode": True, "transfer_id": each, **there})
    assert [right.over(name)["tokens"] for name in names] == alone["few"]
    # Its own, which was made for its address alone, is released.
    assert left.answers([prompt(998, 10)], [where])


def test_the_same_twice(pair: tuple[Any, Any], alone: dict[str, list[list[int]]]) -> None:
    """A client, or a router, tries again: the second is computed where the KV can't be had."""
    left, right = pair
    params = left.prefill(PROMPTS["few"][:1])
    assert right.answers(PROMPTS["few"][:1] * 2, params * 2) == alone["few"][:1] * 2


def test_aborted_at_the_decode_side(pair: tuple[Any, Any], alone: dict[str, list[list[int]]]) -> None:
    """In whatever state that is, the prefill side holds nothing any more (vllm#29906)."""
    left, right = pair
    params = left.prefill(PROMPTS["many"])
    names = [right.add(one, params=each) for one, each in zip(PROMPTS["many"], params, strict=True)]
    for name in names[::2]:
        right.tell("abort", name=name)
    found = [right.over(name)["tokens"] for name in names[1::2]]
    assert found == alone["many"][1::2]


def test_aborted_while_it_waits(pair: tuple[Any, Any]) -> None:
    left, right = pair
    tid = uuid.uuid4().hex
    params = {"do_remote_prefill": True, "remote_addresses": left.addresses, "transfer_id": tid}
    name = right.add(PROMPTS["few"][0], params=params)
    right.until(lambda state: state["held"] > 0)
    right.tell("abort", name=name)
    right.until_free()


def test_aborted_at_the_prefill_side(pair: tuple[Any, Any], alone: dict[str, list[list[int]]]) -> None:
    """Who waits for its KV is told, and computes it."""
    left, right = pair
    tid = uuid.uuid4().hex
    waiting = {"do_remote_prefill": True, "remote_addresses": left.addresses, "transfer_id": tid}
    name = right.add(PROMPTS["few"][0], params=waiting)
    right.until(lambda state: state["held"] > 0)
    behind = left.add(PROMPTS["few"][0], 1, {"do_remote_decode": True, "transfer_id": tid})
    left.tell("abort", name=behind)
    assert right.over(name)["tokens"] == alone["few"][0]


def test_a_peer_that_was_never_there(pair: tuple[Any, Any], alone: dict[str, list[list[int]]]) -> None:
    """It costs its own requests alone, which are computed; those of others go on."""
    left, right = pair
    params = left.prefill(PROMPTS["few"][:4])
    lost = [{**params[0], "remote_addresses": [NOWHERE], "transfer_id": uuid.uuid4().hex}] * 4
    assert right.answers(PROMPTS["few"], params + lost) == alone["few"]


def test_a_peer_that_was_killed(
    pair: tuple[Any, Any], alone: dict[str, list[list[int]]], real: ModuleType, model: str
) -> None:
    """What it held is computed by those who wanted it, and what was held for it is free."""
    left, right = pair
    params = left.prefill(PROMPTS["few"][:4])
    other = real.Instance(model, real.transfer())
    other.hear(event="up")
    lost = other.prefill(PROMPTS["few"][4:])
    tid = uuid.uuid4().hex
    waiting = {"do_remote_prefill": True, "remote_addresses": left.addresses, "transfer_id": tid}
    other.add(prompt(400, 300), params=waiting)
    other.until(lambda state: state["held"] > sum(-(-len(each) // BLOCK) for each in PROMPTS["few"][4:]))
    other.kill()
    left.prefill([prompt(400, 300)], transfer_id=tid, deadline=5)
    assert right.answers(PROMPTS["few"], params + lost) == alone["few"]


def test_nobody_comes_in_time(pair: tuple[Any, Any], alone: dict[str, list[list[int]]]) -> None:
    """Blocks that are another request's by now aren't read: whoever is late computes (vllm#21570)."""
    left, right = pair
    params = left.prefill(PROMPTS["few"][:1], transfer_id=uuid.uuid4().hex, deadline=0.2)
    left.until_free()
    left.answers(PROMPTS["grow"], [None] * len(PROMPTS["grow"]))  # others have the blocks
    assert right.answers(PROMPTS["few"][:1], params) == alone["few"][:1]


def test_a_decode_side_that_is_busy(
    pair: tuple[Any, Any], alone: dict[str, list[list[int]]], real: ModuleType, model: str
) -> None:
    """What waits there for blocks is held for longer than what nobody wants (vllm#21570)."""
    _, right = pair
    with real.started(model, real.transfer(hold=2)) as hasty:
        before = right.figures()
        busy = [right.add(prompt(500 + seed, 120), 880) for seed in range(5)]  # all blocks, for long
        right.until(lambda state: len(state["requests"]) == len(busy))
        params = hasty.prefill(PROMPTS["few"][:2])
        name = right.add(PROMPTS["few"][0], params=params[0])
        hasty.until(lambda state: len(state["requests"]) == 1)  # what nobody wants is free
        for each in busy:
            right.tell("abort", name=each)
        assert right.over(name)["tokens"] == alone["few"][0]
        assert right.figures()["load_seconds_count"] - before["load_seconds_count"] == 1
        hasty.until_free()


def test_reset_while_blocks_are_held(pair: tuple[Any, Any], alone: dict[str, list[list[int]]]) -> None:
    """It says that it did nothing, and works once they are free (vllm#57727)."""
    left, right = pair
    params = left.prefill(PROMPTS["few"])
    assert not left.reset()
    assert right.answers(PROMPTS["few"], params) == alone["few"]
    left.until_free()
    assert left.reset()


def test_figures(pair: tuple[Any, Any]) -> None:
    """They are in vLLM's own endpoint."""
    left, right = pair
    before = right.figures()
    params = left.prefill(PROMPTS["few"][:1])
    lost = {**params[0], "remote_addresses": [NOWHERE], "transfer_id": uuid.uuid4().hex}
    right.answers(PROMPTS["few"][:2], [params[0], lost])
    after = right.figures()
    assert after["load_seconds_count"] - before["load_seconds_count"] == 1
    # 3 blocks of 128 tokens of 4 layers, K and V of 2 heads of 64 elements of 4 bytes
    assert after["load_bytes_sum"] - before["load_bytes_sum"] == 3 * 128 * 4096
    assert after["loads_failed_total"] - before["loads_failed_total"] == 1


def test_policy_fail(pair: tuple[Any, Any]) -> None:
    left, _ = pair
    params = {"do_remote_prefill": True, "remote_addresses": [NOWHERE], "transfer_id": uuid.uuid4().hex}
    assert left.over(left.add(PROMPTS["few"][0], params=params))["reason"] == "error"


def test_parameters_that_mean_nothing(pair: tuple[Any, Any], alone: dict[str, list[list[int]]]) -> None:
    _, right = pair
    for params in (
        {"do_remote_prefill": True},
        {"do_remote_prefill": True, "transfer_id": "x", "tp_size": 0},
    ):
        assert right.answers(PROMPTS["few"][:1], [params]) == alone["few"][:1]
