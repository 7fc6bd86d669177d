# SPDX-License-Identifier: Apache-2.0
"""The words of a CEL expression."""

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

_TOKEN = re.compile(
    r"""(?P<float>\d+\.\d+(?:[eE][+-]?\d{1,3})?)(?!\w) | (?P<int>0x[0-9a-fA-F]{1,16}|\d{1,19})(?![\w.]) |
    (?P<text>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*') | (?P<name>[A-Za-z_]\w*) |
    (?P<sign>\|\||&&|[=!<>]=|[-+*/%<>!?:.,()\[\]])""",
    re.ASCII | re.VERBOSE,
)
_BLANK = re.compile(r"(?:\s|//[^\n]*)*")
_ESCAPE = re.compile(r"\\(.)")
_ESCAPES: Final = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", '"': '"', "'": "'", "`": "`", "?": "?"}


class CelUnsupportedError(Exception):
    """The expression is no CEL, or CEL that is not simulated; names what stopped the reading."""


def tokens(expression: str) -> list[tuple[str, str]]:
    """Returns kind (``float``, ``int``, ``text``, ``name``, ``sign``) and text of each; raises CelUnsupportedError."""
    found = []
    place = _end_of_blank(expression, 0)
    while place < len(expression):
        match = _TOKEN.match(expression, place)
        if match is None:
            raise CelUnsupportedError(f"cannot be read at {expression[place : place + 20]!r}")
        found.append((str(match.lastgroup), match[str(match.lastgroup)]))
        place = _end_of_blank(expression, match.end())
    return found


def _end_of_blank(expression: str, place: int) -> int:
    """Returns where spaces and comments end."""
    match = _BLANK.match(expression, place)
    return match.end() if match else place


def _text(quoted: str) -> str:
    def escaped(match: re.Match[str]) -> str:
        if match[1] not in _ESCAPES:
            raise CelUnsupportedError(f"the escape \\{match[1]} is not simulated")
        return _ESCAPES[match[1]]

    return _ESCAPE.sub(escaped, quoted[1:-1])


LITERALS: Final[Mapping[str, Callable[[str], Any]]] = {
    "text": _text,
    "float": float,
    "int": lambda text: int(text, 16 if "x" in text else 10),
}
"""The values of those kinds of tokens that have one."""
