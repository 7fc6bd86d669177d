# SPDX-License-Identifier: Apache-2.0
"""docs/symptoms.md split into its parts: index, sections and sample outputs."""

import re
from pathlib import Path
from typing import Final, NamedTuple

TEXT: Final = (Path(__file__).parents[2] / "docs/symptoms.md").read_text()
_SAMPLE: Final = re.compile(r"^<!-- output: (?P<name>[^\n]+) -->\n```\w*\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


class Sample(NamedTuple):
    """A sample output on the page."""

    name: str
    """Key of the output in tests/rigs/on_call.py."""
    command: str
    """Command after the prompt; empty for a sample of an Event."""
    parts: tuple[str, ...]
    """Parts of the output that the page shows; the page omits the text between them."""


def slug(title: str) -> str:
    """Returns a heading's anchor."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def _sections() -> dict[str, str]:
    parts = TEXT.split("\n## ")[1:]
    return {part.partition("\n")[0]: part.partition("\n")[2] for part in parts}


def _sample(name: str, text: str) -> Sample:
    command, _, output = text.partition("\n") if text.startswith("$ ") else ("", "", text)
    parts = [part.strip() for part in re.split(r"^\.\.\.$", output, flags=re.MULTILINE)]
    return Sample(name, command.removeprefix("$ "), tuple(filter(None, parts)))


_ALL: Final = _sections()
INDEX: Final = _ALL["Index"]
SECTIONS: Final = {title: text for title, text in _ALL.items() if title not in ("First commands", "Index", "Promises")}
"""Text of each symptom's section, by heading."""
SAMPLES: Final = tuple(_sample(match["name"], match["text"]) for match in _SAMPLE.finditer(TEXT))


def rows(text: str, heading: str) -> list[list[str]]:
    """Returns the cells of all rows in a page's tables whose first column has this heading."""
    found: list[list[str]] = []
    for table in re.findall(rf"^\| {heading} \|.*\n\|[-|]+\|\n((?:\|.*\n?)+)", text, re.MULTILINE):
        found += [[cell.strip() for cell in row.strip("|").split(" | ")] for row in table.splitlines()]
    return found


def quoted(text: str) -> list[str]:
    """Returns the code spans in Markdown."""
    return re.findall(r"`([^`]+)`", text)
