"""The fleet: every request ends, also those of servers that are killed in the middle."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import aiokv

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("transformers", "aiohttp", "openai")),
    reason="the fleet needs the extras examples and router, and openai",
)

FLEET = Path(__file__).parents[2] / "examples" / "fleet.py"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_request_ends() -> None:
    done = subprocess.run(
        [sys.executable, str(FLEET), "--model", "tiny-random", "--requests", "24"],
        env={**os.environ, "PYTHONPATH": str(Path(aiokv.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert re.search(r"24 requests ended: \d+ answered right", done.stdout)
    assert re.search(r"0\s+wrong, 0\s+late", done.stdout)
