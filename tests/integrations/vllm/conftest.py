from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest


def beside(name: str) -> ModuleType:
    """A module beside this file."""
    spec = importlib.util.spec_from_file_location(
        f"aiokv_vllm_{name}", Path(__file__).with_name(f"{name}.py")
    )
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def real() -> ModuleType:
    """Real vLLMs in processes of their own."""
    return beside("real")


@pytest.fixture(scope="session", params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def played(request: pytest.FixtureRequest) -> SimpleNamespace:
    """A vLLM that is played."""
    found = SimpleNamespace(**vars(beside("played")))
    if request.param == "gpu":
        found.Played = found.PlayedOnGpu
        found.warm()  # what CUDA keeps from its first use on is not left behind by the test that is first
    return found
