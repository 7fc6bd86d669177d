# SPDX-License-Identifier: Apache-2.0
import difflib
import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nri_backend.setup.toml import set_value

PATH = ("plugins", "a.b", "on")

LAYOUTS = [
    "",
    "version = 2",
    "[plugins]\n  [plugins.'a.b'] # kept\n    x = 1\n[z]\n",
    "[plugins]\n  [plugins.'a.b']\n    on = true # kept\n",
    "[plugins]\n'a.b'.x = '''\n[plugins.'a.b']\non = 1'''\n[z]\n",
    '[plugins]\n"a.b".on = [ # of its value ]\n  1, "]",\n] # kept\n',
    "plugins = { x = 1 }\n",
    "plugins = { 'a.b' = { y = { on = 1 }, on = \"}\" } }\n",
    "[plugins]\n'a.b' = {}\n",
    "[plugins]\n'a.b' = { sub = { a = 1, b = { c = 2 } }, d = 3 }\n",
    'plugins . "a.b" . on = 1979-05-27 07:32:00 # kept\n',
    "plugins.other.x = 1\r\n# kept\r\n",
    "[plugins.'a.b'.sub]\nx = 1\n",
    "[[list]]\nx = 1\n[[list]]\n[plugins.\"a\\u002Eb\"]\nx = '''it''s'''''\n",
    's = """\n[plugins.\'a.b\']\n\\""""""\n',
]


@pytest.mark.parametrize("text", LAYOUTS)
def test_every_layout_of_a_table_is_understood(text: str) -> None:
    """Headers, dotted keys, inline tables and what only looks like them: one value changes, nothing else."""
    check(text, "false", False)


def check(text: str, literal: str, value: object) -> None:
    """Only the wanted value differs, only its line is touched, and doing it again changes nothing."""
    changed = set_value(text, PATH, literal)
    expected: dict[str, Any] = tomllib.loads(text)
    expected.setdefault(PATH[0], {}).setdefault(PATH[1], {})[PATH[2]] = value
    assert tomllib.loads(changed) == expected
    assert set_value(changed, PATH, literal) == changed
    assert changed.count("# kept") == text.count("# kept")
    lost = [line for line in difflib.ndiff(text.splitlines(), changed.splitlines()) if line.startswith("- ")]
    assert len(lost) <= 1 or "[ # of its value ]" in text
    assert "\r\n" not in text or "\n" not in changed.replace("\r\n", "")


NAMES = st.sampled_from(["a.b", "a", "b", "on", "x y", 'q"', ""])
VALUES = st.sampled_from(
    ["1", "true", "'#'", '"a\\"]"', "'''\n[plugins]\n'''", '"""\n\\"""x"""""', "[1, [2, '}']]", "[\n # ,\n 1,\n]", "{}"]
)
GAPS = st.sampled_from(["", "  ", "# note\n", "\n\n", "\t"])


@st.composite
def documents(draw: st.DrawFn) -> str:
    """A text in which a plugin's table is said in one of many ways, among other things; always valid."""
    lines: list[str] = []

    def entry(key: str) -> str:
        return f"{draw(GAPS)}{key} = {draw(VALUES)} # said\n"

    lines += [entry(f"top{number}") for number in range(draw(st.integers(0, 2)))]
    for number in range(draw(st.integers(0, 2))):
        lines += [f"{draw(GAPS)}[ other . 'n{number}' ]\n", entry("k")]
    way = draw(st.sampled_from(["absent", "header", "dotted", "inline", "below"]))
    said = draw(st.booleans())
    if way == "header":
        lines += [f"{draw(GAPS)}[plugins.'a.b']\n", entry("k"), *([entry("on")] if said else []), entry("l")]
    elif way == "dotted":
        lines += ["[plugins]\n", entry("'a.b'.k"), *([entry('"a.b".on')] if said else []), entry("c.on")]
    elif way == "inline":
        inner = draw(st.sampled_from(["", "k = 1", "k = { on = 1 }, l = [1, 2]"]))
        on = (", " if inner else "") + "on = 'x'" if said else ""
        lines += ["[plugins]\n", f"{draw(GAPS)}'a.b' = {{ {inner}{on} }} # said\n"]
    elif way == "below":
        lines += ["[plugins.'a.b'.on2]\n", entry("k"), *(["[plugins.'a.b']\n", entry("on")] if said else [])]
    lines += [f"[[last]]\n{entry('on')}" for _ in range(draw(st.integers(0, 2)))]
    return "".join(lines)


@given(documents(), st.sampled_from([("true", True), ("false", False)]))
def test_whatever_else_is_said_stays(text: str, wanted: tuple[str, bool]) -> None:
    """The result parses, means the same but for the wanted value, and every line but its own is still there."""
    tomllib.loads(text)
    changed = set_value(text, PATH, wanted[0])
    expected: dict[str, Any] = tomllib.loads(text)
    expected.setdefault("plugins", {}).setdefault("a.b", {})["on"] = wanted[1]
    assert tomllib.loads(changed) == expected
    assert set_value(changed, PATH, wanted[0]) == changed
    assert changed.count("# said") == text.count("# said")
    assert changed.count("# note") == text.count("# note")
