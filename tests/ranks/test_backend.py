"""Which process groups will do. Groups are made in this process alone; real ones are in ``test_gloo.py``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from aiokv.errors import ClosedError, DeviceError
from aiokv.ranks.backend import backends_of, collective_of
from aiokv.testing.ranks import MemoryRanks


@pytest.fixture
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_what_reduces_already_is_taken_as_it_is() -> None:
    collective = MemoryRanks(1).collective(0)
    assert collective_of(collective) is collective


def test_without_a_default_group_it_says_how_to_make_one() -> None:
    with pytest.raises(ClosedError, match="init_process_group"):
        collective_of(None)


def test_without_torch_distributed_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="without torch.distributed"):
        collective_of(None)


@pytest.mark.usefixtures("world")
def test_the_default_group_is_one_of_gloo() -> None:
    collective = collective_of(None)
    assert (collective.rank, collective.size) == (0, 1)
    assert type(collective).__name__ == "GlooCollective"
    assert backends_of(dist.group.WORLD)["cpu"] == "gloo"
    collective.close()
    with pytest.raises(ClosedError):
        collective.reduce(1)


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("odd", [3, "gloo", object()])
def test_what_is_no_process_group_is_refused(odd: object) -> None:
    with pytest.raises(TypeError, match="a process group that this process is in"):
        collective_of(odd)  # type: ignore[arg-type]


@pytest.mark.usefixtures("world")
def test_other_backends_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:mpi,cuda:ucc")
    with pytest.raises(ValueError, match="gloo or NCCL, this one has mpi for cpu, ucc for cuda"):
        collective_of(None)


@pytest.mark.usefixtures("world")
def test_a_group_of_nccl_is_reduced_on_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import aiokv.ranks.nccl

    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
    made = MemoryRanks(1).collective(0)
    monkeypatch.setattr(aiokv.ranks.nccl, "NcclCollective", lambda group: made)
    assert collective_of(None) is made
