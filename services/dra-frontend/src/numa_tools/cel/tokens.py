# SPDX-License-Identifier: Apache-2.0
"""Splits a CEL expression into tokens and converts literals."""

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

_TOKEN = re.compile(
    r"""(?P<float>(?:\d*\.\d+(?:[eE][+-]?\d{1,3})?|\d+[eE][+-]?\d{1,3}))(?!\w) |
    (?P<uint>(?:0x[0-9a-fA-F]{1,16}|\d{1,20})[uU])(?!\w) | (?P<int>0x[0-9a-fA-F]{1,16}|\d{1,19})(?!\w|\.\d) |
    (?P<bytes>(?:[bB][rR]?|[rR][bB])(?:"[^"\n]*"|'[^'\n]*')) |
    (?P<raw>[rR](?:\"{3}(?s:.*?)\"{3}|'{3}(?s:.*?)'{3}|"[^"\n]*"|'[^'\n]*')) |
    (?P<text>\"{3}(?s:[^\\]|\\.)*?\"{3}|'{3}(?s:[^\\]|\\.)*?'{3}|"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*') |
    (?P<name>[A-Za-z_]\w*) | (?P<sign>\|\||&&|[=!<>]=|[-+*/%<>!?:.,()\[\]{}])""",
    re.ASCII | re.VERBOSE,
)
_BLANK = re.compile(r"(?:\s|//[^\n]*)*")
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|X[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-3][0-7]{2}|(?s:.))")
_ESCAPES: Final = dict(zip("abfnrtv", "\a\b\f\n\r\t\v", strict=True)) | {each: each for each in "\\\"'`?"}
INT_END: Final = 2**63
UINT_END: Final = 2**64
"""The first values beyond the ranges of int and uint. The literal 2**63 is accepted because a minus sign may precede
it.
"""
_SURROGATES: Final = range(0xD800, 0xE000)


_MAX_TEXT: Final = 200
"""Maximum length of an error message. Messages quote user-chosen names and appear in Events and logs."""


class CelTextError(Exception):
    """Base class for errors whose message is truncated."""

    def __init__(self, text: str) -> None:
        super().__init__(text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}...")


class CelUnsupportedError(CelTextError):
    """Raised if this evaluator cannot determine an expression's value. The message quotes the unsupported part."""


class Uint(int):
    """An unsigned integer. CEL has no arithmetic between a signed and an unsigned integer."""


def tokens(expression: str) -> list[tuple[str, str]]:
    """Splits an expression into (token kind, text) pairs, where the kind is the name of a group in the pattern.

    Raises CelUnsupportedError.
    """
    found = []
    position = _end_of_blank(expression, 0)
    while position < len(expression):
        match = _TOKEN.match(expression, position)
        if match is None:
            raise CelUnsupportedError(f"cannot be parsed at {expression[position : position + 20]!r}")
        found.append((str(match.lastgroup), match[str(match.lastgroup)]))
        position = _end_of_blank(expression, match.end())
    return found


def _end_of_blank(expression: str, position: int) -> int:
    """Returns the end of the whitespace and comments that begin at a position."""
    match = _BLANK.match(expression, position)
    return match.end() if match else position


def _unquoted(quoted: str) -> str:
    return quoted[3:-3] if len(quoted) >= 6 and quoted[:3] in ('"""', "'''") else quoted[1:-1]


def _text(quoted: str) -> str:
    return _ESCAPE.sub(_unescaped, _unquoted(quoted))


def _unescaped(match: re.Match[str]) -> str:
    escape = match[1]
    if escape in _ESCAPES:
        return _ESCAPES[escape]
    number = int(escape[1:], 16) if escape[0] in "xXuU" and len(escape) > 1 else -1
    if len(escape) == 3 and escape.isdigit():
        number = int(escape, 8)
    if not 0 <= number < 0x110000 or number in _SURROGATES:
        raise CelUnsupportedError(f"the escape \\{escape} is not supported")
    return chr(number)


def _int(text: str) -> int:
    number = int(text, 16 if "x" in text else 10)
    if number > INT_END:
        raise CelUnsupportedError(f"the number {text} does not fit in 64 bits")
    return number


def _uint(text: str) -> Uint:
    number = int(text[:-1], 16 if "x" in text else 10)
    if number >= UINT_END:
        raise CelUnsupportedError(f"the number {text} does not fit in 64 bits")
    return Uint(number)


LITERALS: Final[Mapping[str, Callable[[str], Any]]] = {
    "text": _text,
    "raw": lambda quoted: _unquoted(quoted[1:]),
    "float": float,
    "int": _int,
    "uint": _uint,
}
"""Functions that convert a token's text to its value, by kind of literal."""
