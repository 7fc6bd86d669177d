# SPDX-License-Identifier: Apache-2.0
"""Two drivers that were measured in turn, by figure: ours, the other's, and how many times as much ours is."""

import statistics
from collections.abc import Sequence

from tests.bench.figures import Line

_HEADINGS = ("WHAT", "WITH", "OURS", "OTHER", "RATIO", "P99 OURS", "OTHER", "RATIO")


def ratios(ours: Sequence[Sequence[Line]], other: Sequence[Sequence[Line]]) -> list[tuple[str, ...]]:
    """Returns a row for each figure that both have: medians over all turns."""
    theirs = _by_figure(other)
    rows: list[tuple[str, ...]] = [_HEADINGS]
    for figure, lines in _by_figure(ours).items():
        if figure in theirs:
            medians = [_median([line.median for line in some]) for some in (lines, theirs[figure])]
            tails = [_median([line.p99 for line in some if line.p99 is not None]) for some in (lines, theirs[figure])]
            rows.append((*figure, *_cells(medians, lines[0].unit), *_cells(tails, lines[0].unit)))
    return rows


def _by_figure(turns: Sequence[Sequence[Line]]) -> dict[tuple[str, str], list[Line]]:
    found: dict[tuple[str, str], list[Line]] = {}
    for line in (line for lines in turns for line in lines):
        found.setdefault((line.name, line.load), []).append(line)
    return found


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _cells(pair: Sequence[float | None], unit: str) -> tuple[str, str, str]:
    ours, other = pair
    if ours is None or other is None:
        return "", "", ""
    return f"{ours:.2f} {unit}", f"{other:.2f} {unit}", f"{ours / other:.2f}" if other else ""
