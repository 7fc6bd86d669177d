# SPDX-License-Identifier: Apache-2.0
"""Draws a random sample of the project's texts, for a review of their language: ``python -m hack.sample SEED``.

The sample contains docstrings and comments from the frontend, the backend and the tests, passages from the pages, and
messages. The same seed draws the same texts from the same revision. Generated code and generated pages are left out.
"""

import ast
import io
import random
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

SIZES: Final = {"frontend": 60, "backend": 60, "tests": 60, "pages": 40, "messages": 30}
"""Number of texts to draw from each part of the project."""
_PARTS: Final = {
    "frontend": ("services/dra-frontend/src/", "services/kubectl-numa/src/"),
    "backend": ("services/nri-backend/src/", "shared/src/"),
    "tests": ("tests/", "hack/"),
}
"""For each part, the folders whose docstrings and comments belong to it."""
_MESSAGES: Final = ("services/", "shared/")
_GENERATED: Final = ("_pb/", "docs/state-api.md", "docs/command-reference.md")
_MARKERS: Final = ("SPDX", "noqa", "type:", "!", "pragma")  # strings to look for; they suppress no warnings here
"""Beginnings of comments that are instructions to a tool."""
_SHORTEST: Final = {"comment": 3, "message": 6, "page": 13}
"""Minimum number of words in each kind of text."""
_BLOCK: Final = re.compile(r"```.*?```", re.DOTALL)


@dataclass(frozen=True, order=True)
class Text:
    """A text and its position in a file."""

    path: str
    line: int
    """Line number, or 0 for a passage from a page."""
    name: str
    """Name of the documented object, or the kind of text."""
    content: str


def docstrings(path: str, tree: ast.Module) -> Iterator[Text]:
    """Yields the docstrings of a module, its classes and functions, and the strings below assignments."""
    for node in ast.walk(tree):
        match node:
            case ast.Module() | ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                if text := ast.get_docstring(node):
                    yield Text(path, getattr(node, "lineno", 1), getattr(node, "name", "module"), text)
        if isinstance(node, ast.Module | ast.ClassDef):
            for before, one in zip(node.body, node.body[1:], strict=False):
                match before, one:
                    case (
                        (ast.AnnAssign(target=target) | ast.Assign(targets=[target, *_])),
                        ast.Expr(value=ast.Constant(value=str(text))),
                    ):
                        yield Text(path, one.lineno, ast.unparse(target), text)


def comments(path: str, source: str) -> Iterator[Text]:
    """Yields the comments of a module; consecutive lines of a block are one comment."""
    lines: list[str] = []
    start = last = column = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        text = token.string.lstrip("# ").strip()
        if token.type != tokenize.COMMENT or not text or text.startswith(_MARKERS):
            continue
        row, indent = token.start
        if lines and (row, indent) != (last + 1, column):
            yield Text(path, start, "comment", " ".join(lines))
            lines = []
        if not lines:
            start, column = row, indent
        last = row
        lines.append(text)
    if lines:
        yield Text(path, start, "comment", " ".join(lines))


def messages(path: str, source: str, tree: ast.Module) -> Iterator[Text]:
    """Yields the string literals of a module that have several words, as they are written in its source."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str)):
            text = ast.get_source_segment(source, node) or ""
            if not text.startswith('"""'):
                yield Text(path, node.lineno, "message", text)


def passages(path: str, page: str) -> Iterator[Text]:
    """Yields the paragraphs, lists and tables of a page, without its code blocks."""
    for text in re.split(r"\n\s*\n", _BLOCK.sub("", page)):
        yield Text(path, 0, "page", text)


def texts(files: Mapping[str, str]) -> dict[str, list[Text]]:
    """Returns all texts of each part. ``files`` maps each file's path to its contents."""
    found: dict[str, list[Text]] = {part: [] for part in SIZES}
    for path, source in files.items():
        if any(mark in path for mark in _GENERATED):
            continue
        if path.endswith(".md") and not path.startswith("tests/"):
            found["pages"] += passages(path, source)
        if not path.endswith(".py"):
            continue
        tree = ast.parse(source)
        for part, folders in _PARTS.items():
            if path.startswith(folders):
                found[part] += [*docstrings(path, tree), *comments(path, source)]
        if path.startswith(_MESSAGES):
            found["messages"] += messages(path, source, tree)
    return {part: list(filter(_is_long_enough, several)) for part, several in found.items()}


def _is_long_enough(text: Text) -> bool:
    return len(text.content.split()) >= _SHORTEST.get(text.name, 1)


def draw(seed: str, found: Mapping[str, Sequence[Text]]) -> Iterator[str]:
    """Yields the lines of a sample: a heading for each part, and its texts ordered by file and line."""
    generator = random.Random(seed)  # noqa: S311  the sample must be reproducible, not secret
    for part, several in found.items():
        size = min(SIZES[part], len(several))
        yield f"\n## {part} ({size} of {len(several)})\n"
        for number, one in enumerate(sorted(generator.sample(several, size)), 1):
            position = f"{one.path}:{one.line}" if one.line else one.path
            yield f"{number}. `{position}` {one.name}: {' '.join(one.content.split())}"


def tracked_files(root: Path) -> dict[str, str]:
    """Returns the contents of the Python files and pages that git tracks, by path."""
    command = ["git", "-C", str(root), "ls-files", "*.py", "*.md"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603 - no shell reads the path
    paths = listed.stdout.splitlines()
    return {path: (root / path).read_text() for path in paths}


def main(arguments: Iterable[str]) -> int:
    """Prints a sample for the seed given as the only argument. Returns the exit status."""
    try:
        [seed] = arguments
    except ValueError:
        print("usage: python -m hack.sample SEED", file=sys.stderr)
        return 2
    for line in draw(seed, texts(tracked_files(Path(__file__).parent.parent))):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
