"""What the docs say of the code is what the code says of itself."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from aiokv.proto import messages
from aiokv.proto.parts import TABLE, Event, State, diagram
from aiokv.proto.settings import Settings

ROOT = Path(__file__).parent.parent
PROTOCOL = (ROOT / "docs" / "protocol.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_diagram_is_the_one_of_the_table() -> None:
    (drawn,) = re.findall(r"```mermaid\n(.*?)\n```", PROTOCOL, re.DOTALL)
    assert drawn == diagram()


def test_the_table_of_states_is_the_one_in_the_code() -> None:
    for state in State:
        (row,) = re.findall(rf"^\| \*\*{state.value}\*\* \|(.*)\|$", PROTOCOL, re.MULTILINE)
        cells = [cell.strip() for cell in row.split("|")]
        expected = []
        for event in Event:
            following = TABLE.get((state, event))
            settled = "its outcome" if (state, event) == (State.DRAINING, Event.QUIET) else ""
            expected.append(following.value if following else settled)
        assert cells == expected, state


def test_every_message_and_setting_is_in_the_protocol() -> None:
    kinds = ["Hello", "Ping", "Pong", "Bye", "Reset", "Offer", "Grant", "Accept", "Ready", "Landed"]
    for kind in [*kinds, "Refuse", "Abort", "Aborted", "Renew"]:
        assert hasattr(messages, kind)
        assert kind.upper() in PROTOCOL
    bounds = {"tombstones", "peers"}  # how many, not when
    for name in set(Settings.__slots__) - bounds:
        assert f"`{name}`" in PROTOCOL, name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_within_the_repository_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_in_the_docs_is_python(page: Path) -> None:
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        compile(block, str(page), "exec", flags=0x2000)  # with await at the top level
