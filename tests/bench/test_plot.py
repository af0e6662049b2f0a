"""The picture of a report. Drawn in a process of its own: matplotlib keeps its font files open."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import aiokv

pytest.importorskip("matplotlib", reason="plots need the extra: pip install 'aiokv[bench]'")

DRAW = """
import sys
from aiokv.bench.plot import write
from aiokv.bench.report import Goal, Report
report = Report({"cpu": "a CPU", "cores": 2, "aiokv": "0"})
report.begin("latency", {"latency.some": Goal(3, "lower"), "latency.none": Goal(0, "lower")})
report.row("a table", {"us": 1.0})
report.ratio("latency.some", [2.0])
report.ratio("latency.none", [0])
write(report, sys.argv[1], {"latency": lambda axes, rows: axes.plot([each["us"] for each in rows])})
"""


def test_it_is_drawn(tmp_path: Path) -> None:
    file = tmp_path / "picture.svg"
    env = os.environ | {"PYTHONPATH": str(Path(aiokv.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", DRAW, str(file)], env=env, check=True)
    assert file.read_text().lstrip().startswith("<?xml")
    assert file.stat().st_size > 1000
