# SPDX-License-Identifier: Apache-2.0
"""A report as a table for a terminal."""

from collections.abc import Iterator, Sequence

from tests.bench.figures import Figure, Quantity, Report, median_ratio, shown, shown_ratio


def table(report: Report) -> str:
    """Returns one line for each quantity, kernel and load. If there are two drivers, each line also contains the other
    driver's median and the ratios.
    """
    last = ("OTHER", "RATIO", "RATIOS OF TURNS") if len(report.drivers) > 1 else ("BUDGET",)
    headings = ("WHAT", "KERNEL", "NODE", "MEDIAN", "QUARTILES", "P99", "N", *last)
    rows = [headings, *_rows(report)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(headings))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _rows(report: Report) -> Iterator[Sequence[str]]:
    for quantity in report.quantities:
        for figure in report.figures:
            if (figure.quantity, figure.driver) == (quantity.key, report.drivers[0].name):
                yield (*_cells(quantity, figure), *_last_cells(report, quantity, figure))


def _cells(quantity: Quantity, figure: Figure) -> tuple[str, ...]:
    summary = figure.summary
    return (
        quantity.title,
        figure.mode,
        figure.load,
        shown(summary.median, quantity.unit),
        f"{shown(summary.q1)} to {shown(summary.q3)}",
        shown(summary.p99),
        str(summary.count),
    )


def _last_cells(report: Report, quantity: Quantity, figure: Figure) -> tuple[str, ...]:
    if len(report.drivers) == 1:
        budget = "" if quantity.budget is None else f"{shown(quantity.budget, quantity.unit)} ({quantity.budgeted})"
        return (budget,)
    other = report.find(quantity.key, figure.mode, figure.load, report.drivers[1].name)
    if other is None:
        return "", "", ""
    ratio = median_ratio(figure, other)
    cells = (
        ("", "") if ratio is None else (shown_ratio(ratio[0]), f"{shown_ratio(ratio[1])} to {shown_ratio(ratio[2])}")
    )
    return (shown(other.summary.median, quantity.unit), *cells)
