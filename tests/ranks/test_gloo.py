"""Real groups of gloo: processes that agree, are killed, and never come."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from aiokv.testing.conformance.ranks import CASES

spec = importlib.util.spec_from_file_location("rank_process", Path(__file__).with_name("process.py"))
process = importlib.util.module_from_spec(spec)
spec.loader.exec_module(process)

Found = dict[int, dict[str, Any]]

SIZES = [1, 2, 4, pytest.param(8, marks=pytest.mark.slow)]
PLAYS = ("suite-1", "suite-2", "suite-4", "killed-2", "killed-4", "never-3", "destroyed-2", "default-2")


@pytest.fixture(scope="module")
def plays(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    """What each rank found in each play: what takes long, importing torch, is done once."""
    return process.played(tmp_path_factory.mktemp("ranks"), *PLAYS)


@pytest.fixture(scope="module", params=SIZES)
def suite(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    name = f"suite-{request.param}"
    if name in PLAYS:
        return request.getfixturevalue("plays")[name]
    return process.played(tmp_path_factory.mktemp("many"), name)[name]


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
def test_conformance(suite: Found, case: str, loop: str) -> None:
    for rank, found in suite.items():
        assert found.get("failed", "") == ""
        assert found.get(f"{loop}-{case}", "was not come to") == "", f"rank {rank}"


@pytest.mark.parametrize("size", [2, 4])
def test_the_loss_of_a_rank_is_told_to_all_others_at_once(plays: dict[str, Found], size: int) -> None:
    found = plays[f"killed-{size}"]
    assert sorted(found) == list(range(size - 1))
    for result in found.values():
        assert "a rank was lost, or the way to it: gloo: " in result["error"]
        assert result["again"].startswith("PeerLostError: this group of ranks was given up")
        # Those that are left agree among themselves, in a new group.
        assert (result["agreed"], result["ranks"]) == (5, size - 1)


def test_a_rank_that_never_comes_costs_the_deadline(plays: dict[str, Found]) -> None:
    found = plays["never-3"]
    assert found[0] == {}
    assert sorted(found) == [0, 1, 2]
    for rank in (1, 2):
        assert "not all ranks came to a batch of 3 requests within 1 s" in found[rank]["error"]
        assert found[rank]["again"].startswith("PeerLostError: this group of ranks was given up")


def test_a_group_that_was_destroyed_is_refused(plays: dict[str, Found]) -> None:
    for result in plays["destroyed-2"].values():
        assert result["again"].startswith("ClosedError: the process group was destroyed")
        assert result["made"].startswith("the process group was destroyed")


def test_the_default_group_and_one_without_this_process(plays: dict[str, Found]) -> None:
    found = plays["default-2"]
    assert found[0] == {"agreed": 2}
    assert found[1]["agreed"] == 2
    assert "a process group that this process is in" in found[1]["error"]
