"""The command line of the doctor."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec

import msgspec

from aiokv.doctor.findings import Finding, Report
from aiokv.doctor.look import examine

__all__ = ["main"]

_WIDE = 160
_STYLES = {"ok": "green", "weak": "yellow", "missing": "red"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what was found; 1 if something is missing that nothing works without."""
    parser = argparse.ArgumentParser(
        prog="python -m aiokv doctor",
        description="What this machine can do, what is missing, and the command that mends it.",
    )
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    given = parser.parse_args(arguments)
    report = examine()
    if given.json:
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
    elif find_spec("rich") is not None:
        _show(report)
    else:
        print("\n".join(lines(report)))
    return 1 if report.broken else 0


def _headline(report: Report) -> str:
    return f"aiokv {report.aiokv} on {report.system}"


def _verdict(report: Report) -> str:
    if report.broken:
        return f"aiokv doesn't work here: {', '.join(each.name for each in report.broken)}"
    return "aiokv works here"


def _show(report: Report) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # A file or a pipe has no width; there the table takes what it needs.
    console = Console() if sys.stdout.isatty() else Console(width=_WIDE)
    shown = Table(title=_headline(report), title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for column in ("", "what", "state", "found", "to mend"):
        shown.add_column(column, overflow="fold", no_wrap=column in ("", "what", "state"))
    before = ""
    for each in report.findings:
        state = Text(each.state, style=_STYLES[each.state])
        shown.add_row(
            each.topic if each.topic != before else "", each.name, state, Text(each.found), Text(each.mend)
        )
        before = each.topic
    console.print(shown)
    console.print(_verdict(report), markup=False, highlight=False)


def lines(report: Report) -> list[str]:
    """The same without rich: a line for each finding, and one for what mends it."""
    found = [_headline(report)]
    for each in report.findings:
        found.append(f"{each.state:8}{each.topic + ': ' + each.name:30}  {each.found}")
        found.extend(_mending(each))
    return [*found, _verdict(report)]


def _mending(each: Finding) -> list[str]:
    return [f"{'':8}{'':30}  to mend: {each.mend}"] if each.mend else []
