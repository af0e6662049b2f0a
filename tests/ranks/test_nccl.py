"""Reduction by NCCL, on CUDA and a torch that are played by host memory."""

from __future__ import annotations

import asyncio
import importlib.util
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch.distributed

from aiokv.errors import ClosedError, DeadlineExceeded, DeviceError, PeerLostError
from aiokv.ranks import Blocks, Hit, Miss, RankGroup
from aiokv.ranks.nccl import NcclCollective
from aiokv.ranks.vector import LENGTH
from aiokv.testing.conformance.ranks import CASES
from aiokv.testing.ranks import MemoryRanks

spec = importlib.util.spec_from_file_location("rank_faketorch", Path(__file__).with_name("faketorch.py"))
fake = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fake)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Process groups that were destroyed; all others are registered with torch."""
    destroyed: list[object] = []

    def get_backend(group: object) -> str:
        if group in destroyed:
            raise ValueError("Process group is not initialized in the world group map.")
        return "nccl"

    monkeypatch.setattr(torch.distributed.distributed_c10d, "get_backend", get_backend)
    return destroyed


class Rank:
    def __init__(self, ranks: MemoryRanks, rank: int, bound: int | None = None, guard: Any = None) -> None:
        self.torch = fake.FakeTorch()
        self.process_group = fake.FakeGroup(self.torch, ranks, rank, bound)
        self.collective = NcclCollective(self.process_group, torch=self.torch, guard=guard or nullcontext())
        self.group = RankGroup(self.collective)

    @property
    def stream(self) -> Any:
        return self.torch.streams[0]


@contextmanager
def several(size: int) -> Iterator[list[Rank]]:
    ranks = MemoryRanks(size)
    found = [Rank(ranks, rank) for rank in range(size)]
    try:
        yield found
    finally:
        for each in found:
            each.group.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
async def test_conformance(case: Any) -> None:
    with several(3) as ranks:
        await asyncio.gather(*(case(rank.group) for rank in ranks))


@pytest.mark.asyncio
async def test_one_copy_each_way_on_a_side_stream_of_the_groups_own_gpu() -> None:
    rank = Rank(MemoryRanks(1), 0, bound=5)
    with rank.group as group:
        assert await group.agree([Hit(Blocks(3))]) == [Hit(Blocks(3))]
        assert rank.stream.device == "cuda:5"
        pinned, gpu = rank.torch.tensors
        assert (pinned.place, gpu.place) == ("pinned", "cuda:5")
        assert gpu.streams == [rank.stream]
        rank.stream.held = True
        second = asyncio.ensure_future(group.agree([Miss()]))
        await asyncio.sleep(0)
        # There, reduced, back, and the event: nothing else, and nothing new was allocated.
        assert len(rank.stream.queue) == 4
        assert len(rank.torch.tensors) == 2
        assert len(pinned.array) == len(gpu.array) == LENGTH
        rank.stream.held = False
        assert await second == [Miss()]


@pytest.mark.asyncio
async def test_without_a_bound_device_the_current_one_counts() -> None:
    rank = Rank(MemoryRanks(1), 0)
    assert rank.collective.place == "cuda:3"
    rank.group.close()


@pytest.mark.asyncio
async def test_whoever_looks_at_an_event_breaks_no_capture() -> None:
    depth = 0

    class Guard:
        def __enter__(self) -> None:
            nonlocal depth
            depth += 1

        def __exit__(self, *_: object) -> None:
            nonlocal depth
            depth -= 1

    rank = Rank(MemoryRanks(1), 0, guard=Guard())
    query = fake.FakeEvent.query
    looks: list[int] = []
    rank.collective._event.query = lambda: (looks.append(depth), query(rank.collective._event))[1]
    for _ in range(3):
        await rank.group.agree([Miss()])
    rank.stream.held = True
    with pytest.raises(DeadlineExceeded):
        await rank.group.agree([Miss()], deadline=0.01)
    assert looks and all(looks)
    assert not depth
    rank.group.close()


@pytest.mark.asyncio
async def test_the_first_time_it_connects_off_the_loop() -> None:
    with several(2) as ranks:
        for _ in range(3):
            await asyncio.gather(*(rank.group.agree([Miss()]) for rank in ranks))
        here = threading.get_ident()
        for rank in ranks:
            first, *later = rank.process_group.threads
            assert first != here
            assert set(later) == {here}


@pytest.mark.asyncio
@pytest.mark.parametrize("first", [True, False])
async def test_what_nccl_refuses_is_a_lost_rank(first: bool) -> None:
    with several(1) as (rank,):
        if not first:
            await rank.group.agree([Miss()])
        rank.process_group.failing = RuntimeError("unhandled system error")
        with pytest.raises(PeerLostError, match="NCCL: unhandled system error"):
            await rank.group.agree([Miss()])


@pytest.mark.asyncio
async def test_what_nobody_expects_while_connecting_is_a_device_error() -> None:
    with several(1) as (rank,):
        rank.process_group.failing = KeyError("surprise")
        with pytest.raises(PeerLostError, match="surprise") as caught:
            await rank.group.agree([Miss()])
        assert isinstance(caught.value.__cause__, DeviceError)


@pytest.mark.asyncio
async def test_events_of_an_aborted_communicator_are_no_answer() -> None:
    with several(2) as ranks:
        await asyncio.gather(*(rank.group.agree([Miss()]) for rank in ranks))
        waiting = asyncio.ensure_future(ranks[0].group.agree([Hit(Blocks(3))]))
        await asyncio.sleep(0.01)
        ranks[0].process_group.state = "REMOTE_ERROR"
        with pytest.raises(PeerLostError, match="NCCL reports remote error"):
            await waiting


@pytest.mark.asyncio
async def test_a_reduction_that_was_cut_short_is_no_answer() -> None:
    with several(2) as ranks:
        await asyncio.gather(*(rank.group.agree([Miss()]) for rank in ranks))
        waiting = asyncio.ensure_future(ranks[1].group.agree([Hit(Blocks(3))]))
        await asyncio.sleep(0)
        # Its own vector comes back, as if all had brought the same; and NCCL knows of nothing.
        assert len(ranks[1].stream.queue) == 3
        ranks[1].stream.queue.popleft()
        with pytest.raises(PeerLostError, match="ranks 1 to 1 came into a reduction over 2 ranks"):
            await waiting


@pytest.mark.asyncio
async def test_after_a_deadline_nothing_is_looked_at_any_more() -> None:
    with several(2) as ranks:
        await asyncio.gather(*(rank.group.agree([Miss()]) for rank in ranks))
        with pytest.raises(DeadlineExceeded):
            await ranks[0].group.agree([Miss()], deadline=0.01)
        assert ranks[0].stream.queue
        with pytest.raises(ClosedError, match="let go of"):
            ranks[0].collective.reduce(1)
        with pytest.raises(DeviceError, match="let go of"):
            ranks[0].collective.check()


@pytest.mark.asyncio
async def test_an_event_that_fails_is_a_device_error() -> None:
    with several(1) as (rank,):
        await rank.group.agree([Miss()])
        rank.stream.queue.append(lambda: (_ for _ in ()).throw(RuntimeError("an illegal memory access")))
        with pytest.raises(PeerLostError, match="CUDA: an illegal memory access"):
            await rank.group.agree([Miss()])


@pytest.mark.asyncio
async def test_a_group_that_was_destroyed_is_closed(registered: list[object]) -> None:
    with several(1) as (rank,):
        await rank.group.agree([Miss()])
        registered.append(rank.process_group)
        with pytest.raises(ClosedError, match="destroyed"):
            await rank.group.agree([Miss()])


def test_without_a_gpu_it_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    group = fake.FakeGroup(fake.FakeTorch(), MemoryRanks(1), 0)
    with pytest.raises(DeviceError, match="the GPU of an NCCL group can't be used"):
        NcclCollective(group)
