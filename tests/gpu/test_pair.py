"""The pair of examples on a GPU, by each transport."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the examples need the extra: pip install 'aiokv[examples]'")

pytestmark = [pytest.mark.gpu, pytest.mark.may_block("it waits for another process")]

PAIR = Path(__file__).parents[2] / "examples" / "pair.py"


@pytest.mark.parametrize("transport", ["cuda_ipc", "nccl", "shm", "tcp"])
def test_two_processes_answer_as_one_does(transport: str) -> None:
    line = [sys.executable, str(PAIR), "--device=cuda", f"--transport={transport}", "--model=tiny-random"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300, check=False)
    assert "equal: all 4 answers" in done.stdout, done.stdout + done.stderr
    # Whether a layer lands before so small a model has computed the rest is a matter of time, and not tested.
    assert done.returncode == 0 or "NOT OVERLAPPED" in done.stdout, done.stdout + done.stderr
    assert transport in done.stdout
