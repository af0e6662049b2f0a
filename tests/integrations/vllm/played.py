"""A vLLM that is played: its scheduler, block pool and prefix cache, with a model that can be checked.

It keeps vLLM's rules, and asserts what vLLM asserts. What the model writes for a token is a number made of
all tokens up to it and of the weights; before it computes it looks whether all that it reads is that. So a
block that is written too early or too late, or comes back with another's content, is found in the step that
uses it.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from aiokv.device.cache import KVCache
from aiokv.integrations.vllm.asking import Asking
from aiokv.integrations.vllm.keeping import Keeping
from aiokv.integrations.vllm.layout import Group, cache_layout
from aiokv.integrations.vllm.leaving import Leaving
from aiokv.integrations.vllm.news import News
from aiokv.integrations.vllm.reports import Outcome
from aiokv.integrations.vllm.scheduler import SchedulerHalf
from aiokv.integrations.vllm.settings import ConnectorSettings
from aiokv.integrations.vllm.stretches import Stretches
from aiokv.integrations.vllm.worker import WorkerHalf
from aiokv.offload.sharing.lookout import Lookout

__all__ = ["LAYERS", "SIZE", "Played", "PlayedOnGpu", "Request", "answer", "warm"]

SIZE = 32
LAYERS = ("layers.0", "layers.1")
BLOCK_BYTES = len(LAYERS) * 2 * SIZE * 16 * 4


def numbers(tokens: Iterable[int], weights: int) -> list[int]:
    """What the model writes for each token: exact as float32."""
    found, number = [], weights
    for token in tokens:
        number = (number * 31 + token + 1) % 65521
        found.append(number)
    return found


def answer(prompt: list[int], count: int, weights: int = 1) -> list[int]:
    """What the model answers."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(numbers(tokens, weights)[-1] % 50)
    return tokens[len(prompt) :]


