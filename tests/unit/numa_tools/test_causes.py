# SPDX-License-Identifier: Apache-2.0
"""A remedy belongs to the cause that a text of the backend names."""

from pathlib import Path

import pytest
from numa_contract.state.status import Notice, StatusCode
from numa_tools.causes import _REMEDIES, CAUSES, EXPLAINED, cause_of, remedy_of

BACKEND = Path(__file__).parents[3] / "services/nri-backend/src"
# The kernel's words: errors of system calls, and what cpuset.cpus.partition contains.
KERNEL = {
    "Enable partition not permitted",
    "Permission denied",
    "Read-only file system",
    "Operation not permitted",
    "No space left",
}
NOUNS = ("interrupts", "host daemons")
"""The two nouns that the sentences of host_isolation/evictor.py are about."""


def test_every_phrase_is_one_that_the_backend_or_the_kernel_uses() -> None:
    """A text that is changed in the backend changes the table, too."""
    source = "\n".join(path.read_text() for path in BACKEND.rglob("*.py"))
    texts = [source, *(source.replace("{one.noun}", noun) for noun in NOUNS)]
    phrases = [phrase for cause in CAUSES for phrase in cause.phrases if phrase not in KERNEL]
    assert [phrase for phrase in phrases if not any(phrase in text for text in texts)] == []


def test_no_phrase_can_be_a_name() -> None:
    """Names of Kubernetes objects, containers and environment variables contain no space."""
    assert [phrase for cause in CAUSES for phrase in cause.phrases if " " not in phrase] == []


@pytest.mark.parametrize("quote", ["'", '"'])
def test_a_quoted_value_decides_nothing(quote: str) -> None:
    """The value of a variable and the name of a file may be any text; a text that was cut lacks the second quote."""
    for cause in CAUSES:
        for phrase in cause.phrases:
            value = repr(f"{phrase}{quote}")
            for text in (f"the container's X={value} is wrong", f"the container's X={value[:-1]}"):
                assert cause_of(text).phrases == ()
    assert "boot Linux 6.7" in cause_of("the node's file 'a' and the pod's 'b': boot Linux 6.7 or later").remedy


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("cpuset.cpus.partition says root invalid (Enable partition not permitted)", "capability SYS_ADMIN"),
        ("/sys/fs/cgroup/a/cpuset.cpus: Operation not permitted when 2-11 was written", "the chart's volume cgroup"),
        ("/sys/fs/cgroup/a/cpuset.cpus: Permission denied when 2 was written", "capability DAC_OVERRIDE"),
        ("what containers were given cannot be kept: Read-only file system", "run-backend"),
        ("no cgroup has the CPUs 4-5, since a partition did not end", "drain and reboot"),
        ("the kernel has not answered for 12 s about x", "dmesg"),
        ("dra.cpu claim ns/c (u) belongs to container main of pod ns/p", "a claim of its own"),
        ("no instance of nri-backend has enforced its claims; none is active", "driver.status"),
        ("nothing that anybody foresaw", "kubectl logs POD -c backend"),
    ],
)
def test_the_remedy_is_that_of_the_cause(text: str, remedy: str) -> None:
    """The effect in a text is the same for many causes, so it decides nothing."""
    assert remedy in cause_of(text).remedy


def test_each_code_has_a_remedy_or_a_check_of_its_own() -> None:
    """A new code of the service needs a row; a text of the backend has the remedy of its cause."""
    others = {StatusCode.SERVICE_DOWN, StatusCode.FILE_MISSING}
    assert others.isdisjoint({*_REMEDIES} | EXPLAINED), "only the command status reports these"
    assert {*_REMEDIES} | EXPLAINED | others | {StatusCode.BACKEND_PROBLEM} == {*StatusCode}
    assert {*_REMEDIES} & EXPLAINED == set()
    for code, remedy in _REMEDIES.items():
        assert remedy_of(Notice(code=code, text="anything")) == remedy
    assert "drain and reboot" in remedy_of(Notice(code=StatusCode.BACKEND_PROBLEM, text="no cgroup has the CPUs 4-5"))
    assert "kubectl logs POD -c frontend" in remedy_of(Notice(code="OfALaterRelease", text="anything"))
