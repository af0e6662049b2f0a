"""Two instances without vLLM: their halves, joined by a scheduler that is played and keeps vLLM's rules.

It asserts what vLLM asserts: a report is of a request that waits for one, and comes once; and it frees blocks
as vLLM does, so that a report which comes too early is found by what then stands in the blocks.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from aiokv.device.cache import KVCache
from aiokv.integrations.vllm.layout import Group, cache_layout
from aiokv.integrations.vllm.leaving import Leaving
from aiokv.integrations.vllm.orders import Orders, Refusal, Ticket, Watch
from aiokv.integrations.vllm.reports import Outcome
from aiokv.integrations.vllm.scheduler import SchedulerHalf
from aiokv.integrations.vllm.settings import ConnectorSettings
from aiokv.integrations.vllm.worker import WorkerHalf

SIZE, BLOCKS = 32, 24
LAYERS = ("layers.0", "layers.1")


@dataclass
class Request:
    request_id: str
    num_prompt_tokens: int
    kv_transfer_params: dict[str, Any] | None
    num_computed_tokens: int = 0


class Played:
    """vLLM's scheduler and worker, as far as the connector sees them."""

    def __init__(self, name: str, **extra: object) -> None:
        # As on a CPU: all layers are views of one storage, K and V joined.
        storage = torch.zeros(len(LAYERS), BLOCKS, 2, SIZE, 16)
        self.tensors = dict(zip(LAYERS, storage, strict=True))
        layout, tensors = cache_layout(
            [Group(LAYERS, SIZE, 2, 8)], self.tensors, heads=(0, 2), total_heads=2, model=b""
        )
        settings = ConnectorSettings.read(extra)
        self.worker = WorkerHalf(KVCache.from_tensors(layout, tensors), settings)
        self.half = SchedulerHalf([SIZE], Leaving([SIZE], name, hold=settings.hold))
        self.half.leaving.addresses = (self.worker.address,)
        self.free = list(range(1, BLOCKS))
        #: Blocks of requests that vLLM still knows.
        self.blocks: dict[str, list[int]] = {}
        self.loading: dict[str, Request] = {}
        self.sending: set[str] = set()
        self.gone: set[str] = set()
        #: What became of loads: blocks that hold nothing.
        self.loaded: dict[str, set[int]] = {}

    def take(self, request: Request) -> list[int]:
        count = -(-request.num_prompt_tokens // SIZE)
        self.blocks[request.request_id] = [self.free.pop() for _ in range(count)]
        return self.blocks[request.request_id]

    def give_back(self, name: str) -> None:
        for block in self.blocks.pop(name):
            for tensor in self.tensors.values():
                tensor[block] = -1  # the next request writes there
            self.free.append(block)

    def prefill(self, request: Request) -> dict[str, Any] | None:
        """A request that is computed here, and over."""
        for block in self.take(request):
            for tensor in self.tensors.values():
                tensor[block] = torch.rand(2, SIZE, 16)
        request.num_computed_tokens = request.num_prompt_tokens
        return self.over(request, complete=True)

    def load(self, request: Request, computed: int = 0) -> bool:
        """A request that begins; gives whether it waits for a load."""
        tokens = self.half.matched(request, computed)
        self.half.allocated(request, [self.take(request)], tokens)
        if tokens:
            self.loading[request.request_id] = request
        return tokens > 0

    def over(self, request: Request, *, complete: bool) -> dict[str, Any] | None:
        name = request.request_id
        held, said = self.half.finished(request, [self.blocks.get(name, [])], complete=complete)
        if name in self.loading:
            self.gone.add(name)
        elif held:
            self.sending.add(name)
        elif name in self.blocks:
            self.give_back(name)
        return said

    def step(self) -> None:
        orders = self.half.orders()
        self.worker.before(orders)
        self.worker.carry_out(orders)
        outcome = self.worker.outcome() or Outcome()
        self.half.reported(list(outcome.loaded))
        for name in outcome.loaded:
            del self.loading[name]  # it is there, or vLLM's engine ends
            if name in self.gone:
                self.gone.discard(name)
                self.give_back(name)
            else:
                failed = outcome.failed.get(name, ())
                self.loaded[name] = {block for group in failed for block in group.ids}
        for name in outcome.sent:
            self.sending.remove(name)
            self.give_back(name)

    @property
    def quiet(self) -> bool:
        return not self.loading and not self.sending

    def content(self, blocks: list[int]) -> torch.Tensor:
        return torch.stack([tensor[blocks] for tensor in self.tensors.values()])


def until_quiet(*sides: Played) -> None:
    pause = threading.Event()
    while not all(side.quiet and not side.half.pending for side in sides):
        for side in sides:
            side.step()
        pause.wait(0.001)  # as a step of a model would


@pytest.fixture
def pair() -> Iterator[tuple[Played, Played]]:
    left, right = (
        Played("left", transports=["tcp"], hold=20),
        Played("right", transports=["tcp"], load_timeout=20),
    )
    yield left, right
    for side in (left, right):
        side.worker.close()


def prefilled(left: Played, name: str, tokens: int, **more: object) -> tuple[dict[str, Any], torch.Tensor]:
    request = Request(name, tokens, {"do_remote_decode": True, **more})
    said = left.prefill(request)
    assert said is not None
    return said, left.content(left.blocks[name]).clone()


def test_a_load(pair: tuple[Played, Played]) -> None:
    left, right = pair
    said, sent = prefilled(left, "a", 100)
    assert right.load(Request("b", 100, said))
    until_quiet(left, right)
    assert right.loaded == {"b": set()}
    assert torch.equal(right.content(right.blocks["b"]), sent)
    assert not left.blocks


def test_only_what_is_missing_is_loaded(pair: tuple[Played, Played]) -> None:
    left, right = pair
    said, sent = prefilled(left, "a", 100)
    assert right.load(Request("b", 100, said), computed=64)
    until_quiet(left, right)
    found = right.content(right.blocks["b"])
    assert torch.equal(found[:, 2:], sent[:, 2:])
    assert not found[:, :2].any()


def test_all_of_it_is_here(pair: tuple[Played, Played]) -> None:
    left, right = pair
    said, _ = prefilled(left, "a", 100)
    assert not right.load(Request("b", 100, said), computed=100)
    until_quiet(left, right)
    assert not left.blocks


def test_given_up_in_the_queue(pair: tuple[Played, Played]) -> None:
    left, right = pair
    said, _ = prefilled(left, "a", 100)
    right.over(Request("b", 100, said), complete=False)
    until_quiet(left, right)
    assert not left.blocks


def test_given_up_at_any_time(pair: tuple[Played, Played], seed: int) -> None:
    """Whatever the moment: one report, no block held, and nothing is written into blocks of others."""
    left, right = pair
    drawn = random.Random(seed)
    for number in range(20):
        said, _ = prefilled(left, f"a{number}", 100)
        request = Request(f"b{number}", 100, said)
        right.load(request)
        for _ in range(drawn.randrange(4)):
            right.step()
        right.over(request, complete=False)
        until_quiet(left, right)
    assert not left.blocks
    assert not right.blocks
    assert (right.content(right.free) <= 0).all()


def test_the_decode_side_comes_first(pair: tuple[Played, Played]) -> None:
    left, right = pair
    said = {"do_remote_prefill": True, "transfer_id": "t", "remote_addresses": [left.worker.address]}
    right.load(Request("b", 100, said))
    right.step()
    _, sent = prefilled(left, "a", 100, transfer_id="t")
    until_quiet(left, right)
    assert torch.equal(right.content(right.blocks["b"]), sent)


@pytest.mark.parametrize("computed", [0, 64, 100])
def test_pushed(pair: tuple[Played, Played], computed: int) -> None:
    """The prefill side names the decode side, whichever comes first."""
    left, right = pair
    for first in (left, right):
        name = f"{first is left}"
        said = {"do_remote_prefill": True, "transfer_id": name, "push": True}
        there = {"transfer_id": name, "push": True, "remote_addresses": [right.worker.address]}
        if first is right:
            right.load(Request(name, 100, said), computed)
            right.step()
        _, sent = prefilled(left, "a", 100, **there)
        if first is left:
            left.step()
            right.load(Request(name, 100, said), computed)
        until_quiet(left, right)
        found = right.content(right.blocks[name])
        assert torch.equal(found[:, computed // SIZE :], sent[:, computed // SIZE :]) or computed == 100
        right.give_back(name)
    assert not left.blocks


def test_the_prefill_side_gives_up_what_it_was_to_push(pair: tuple[Played, Played]) -> None:
    left, right = pair
    right.load(Request("b", 100, {"do_remote_prefill": True, "transfer_id": "t", "push": True}))
    right.step()
    there = {"transfer_id": "t", "push": True, "remote_addresses": [right.worker.address]}
    left.over(Request("a", 100, {"do_remote_decode": True, **there}), complete=False)
    until_quiet(left, right)
    assert right.loaded == {"b": set(right.blocks["b"])}


def test_the_prefill_side_gives_up(pair: tuple[Played, Played], caplog: pytest.LogCaptureFixture) -> None:
    left, right = pair
    said = {"do_remote_prefill": True, "transfer_id": "t", "remote_addresses": [left.worker.address]}
    right.load(Request("b", 100, said))
    right.step()
    left.over(Request("a", 100, {"do_remote_decode": True, "transfer_id": "t"}), complete=False)
    with caplog.at_level(logging.ERROR, "aiokv"):
        until_quiet(left, right)
    assert right.loaded == {"b": set(right.blocks["b"])}


def test_the_same_twice(pair: tuple[Played, Played]) -> None:
    left, right = pair
    said, sent = prefilled(left, "a", 100)
    right.load(Request("b", 100, said))
    right.load(Request("c", 100, dict(said)))
    until_quiet(left, right)
    assert right.loaded == {"b": set(), "c": set(right.blocks["c"])}
    assert torch.equal(right.content(right.blocks["b"]), sent)


def test_nobody_comes(pair: tuple[Played, Played]) -> None:
    """What isn't fetched in time is nobody's any more, and who comes later gets nothing (vllm#21570)."""
    _, right = pair
    hasty = Played("hasty", transports=["tcp"], hold=0.05)
    said, _ = prefilled(hasty, "a", 100)
    until_quiet(hasty)
    assert not hasty.blocks
    right.load(Request("b", 100, said))
    until_quiet(hasty, right)
    assert right.loaded == {"b": set(right.blocks["b"])}
    hasty.worker.close()


def test_what_waits_in_the_queue_is_held(pair: tuple[Played, Played]) -> None:
    """For longer than what nobody wants; what comes of it is as if it had not waited."""
    _, right = pair
    hasty = Played("hasty", transports=["tcp"], hold=1.5)
    said, sent = prefilled(hasty, "a", 100)
    unwanted, _ = prefilled(hasty, "x", 100)
    request = Request("b", 100, said)
    right.half.added(request)
    pause = threading.Event()
    while "x" in hasty.blocks:
        for side in (hasty, right):
            side.step()
        pause.wait(0.001)
    assert unwanted
    assert "a" in hasty.blocks
    right.load(request)
    until_quiet(hasty, right)
    assert right.loaded == {"b": set()}
    assert torch.equal(right.content(right.blocks["b"]), sent)
    assert not hasty.blocks
    hasty.worker.close()


def test_given_up_in_the_queue_it_is_held_no_longer(pair: tuple[Played, Played]) -> None:
    left, right = pair
    said, _ = prefilled(left, "a", 100)
    request = Request("b", 100, said)
    right.half.added(request)
    right.step()
    right.over(request, complete=False)
    until_quiet(left, right)
    assert not left.blocks
    assert not right.worker._renewing._renewals


def test_a_peer_that_is_gone_costs_its_own_requests(pair: tuple[Played, Played]) -> None:
    left, right = pair
    other = Played("other", transports=["tcp"])
    lost, _ = prefilled(other, "x", 100)
    other.worker.close()
    said, sent = prefilled(left, "a", 100)
    right.load(Request("b", 100, lost))
    right.load(Request("c", 100, said))
    until_quiet(left, right)
    assert right.loaded == {"b": set(right.blocks["b"]), "c": set()}
    assert torch.equal(right.content(right.blocks["c"]), sent)


def test_addresses_that_mean_nothing(pair: tuple[Played, Played]) -> None:
    _, right = pair
    said = {"do_remote_prefill": True, "transfer_id": "t", "remote_addresses": ["nonsense"]}
    right.load(Request("b", 100, said))
    until_quiet(right)
    assert right.loaded == {"b": set(right.blocks["b"])}


def test_after_it_was_closed_everything_is_reported(pair: tuple[Played, Played]) -> None:
    left, right = pair
    said, _ = prefilled(left, "a", 100)
    right.worker.close()
    right.load(Request("b", 100, said))
    until_quiet(right)
    left.worker.close()
    until_quiet(left)
    assert right.loaded == {"b": set(right.blocks["b"])}


def test_what_two_watch_for_is_watched_for_once(pair: tuple[Played, Played]) -> None:
    """Two requests by one id, as where somebody tries again: nothing is left of either."""
    left, _ = pair

    async def turns() -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    for name in ("a", "b"):
        left.worker.before(Orders(watches=[Watch(name, Ticket("t"), 0)]))
        left.worker._thread.run(turns())
    core = left.worker._engine._core
    assert core is not None
    assert core._watching
    left.worker.carry_out(Orders(refusals=[Refusal(Ticket("t"))]))
    left.worker._thread.run(turns())
    assert not core._watching
    assert not left.worker._watches
