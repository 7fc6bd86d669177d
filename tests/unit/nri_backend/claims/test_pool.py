# SPDX-License-Identifier: Apache-2.0
"""The shared pool."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nri_backend.claims.pool import claimed_cpus, shared_pool
from numa_contract.cdi import ClaimFile
from numa_contract.cpuset import parse_cpu_list

cpus = st.frozensets(st.integers(0, 15))


@given(cpus, cpus, cpus)
def test_the_pool_never_meets_a_claim(online: frozenset[int], reserved: frozenset[int], held: frozenset[int]) -> None:
    """No CPU is both in a claim and in the pool, and none in it is offline."""
    pool = shared_pool(online, reserved, held)
    assert not pool & held
    assert pool <= online
    assert pool == online - reserved - held or not online - reserved - held


@pytest.mark.parametrize(
    ("online", "reserved", "held", "pool"),
    [
        ("0-7", "0", "", "1-7"),
        ("0-7", "0", "2-3", "1,4-7"),
        ("0-7", "0", "1-7", "0"),
        ("0-7", "", "0-7", ""),
        ("0-3", "", "4-7", "0-3"),
        ("1-7", "0", "1-7", ""),
    ],
)
def test_who_is_left_without_a_cpu_gets_the_reserved_ones(online: str, reserved: str, held: str, pool: str) -> None:
    """A full node puts the rest on the reserved CPUs; without any there is no pool, and nothing empty is sent."""
    assert shared_pool(*map(parse_cpu_list, (online, reserved, held))) == parse_cpu_list(pool)


def test_a_file_without_a_record_holds_its_cpus() -> None:
    """A damaged record does not give its CPUs away."""
    files = [
        ClaimFile("dra.cpu", "a", None, frozenset({1}), "damaged"),
        ClaimFile("dra.memory", "b", None, frozenset()),
    ]
    assert claimed_cpus(files) == {1}
