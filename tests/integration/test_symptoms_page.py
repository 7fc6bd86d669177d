# SPDX-License-Identifier: Apache-2.0
"""The samples in docs/symptoms.md are the commands' actual output on nodes with the faults that the page describes."""

from collections.abc import Iterator

import pytest

from tests.rigs.on_call import plain, played
from tests.rigs.symptoms import SAMPLES, Sample


@pytest.fixture(scope="module")
def shown() -> Iterator[dict[str, str]]:
    """Yields the output of each command. The faults are injected only once for all tests."""
    with played() as outputs:
        yield outputs


@pytest.mark.parametrize("sample", SAMPLES, ids=[sample.name for sample in SAMPLES])
@pytest.mark.timeout(900)
def test_the_page_shows_the_output_of_the_commands(sample: Sample, shown: dict[str, str]) -> None:
    """An operator whose node has one of the faults sees the same output. Line breaks are ignored."""
    output, start = plain(shown[sample.name]), 0
    for part in map(plain, sample.parts):
        found = output.find(part, start)
        assert found >= 0, f"{part}\n\nis not in\n\n{shown[sample.name]}"
        start = found + len(part)


def test_every_sample_is_shown_with_its_command() -> None:
    """The prompt shows the command of the kubectl plugin; ``status`` and ``doctor`` also name the node. An Event has no
    command.
    """
    for sample in SAMPLES:
        subject = sample.name.partition(": ")[2]
        expected = {"Event": "", "status": "kubectl numa status node-a", "doctor": "kubectl numa doctor node-a"}
        assert sample.command == expected.get(subject, f"kubectl numa {subject}")
