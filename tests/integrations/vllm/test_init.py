from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import aiokv.integrations.vllm

ASK = """
import aiokv.integrations.vllm
try:
    aiokv.integrations.vllm.AioKVConnector
except ImportError as error:
    print(error)
"""


def said(program: str = ASK, folder: Path | None = None) -> str:
    """What a new process says that has the packages in a folder."""
    paths = [str(folder)] if folder else []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment
    )
    return done.stdout


def with_vllm(folder: Path, version: str) -> str:
    """The same with a vLLM that has a version, and nothing else."""
    package = folder / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text(f"__version__ = {version!r}\n")
    return said(folder=folder)


def test_without_vllm_it_says_what_is_missing() -> None:
    told = said('import sys\nsys.modules["vllm"] = None' + ASK)
    assert "made for vLLM 0.32 and 0.33, which isn't here" in told


def test_an_old_vllm_is_refused(tmp_path: Path) -> None:
    assert "made for vLLM 0.32 and 0.33; this is 0.31.0, which is older" in with_vllm(tmp_path, "0.31.0")


def test_one_that_differs_is_refused(tmp_path: Path) -> None:
    told = with_vllm(tmp_path, "0.34.0")
    assert "made for vLLM 0.32 and 0.33; this is 0.34.0, which differs: No module named 'vllm." in told


def test_there_is_nothing_else() -> None:
    with pytest.raises(AttributeError, match="xyzzy"):
        aiokv.integrations.vllm.xyzzy  # noqa: B018
