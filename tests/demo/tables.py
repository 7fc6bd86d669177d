# SPDX-License-Identifier: Apache-2.0
"""The demo's output: headings, tables, readable amounts."""

from collections.abc import Sequence

_UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def heading(text: str) -> None:
    """Prints the heading for a part of the output."""
    print(f"\n== {text}")


def say(text: str) -> None:
    """Prints a sentence."""
    print(text)


def table(titles: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Prints a table whose columns are as wide as their longest cell."""
    cells = [[str(cell) for cell in row] for row in (titles, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(titles))]
    for row in cells:
        print("   " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def amount(size: int) -> str:
    """Formats a number of bytes with the largest unit that does not exceed it and at most one decimal place."""
    for unit, name in _UNITS:
        if size >= unit:
            return f"{size / unit:.1f}".removesuffix(".0") + f" {name}"
    return f"{size} B"
