"""What the doctor says of Python, packages and GPUs."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

from aiokv.doctor.software import EXTRAS, extras, gpu, needed

ROOT = Path(__file__).parents[2]


def test_here_all_that_is_needed_is_there() -> None:
    found = {each.name: each for each in needed()}
    assert {name for name, each in found.items() if each.state != "ok"} == set()
    assert found["python"].required
    assert found["torch"].required


def test_another_python_is_said_to_be_the_wrong_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 14, 0, "final", 0))
    (python,) = (each for each in needed() if each.name == "python")
    assert (python.state, python.required) == ("missing", True)
    assert "3.12" in python.mend


def test_a_package_that_is_not_there_is_named_with_the_command_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    found = {each.name: each for each in needed()}
    assert found["pyzmq"].state == "missing"
    assert found["pyzmq"].mend == "pip install --force-reinstall pyzmq"
    assert found["zmq: curve"].state == "missing"


def test_the_extras_are_those_of_the_package() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra, modules in EXTRAS.items():
        assert sorted(each.partition(">")[0] for each in declared[extra]) == sorted(modules)


def test_an_extra_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXTRAS, "metrics", {"no-such-thing": "no_such_thing"})
    (metrics,) = (each for each in extras() if each.name == "metrics")
    assert metrics.state == "missing"
    assert "no-such-thing" in metrics.found
    assert metrics.mend == "pip install 'aiokv[metrics]'"
    assert not metrics.required


def test_without_a_gpu_it_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (cuda,) = gpu(tmp_path / "driver")
    assert "no driver" in cuda.found
    (tmp_path / "driver").touch()
    monkeypatch.setattr(torch.version, "cuda", None)
    (cuda,) = gpu(tmp_path / "driver")
    assert "without CUDA" in cuda.found
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    (cuda,) = gpu(tmp_path / "driver")
    assert "for CUDA 12.8" in cuda.found
