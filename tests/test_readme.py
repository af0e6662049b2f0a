"""Code in the README is code from examples/, word for word, so it has been run."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_code_is_from_an_example() -> None:
    examples = [path.read_text() for path in ROOT.glob("examples/**/*.py")]
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    for block in blocks:
        assert any(block in example for example in examples), f"in no example:\n{block}"
