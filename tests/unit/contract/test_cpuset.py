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
def test_kernel_lists_are_parsed(text: str, cpus: set[int]) -> None:
    """Ascending numbers and ranges parse to a set, and the empty list parses to the empty set."""
    assert parse_cpu_list(text) == cpus


@pytest.mark.parametrize("text", ["a", "1-", "-1", "3-1", "1,,2", "0 - 3", "0-3:1/2", "99999999", "8192", "1,", "٣"])
def test_an_invalid_list_is_rejected_with_an_error_that_quotes_it(text: str) -> None:
    """An invalid list never results in an empty or guessed set."""
    with pytest.raises(MalformedError, match=rf"^CPU list '{text}': "):
        parse_cpu_list(text)


@pytest.mark.parametrize("text", ["0,0", "1,0", "0-3,3", "0-3,2-5", "8,0-1"])
def test_a_list_must_be_ascending_and_disjoint(text: str) -> None:
    """The kernel writes lists in this form. As no CPU can appear twice, no list costs more to parse than one for the
    largest machine.
    """
    with pytest.raises(MalformedError, match="ascending"):
        parse_cpu_list(text)


@given(st.frozensets(st.integers(0, 4096)))
def test_every_set_survives_formatting_and_parsing(cpus: frozenset[int]) -> None:
    """A set is formatted as the shortest possible list, which parses back to the same set."""
    assert parse_cpu_list(format_cpu_list(cpus)) == cpus
    assert format_cpu_list([3, 1, 2, 8, 10, 9]) == "1-3,8-10"


def test_the_cache_for_parsed_lists_is_bounded() -> None:
    """Tenants can write lists too. Only the few most recent huge lists are cached, and an invalid list raises its error
    on every call.
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
