# SPDX-License-Identifier: Apache-2.0
"""Derives the kind of a NUMA node's memory from facts that the kernel reports.

No kernel file states the kind. Three facts together are enough for most nodes:

* The bus of the device that provides the memory. Memory on the CXL bus is CXL memory, and memory on the nvdimm bus is
  persistent memory.
* Whether the node has CPUs and normal memory, which the kernel can use for its own allocations. The kernel assumes
  that such nodes are DRAM, and ranks all other memory relative to them (``default_dram_nodes`` in mm/memory-tiers.c).
  This module does the same.
* The performance that the firmware reports (HMAT). Memory with more than twice the bandwidth of that DRAM is HBM, which
  is also hwloc's rule. Memory that performs like DRAM is DRAM.

All other memory is of unknown kind, since allocating the wrong kind of memory to a claim is worse than leaving the
claim pending. In particular, slow memory is not assumed to be CXL: it may also be persistent memory.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from dra_frontend.machine.model import MemoryKind


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """Facts that the kernel reports about the memory of one NUMA node."""

    has_cpus: bool
    normal: bool = True
    """True if the kernel can use the memory for its own allocations (``has_normal_memory``)."""
    bus: MemoryKind | None = None
    """Kind of memory according to the bus of the device that provides it, or None if the device or bus is unknown."""
    special_purpose: bool = False
    """True if the firmware marked the memory as special-purpose and a driver added it to the system (dax/kmem)."""
    side_cache: bool = False
    """True if other memory serves as a cache for this memory, so the reported performance is that of both combined."""
    bandwidth: int | None = None
    latency: int | None = None
    tier: int | None = None
    """Number of the kernel's memory tier; lower is faster."""


def memory_kinds(nodes: Mapping[int, MemoryFacts]) -> dict[int, MemoryKind]:
    """Returns the kind of memory of every NUMA node, by the node's ID."""
    ordinary = [facts for facts in nodes.values() if _is_ordinary(facts)]
    return {number: _kind(facts, ordinary) for number, facts in nodes.items()}


def _is_ordinary(facts: MemoryFacts) -> bool:
    """Returns True if the kernel assumes that the memory is DRAM and nothing contradicts it."""
    return facts.has_cpus and facts.normal and not (facts.bus or facts.special_purpose or facts.side_cache)


def _kind(facts: MemoryFacts, ordinary: Collection[MemoryFacts]) -> MemoryKind:
    if facts.side_cache:
        return MemoryKind.UNKNOWN
    if facts.bus:
        # A node with CPUs also has ordinary memory, so its memory is mixed.
        return MemoryKind.UNKNOWN if facts.has_cpus else facts.bus
    if _is_ordinary(facts):
        return MemoryKind.DRAM
    if facts.bandwidth and (known := [one.bandwidth for one in ordinary if one.bandwidth]):
        if facts.bandwidth > 2 * max(known):
            return MemoryKind.HBM
        return MemoryKind.DRAM if any(_is_similar(facts, one) for one in ordinary) else MemoryKind.UNKNOWN
    # The kernel ranks memory above DRAM only if it knows the memory's performance, possibly from a source other than
    # HMAT.
    tiers = [one.tier for one in ordinary if one.tier is not None]
    faster = facts.tier is not None and tiers and facts.tier < min(tiers)
    return MemoryKind.HBM if faster else MemoryKind.UNKNOWN


def _is_similar(facts: MemoryFacts, other: MemoryFacts) -> bool:
    """Returns True if both values are known and differ by at most a tenth, which is the kernel's tolerance for DRAM
    nodes.
    """
    pairs = (facts.bandwidth, other.bandwidth), (facts.latency, other.latency)
    return all(mine and its and 10 * abs(mine - its) <= its for mine, its in pairs)
