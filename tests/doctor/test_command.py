"""The doctor at a terminal."""

from __future__ import annotations

import json

import pytest

from aiokv.doctor import command, trial
from aiokv.doctor.command import lines, main
from aiokv.doctor.findings import Finding, Report, missing, ok, weak

REPORT = Report(
    "1.0",
    "Linux 6",
    [
        ok("needed", "python", "3.12", required=True),
        weak("needed", "uvloop", "slower", "pip install uvloop"),
        missing("gpu", "cuda", "no [GPU]"),
    ],
)
BROKEN = Report("1.0", "Linux 6", [missing("needed", "torch", "gone", "pip install torch", required=True)])


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Report:
    monkeypatch.setattr(command, "examine", lambda: request.param)
    report: Report = request.param
    return report


@pytest.mark.parametrize(("found", "status"), [(REPORT, 0), (BROKEN, 1)], indirect=["found"])
@pytest.mark.parametrize("rich", [True, False])
def test_a_table_and_a_status(
    found: Report,
    status: int,
    rich: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda _: rich or None)
    assert main([]) == status
    text = capsys.readouterr().out
    for each in found.findings:
        for said in (each.name, each.state, each.found, each.mend):
            assert said in text
    assert ("aiokv works here" in text) == (status == 0)
    assert ("doesn't work here: torch" in text) == (status == 1)


@pytest.mark.parametrize("found", [BROKEN], indirect=True)
def test_json_has_all_of_it(found: Report, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["aiokv"] == "1.0"
    assert said["findings"] == [
        {
            "topic": "needed",
            "name": "torch",
            "state": "missing",
            "found": "gone",
            "mend": "pip install torch",
            "required": True,
        }
    ]


def test_lines_say_what_mends() -> None:
    assert [line.strip() for line in lines(REPORT) if "to mend" in line] == ["to mend: pip install uvloop"]


def test_all_of_it_on_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json"]) == 0
    said = json.loads(capsys.readouterr().out)["findings"]
    assert {each["topic"] for each in said} == {"needed", "transports", "gpu", "network", "limits", "extras"}
    for each in said:
        assert each["found"], each


def test_a_transfer_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(_: str) -> None:
        raise OSError("no sockets today")

    monkeypatch.setattr(trial, "_moved", fails)
    tcp, shm = trial.trials()
    assert isinstance(tcp, Finding)
    assert "no sockets today" in tcp.found
    assert (tcp.required, shm.required) == (True, False)
