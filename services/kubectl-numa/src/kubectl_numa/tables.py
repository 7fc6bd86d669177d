# SPDX-License-Identifier: Apache-2.0
"""Formats rows as tables, and documents as JSON and YAML. This module does no I/O.

Claim authors choose some of the strings, and these are printed to a terminal, so every string is escaped.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

Row = Mapping[str, Any]
"""Cells by column. A column whose name begins with ``+`` is shown only by ``-o wide``."""
_PLAIN: Final = re.compile(r"[a-zA-Z][a-zA-Z0-9./-]*", re.ASCII)
"""Strings that YAML accepts without quotes, except for _YAML_WORDS."""
_YAML_WORDS: Final = frozenset(("y", "n", "yes", "no", "on", "off", "true", "false", "null"))


def safe(value: object) -> str:
    """Escapes control characters and characters that change the text direction."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in str(value))


def table(rows: Sequence[Row], *, wide: bool = False, headers: bool = True) -> str:
    """Formats rows as a table with one line per row. Shows an empty cell as ``-``."""
    columns = [name for name in dict.fromkeys(name for row in rows for name in row) if wide or not name.startswith("+")]
    lines = [[name.removeprefix("+").upper() for name in columns]] if headers else []
    lines += [[safe(row.get(name, "")) or "-" for name in columns] for row in rows]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    return "\n".join("   ".join(map(str.ljust, cells, widths)).rstrip() for cells in lines)


def json_text(documents: Sequence[Mapping[str, Any]]) -> str:
    """Returns documents as a JSON list, in ASCII."""
    return json.dumps(documents, indent=2)


def yaml_text(documents: Sequence[Mapping[str, Any]]) -> str:
    """Returns documents as a YAML list, in ASCII."""
    return "\n".join(_yaml(documents)) or "[]"


def _yaml(value: Any) -> Iterator[str]:
    """Yields a value's lines. Maps and lists that are not empty become blocks. Any other value takes up one line."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _member(f"{_scalar(key)}:", inner, "  " if isinstance(inner, Mapping) else "")
    elif isinstance(value, Sequence) and not isinstance(value, str) and value:
        for inner in value:
            first, *rest = _yaml(inner)
            yield f"- {first}"
            yield from (f"  {line}" for line in rest)
    else:
        yield _scalar(value)


def _member(key: str, value: Any, indent: str) -> Iterator[str]:
    lines = list(_yaml(value))
    if value and isinstance(value, Mapping | list | tuple):
        yield key
        yield from (indent + line for line in lines)
    else:
        yield f"{key} {lines[0]}"


def _scalar(value: Any) -> str:
    """Formats a value as JSON, which YAML reads as the same value. A string that needs no quotes is unchanged.

    Non-ASCII characters use YAML's ``\\U`` escape, since JSON writes a character above U+FFFF as two escapes.
    """
    if not isinstance(value, str):
        return json.dumps(value)
    if _PLAIN.fullmatch(value) and value.lower() not in _YAML_WORDS:
        return value
    text = json.dumps(value, ensure_ascii=False)
    return "".join(one if one.isascii() and one.isprintable() else f"\\U{ord(one):08x}" for one in text)
