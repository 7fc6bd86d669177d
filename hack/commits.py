# SPDX-License-Identifier: Apache-2.0
"""Checks commit subjects: ``area: verb object``, see CONTRIBUTING.md. Reads the local repository only.

Commits before BASE are not checked. A clone that is too shallow to contain BASE has only newer commits, so all of them
are checked. Without git, or outside a repository, nothing is checked. Merge commits are not checked, because their
subjects have a different form.
"""

import re
import subprocess
import sys
from pathlib import Path
from typing import Final

BASE: Final = "5f30846ed18bcac2bbe97a29b6c74d758f7d94bb"
MAX_LENGTH: Final = 71
AREAS: Final = frozenset(
    {"all", "backend", "build", "chart", "contract", "docs", "examples", "frontend", "fuzz", "kubectl-numa", "node"}
    | {"numa_tools", "proto", "shared", "tests"}
)
ROOT: Final = Path(__file__).parents[1]
_SOURCES: Final = ("shared/src", "services/dra-frontend/src", "services/nri-backend/src", "services/kubectl-numa/src")
_SUBJECT: Final = re.compile(r"(?P<area>[a-z][a-z0-9_-]*): (?P<text>\S.*)", re.ASCII)


def sources(root: Path) -> frozenset[str]:
    """Returns the names of the product's packages and modules, which are also valid areas."""
    paths = [path for source in _SOURCES for path in (root / source).rglob("*.py")]
    return frozenset({path.stem for path in paths} | {path.parent.name for path in paths})


def fault(subject: str, areas: frozenset[str]) -> str:
    """Returns the error in a subject, or an empty string."""
    found = _SUBJECT.fullmatch(subject)
    if found is None:
        return 'is not "area: verb object"'
    if found["area"] not in areas:
        return f"the area {found['area']} is neither a package or module nor one of {', '.join(sorted(AREAS))}"
    if not re.match("[a-z]", found["text"]):
        return "the verb must begin with a lower-case letter"
    if re.match(r"(add|chang|fix|remov|renam|updat|us|mak)(s|es|ed|d|ing)\b", found["text"]):
        return 'the verb must be imperative: "add", not "added" or "adds"'
    if found["text"].endswith("."):
        return "ends with a full stop"
    return f"has {len(subject)} characters, at most {MAX_LENGTH}" if len(subject) > MAX_LENGTH else ""


def subjects(root: Path) -> list[tuple[str, str]]:
    """Returns the abbreviated hash and the subject of each commit to check."""
    if _git(root, "rev-parse", "--git-dir") is None:
        return []
    base = _git(root, "rev-parse", "--quiet", "--verify", f"{BASE}^{{commit}}")
    if base is None and (_git(root, "rev-parse", "--is-shallow-repository") or "").strip() != "true":
        return []  # a history without BASE, for example after the tree has been imported into another repository
    log = _git(root, "log", "--no-merges", "--format=%h %s", f"{BASE}..HEAD" if base else "HEAD")
    return [(line.partition(" ")[0], line.partition(" ")[2]) for line in (log or "").splitlines()]


def _git(root: Path, *arguments: str) -> str | None:
    try:
        ran = subprocess.run(  # noqa: S603 - the arguments are constants
            ["git", "-C", str(root), *arguments],  # noqa: S607 - the git of the developer
            check=False,
            capture_output=True,
            text=True,
        )
    except OSError:
        return None
    return ran.stdout if ran.returncode == 0 else None


def faults(root: Path) -> list[str]:
    """Returns a line for each commit with an invalid subject."""
    areas = AREAS | sources(root)
    found = ((commit, subject, fault(subject, areas)) for commit, subject in subjects(root))
    return [f"{commit} {subject}: {why}" for commit, subject, why in found if why]


def main(arguments: list[str]) -> str | int:
    """Checks the history, or with ``--message FILE`` the message of a commit that is about to be made."""
    if arguments[:1] == ["--message"]:
        subject = Path(arguments[1]).read_text().partition("\n")[0]
        why = fault(subject, AREAS | sources(ROOT))
        return f"{subject}: {why}" if why else 0
    return "\n".join(faults(ROOT)) or 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
