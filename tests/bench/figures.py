# SPDX-License-Identifier: Apache-2.0
"""What was measured: one line for each quantity, with the budget it is held against; a table and a JSON document."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

BudgetOf = Literal["median", "p99"]


@dataclass(frozen=True, slots=True)
class Line:
    """One quantity. Times are milliseconds, memory is MB, CPU is percent of one CPU, ``x`` is a ratio."""

    name: str
    load: str
    unit: str
    median: float
    p99: float | None = None
    count: int = 1
    budget: float | None = None
    budget_of: BudgetOf = "median"

    @property
    def within(self) -> bool | None:
        """Whether the budget is kept; None without one."""
        measured = self.median if self.budget_of == "median" else self.p99
        return None if self.budget is None or measured is None else measured <= self.budget


def timed(
    name: str, load: str, seconds: Sequence[float], budget: float | None = None, *, budget_of: BudgetOf = "median"
) -> Line:
    """A line from durations in seconds; the budget is milliseconds."""
    ordered = sorted(one * 1000 for one in seconds)
    p99 = ordered[math.ceil(len(ordered) * 0.99) - 1]
    return Line(name, load, "ms", statistics.median(ordered), p99, len(ordered), budget, budget_of)


@dataclass(slots=True)
class Figures:
    """All lines of one run, and what they were measured on."""

    about: Mapping[str, Any]
    lines: list[Line] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        """The content of bench.json."""
        lines = [
            {
                "name": line.name,
                "load": line.load,
                "unit": line.unit,
                "median": round(line.median, 3),
                "p99": None if line.p99 is None else round(line.p99, 3),
                "count": line.count,
                "budget": line.budget,
                "budgetOf": line.budget_of,
                "within": line.within,
            }
            for line in self.lines
        ]
        return {"version": 1, **self.about, "figures": lines}

    def table(self) -> str:
        """The table for people."""
        rows = [("WHAT", "WITH", "MEDIAN", "P99", "N", "BUDGET")]
        for line in self.lines:
            p99 = "" if line.p99 is None else f"{line.p99:.2f} {line.unit}"
            budget = "" if line.budget is None else f"{_budget(line)} {'kept' if line.within else 'MISSED'}"
            rows.append((line.name, line.load, f"{line.median:.2f} {line.unit}", p99, str(line.count), budget))
        return columns(rows)


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Returns rows, the first with headings, in columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _budget(line: Line) -> str:
    return f"{line.budget:g} {line.unit}" + ("" if line.budget_of == "median" else f" {line.budget_of}")
