# SPDX-License-Identifier: Apache-2.0
"""``hack/commits.py``: "make check" fails for commit subjects that violate the rule in CONTRIBUTING.md."""

import subprocess
from pathlib import Path

import pytest

from hack import commits

AREAS = commits.AREAS | commits.sources(commits.ROOT)


@pytest.mark.parametrize(
    "subject",
    [
        "backend: retry a partition that the kernel rejected with EBUSY",
        "kubectl-numa: list claims of all namespaces with -A",
        "numa_tools: report in simulate that an observing node refuses claims",
        "allocation: name the claim in refusals",
        "telemetry: name the unit in help texts",
        "chart: " + "x" * 64,
    ],
)
def test_valid_subjects_are_accepted(subject: str) -> None:
    assert commits.fault(subject, AREAS) == ""


@pytest.mark.parametrize(
    ("subject", "why"),
    [
        ("Halve the pages", "is not"),
        ("backend: ", "is not"),
        ("wip: try something", "the area wip is neither"),
        ("allocation, doctor: name the claim in refusals", "is not"),
        ("docs: Rewrite the pages", "lower-case"),
        ("docs: added a page", "imperative"),
        ("docs: fixes a link", "imperative"),
        ("docs: rewrite the pages.", "full stop"),
        ("chart: " + "x" * 65, "has 72 characters, at most 71"),
    ],
)
def test_invalid_subjects_are_rejected_with_the_reason(subject: str, why: str) -> None:
    assert why in commits.fault(subject, AREAS)


def git(tree: Path, *arguments: str) -> str:
    """Runs git under an identity other than the user's."""
    identity = ("-c", "user.name=n", "-c", "user.email=e@example.com", "-c", "commit.gpgsign=false")
    command = ["git", *identity, "-C", str(tree), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Creates a repository with an old commit, the base, and two commits after it. The second of these has an invalid
    subject.
    """
    made = tmp_path / "tree"
    made.mkdir()
    git(made, "init", "-q", "-b", "main")
    hashes = []
    for subject in ("Before the rule", "The base", "docs: add a page", "A page"):
        git(made, "commit", "-q", "--allow-empty", "-m", subject)
        hashes.append(git(made, "rev-parse", "HEAD"))
    monkeypatch.setattr(commits, "BASE", hashes[1])
    return made


def test_commits_after_the_base_are_checked(tree: Path) -> None:
    """The output contains the commit and the reason. A merge commit is not checked."""
    git(tree, "checkout", "-q", "-b", "other", "HEAD~1")
    git(tree, "commit", "-q", "--allow-empty", "-m", "docs: add a word")
    git(tree, "merge", "-q", "--no-ff", "-m", "Merge pull request", "main")
    (line,) = commits.faults(tree)
    assert line.endswith(' A page: is not "area: verb object"')


@pytest.mark.parametrize(("depth", "checked"), [(1, 1), (2, 2), (3, 2)])
def test_all_commits_of_a_shallow_clone_are_checked(depth: int, checked: int, tree: Path) -> None:
    """If the base is missing, all commits of the clone are newer than the base."""
    clone = tree.parent / "clone"
    git(tree, "clone", "-q", "--depth", str(depth), tree.as_uri(), str(clone))
    assert len(commits.subjects(clone)) == checked
    assert len(commits.faults(clone)) == 1


def test_a_tree_without_the_projects_history_is_not_checked(tree: Path, tmp_path: Path) -> None:
    """Neither a repository into which the tree was imported nor an unpacked archive has commits that can be checked."""
    imported = tmp_path / "imported"
    imported.mkdir()
    assert commits.faults(imported) == []
    git(imported, "init", "-q")
    git(imported, "commit", "-q", "--allow-empty", "-m", "Import")
    assert commits.faults(imported) == []


def test_the_message_of_a_new_commit_can_be_checked(tmp_path: Path) -> None:
    """A commit-msg hook passes the file; only its first line is the subject."""
    message = tmp_path / "COMMIT_EDITMSG"
    message.write_text("docs: add a page\n\nBecause it was missing.\n")
    assert commits.main(["--message", str(message)]) == 0
    message.write_text("Add a page\n")
    assert commits.main(["--message", str(message)]) == 'Add a page: is not "area: verb object"'
