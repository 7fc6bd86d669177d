# SPDX-License-Identifier: Apache-2.0
"""The kind of each NUMA node's memory, derived from kernel data."""

from dataclasses import replace

import pytest
from dra_frontend.machine.memory_kinds import MemoryFacts, memory_kinds
from dra_frontend.machine.model import MemoryKind
from hypothesis import given
from hypothesis import strategies as st

CPUS = MemoryFacts(has_cpus=True, bandwidth=200, latency=90, tier=4)
"""A node with CPUs and DRAM."""
FAR = MemoryFacts(has_cpus=False, normal=False)
"""A node that has no CPUs and about which nothing else is known."""


@pytest.mark.parametrize(
    ("facts", "kind"),
    [
        (FAR, MemoryKind.UNKNOWN),
        # Memory with more than twice the bandwidth of DRAM is HBM, whatever its latency. Exactly twice is not enough.
        (replace(FAR, bandwidth=401, latency=120), MemoryKind.HBM),
        (replace(FAR, bandwidth=400, latency=60), MemoryKind.UNKNOWN),
        # HBM is recognized even if the firmware has marked it as special-purpose memory, and even on a node with CPUs.
        (replace(FAR, special_purpose=True, bandwidth=900), MemoryKind.HBM),
        (MemoryFacts(has_cpus=True, normal=False, special_purpose=True, bandwidth=900), MemoryKind.HBM),
        (replace(FAR, special_purpose=True), MemoryKind.UNKNOWN),
        # Memory as fast as DRAM is DRAM if both bandwidth and latency are known to match.
        (replace(FAR, bandwidth=185, latency=98), MemoryKind.DRAM),
        (replace(FAR, bandwidth=185), MemoryKind.UNKNOWN),
        (replace(FAR, bandwidth=185, latency=150), MemoryKind.UNKNOWN),
        # Slow memory alone does not imply CXL.
        (replace(FAR, bandwidth=60, latency=300, tier=22), MemoryKind.UNKNOWN),
        (replace(FAR, bus=MemoryKind.CXL, special_purpose=True, bandwidth=60), MemoryKind.CXL),
        (replace(FAR, bus=MemoryKind.PERSISTENT, special_purpose=True), MemoryKind.PERSISTENT),
        # CXL memory with the bandwidth of HBM is still CXL.
        (replace(FAR, bus=MemoryKind.CXL, bandwidth=900, tier=1), MemoryKind.CXL),
        # A node with CPUs also has memory that does not come from the CXL device, so its memory is of unknown kind.
        (replace(CPUS, bus=MemoryKind.CXL), MemoryKind.UNKNOWN),
        # If the node has a memory-side cache, its performance and tier describe the cache, not the memory.
        (replace(FAR, side_cache=True, bandwidth=900), MemoryKind.UNKNOWN),
        (replace(CPUS, side_cache=True), MemoryKind.UNKNOWN),
        # If the bandwidth is unknown, memory in a faster tier is HBM. The kernel puts memory it knows nothing about
        # into the DRAM tier.
        (replace(FAR, tier=2), MemoryKind.HBM),
        (replace(FAR, tier=4), MemoryKind.UNKNOWN),
        (replace(FAR, bandwidth=300, latency=90, tier=3), MemoryKind.UNKNOWN),
    ],
)
def test_the_kind_of_one_node_next_to_dram(facts: MemoryFacts, kind: MemoryKind) -> None:
    assert memory_kinds({0: CPUS, 1: CPUS, 2: facts}) == {0: MemoryKind.DRAM, 1: MemoryKind.DRAM, 2: kind}


def test_memory_is_compared_only_with_memory_that_is_known_to_be_dram() -> None:
    assert memory_kinds({0: replace(CPUS, side_cache=True), 1: replace(FAR, bandwidth=900, tier=1)}) == {
        0: MemoryKind.UNKNOWN,
        1: MemoryKind.UNKNOWN,
    }


_VALUES = st.none() | st.integers(1, 2000)
_FACTS = st.builds(
    MemoryFacts,
    has_cpus=st.booleans(),
    normal=st.booleans(),
    bus=st.sampled_from([None, None, None, MemoryKind.CXL, MemoryKind.PERSISTENT]),
    special_purpose=st.booleans(),
    side_cache=st.sampled_from([False, False, True]),
    bandwidth=_VALUES,
    latency=_VALUES,
    tier=st.none() | st.integers(1, 30),
)
_NODES = st.dictionaries(st.integers(0, 40), _FACTS, max_size=8)
_BUSES = {MemoryKind.CXL, MemoryKind.PERSISTENT}


@given(_NODES, st.integers(1, 9))
def test_cxl_and_pmem_are_recognized_by_their_bus_and_hbm_by_its_speed(
    nodes: dict[int, MemoryFacts], factor: int
) -> None:
    """Every node gets exactly one kind. HBM is recognized only if it is more than twice as fast as any DRAM."""
    kinds = memory_kinds(nodes)
    assert kinds.keys() == nodes.keys()
    dram = [one for number, one in nodes.items() if one.has_cpus and kinds[number] is MemoryKind.DRAM]
    for number, one in nodes.items():
        kind = kinds[number]
        assert kind not in _BUSES or (kind is one.bus and not one.has_cpus)
        assert not one.side_cache or kind is MemoryKind.UNKNOWN
        if kind is MemoryKind.HBM:
            assert one.bus is None
            assert all(not (one.bandwidth and its.bandwidth) or one.bandwidth > 2 * its.bandwidth for its in dram)
    # Neither the node numbers nor the unit of bandwidth matters.
    renamed = {1000 - number: one for number, one in nodes.items()}
    assert memory_kinds(renamed) == {1000 - number: kind for number, kind in kinds.items()}
    scaled = {n: replace(one, bandwidth=one.bandwidth and one.bandwidth * factor) for n, one in nodes.items()}
    assert memory_kinds(scaled) == kinds


@given(_NODES, st.integers(0, 5000))
def test_more_bandwidth_never_turns_hbm_into_another_kind(nodes: dict[int, MemoryFacts], more: int) -> None:
    nodes = nodes | {50: CPUS, 51: replace(FAR, bandwidth=4001)}
    for number, kind in memory_kinds(nodes).items():
        if kind is MemoryKind.HBM:
            faster = replace(nodes[number], bandwidth=(nodes[number].bandwidth or 4001) + more)
            assert memory_kinds(nodes | {number: faster})[number] is MemoryKind.HBM
    assert memory_kinds(nodes)[51] is MemoryKind.HBM
