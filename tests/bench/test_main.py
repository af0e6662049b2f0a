"""Each benchmark runs, quickly, and gives the figures that it says it gives. Nothing here looks at a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("rich", reason="the benchmarks need the extra: pip install 'aiokv[bench]'")

from aiokv.bench.__main__ import main
from aiokv.bench.figures import Spread
from aiokv.bench.registry import load, names
from aiokv.bench.report import Goal, Report

LISTED = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text()


@pytest.mark.parametrize("name", names())
@pytest.mark.timeout(120)
def test_it_runs(name: str, tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    assert main([name, "--quick", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    goals = load(name).goals
    assert {*found["ratios"], *found["absent"]} == set(goals)
    for ratio in found["ratios"].values():
        assert set(ratio) == {"value", "goal", "better", "spread"}
    # What can be measured here is missing only where the machine was too busy to tell.
    for why in found["absent"].values():
        assert "failed" not in why
        assert why != "not measured"
    if not load(name).missing():
        assert found["rows"]


@pytest.mark.parametrize("name", names())
def test_each_figure_is_in_the_docs(name: str) -> None:
    for figure, goal in load(name).goals.items():
        assert f"`{figure}`" in LISTED
        assert figure.startswith(f"{name}.")
        assert goal.better in ("higher", "lower")


@pytest.mark.parametrize("name", names())
def test_each_says_what_it_measures(name: str) -> None:
    assert load(name).about


def test_what_was_written_is_shown_and_written_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = Report({"cpu": "a CPU"})
    report.begin("latency", {"latency.some": Goal(3, "lower"), "latency.none": Goal(None, "lower")})
    report.row("a table", {"what": "an echo", "us": Spread.of([1.0, 2.0, 9.0])})
    report.ratio("latency.some", [2.0, 2.5])
    report.end()
    file = tmp_path / "found.json"
    file.write_text(report.to_json())
    assert Report.of_json(report.to_json()).to_json() == report.to_json()
    assert main(["latency", "--from", str(file)]) == 0
    assert "an echo" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"machine": {}, "rows": [1], "ratios": {}, "absent": {}}'])
def test_what_is_no_report_is_refused(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "other.json"
    file.write_text(text)
    with pytest.raises(SystemExit):
        main(["latency", "--from", str(file)])
    assert f"--from {file}" in capsys.readouterr().err


def test_one_that_fails_stops_no_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from aiokv.bench import __main__ as program
    from aiokv.bench.registry import Benchmark, Options

    goals = {"good.figure": Goal(1, "lower"), "bad.figure": Goal(1, "lower"), "gpu.figure": Goal(1, "lower")}

    def made(name: str, device: str) -> Benchmark:
        def run(report: Report, options: Options) -> None:
            if name == "bad":
                raise OSError("no such thing")
            report.ratio("good.figure", [0.5])

        own = {figure: goal for figure, goal in goals.items() if figure.startswith(name)}
        return Benchmark(name, name, own, lambda: "no GPU" if name == "gpu" else "", run)

    monkeypatch.setattr(program, "names", lambda device="host": ["bad", "good", "gpu"])
    monkeypatch.setattr(program, "load", made)
    file = tmp_path / "found.json"
    assert main(["all", "--json", str(file)]) == 1
    found = json.loads(file.read_text())
    assert list(found["ratios"]) == ["good.figure"]
    assert found["absent"]["gpu.figure"] == "no GPU"
    assert "no such thing" in found["absent"]["bad.figure"]


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from aiokv.bench import __main__ as program

    monkeypatch.setattr(program, "load", lambda *_: pytest.fail("something is measured"))
    for file in (tmp_path / "none" / "found.svg", tmp_path):
        with pytest.raises(SystemExit):
            main(["transfer", option, str(file)])
        said = capsys.readouterr().err
        assert f"{option} {file} can't be written" in said
        assert said.startswith("usage: python -m aiokv bench ")
