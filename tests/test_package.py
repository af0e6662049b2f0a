"""Importing aiokv does nothing but define names, and each of them is documented."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import aiokv
import aiokv.errors

# torch comes first: what it does when imported is not ours to answer for.
SEEN_ON_IMPORT = """
import asyncio, json, os, sys, torch

def seen():
    return {
        "environment": dict(os.environ),
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "policy": repr(type(asyncio.get_event_loop_policy())),
        "cuda": torch.cuda.is_initialized(),
        "torch": repr([torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled()]),
    }

before = seen()
import aiokv
print(json.dumps([before, seen(), sorted(sys.modules)]))
"""


@pytest.fixture(scope="module")
def imported() -> tuple[dict[str, object], dict[str, object], list[str]]:
    """The process before and after the import, and all modules it then has."""
    done = subprocess.run(
        [sys.executable, "-c", SEEN_ON_IMPORT],
        env={**os.environ, "PYTHONPATH": str(Path(aiokv.__file__).parents[1])},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    )
    before, after, modules = json.loads(done.stdout)
    return before, after, modules


def test_import_changes_nothing(imported: tuple[dict[str, object], dict[str, object], list[str]]) -> None:
    before, after, _ = imported
    assert after == before


@pytest.mark.parametrize("module", ["aiohttp", "aiozmq", "cupy", "prometheus_client", "transformers", "zmq"])
def test_import_brings_no_optional_or_slow_module(
    imported: tuple[dict[str, object], dict[str, object], list[str]], module: str
) -> None:
    assert module not in imported[2]


def test_import_brings_no_test_kit(
    imported: tuple[dict[str, object], dict[str, object], list[str]],
) -> None:
    assert [name for name in imported[2] if name.startswith(("aiokv.testing", "aiokv.bench"))] == []


@pytest.mark.parametrize("name", aiokv.__all__)
def test_public_name_is_documented(name: str) -> None:
    public = getattr(aiokv, name)
    if not (inspect.isclass(public) or inspect.isroutine(public) or inspect.ismodule(public)):
        pytest.skip("a constant or an alias is documented by a comment")
    # A dataclass that has no docstring is given its signature for one.
    assert not (public.__doc__ or f"{name}(").startswith(f"{name}("), f"aiokv.{name} has no docstring"


@pytest.mark.parametrize("public", [aiokv.Progress, aiokv.Settings, aiokv.Statistics])
def test_help_explains_every_field(public: type) -> None:
    text = inspect.cleandoc(public.__doc__ or "")
    for field in dataclasses.fields(public):
        assert re.search(rf"^    {field.name}: \S", text, re.MULTILINE), field.name


def test_every_error_is_public() -> None:
    assert set(aiokv.errors.__all__) <= set(aiokv.__all__)


def test_types_are_published() -> None:
    assert Path(aiokv.__file__).with_name("py.typed").is_file()


def test_version_is_that_of_the_package() -> None:
    try:
        installed = importlib.metadata.version("aiokv")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("aiokv runs from its source tree here")
    assert aiokv.__version__ == installed
