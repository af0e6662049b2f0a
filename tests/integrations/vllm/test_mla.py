"""Latent attention (MLA): each rank keeps the same vector of a token, in tensors without heads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from aiokv.blocking.thread import LoopThread
from aiokv.device.cache import KVCache
from aiokv.integrations.vllm.keeping import Keeping
from aiokv.integrations.vllm.layout import Group, cache_layout, rank_heads
from aiokv.integrations.vllm.leaving import Leaving
from aiokv.integrations.vllm.orders import Blocks, Keep, Orders, Recall
from aiokv.integrations.vllm.scheduler import SchedulerHalf
from aiokv.integrations.vllm.settings import ConnectorSettings
from aiokv.integrations.vllm.stretches import Stretches
from aiokv.integrations.vllm.worker import WorkerHalf
from aiokv.offload.sharing.owner import HostPool

SIZE, BLOCKS, LATENT = 16, 12, 24
LAYERS = ("layers.0", "layers.1", "layers.2")


class Request:
    def __init__(self, params: dict[str, Any]) -> None:
        self.request_id = "r"
        self.num_prompt_tokens = self.num_computed_tokens = 5 * SIZE
        self.kv_transfer_params = params


class Side:
    """An instance of some ranks; on a CPU vLLM's tensors have an axis for the only head."""

    def __init__(self, ranks: int, *, head: bool = False, **extra: object) -> None:
        self.tensors = [torch.zeros(len(LAYERS), BLOCKS, SIZE, LATENT) for _ in range(ranks)]
        settings = ConnectorSettings.read({"transports": ["tcp"], "hold": 20, "load_timeout": 20, **extra})
        self.workers = []
        for rank, storage in enumerate(self.tensors):
            layout, tensors = cache_layout(
                [Group(LAYERS, SIZE, 1, LATENT, "mla")],
                dict(zip(LAYERS, storage.unsqueeze(2) if head else storage, strict=True)),
                heads=rank_heads(1, ranks, rank),
                total_heads=1,
                model=b"latent",
            )
            self.workers.append(WorkerHalf(KVCache.from_tensors(layout, tensors), settings, rank, ranks))
        self.half = SchedulerHalf([SIZE], Leaving([SIZE], "side", hold=settings.hold))
        self.half.leaving.addresses = tuple(worker.address for worker in self.workers)

    def begin(self) -> None:
        orders = self.half.orders()
        for worker in self.workers:
            worker.before(orders)
            worker.carry_out(orders)
            worker.computed(orders)

    def close(self) -> None:
        for worker in self.workers:
            worker.close()


@pytest.fixture
def make() -> Iterator[Callable[..., Side]]:
    with ExitStack() as stack:

        def one(ranks: int, **extra: object) -> Side:
            made = Side(ranks, **extra)
            stack.callback(made.close)
            return made

        yield one


def until(reached: Callable[[], bool]) -> None:
    pause = threading.Event()
    while not reached():
        pause.wait(0.001)


@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_from_any_ranks_to_any(make: Callable[..., Side], prefill: int, decode: int) -> None:
    """Each rank of the decode side gets all of it once, and each of the prefill side is done then."""
    left, right = make(prefill, head=True, decode_ranks=decode), make(decode)
    content = torch.rand(len(LAYERS), 5, SIZE, LATENT)
    for tensors in left.tensors:
        tensors[:, 3:8] = content
    _, said = left.half.finished(
        Request({"do_remote_decode": True}),
        [[3, 4, 5, 6, 7]],
        complete=True,  # type: ignore[list-item]
    )
    assert said is not None
    left.begin()
    request = Request(said)
    assert right.half.matched(request, SIZE) == 4 * SIZE
    right.half.allocated(request, [[2, 7, 1, 10, 9]], 4 * SIZE)
    right.begin()
    loads: list[tuple[float, int]] = []
    for worker in right.workers:
        ends = _ends(worker)
        assert (ends["loaded"], ends["failed"]) == ({"r"}, {})
        loads += ends["loads"]
    for worker in left.workers:
        ends = _ends(worker)
        assert (ends["sent"], ends["unsent"]) == ({"r"}, 0)
    block = len(LAYERS) * SIZE * LATENT * 4
    assert [size for _, size in loads] == [4 * block] * decode
    for tensors in right.tensors:
        assert torch.equal(tensors[:, [7, 1, 10, 9]], content[:, 1:])
        assert not tensors[:, 2].any(), "it was there already"


def _ends(worker: WorkerHalf) -> dict[str, Any]:
    found: list[Any] = []

    def ended() -> bool:
        outcome = worker.outcome()
        found.append(outcome)
        return outcome is not None and bool(outcome.loaded or outcome.sent)

    until(ended)
    return {name: getattr(found[-1], name) for name in ("loaded", "failed", "loads", "sent", "unsent")}


def test_ranks_share_what_is_in_a_pool(make: Callable[..., Side], tmp_path: Path) -> None:
    """The latent vector is the same on all of them, and is there once."""
    thread = LoopThread("pool")
    pool = HostPool(tmp_path / "pool", 1 << 20)
    thread.run(pool.__aenter__())
    try:
        side = make(2, host_pool=pool.path)
        assert side.workers[0].digest == side.workers[1].digest
        content = torch.rand(len(LAYERS), 3, SIZE, LATENT)
        for tensors in side.tensors:
            tensors[:, 3:6] = content
        tier = Keeping(Stretches([SIZE]), 2)
        keep = Keep(1, (b"a", b"b", b"c"), ((3, 4, 5),), None)
        for worker in side.workers:
            worker.computed(Orders(keeps=[keep]))
        for worker in side.workers:
            news: list[Any] = []
            until(lambda worker=worker, news=news: bool(news.append(worker.news()) or news[-1]))
            assert [change.count for change in news[-1].changes] == [3]
            tier.told(news[-1])
        assert pool.statistics().places_used == 3
        recall = Recall("r", keep.hashes, 0, (Blocks(0, (8, 9, 10)),))
        for worker in side.workers:
            worker.carry_out(Orders(recalls=[recall]))
            assert _ends(worker)["loaded"] == {"r"}
        for tensors in side.tensors:
            assert torch.equal(tensors[:, 8:11], content)
        side.close()
    finally:
        thread.run(pool.aclose())
        thread.close()
