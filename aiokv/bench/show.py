"""A report as tables on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from aiokv.bench.figures import Spread
from aiokv.bench.report import Cell, Report

__all__ = ["show_ratios", "show_rows"]


def show_rows(console: Console, report: Report, benchmark: str) -> None:
    """The tables of one benchmark; medians, with half of the distance between the quartiles."""
    for (of, title), rows in report.tables().items():
        if of == benchmark:
            console.print(_table(f"{of}: {title}", rows))


def _table(title: str, rows: Sequence[dict[str, Cell]]) -> Table:
    shown = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    columns = list(dict.fromkeys(column for cells in rows for column in cells))
    for column in columns:
        words = all(isinstance(cells.get(column, ""), str) for cells in rows)
        shown.add_column(column, justify="left" if words else "right", no_wrap=True)
    for cells in rows:
        shown.add_row(*(_text(cells.get(column, "")) for column in columns))
    return shown


def _text(cell: Cell) -> str:
    if isinstance(cell, str):
        return cell
    if isinstance(cell, Spread):
        if cell.low == cell.high:
            return _number(cell.median)
        return f"{_number(cell.median)} ± {_number((cell.high - cell.low) / 2)}"
    return _number(cell)


def _number(value: float) -> str:
    """Three digits that count, and no exponent where people would write none."""
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value == 0 or abs(value) >= 1e-3 else f"{value:.1e}"


def show_ratios(console: Console, report: Report) -> None:
    """All named figures with their goals, and why some are missing."""
    shown = Table(title="against the goals", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    shown.add_column("figure", no_wrap=True)
    shown.add_column("value", justify="right", no_wrap=True)
    shown.add_column("goal", justify="right", no_wrap=True)
    shown.add_column("")
    for name, ratio in report.ratios.items():
        sign = ">=" if ratio.goal.better == "higher" else "<="
        goal = "printed" if ratio.goal.value is None else f"{sign} {_number(ratio.goal.value)}"
        verdict = {None: "", True: "holds", False: "[bold]missed[/bold]"}[ratio.holds]
        shown.add_row(name, _text(ratio.found), goal, verdict)
    if report.ratios:
        console.print(shown)
    for name, why in report.absent.items():
        console.print(f"{name}: absent, {why}", markup=False, highlight=False, soft_wrap=True)
