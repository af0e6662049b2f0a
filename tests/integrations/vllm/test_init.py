from __future__ import annotations

import subprocess
import sys

import pytest

import aiokv.integrations.vllm

WITHOUT = """
import sys
sys.modules["vllm"] = None
import aiokv.integrations.vllm
try:
    aiokv.integrations.vllm.AioKVConnector
except ImportError as error:
    print(error)
"""


def test_without_vllm_it_says_what_is_missing() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=True)
    assert "made for vLLM 0.32" in done.stdout


def test_there_is_nothing_else() -> None:
    with pytest.raises(AttributeError, match="xyzzy"):
        aiokv.integrations.vllm.xyzzy  # noqa: B018
