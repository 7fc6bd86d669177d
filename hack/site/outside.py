# SPDX-License-Identifier: Apache-2.0
"""mkdocs hook: README.md becomes the first page, and links to files outside docs/ become plain paths.

The site does not contain the chart, the examples or the code. If REPOSITORY is set to the address of a source tree, the
links point there instead.
"""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+[^)\s]*)\)")


def on_files(files: Files, *, config: Any) -> Files:
    """Adds README.md as index.md, with links in the form that the pages in docs/ use."""
    readme = (ROOT / "README.md").read_text()
    elsewhere = re.sub(r"\]\((?!docs/|https?:|#)", "](../", readme)
    files.append(File.generated(config, "index.md", content=elsewhere.replace("](docs/", "](")))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_kwargs: Any) -> str:
    """Replaces links to files outside docs/ with addresses under REPOSITORY, or with plain paths if REPOSITORY is not
    set. A link to README.md becomes a link to the first page.
    """
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
