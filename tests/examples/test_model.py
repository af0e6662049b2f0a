"""Paged attention answers as the model does by itself, wherever the blocks are."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
import torch

import aiokv

pytest.importorskip("transformers", reason="the model needs the extra: pip install 'aiokv[examples]'")

from serving.model import Model, load
from serving.paged import PagedCache

BLOCK_SIZE = 16


@contextmanager
def allocated(model: Model, blocks: int = 16) -> Iterator[aiokv.KVCache]:
    with closing(aiokv.KVCache.allocate(model.layout(blocks, BLOCK_SIZE))) as cache:
        yield cache


def prompt_of(length: int) -> list[int]:
    return [(7 * position + 3) % 251 for position in range(length)]


def answer_of(model: Model, kv: PagedCache, prompt: list[int], limit: int) -> list[int]:
    answer = [model.next_token(prompt, kv)]
    while len(answer) < limit:
        answer.append(model.next_token(answer[-1:], kv))
    return answer


def plain(model: Model, prompt: list[int], limit: int) -> list[int]:
    """What transformers answers with a cache of its own."""
    tokens = torch.tensor([prompt])
    output = model.network.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=limit, do_sample=False
    )
    return output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("length", [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 100])
def test_answers_as_transformers_does(model: Model, length: int) -> None:
    prompt = prompt_of(length)
    with allocated(model) as cache:
        blocks = [11, 2, 15, 0, 7, 4, 9, 1][: -(-(length + 12) // BLOCK_SIZE)]
        assert answer_of(model, PagedCache(cache, blocks), prompt, 12) == plain(model, prompt, 12)


def test_requests_in_one_cache_leave_each_other_alone(model: Model) -> None:
    prompts = prompt_of(40), prompt_of(23)[::-1]
    with allocated(model) as cache:
        kvs = PagedCache(cache, [3, 8, 1, 12]), PagedCache(cache, [0, 9, 2])
        answers = [[model.next_token(prompt, kv)] for prompt, kv in zip(prompts, kvs, strict=True)]
        for _ in range(11):
            for answer, kv in zip(answers, kvs, strict=True):
                answer.append(model.next_token(answer[-1:], kv))
    assert answers == [plain(model, prompt, 12) for prompt in prompts]


def test_a_layer_is_announced_once_it_is_written_and_before_the_next(model: Model) -> None:
    prompt, blocks = prompt_of(20), [5, 3]
    seen: list[tuple[int, int]] = []
    with allocated(model) as cache:

        def written(layer: int) -> None:
            full = [int(cache.tensor(each)[:, 5].any()) for each in range(model.layers)]
            seen.append((layer, sum(full)))

        model.next_token(prompt, PagedCache(cache, blocks, on_layer=written))
    assert seen == [(layer, layer + 1) for layer in range(model.layers)]


def test_announced_in_the_thread_that_computes(model: Model) -> None:
    threads = set()
    with allocated(model) as cache:
        kv = PagedCache(cache, [0], on_layer=lambda _: threads.add(threading.get_ident()))
        worker = threading.Thread(target=model.next_token, args=(prompt_of(5), kv))
        worker.start()
        worker.join()
    assert len(threads) == 1
    assert threading.get_ident() not in threads


def test_kv_from_elsewhere_is_as_good_as_its_own(model: Model) -> None:
    prompt = prompt_of(37)
    with allocated(model) as producer, allocated(model) as consumer:
        theirs, ours = [3, 1, 4], [9, 2, 6, 5]
        first = model.next_token(prompt, PagedCache(producer, theirs))
        for layer in range(model.layers):
            consumer.tensor(layer)[:, ours[:3]] = producer.tensor(layer)[:, theirs]
        answer = [first, *answer_of(model, PagedCache(consumer, ours, length=37), [first], 11)]
        assert answer == plain(model, prompt, 12)


@pytest.mark.parametrize("block", [0, 1, 2])
def test_kv_that_did_not_arrive_changes_the_answer(model: Model, block: int) -> None:
    """Or else comparing answers would show nothing."""
    prompt = prompt_of(48)
    with allocated(model) as cache:
        first = model.next_token(prompt, PagedCache(cache, [0, 1, 2]))
        for layer in range(model.layers):
            cache.tensor(layer)[:, block] = 0
        kv = PagedCache(cache, [0, 1, 2, 3], length=48)
        assert [first, *answer_of(model, kv, [first], 11)] != plain(model, prompt, 12)


class Deaf(torch.nn.Module):
    """A network that leaves the cache that it is given alone."""

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self._network = network
        self.config, self.device = network.config, network.device

    def forward(self, *, cache: object, **given: object) -> object:
        return self._network(**given)


def test_a_version_of_transformers_that_does_not_use_the_cache_is_told(model: Model) -> None:
    deaf = dataclasses.replace(model, network=Deaf(model.network))
    with allocated(model) as cache, pytest.raises(RuntimeError, match="left the KV cache alone"):
        deaf.next_token(prompt_of(3), PagedCache(cache, [0]))


def test_more_tokens_than_slots_are_refused(model: Model) -> None:
    with allocated(model) as cache, pytest.raises(ValueError, match="17 tokens don't fit into 16 slots"):
        model.next_token(prompt_of(17), PagedCache(cache, [0]))


def test_loading_leaves_the_random_numbers_of_others_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    load("tiny-random")
    assert torch.equal(torch.rand(3), expected)
