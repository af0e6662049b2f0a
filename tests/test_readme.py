"""Code in the documents is code from examples/, word for word, and what they link to is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
EXAMPLES = [path.read_text() for path in ROOT.glob("examples/**/*.py")]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_code_is_from_an_example(document: Path) -> None:
    for block in re.findall(r"^```python\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL):
        assert any(block in example for example in EXAMPLES), f"in no example:\n{block}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", document.read_text()):
        assert (document.parent / target).exists(), target
