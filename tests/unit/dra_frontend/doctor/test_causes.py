# SPDX-License-Identifier: Apache-2.0
"""A remedy belongs to the cause that a text of the backend names."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from dra_frontend.doctor.causes import CAUSES, cause_of

ROOT = Path(__file__).parents[4]
SOURCES = (ROOT / "services/nri-backend/src", ROOT / "shared/src")
# The kernel's words: errors of system calls, and contents of cpuset.cpus.partition.
KERNEL = {
    "Enable partition not permitted",
    "Permission denied",
    "Read-only file system",
    "Operation not permitted",
    "No space left",
}


def texts(path: Path) -> Iterator[str]:
    """Yields the strings of a module, docstrings excluded: the backend reports none of those."""
    tree = ast.parse(path.read_text())
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            yield node.value


def test_every_word_is_in_a_text_of_the_backend_or_the_kernel() -> None:
    """A text that is changed in the backend is changed in the table, too; a word that no text contains is dead."""
    known = "\n".join(text for source in SOURCES for path in source.rglob("*.py") for text in texts(path))
    words = [word for cause in CAUSES for word in cause.words if word not in KERNEL]
    assert [word for word in words if word not in known] == []


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("cpuset.cpus.partition says root invalid (Enable partition not permitted)", "capability SYS_ADMIN"),
        ("nri-backend lacks the capability SYS_ADMIN, which", "capability SYS_ADMIN"),
        (
            "although it has the capability SYS_ADMIN (root invalid (Enable partition not permitted))",
            "let the security module allow the capability SYS_ADMIN",
        ),
        ("nri-backend lacks the capability DAC_OVERRIDE: it can neither", "capability DAC_OVERRIDE"),
        ("nri-backend runs in a user namespace", "hostUsers: true"),
        ("so this node is itself a container (as in kind)", "nodes that are not containers"),
        ("/sys/fs/cgroup/a/cpuset.cpus: Operation not permitted when 2-11 was written", "the chart's volume cgroup"),
        ("/sys/fs/cgroup/a/cpuset.cpus: Permission denied when 2 was written", "capability DAC_OVERRIDE"),
        ("what containers were given cannot be kept: Read-only file system", "run-backend"),
        ("no cgroup has the CPUs 4-5, since a partition ended", "offline and online again"),
        ("the kernel has not answered for 12 s about x", "dmesg"),
        ("dra.cpu claim ns/c (u) belongs to container main of pod ns/p", "a claim of its own"),
        ("no instance of nri-backend has enforced its claims; none is active", "driver.enforced"),
        ("nothing that anybody foresaw", "kubectl logs POD -c backend"),
    ],
)
def test_the_remedy_is_that_of_the_cause(text: str, remedy: str) -> None:
    """The effect in a text is the same for many causes, so it decides nothing."""
    assert remedy in cause_of(text).remedy
