"""What the command lines of the pair take, refuse and say."""

from __future__ import annotations

import os
import re

import pytest

pytest.importorskip("transformers", reason="the examples need the extra: pip install 'aiokv[examples]'")

import decode
import pair
import prefill
import torch

from serving.options import start

PARSED = {"prefill": prefill.parsed, "decode": decode.parsed, "pair": pair.parsed}

REFUSED = [
    (
        "prefill",
        "--listen=127.0.0.1:99999",
        "--listen: '127.0.0.1:99999': '99999' is not a port, which is 0 to 65535",
    ),
    ("prefill", "--listen=127.0.0.1:-1", "--listen: '127.0.0.1:-1': '-1' is not a port"),
    ("prefill", "--listen=7001", "--listen: '7001' is not host:port"),
    ("prefill", "--listen=:7001", "--listen: ':7001' is not host:port"),
    ("decode", "--listen=localhost:http", "--listen: 'localhost:http': 'http' is not a port"),
    ("decode", "--prefill=127.0.0.1:0", "--prefill: '127.0.0.1:0': '0' is not a port, which is 1 to 65535"),
    ("decode", "--prompt=Hi", "one of the arguments --listen --prefill is required"),
    ("decode", "--listen=127.0.0.1:0 --prefill=127.0.0.1:1", "--prefill: not allowed with argument --listen"),
    ("decode", "--listen=127.0.0.1:0 --prompt=Hi", "--prompt: not allowed with argument --listen"),
    ("decode", "--prefill=127.0.0.1:1 --with-parent", "--with-parent: standard input is read for prompts"),
    ("decode", "--prefill=127.0.0.1:1 --limit=0", "--limit: '0' is not a whole number from 1 on"),
    ("prefill", "--deadline=0", "--deadline: '0' is not a number of seconds above 0"),
    ("prefill", "--deadline=nan", "--deadline: 'nan' is not a number of seconds above 0"),
    ("pair", "--blocks=few", "--blocks: 'few' is not a whole number from 1 on"),
    ("pair", "--tp=0", "--tp: '0' is not a whole number from 1 on"),
    ("pair", "--tp=2 --trace=a.json", "--tp: without --trace"),
    ("pair", "--device=gpu", "'gpu' is neither cpu nor cuda nor cuda:N"),
    ("pair", "--limit=-1", "--limit: '-1' is not a whole number from 1 on"),
]


@pytest.mark.parametrize(("script", "line", "why"), REFUSED, ids=lambda text: text[:40])
def test_what_can_not_be_meant_is_refused(
    script: str, line: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        PARSED[script](line.split())
    assert ended.value.code == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize("script", PARSED)
def test_help_says_each_default(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        PARSED[script](["--help"])
    text = " ".join(capsys.readouterr().out.split())
    described = re.split(r" (?=--[a-z-]+ )", text.split(" options: ")[1])
    options = [each for each in described if not each.startswith(("-h", "--help"))]
    assert len(options) >= 6
    for each in options:
        assert "(default: " in each, each
        assert "(default: None" not in each


@pytest.mark.parametrize("script", ["prefill", "decode"])
def test_help_says_how_to_use_two_hosts(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        PARSED[script](["--help"])
    text = capsys.readouterr().out
    assert "prefill.py --keys DIR --listen HOST:7001 --bind tcp://HOST:7002\n" in text
    assert "decode.py --keys DIR --bind tcp://OTHER:0 --prefill HOST:7001\n" in text


@pytest.mark.parametrize("script", PARSED)
def test_a_gpu_that_is_not_there_is_said_before_anything_is_loaded(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    line = ["--device=cuda"] + (["--listen=127.0.0.1:0"] if script == "decode" else [])
    options = PARSED[script](line)
    assert (pair.start(options) if script == "pair" else start(unwanted, options)) == 2
    assert "--device cuda: torch" in capsys.readouterr().err


async def unwanted(*_: object) -> int:
    raise AssertionError("it was started")


@pytest.mark.parametrize(("one_gpu", "line", "hosts"), [
    (True, "--transport=nccl", 2), (True, "--transport=shm", 0), (False, "--transport=nccl", 0)
])  # fmt: skip
def test_two_processes_on_one_gpu_pass_for_two_hosts(
    one_gpu: bool, line: str, hosts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    found = {pair.environment(script, [line], one_gpu=one_gpu).get("NCCL_HOSTID") for script in pair.SCRIPTS}
    assert len(found - {None}) == hosts
    assert "NCCL_HOSTID" not in os.environ