@dataclass
class Request:
    request_id: str
    prompt: list[int]
    wanted: int = 4
    kv_transfer_params: dict[str, Any] | None = None
    num_computed_tokens: int = 0
    lora_request: None = None
    tokens: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    #: Its blocks, of each KV cache group.
    table: list[list[int]] = field(default_factory=lambda: [[]])
    #: It waits for a load, which was not reported.
    waits: bool = False
    #: Blocks that the load left empty; None while it isn't reported.
    empty: set[int] | None = None
    #: All tokens, those included that the scheduler hasn't heard of; and how many those are.
    truth: list[int] = field(default_factory=list)
    unheard: int = 0
    #: Another one after each preemption: what is on its way then counts no more.
    life: int = 0
    over: bool = False
    said: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        self.truth = list(self.prompt)
        self.hash()

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def all_token_ids(self) -> list[int]:
        return self.tokens

    @property
    def answered(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def blocks(self) -> list[int]:
        return self.table[0]

    def hash(self) -> None:
        while len(self.block_hashes) < len(self.tokens) // SIZE:
            end = (len(self.block_hashes) + 1) * SIZE
            self.block_hashes.append(hashlib.sha256(repr(self.tokens[:end]).encode()).digest())


class Played:
    """One instance.

    Args:
        name: Of the instance.
        blocks: Of the cache, with the one that vLLM never gives to anybody.
        budget: Tokens that a step computes at most.
        events: Whether the host tier's changes are to be told.
        ahead: As with vLLM's asynchronous scheduling, a step is put together before it is known what came
            of the one before.
        named: What its weights are called, in a pool.
        extra: As in ``kv_connector_extra_config``.
    """

    def __init__(
        self,
        name: str = "one",
        *,
        blocks: int = 24,
        budget: int = 64,
        events: bool = False,
        ahead: bool = False,
        named: bytes = b"weights",
        **extra: object,
    ) -> None:
        self.ahead = ahead
        #: What came of steps, as far as the scheduler hasn't heard of it.
        self.unheard: deque[tuple[list[tuple[Request, int, int]], Outcome, News | None]] = deque()
        self.tensors = self.allocate(blocks)
        groups = self.groups()
        sizes, windows = [each.block_size for each in groups], [each.window for each in groups]
        layout, tensors = cache_layout(groups, self.tensors, heads=(0, 2), total_heads=2, model=b"played")
        settings = ConnectorSettings.read({"transports": ["tcp"], "load_timeout": 20, **extra})
        self.worker = WorkerHalf(KVCache.from_tensors(layout, tensors), settings, weights=named)
        tier = Keeping(Stretches(sizes, windows), events=events) if settings.keeps else None
        kept = not any(windows)
        leaving = Leaving(
            sizes,
            name,
            layerwise=settings.layerwise and kept,
            chunks=settings.chunks and kept,
            hold=settings.hold,
        )
        self.half = SchedulerHalf(sizes, leaving, tier)
        self.half.leaving.addresses = (self.worker.address,)
        if settings.host_pool is not None:
            self.half.share(Asking(Lookout(settings.host_pool, [self.worker.digest or b""])))
        self.budget = budget
        self.weights = 1
        #: As in vLLM: free blocks keep what is in them until they are taken, the least recently freed first.
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, blocks))
        self.users = [0] * blocks
        self.cached: dict[Any, int] = {}
        self.names: dict[int, Any] = {}
        self.requests: dict[str, Request] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        #: Over, with blocks that are held until they were sent.
        self.held: dict[str, Request] = {}
        #: Preempted since the last step.
        self.taken: set[str] = set()
        self.computed = self.preempted = self.recalled = 0

    # -- the device

    def groups(self) -> list[Group]:
        """The KV cache groups."""
        return [Group(LAYERS, SIZE, 2, 8)]

    def allocate(self, blocks: int) -> dict[str, torch.Tensor]:
        """As on a CPU: all layers are views of one storage, K and V joined."""
        return dict(zip(LAYERS, torch.zeros(len(LAYERS), blocks, 2, SIZE, 16), strict=True))

    def stream(self) -> object | None:
        """What the model computes on."""
        return None

    def attend(self, tensor: torch.Tensor, request: Request, first: int, last: int) -> None:
        """Look whether the tokens before ``first`` are there, and write the others."""
        wanted = np.array(numbers(request.truth[:last], self.weights), np.float32)
        content = tensor.numpy()  # torch takes long for little, where others take the cores
        there = content[request.blocks].transpose(0, 2, 1, 3).reshape(-1, 2 * 16)
        assert (there[:first] == wanted[:first, None]).all(), f"{request.request_id} reads another's"
        at = np.arange(first, last)
        blocks = np.array(request.blocks)[at // SIZE]
        content[blocks, :, at % SIZE] = wanted[first:, None, None]

    # -- blocks

    def take(self, request: Request, tokens: int) -> bool:
        count = -(-tokens // SIZE) - len(request.blocks)
        if count > len(self.free):
            return False
        for _ in range(count):
            block, _ = self.free.popitem(last=False)
            name = self.names.pop(block, None)
            if name is not None and self.cached.get(name) == block:
                del self.cached[name]
            self.users[block] = 1
            request.blocks.append(block)
        return True

    def give(self, request: Request) -> None:
        for block in reversed(request.blocks):
            self.users[block] -= 1
            if not self.users[block]:
                self.free[block] = None
        request.table = [[]]

    def cache(self, request: Request) -> None:
        for at in range(min(request.num_computed_tokens // SIZE, len(request.block_hashes))):
            name, block = request.block_hashes[at], request.blocks[at]
            if name not in self.cached and block not in self.names:
                self.cached[name], self.names[block] = block, name

    def hits(self, request: Request) -> list[Any]:
        """Blocks that are cached."""
        found = []
        for name in request.block_hashes[: (len(request.tokens) - 1) // SIZE]:
            if name not in self.cached:
                break
            found.append(self.cached[name])
        return found

    def covered(self, there: list[Any]) -> int:
        """Tokens of what was cached."""
        return len(there) * SIZE

    def adopt(self, request: Request, there: list[Any], tokens: int) -> None:
        """Begin with blocks that were cached, of so many tokens with those to be loaded."""
        for block in there:
            self.users[block] += 1
            self.free.pop(block, None)
        request.table = [there]

    # -- requests

    def add(
        self, name: str, prompt: list[int], wanted: int = 4, params: dict[str, Any] | None = None
    ) -> Request:
        request = self.requests[name] = Request(name, prompt, wanted, params)
        self.half.added(request)
        self.waiting.append(request)
        return request

    def abort(self, name: str) -> None:
        request = self.requests[name]
        if request in self.running:
            self.running.remove(request)
        if request in self.waiting:
            self.waiting.remove(request)
        self.end(request, complete=False)

    def end(self, request: Request, *, complete: bool) -> None:
        request.over = True
        held, request.said = self.half.finished(request, request.table, complete=complete)
        if held:
            self.held[request.request_id] = request
        elif not request.waits:
            self.forget(request)

    def forget(self, request: Request) -> None:
        self.give(request)
        del self.requests[request.request_id]

    # -- a step

    def step(self) -> None:
        scheduled = self.schedule()
        self.half.preempted(self.taken)
        self.taken.clear()
        for request, (tokens, new) in scheduled.items():
            self.half.scheduled(request, tokens, new)
        orders = self.half.orders()
        chosen = []
        for name, (tokens, _) in scheduled.items():
            request = self.requests[name]
            chosen.append((request, request.num_computed_tokens, tokens))
            request.num_computed_tokens += tokens
            if request.num_computed_tokens == len(request.tokens) + request.unheard:
                request.unheard += 1
        self.worker.before(orders, self.stream)
        self.compute(chosen)
        self.worker.carry_out(orders, self.stream())
        self.worker.computed(orders, self.stream)
        self.recalled += sum(len(each.hashes) for each in orders.recalls)
        self.unheard.append((self.sample(chosen), self.worker.outcome() or Outcome(), self.worker.news()))
        while len(self.unheard) > (self.ahead and bool(chosen)):
            self.hear(*self.unheard.popleft())

    def sample(self, chosen: list[tuple[Request, int, int]]) -> list[tuple[Request, int, int]]:
        found = []
        for request, first, tokens in chosen:
            if first + tokens == len(request.truth):
                request.truth.append(numbers(request.truth, self.weights)[-1] % 50)
                found.append((request, request.life, request.truth[-1]))
        return found

    def hear(self, sampled: list[tuple[Request, int, int]], outcome: Outcome, news: News | None) -> None:
        for request, life, token in sampled:
            if request.over or request.life != life:
                continue
            request.tokens.append(token)
            request.unheard -= 1
            request.hash()
            if len(request.answered) == request.wanted:
                self.running.remove(request)
                self.end(request, complete=True)
        self.report(outcome, news)

    def schedule(self) -> dict[str, tuple[int, list[list[int]]]]:
        found: dict[str, tuple[int, list[list[int]]]] = {}
        budget, before = self.budget, self.preempted
        for request in list(self.running):
            tokens = min(len(request.tokens) + request.unheard - request.num_computed_tokens, budget)
            if request not in self.running or not tokens:
                continue
            had = [len(ids) for ids in request.table]
            while not self.take(request, request.num_computed_tokens + tokens):
                victim = self.running.pop()
                found.pop(victim.request_id, None)
                self.preempt(victim)
                if victim is request:
                    break
            if request in self.running:
                new = [ids[count:] for ids, count in zip(request.table, had, strict=True)]
                found[request.request_id] = tokens, new
                budget -= tokens
        if self.preempted == before:
            self.admit(found, budget)
        return found

    def preempt(self, request: Request) -> None:
        self.preempted += 1
        self.taken.add(request.request_id)
        self.give(request)
        request.num_computed_tokens = request.unheard = 0
        request.truth = list(request.tokens)
        request.life += 1
        self.waiting.insert(0, request)

    def admit(self, found: dict[str, tuple[int, list[list[int]]]], budget: int) -> None:
        for request in list(self.waiting):
            if request.waits:
                continue
            if request.empty is not None:
                self.arrive(request)
            more, fresh = 0, not request.num_computed_tokens
            if fresh:
                there = self.hits(request)
                for _ in range(2):  # vLLM may ask again
                    asked = self.half.matched(request, self.covered(there))
                if asked is None:
                    continue
                more = asked
                request.num_computed_tokens = self.covered(there) + more
                self.adopt(request, there, request.num_computed_tokens)
                assert request.num_computed_tokens <= len(request.tokens)
            tokens = 0 if more else min(len(request.tokens) - request.num_computed_tokens, budget)
            if not (tokens or more) or not self.take(request, request.num_computed_tokens + tokens):
                if fresh:
                    self.give(request)
                    request.num_computed_tokens = 0
                return
            self.half.allocated(request, request.table, more)
            if more:
                request.waits = True
                continue
            self.waiting.remove(request)
            self.running.append(request)
            found[request.request_id] = tokens, []
            budget -= tokens

    def arrive(self, request: Request) -> None:
        """A load is over: what it left empty is computed."""
        empty, request.empty = request.empty, None
        assert empty is not None
        for at, block in enumerate(request.blocks):
            if block in empty:
                request.num_computed_tokens = min(request.num_computed_tokens, at * SIZE)
        self.cache(request)
        if not request.num_computed_tokens:
            self.give(request)
        request.num_computed_tokens = min(request.num_computed_tokens, len(request.tokens) - 1)

    def compute(self, chosen: list[tuple[Request, int, int]]) -> None:
        for layer, tensor in enumerate(self.tensors.values()):
            for request, first, tokens in chosen:
                self.attend(tensor, request, first, first + tokens)
            self.worker.written(layer, self.stream)
        for request, _, tokens in chosen:
            self.computed += tokens
            self.cache(request)

    def report(self, outcome: Outcome, news: News | None) -> None:
        self.half.reported(outcome.loaded, [] if news is None else [news])
        for name in outcome.loaded:
            request = self.requests[name]  # it is there, or vLLM's engine ends
            assert request.waits
            request.waits = False
            request.empty = {block for group in outcome.failed.get(name, ()) for block in group.ids}
            if request.over:
                self.forget(request)
        for name in outcome.sent:
            self.forget(self.held.pop(name))

    # -- for tests

    def close(self) -> None:
        """End it."""
        self.worker.close()
        self.half.close()

    def settle(self, *others: Played) -> None:
        """Step until nothing is left to do."""
        pause = threading.Event()
        sides = (self, *others)
        while any(side.requests or side.unheard or side.half.pending for side in sides):
            for side in sides:
                side.step()
            pause.wait(0.0005)  # as a step of a model would

    def answer(self, prompt: list[int], wanted: int = 4) -> list[int]:
        """One request, to its end."""
        request = self.add(f"request {len(prompt)} {self.computed}", prompt, wanted)
        self.settle()
        return request.answered

    def reset(self, *, connector: bool = True) -> bool:
        """``reset_prefix_cache``."""
        well = not any(self.users)
        if well:
            self.cached.clear()
            self.names.clear()
        return (self.half.reset() is not False and well) if connector else well

    def flood(self) -> None:
        """Let others have all blocks."""
        self.answer([self.computed % 49, *range(SIZE * len(self.free) - 2)], 1)


class PlayedOnGpu(Played):
    """The same on a GPU, as vLLM has it there: layers of their own, and a stream that lags behind the host.

    As with piecewise CUDA graphs, what lies between two layers is replayed, and the layers are not. What a
    step reads is looked at by the GPU itself, on the stream that computes, so that it is what a model would
    have read; the host learns of it in ``settle``.
    """

    #: Cycles by which each layer of each step is late.
    LATE = 100_000

    def allocate(self, blocks: int) -> dict[str, torch.Tensor]:
        self.computing: Any = torch.cuda.Stream()
        self.wrong = torch.zeros((), dtype=torch.bool, device="cuda")
        self.steps: deque[Any] = deque()
        made = {layer: torch.zeros(blocks, 2, SIZE, 2, 8, device="cuda") for layer in LAYERS}
        torch.cuda.synchronize()
        self.piece = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.piece, stream=self.computing, capture_error_mode="thread_local"):
            torch.cuda._sleep(self.LATE)
        return made

    def stream(self) -> object:
        return self.computing

    def attend(self, tensor: torch.Tensor, request: Request, first: int, last: int) -> None:
        wanted, at = numbers(request.truth[:last], self.weights), range(first, last)
        with torch.cuda.stream(self.computing):
            self.piece.replay()
            there = tensor[_there(request.blocks)].transpose(1, 2).reshape(-1, 2 * 16)
            before = _there(wanted[:first], torch.float32)
            self.wrong |= (there[:first] != before[:, None]).any()
            blocks, slots = _there([request.blocks[token // SIZE] for token in at]), [t % SIZE for t in at]
            tensor[blocks, :, _there(slots)] = _there(wanted[first:], torch.float32)[:, None, None, None]

    def step(self) -> None:
        super().step()
        event = torch.cuda.Event()
        event.record(self.computing)
        self.steps.append(event)
        if len(self.steps) > self.ahead:  # what a step has sampled is needed for the next, or the one after
            self.steps.popleft().synchronize()

    def settle(self, *others: Played) -> None:
        super().settle(*others)
        for side in (self, *others):
            assert isinstance(side, PlayedOnGpu)
            side.computing.synchronize()
            assert not side.wrong.item(), "a request has read another's"


def _there(values: list[Any], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """On the GPU, by a copy that the host doesn't wait for."""
    return torch.tensor(values, dtype=dtype).pin_memory().to("cuda", non_blocking=True)


def warm() -> None:
    """Have CUDA, and torch's pinned memory, begun."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        _there([1]).add_(1)
    torch.cuda.synchronize()
