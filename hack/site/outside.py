# SPDX-License-Identifier: Apache-2.0
"""A hook of mkdocs: README.md is the first page, and links that leave docs/ show the file's path instead.

A site has no place for the chart, the examples and the code. REPOSITORY, the address of a tree of the sources, makes
them links again.
"""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+[^)\s]*)\)")


def on_files(files: Files, *, config: Any) -> Files:
    """Adds README.md as index.md, with links as a page of docs/ writes them."""
    readme = (ROOT / "README.md").read_text()
    elsewhere = re.sub(r"\]\((?!docs/|https?:|#)", "](../", readme)
    files.append(File.generated(config, "index.md", content=elsewhere.replace("](docs/", "](")))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_kwargs: Any) -> str:
    """Makes links out of docs/ addresses below REPOSITORY, or plain paths."""
    repository = os.environ.get("REPOSITORY", "").rstrip("/")
    folder = Path("docs", page.file.src_uri).parent

    def outside(match: re.Match[str]) -> str:
        text, target = match.groups()
        path = os.path.normpath(folder / target)
        if path == "README.md":
            return f"[{text}]({'../' * (len(folder.parts) - 1)}index.md)"
        if path.startswith("docs/"):
            return match.group()
        return f"[{text}]({repository}/{path})" if repository else f"{text} (`{path}`)"

    return _LINK.sub(outside, markdown)
