"""The benchmark with real vLLMs, as quick as it can be."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_it_measures_a_pair_beside_one_alone(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    subprocess.run(
        [sys.executable, "-m", "aiokv.bench", "vllm", "--quick", "--json", str(found)],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    told = json.loads(found.read_text())
    assert told["ratios"]["vllm.ttft_over_alone"]["value"] > 0
    assert {"one alone", "a pair by aiokv"} <= {row.get("who") for row in told["rows"]}
    assert "build_connector_meta" in {row.get("hook") for row in told["rows"]}
