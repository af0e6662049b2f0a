"""What a run found: the machine, rows of figures, and ratios with their goals."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from aiokv.bench.figures import Spread

__all__ = ["Cell", "Goal", "Ratio", "Report"]

#: A figure of a row: a number, several measurements of it, or words.
Cell = float | int | str | Spread

#: Beyond this share of the value, a spread that reaches across the goal hides whether it is met.
_HIDING = 0.25


class Goal(NamedTuple):
    """What a ratio is to reach; ``value`` is None where it is only printed."""

    value: float | None
    better: Literal["higher", "lower"]


@dataclass(frozen=True, slots=True)
class Ratio:
    """One figure by its name in docs/benchmarks.md."""

    found: Spread
    goal: Goal

    @property
    def holds(self) -> bool | None:
        """Whether the goal is met; None where there is none."""
        if self.goal.value is None:
            return None
        if self.goal.better == "higher":
            return self.found.median >= self.goal.value
        return self.found.median <= self.goal.value

    @property
    def hidden(self) -> bool:
        """Whether the measurements lie on both sides of the goal, and far apart."""
        wide = self.found.high - self.found.low > _HIDING * abs(self.found.median)
        return self.goal.value is not None and wide and self.found.low < self.goal.value < self.found.high


class Report:
    """Filled by benchmarks, then shown or written.

    Args:
        machine: What it ran on.

    Attributes:
        rows: What was measured: for each row its benchmark, its table and its cells.
        ratios: The named figures.
        absent: Why named figures are missing.
    """

    def __init__(self, machine: Mapping[str, Any]) -> None:
        self.machine = dict(machine)
        self.rows: list[tuple[str, str, dict[str, Cell]]] = []
        self.ratios: dict[str, Ratio] = {}
        self.absent: dict[str, str] = {}
        self._benchmark = ""
        self._goals: Mapping[str, Goal] = {}

    def begin(self, benchmark: str, goals: Mapping[str, Goal]) -> None:
        """What comes now belongs to this benchmark, which may give the figures that have a goal."""
        self._benchmark, self._goals = benchmark, goals

    def end(self, why: str = "not measured") -> None:
        """The benchmark is over; named figures that it did not give are absent."""
        for name in self._goals:
            if name not in self.ratios:
                self.absent.setdefault(name, why)

    def row(self, table: str, cells: Mapping[str, Cell]) -> None:
        """One row of a table, by column; the column says the unit."""
        self.rows.append((self._benchmark, table, dict(cells)))

    def ratio(self, name: str, values: Iterable[float]) -> None:
        """A named figure, from one measurement for each round.

        Raises:
            KeyError: The benchmark has no such figure.
            ValueError: There is no measurement.
        """
        ratio = Ratio(Spread.of(values), self._goals[name])
        if ratio.hidden:
            self.absent[name] = (
                f"the spread hides the answer: {ratio.found} for a goal of {ratio.goal.value:g}"
            )
        else:
            self.ratios[name] = ratio

    def leave_out(self, names: Iterable[str], why: str) -> None:
        """Named figures that can't be had here; those that are absent already keep their reason."""
        for name in names:
            self.absent.setdefault(name, why)

    def tables(self) -> dict[tuple[str, str], Sequence[dict[str, Cell]]]:
        """Rows by benchmark and table, in the order in which they came."""
        found: dict[tuple[str, str], list[dict[str, Cell]]] = {}
        for benchmark, table, cells in self.rows:
            found.setdefault((benchmark, table), []).append(cells)
        return dict(found)

    @classmethod
    def of_json(cls, text: str) -> Report:
        """What ``to_json`` made; the quartiles of a ratio are then those of its spread, around its value.

        Raises:
            ValueError: It is something else.
        """
        try:
            whole = json.loads(text)
            found = cls(whole["machine"])
            for cells in whole["rows"]:
                benchmark, table = cells.pop("benchmark"), cells.pop("table")
                found.rows.append((benchmark, table, {name: _cell(each) for name, each in cells.items()}))
            for name, each in whole["ratios"].items():
                half = each["spread"] / 2
                spread = Spread(each["value"], each["value"] - half, each["value"] + half, 0)
                found.ratios[name] = Ratio(spread, Goal(each["goal"], each["better"]))
            found.absent.update(whole["absent"])
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"no report of a benchmark: {error!r}") from error
        return found

    def to_json(self) -> str:
        """One object: ``machine``, ``rows``, ``ratios``, and why ratios are ``absent``."""
        rows = [
            {"benchmark": benchmark, "table": table}
            | {column: _plain(cell) for column, cell in cells.items()}
            for benchmark, table, cells in self.rows
        ]
        ratios = {
            name: {
                "value": ratio.found.median,
                "goal": ratio.goal.value,
                "better": ratio.goal.better,
                "spread": ratio.found.high - ratio.found.low,
            }
            for name, ratio in self.ratios.items()
        }
        whole = {"machine": self.machine, "rows": rows, "ratios": ratios, "absent": self.absent}
        return json.dumps(whole, indent=2, allow_nan=False) + "\n"


def _cell(plain: Any) -> Cell:  # noqa: ANN401 - what JSON has
    if isinstance(plain, dict):
        return Spread(plain["median"], plain["low"], plain["high"], plain["rounds"])
    found: Cell = plain
    return found


def _plain(cell: Cell) -> object:
    if isinstance(cell, Spread):
        return {"median": cell.median, "low": cell.low, "high": cell.high, "rounds": cell.count}
    return cell
