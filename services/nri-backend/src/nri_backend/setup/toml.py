# SPDX-License-Identifier: Apache-2.0
"""Sets a value in a TOML text and leaves every other byte alone: comments, order, quoting, line ends.

The standard library reads TOML (1.0) and writes none. What is here finds where a table or a value stands in a text that
``tomllib`` has accepted; it need not be strict itself, and whoever uses it compares the meaning before and after.
"""

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

# A multi-line string may end in up to five quotes.
_MULTI_LINE: Final = r'"""(?:[^\\]|\\.)*?"""(?:"{0,2})|' + r"'''.*?'''(?:'{0,2})"
_STRING: Final = _MULTI_LINE + r'|"(?:[^"\\\n]|\\.)*"|' + r"'[^'\n]*'"
_KEY: Final = re.compile(rf"(?:{_STRING}|[A-Za-z0-9_-]+)(?:[ \t]*\.[ \t]*(?:{_STRING}|[A-Za-z0-9_-]+))*", re.DOTALL)
_BLANK: Final = re.compile(r"(?:[ \t\r\n,]|#[^\n]*)*")
# Commas are blank: within a table that was accepted they only stand between entries.
_TOKEN: Final = re.compile(rf"{_STRING}|#[^\n]*|.", re.DOTALL)
_BARE: Final = re.compile(r"[A-Za-z0-9_-]+")

Path = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """One ``key = value``, wherever it stands."""

    table: Path
    """The header that it stands below, or the inline table."""
    path: Path
    """Its full path."""
    key: slice
    value: slice


@dataclass(frozen=True, slots=True)
class Header:
    """One ``[table]`` line."""

    path: Path
    span: slice


def set_value(text: str, path: Path, literal: str) -> str:
    """Returns the text with one value set; the table is made when there is none. The text must be valid TOML."""
    statements = list(_statements(text))
    entries = [one for one in statements if isinstance(one, Entry)]
    for entry in entries:
        if entry.path == path:
            return _replace(text, entry.value, literal)
    table, line = path[:-1], f"{_quote(path[-1])} = {literal}"
    for depth in range(len(table), 0, -1):
        for entry in entries:
            if entry.path == table[:depth] and text[entry.value].startswith("{"):
                return _into_inline(text, entry.value, f"{_dotted(path[depth:])} = {literal}")
    for one in statements:
        if isinstance(one, Header) and one.path == table:
            return _after_line(text, one.span, line, "  ")
    for entry in entries:
        if len(entry.table) < len(table) and entry.path[: len(table)] == table:
            return _after_line(text, entry.value, f"{_dotted(path[len(entry.table) :])} = {literal}", "", entry.key)
    end = _line_end(text)
    gap = "" if not text else end if text.endswith("\n") else end * 2
    return f"{text}{gap}[{_dotted(table)}]{end}  {line}{end}"


def _statements(text: str) -> Iterator[Entry | Header]:
    table: Path = ()
    at = _blank(text, 0)
    while at < len(text):
        if text[at] == "[":
            key = _key(text, _blank(text, at + (2 if text.startswith("[[", at) else 1)))
            table = _names(text[key])
            at = text.index("]", key.stop) + 1
            yield Header(table, slice(at - 1, at))
            at += text.startswith("]", at)
        else:
            for entry in _entry(text, at, table):
                yield entry
                # The first is the whole of it; those that follow stand in its inline table.
                at = max(at, entry.value.stop)
        at = _blank(text, at)


def _entry(text: str, at: int, table: Path) -> Iterator[Entry]:
    key = _key(text, at)
    start = _blank(text, text.index("=", key.stop) + 1)
    entry = Entry(table, table + _names(text[key]), key, slice(start, _value_end(text, start)))
    yield entry
    if text[start] == "{":
        at = _blank(text, start + 1)
        while text[at] != "}":
            last = at
            for inner in _entry(text, at, entry.path):
                yield inner
                last = max(last, inner.value.stop)
            at = _blank(text, last)


def _blank(text: str, at: int) -> int:
    found = _BLANK.match(text, at)
    return found.end() if found else at


def _key(text: str, at: int) -> slice:
    found = _KEY.match(text, at)
    if found is None:
        raise ValueError(f"no key at character {at}")
    return slice(*found.span())


def _names(key: str) -> Path:
    names = []
    value: object = tomllib.loads(f"{key} = 0")
    while isinstance(value, dict):
        ((name, value),) = value.items()
        names.append(name)
    return tuple(names)


def _value_end(text: str, start: int) -> int:
    depth, at = 0, start
    while at < len(text):
        found = _TOKEN.match(text, at)
        token = found.group() if found else ""
        if depth == 0 and (token in {",", "}", "]", "\n"} or token.startswith("#")):
            break
        depth += (token in {"[", "{"}) - (token in {"]", "}"})
        at += len(token)
        if depth == 0 and token in {"]", "}"}:
            break
    return start + len(text[start:at].rstrip())


def _replace(text: str, span: slice, new: str) -> str:
    return text[: span.start] + new + text[span.stop :]


def _into_inline(text: str, span: slice, line: str) -> str:
    inside = text[span.start + 1 : span.stop - 1]
    new = f"{{{inside.rstrip()}, {line} }}" if inside.strip() else f"{{ {line} }}"
    return _replace(text, span, new)


def _after_line(text: str, span: slice, line: str, deeper: str, start: slice | None = None) -> str:
    begin = text.rfind("\n", 0, (start or span).start) + 1
    indent = text[begin : begin + len(text[begin:]) - len(text[begin:].lstrip(" \t"))]
    stop = text.find("\n", span.stop)
    end = _line_end(text)
    if stop < 0:
        return f"{text}{end}{indent}{deeper}{line}{end}"
    return f"{text[: stop + 1]}{indent}{deeper}{line}{end}{text[stop + 1 :]}"


def _line_end(text: str) -> str:
    return "\r\n" if "\r\n" in text else "\n"


def _quote(name: str) -> str:
    if _BARE.fullmatch(name):
        return name
    return '"' + name.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _dotted(path: Path) -> str:
    return ".".join(map(_quote, path))
