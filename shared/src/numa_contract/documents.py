# SPDX-License-Identifier: Apache-2.0
"""Parses untrusted documents: limits their nesting depth, and accepts only JSON whose values can be serialized again.

Parsers recurse, and their maximum depth depends on the interpreter: Python 3.11 rejects JSON that is nested 1,000
levels deep, while Python 3.13 parses 9,000 levels. Code that uses the parsed value also recurses and may fail where the
parser did not. Therefore the driver has its own limit, which is checked before a parser expands the document. It is the
same for JSON, YAML and TOML, and far below the limit of any supported interpreter.
"""

import json
import math
from collections.abc import Iterable
from typing import Any, Final, NoReturn

from numa_contract.errors import MalformedError, shown

MAX_NESTING: Final = 64
"""Maximum nesting depth of lists and maps in a document. Kubernetes API objects have about 20 levels."""
TOO_DEEP: Final = f"is nested more than {MAX_NESTING} levels deep"
_PARENTHESES: Final = bytes.maketrans(b"[{]}", b"(())")
_OTHERS: Final = bytes(set(range(256)) - set(b"[]{}"))
_DIGITS: Final = 20
"""Maximum number of digits in an integer. 2^64 has 20 digits, and no number here is larger."""


def parse_json(data: bytes, max_bytes: int, kind: str, name: str) -> Any:
    """Parses a JSON document in UTF-8. Error messages refer to the document by ``kind`` and ``name``.

    Raises MalformedError if the document is too long, nested too deeply, not JSON or not UTF-8, or if it contains NaN,
    an infinite or huge number, or a lone surrogate, which could be parsed but never serialized again.
    """
    if len(data) > max_bytes:
        raise MalformedError(kind, name, f"is {len(data)} bytes long, more than {max_bytes}")
    if json_too_deep(data):
        raise MalformedError(kind, name, TOO_DEEP)
    try:
        document = _decode(data.decode())
        if b"\\u" in data:
            json.dumps(document, ensure_ascii=False).encode()
    except ValueError as error:  # UnicodeError, JSONDecodeError and those raised below
        raise MalformedError(kind, name, f"cannot be read as JSON ({_words(error)})") from error
    return document


def _words(error: ValueError) -> str:
    # The message of a UnicodeError contains the whole undecodable input.
    return error.reason if isinstance(error, UnicodeDecodeError | UnicodeEncodeError) else str(error)


def _refused(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {shown(text)} is too large")
    return value


def _bounded(text: str) -> int:
    if len(text) > _DIGITS:
        raise ValueError(f"the number {shown(text)} is too large")
    return int(text)


# json.loads() with these functions would create a decoder for each document, which takes ten times as long as parsing a
# short document.
_decode: Final = json.JSONDecoder(parse_constant=_refused, parse_float=_finite, parse_int=_bounded).decode


def json_too_deep(data: bytes) -> bool:
    """Returns True if a JSON document is nested too deeply. For a string that is not JSON, the result is undefined."""
    if data.count(b"[") + data.count(b"{") <= MAX_NESTING:
        return False
    # Removes the strings. After escaped backslashes and quotes have been removed, the text is split at its quotes, and
    # every second part is the content of a string.
    return brackets_too_deep(b"".join(data.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2]))


def brackets_too_deep(text: bytes) -> bool:
    """Returns True if the brackets in a document without strings and comments are nested too deeply.

    Each round removes the innermost pairs, so a document with N levels is empty after N rounds. Brackets that are never
    closed count as one level each.
    """
    left = text.translate(_PARENTHESES, _OTHERS)
    for _ in range(MAX_NESTING):
        if b"(" * (MAX_NESTING + 1) in left:
            return True
        shorter = left.replace(b"()", b"")
        if len(shorter) == len(left):
            break
        left = shorter
    return b"()" in left or left.count(b"(") > MAX_NESTING


def value_too_deep(value: Any) -> bool:
    """Returns True if a value that consists of lists and maps is nested too deeply, regardless of how it was built."""
    level = _containers([value])
    for _ in range(MAX_NESTING):
        level = [inner for one in level for inner in _containers(one.values() if isinstance(one, dict) else one)]
    return bool(level)


def _containers(values: Iterable[Any]) -> list[Any]:
    return [one for one in values if isinstance(one, dict | list)]
