# SPDX-License-Identifier: Apache-2.0
"""Rows as tables, or as JSON. Whoever writes a claim chooses texts that end up in an operator's terminal. Pure."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
"""Cells by column. A column whose name begins with ``+`` is shown by ``-o wide`` alone."""


def safe(value: object) -> str:
    """Returns a text with control characters, and those that change the direction of writing, spelled out."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in str(value))


def table(rows: Sequence[Row], *, wide: bool = False) -> str:
    """Returns rows as a table, one line each, empty cells as ``-``."""
    columns = [name for name in dict.fromkeys(name for row in rows for name in row) if wide or not name.startswith("+")]
    lines = [[name.removeprefix("+").upper() for name in columns]]
    lines += [[safe(row.get(name, "")) or "-" for name in columns] for row in rows]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    return "\n".join("   ".join(map(str.ljust, cells, widths)).rstrip() for cells in lines)


def document(rows: Iterable[Row]) -> str:
    """Returns rows as a JSON list, in ASCII."""
    listed = [{_key(name): cell for name, cell in row.items()} for row in rows]
    return json.dumps(listed, indent=2, default=lambda cell: cell.document())


def _key(column: str) -> str:
    first, *rest = column.removeprefix("+").split()
    return first + "".join(map(str.title, rest))
