from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


def beside(name: str) -> ModuleType:
    """A module beside this file."""
    spec = importlib.util.spec_from_file_location(
        f"aiokv_vllm_{name}", Path(__file__).with_name(f"{name}.py")
    )
    assert spec is not None
    assert spec.loader is not None
    if spec.name in sys.modules:
        return sys.modules[spec.name]
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def real() -> ModuleType:
    """Real vLLMs in processes of their own."""
    return beside("real")


@pytest.fixture(scope="session")
def model(real: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The model of most of them."""
    made: str = real.make_model(tmp_path_factory.mktemp("model"))
    return made


@pytest.fixture(scope="session")
def lone(real: ModuleType, model: str) -> Iterator[Any]:
    """A vLLM without a connector; it sleeps unless it is asked."""
    with real.started(model) as instance:
        yield instance


@pytest.fixture(scope="module")
def alone(request: pytest.FixtureRequest, lone: Any) -> dict[str, list[list[int]]]:
    """What that answers to each of the module's ``PROMPTS``."""
    prompts: dict[str, list[list[int]]] = request.module.PROMPTS
    return {key: lone.answers(each, [None] * len(each)) for key, each in prompts.items()}


@pytest.fixture(scope="session")
def windows() -> ModuleType:
    """A vLLM that is played, whose model has a sliding window beside full attention."""
    beside("played")
    return beside("windows")


@pytest.fixture(scope="session", params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def played(request: pytest.FixtureRequest) -> SimpleNamespace:
    """A vLLM that is played."""
    found = SimpleNamespace(**vars(beside("played")))
    if request.param == "gpu":
        found.Played = found.PlayedOnGpu
        found.warm()  # what CUDA keeps from its first use on is not left behind by the test that is first
    return found


@pytest.fixture
def make(played: SimpleNamespace) -> Iterator[Callable[..., Any]]:
    """Makes instances of it, and closes them; tests of a tier have one of their own."""
    made = []

    def one(name: str, **more: object) -> Any:
        made.append(played.Played(name, **more))
        return made[-1]

    yield one
    for each in made:
        each.worker.close()
