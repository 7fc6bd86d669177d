# SPDX-License-Identifier: Apache-2.0
"""Helpers shared by the generators in this directory. They wrap prose, replace a marked part, and write or compare
files.
"""

import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

WIDTH: Final = 120
"""Maximum length of a line of prose on a page."""


def wrapped(text: str) -> str:
    """Wraps each paragraph at WIDTH."""
    return "\n\n".join(textwrap.fill(paragraph, WIDTH, break_on_hyphens=False) for paragraph in text.split("\n\n"))


def replaced(name: str, page: str, begins: str, ends: str, content: str) -> str:
    """Returns the page ``name`` with new content between two markers. Raises ValueError if one of them is missing."""
    before, begin, rest = page.partition(begins)
    _, end, after = rest.partition(ends)
    if not (begin and end):
        raise ValueError(f"{name} does not contain the lines {begins!r} and {ends!r}")
    return f"{before}{begins}{content}{ends}{after}"


def write_or_check(texts: Mapping[Path, str], arguments: Sequence[str], *, source: str, target: str) -> int:
    """Writes the files, or compares them if ``--check`` is given. Returns the exit status.

    A message about a difference names the ``source`` of the text and the make target that writes it.
    """
    status = 0
    for path, text in texts.items():
        if "--check" not in arguments:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            print(f"{path.name} differs from {source}: run make {target}", file=sys.stderr)
            status = 1
    return status
