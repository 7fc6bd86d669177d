# SPDX-License-Identifier: Apache-2.0
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nri_backend.host_isolation.masks import format_mask, parse_mask
from numa_contract.cpuset import MAX_CPU
from numa_contract.errors import MalformedError


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("ff", set(range(8))), ("00000001,00000000\n", {32}), ("0", set()), ("8,00000003", {0, 1, 35})],
)
def test_kernel_masks_are_parsed(text: str, cpus: set[int]) -> None:
    """A mask consists of groups of 32 bits, most significant group first. The first group may have fewer digits."""
    assert parse_mask(text) == cpus


@given(st.frozensets(st.integers(0, MAX_CPU), max_size=40))
def test_a_formatted_mask_parses_to_the_same_cpus(cpus: frozenset[int]) -> None:
    """Each group has eight digits, which the kernel requires for all but the first (bitmap_parse)."""
    text = format_mask(cpus)
    assert parse_mask(text) == cpus
    assert all(len(group) == 8 for group in text.split(","))


@pytest.mark.parametrize("text", ["", "0-3", "ff,f", "fffffffff", "f" * 8 + ",00000000" * 300])
def test_other_strings_are_rejected(text: str) -> None:
    """The string may come from another program, so its length is limited too."""
    with pytest.raises(MalformedError, match="CPU mask"):
        parse_mask(text)
