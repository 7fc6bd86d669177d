# SPDX-License-Identifier: Apache-2.0
"""JSON from files and peers, read so that whatever is read can be computed with and written again."""

import json
import math
from typing import Any, Final, NoReturn

from numa_contract.errors import MalformedError, shown
from numa_contract.nesting import TOO_DEEP, json_too_deep

_DIGITS: Final = 20
"""Of an integer: 2^64 has 20, and no number here is larger."""


def parse_json(data: bytes, most_bytes: int, kind: str, name: str) -> Any:
    """Reads one JSON text in UTF-8; errors call it ``kind`` and ``name``.

    Raises MalformedError if the text is too long, nested too deep, not JSON or not UTF-8, or if it contains NaN, an
    infinite or huge number, or a lone surrogate, which could be read but never be written again.
    """
    if len(data) > most_bytes:
        raise MalformedError(kind, name, f"has {len(data)} bytes, more than {most_bytes}")
    if json_too_deep(data):
        raise MalformedError(kind, name, TOO_DEEP)
    try:
        document = json.loads(data.decode(), parse_constant=_refused, parse_float=_finite, parse_int=_bounded)
        if b"\\u" in data:
            json.dumps(document, ensure_ascii=False).encode()
    except ValueError as error:  # UnicodeError, JSONDecodeError and ours
        raise MalformedError(kind, name, f"cannot be read as JSON ({_words(error)})") from error
    return document


def _words(error: ValueError) -> str:
    # A UnicodeError shows all of what it could not decode.
    return error.reason if isinstance(error, UnicodeDecodeError | UnicodeEncodeError) else str(error)


def _refused(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {shown(text)} is too large")
    return value


def _bounded(text: str) -> int:
    if len(text) > _DIGITS:
        raise ValueError(f"the number {shown(text)} is too large")
    return int(text)
