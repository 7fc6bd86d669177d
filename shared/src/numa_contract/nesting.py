# SPDX-License-Identifier: Apache-2.0
"""The limit on nesting of every document from outside, checked before a parser expands the document.

Parsers recurse, and how deep they can depends on the interpreter: Python 3.11 refuses JSON that is nested 1,000 levels
deep, Python 3.13 reads 9,000. Code behind the parser recurses, too, and may fail where the parser did not. So the limit
is the driver's own: it is the same for JSON, YAML and TOML, and far below what any supported interpreter refuses.
"""

from collections.abc import Iterable
from typing import Any, Final

MAX_NESTING: Final = 64
"""Levels of lists and maps in one document. Objects of the Kubernetes API have about 20."""
TOO_DEEP: Final = f"is nested more than {MAX_NESTING} levels deep"
_PARENTHESES: Final = bytes.maketrans(b"[{]}", b"(())")
_OTHERS: Final = bytes(set(range(256)) - set(b"[]{}"))


def json_too_deep(data: bytes) -> bool:
    """Returns True if a JSON text is nested too deep. A text that is not JSON counts up to its first error."""
    if data.count(b"[") + data.count(b"{") <= MAX_NESTING:
        return False
    # Brackets in strings do not count. Without escaped quotes and backslashes, every second part is a string.
    return brackets_too_deep(b"".join(data.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2]))


def brackets_too_deep(text: bytes) -> bool:
    """Returns True if the brackets in a text without strings and comments are nested too deep.

    Each round removes the innermost pairs, so a text with N levels is empty after N rounds. Of brackets that are never
    closed the number counts.
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
