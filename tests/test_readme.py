"""What the README shows can be copied and run."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import aiokv

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()

CODE = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
TYPED = [
    line.partition("  #")[0].strip()
    for block in re.findall(r"^```sh\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
]


def test_code_is_from_an_example() -> None:
    examples = [path.read_text() for path in ROOT.glob("examples/**/*.py")]
    assert CODE
    for block in CODE:
        assert any(block in example for example in examples), f"in no example:\n{block}"


@pytest.mark.parametrize("code", CODE)
def test_code_runs_as_it_is_copied(code: str, tmp_path: Path) -> None:
    (tmp_path / "copied.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "copied.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(aiokv.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "equal"


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="the examples need the extra: pip install 'aiokv[examples]'",
)
@pytest.mark.parametrize("script", ["prefill", "decode"])
def test_examples_take_what_is_typed_by_hand(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    module = importlib.import_module(script)
    lines = [line for line in TYPED if line.startswith(f"python examples/{script}.py ")]
    assert len(lines) >= 2
    for line in lines:
        module.parsed(shlex.split(line)[2:])


def test_environments_of_tox_and_extras_are_there() -> None:
    tox, project = (ROOT / "tox.ini").read_text(), (ROOT / "pyproject.toml").read_text()
    for name in re.findall(r"tox run -e ([a-z]+)", README):
        assert f"[testenv:{name}]" in tox
    for name in re.findall(r"'\.\[([a-z0-9]+)\]'", README):
        assert re.search(rf"^{name} = \[", project, re.MULTILINE)


def test_the_model_is_kept_where_the_user_keeps_caches() -> None:
    assert "~/.cache/aiokv" in README
    assert re.search(r"^    XDG_CACHE_HOME$", (ROOT / "tox.ini").read_text(), re.MULTILINE)
