# SPDX-License-Identifier: Apache-2.0
"""Parses TOML from files and pipes, after a check of its nesting depth."""

import re
import tomllib
from typing import Any, Final

from numa_contract.documents import MAX_NESTING, TOO_DEEP, brackets_too_deep, value_too_deep

# Strings and comments. An unclosed string is accepted up to the end of its line or of the document. So no alternative
# fails after it has matched a long text, no text is matched twice, and matching takes linear time. Possessive
# quantifiers are not used: Python before 3.11.5 mishandles them if their content backtracks.
_NOT_STRUCTURE: Final = re.compile(
    r'"""(?:[^"\\]+|\\.|"{1,2}(?!"))*(?:"{3,5}|\\?\Z)'
    r"|'''(?:[^']+|'{1,2}(?!'))*(?:'{3,5}|\Z)"
    r'|"(?:[^"\\\n]+|\\.)*"?'
    r"|'[^'\n]*'?"
    r"|#[^\n]*",
    re.DOTALL,
)

_BETWEEN_KEYS: Final = re.compile(r"[]\n\r=,{}[]")
"""Characters that end a key, a header or a value. No value contains more than one dot, so text between two of these
characters that contains more dots is a key or a header.
"""


def parse_toml(text: str) -> dict[str, Any]:
    """Parses a TOML document. Raises ValueError if the document is not TOML or is nested too deeply."""
    structure = _NOT_STRUCTURE.sub("s", text)
    if brackets_too_deep(structure.encode(errors="replace")) or _dots_too_deep(structure):
        raise ValueError(TOO_DEEP)
    document = tomllib.loads(text)
    # Dotted keys nest values without brackets.
    if value_too_deep(document):
        raise ValueError(TOO_DEEP)
    return document


def _dots_too_deep(structure: str) -> bool:
    """Returns True if a key or a table header has too many parts.

    Each part is a nesting level without a bracket, and tomllib's run time grows with the square of the number of parts.
    """
    return any(key.count(".") >= MAX_NESTING for key in _BETWEEN_KEYS.split(structure))
