# SPDX-License-Identifier: Apache-2.0
"""The kernel's list format."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from numa_contract.cpuset import format_cpu_list, parse_cpu_list
from numa_contract.errors import MalformedError


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("", set()), ("\n", set()), ("0", {0}), ("0-3,8", {0, 1, 2, 3, 8}), ("0-1,2,8-8\n", {0, 1, 2, 8}), ("007", {7})],
)
def test_reads_the_kernels_lists(text: str, cpus: set[int]) -> None:
    """Ascending numbers and ranges are a set; the empty list is the empty set."""
    assert parse_cpu_list(text) == cpus


@pytest.mark.parametrize("text", ["a", "1-", "-1", "3-1", "1,,2", "0 - 3", "0-3:1/2", "99999999", "8192", "1,", "٣"])
def test_invalid_lists_are_rejected_with_their_text(text: str) -> None:
    """An invalid list is an error that contains the list, never an empty or a guessed set."""
    with pytest.raises(MalformedError, match=rf"^CPU list '{text}': "):
        parse_cpu_list(text)


@pytest.mark.parametrize("text", ["0,0", "1,0", "0-3,3", "0-3,2-5", "8,0-1"])
def test_a_list_is_ascending_and_disjoint(text: str) -> None:
    """This is the kernel's form, so no CPU can appear twice, and no text costs more than the largest machine."""
    with pytest.raises(MalformedError, match="ascending"):
        parse_cpu_list(text)


@given(st.frozensets(st.integers(0, 4096)))
def test_every_set_survives_formatting_and_parsing(cpus: frozenset[int]) -> None:
    """A set is formatted as the shortest list and parses to the same set."""
    assert parse_cpu_list(format_cpu_list(cpus)) == cpus
    assert format_cpu_list([3, 1, 2, 8, 10, 9]) == "1-3,8-10"


def test_the_cache_of_parsed_lists_is_bounded() -> None:
    """Tenants also write lists: only the latest few huge ones are cached, and an invalid list raises the error each
    time.
    """
    assert parse_cpu_list("0-3") is parse_cpu_list("0-3")
    large = parse_cpu_list("0-8191")
    assert parse_cpu_list("0-8191") is large
    for last in range(8100, 8120):
        parse_cpu_list(f"0-{last}")
    assert parse_cpu_list("0-8191") is not large
    assert format_cpu_list(range(8192)) == "0-8191"
    for text in ("x", "9" * 5000):
        for _ in range(2):
            with pytest.raises(MalformedError):
                parse_cpu_list(text)
