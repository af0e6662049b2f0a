"""A report as one picture: named figures against their goals, and what a benchmark draws of its own rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from aiokv.bench.registry import Draw
from aiokv.bench.report import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["write"]


def write(report: Report, file: str, draws: Mapping[str, Draw]) -> None:
    """Draw it, in the format that the file's name says.

    Args:
        report: What was found.
        file: Where to.
        draws: By the name of a benchmark what fills a panel with its rows.
    """
    rows = {name: [cells for of, _, cells in report.rows if of == name] for name, _, _ in report.rows}
    drawn = [name for name in rows if name in draws]
    figure = Figure(figsize=(9, 2.5 + 0.3 * len(report.ratios) + 4 * len(drawn)), layout="constrained")
    heights = [1.5 + 0.3 * len(report.ratios)] + [4.0] * len(drawn)
    panels = figure.subplots(len(heights), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    _draw_ratios(panels[0], report)
    for axes, name in zip(panels[1:], drawn, strict=True):
        draws[name](axes, rows[name])
    machine = report.machine
    figure.suptitle(
        f"aiokv {machine.get('aiokv', '')} on {machine.get('cores', '?')} x {machine.get('cpu', '?')}"
    )
    figure.savefig(file)


def _draw_ratios(axes: Axes, report: Report) -> None:
    """How many times its goal each figure reaches, whichever way is better."""
    names, reached = [], []
    for name, ratio in reversed(report.ratios.items()):
        value, goal = ratio.found.median, ratio.goal.value
        if goal and value > 0:  # neither without a goal, nor where the goal is 0
            names.append(name)
            reached.append(value / goal if ratio.goal.better == "higher" else goal / value)
    axes.barh(names, reached, color=["tab:green" if times >= 1 else "tab:orange" for times in reached])
    axes.axvline(1, color="black", linewidth=1)
    if reached:
        axes.set_xscale("log")
    axes.set_xlabel("times its goal (1 is reached)")
