"""Each invariant, and each fault that others met, names the tests that hold it, and those tests exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ROOT = TESTS.parent
PAGE = (ROOT / "docs" / "invariants.md").read_text(encoding="utf-8")

#: Where the cases of a conformance suite are, by the file that runs them.
SUITES = {
    "control/test_conformance.py": "channels.py",
    "device/test_conformance.py": "devices.py",
    "ranks/test_group.py": "ranks.py",
    "transports/test_conformance.py": "transports.py",
}
NAME = re.compile(r"`([\w/]+\.py)::(\w+)(?:\[(\w+)\])?`")
ROWS = re.findall(r"^\| (\d+) \|(.*)\|$", PAGE, re.MULTILINE)
NAMED = sorted(set(NAME.findall(PAGE)))


@cache
def functions(path: Path) -> frozenset[str]:
    """Names of the functions and methods that a file defines."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, kinds))


@pytest.mark.parametrize(("file", "test", "case"), NAMED, ids=lambda value: value)
def test_what_is_named_exists(file: str, test: str, case: str) -> None:
    assert test.startswith("test_")
    assert test in functions(TESTS / file)
    if case:
        assert case in functions(ROOT / "aiokv" / "testing" / "conformance" / SUITES[file])


def test_every_name_is_understood() -> None:
    assert len(NAME.findall(PAGE)) == PAGE.count(".py::")


def test_each_invariant_and_each_fault_has_its_row() -> None:
    numbers = [int(number) for number, _ in ROWS]
    assert numbers == [*range(1, 11), *range(1, 44)]


@pytest.mark.parametrize(("number", "row"), ROWS[:10], ids=lambda value: value[:4].strip())
def test_each_invariant_has_tests(number: str, row: str) -> None:
    assert NAME.findall(row), number


@pytest.mark.parametrize(("number", "row"), ROWS[10:], ids=lambda value: value[:4].strip())
def test_each_fault_has_a_test_or_belongs_to_a_later_part(number: str, row: str) -> None:
    last = row.rsplit("|", 1)[-1]
    assert NAME.findall(last) or last.strip().startswith("later: "), number
