"""Groups of NCCL: real processes on one GPU, or on several."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from aiokv.testing.conformance.ranks import CASES

pytestmark = pytest.mark.gpu

HERE = Path(__file__).parents[1] / "ranks" / "process.py"


@pytest.fixture(scope="module")
def plays(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, dict[str, Any]]]:
    spec = importlib.util.spec_from_file_location("rank_process_of_gpus", HERE)
    process = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(process)
    return process.played(tmp_path_factory.mktemp("ranks"), "nccl-2", "nccl_killed-2")


@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
def test_conformance(plays: dict[str, dict[int, dict[str, Any]]], case: str) -> None:
    for rank, found in plays["nccl-2"].items():
        assert found.get("failed", "") == ""
        assert found.get(case, "was not come to") == "", f"rank {rank}"


def test_the_loss_of_a_rank_raises(plays: dict[str, dict[int, dict[str, Any]]]) -> None:
    found = plays["nccl_killed-2"]
    assert sorted(found) == [0]
    assert found[0].get("failed", "") == ""
    assert found[0]["error"].startswith(("PeerLostError: ", "DeadlineExceeded: "))
    assert found[0]["again"].startswith("PeerLostError: this group of ranks was given up")
