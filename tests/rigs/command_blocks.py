# SPDX-License-Identifier: Apache-2.0
"""Command blocks from documentation pages, extracted from the Markdown source.

A command block is fenced as ``sh`` or ``console``. A comment on the line before the fence selects the test that runs
it: ``<!-- run on: node -->`` for tests/node, ``<!-- not run: REASON -->`` for none. A block without a comment runs in
tests/quickstart, with real Helm and kubectl. A new block is therefore run unless its page contains a reason not to.
"""

import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

DOCS: Final = Path(__file__).parents[2] / "docs"
PAGES: Final = ("install", "runtime", "quickstart", "upgrade", "uninstall", "migration")
"""Pages whose command blocks are all run."""
COMMANDS: Final = ("sh", "console")
DATA: Final = ("yaml", "toml")

CLUSTER: Final = "cluster"
NODE: Final = "node"
NOWHERE: Final = ""

_FENCE: Final = re.compile(
    r"(?:^ *<!-- (?P<mark>[^\n]*) -->\n)?^(?P<indent> *)```(?P<kind>[^\n]*)\n(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
_MARK: Final = re.compile(r"run on: (?P<place>node)|not run: (?P<reason>.+)")


class MarkError(ValueError):
    """The comment before a block is neither ``run on: node`` nor ``not run: REASON``."""


@dataclass(frozen=True, slots=True)
class Block:
    """One command block."""

    page: str
    line: int
    """Line number of the fence in the page's source."""
    kind: str
    text: str
    place: str
    """CLUSTER, NODE or NOWHERE."""
    reason: str = ""
    """Reason why no test runs the block."""

    def __str__(self) -> str:
        return f"docs/{self.page}.md:{self.line}"

    def script(self, values: Mapping[str, str]) -> str:
        """Returns the block as a shell script in which each placeholder is replaced with its value."""
        text = "\n".join(command for command, _ in self.commands())
        for word, value in values.items():
            text = re.sub(rf"\b{word}\b", value.replace("\\", r"\\"), text)
        return text

    def commands(self) -> list[tuple[str, str]]:
        """Returns the commands, each with the output that the page shows; blocks of kind ``sh`` show none."""
        if self.kind == "sh":
            return [(self.text, "")]
        parts = re.split(r"^\$ ", self.text.replace("\\\n", " "), flags=re.MULTILINE)[1:]
        return [(command, shown) for command, _, shown in (part.partition("\n") for part in parts)]


def blocks(page: str, place: str | None = None) -> list[Block]:
    """Returns a page's command blocks in order, or only those that run in one place. Raises MarkError."""
    found = blocks_of(page, (DOCS / f"{page}.md").read_text())
    return [block for block in found if place in (None, block.place)]


def blocks_of(page: str, source: str) -> list[Block]:
    """Returns the command blocks of a page's source. Raises MarkError."""
    return [_block(page, source, match) for match in _FENCE.finditer(source) if match["kind"] in COMMANDS]


def fence_kinds(page: str) -> set[str]:
    """Returns the languages of all fences on a page."""
    return {match["kind"] for match in _FENCE.finditer((DOCS / f"{page}.md").read_text())}


def _block(page: str, source: str, match: re.Match[str]) -> Block:
    line = source.count("\n", 0, match.start("kind")) + 1
    text, place, reason = textwrap.dedent(match["text"]), CLUSTER, ""
    if match["mark"]:
        mark = _MARK.fullmatch(match["mark"])
        if mark is None:
            raise MarkError(f'docs/{page}.md:{line}: "{match["mark"]}" is neither "run on: node" nor "not run: REASON"')
        place, reason = (NOWHERE, mark["reason"]) if mark["reason"] else (NODE, "")
    return Block(page, line, match["kind"], text, place, reason)
