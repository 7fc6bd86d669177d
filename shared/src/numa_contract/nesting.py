# SPDX-License-Identifier: Apache-2.0
"""The limit on nesting of every document from outside, checked before a parser expands the document.

Parsers recurse, and their maximum depth depends on the interpreter: Python 3.11 rejects JSON that is nested 1,000
levels deep, Python 3.13 parses 9,000. Code that uses the parsed value recurses, too, and may fail where the parser did
not. So the driver has a limit of its own. It is the same for JSON, YAML and TOML, and far below the limit of any
supported interpreter.
"""

from collections.abc import Iterable
from typing import Any, Final

MAX_NESTING: Final = 64
"""Levels of lists and maps in one document. Objects of the Kubernetes API have about 20."""
TOO_DEEP: Final = f"is nested more than {MAX_NESTING} levels deep"
_PARENTHESES: Final = bytes.maketrans(b"[{]}", b"(())")
_OTHERS: Final = bytes(set(range(256)) - set(b"[]{}"))


def json_too_deep(data: bytes) -> bool:
    """Returns True if a JSON text is nested too deep. For a text that is not JSON, either answer is possible."""
    if data.count(b"[") + data.count(b"{") <= MAX_NESTING:
        return False
    # Drops the strings: once escaped backslashes and quotes are gone, every second part between quotes is one.
    return brackets_too_deep(b"".join(data.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2]))


def brackets_too_deep(text: bytes) -> bool:
    """Returns True if the brackets in a text without strings and comments are nested too deep.

    Each round removes the innermost pairs, so a text with N levels is empty after N rounds. Brackets that are never
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
    """Returns True if a value of lists and maps is nested too deep, however it was built."""
    level = _containers([value])
    for _ in range(MAX_NESTING):
        level = [inner for one in level for inner in _containers(one.values() if isinstance(one, dict) else one)]
    return bool(level)


def _containers(values: Iterable[Any]) -> list[Any]:
    return [one for one in values if isinstance(one, dict | list)]
