# SPDX-License-Identifier: Apache-2.0
"""Computes, from the Node's status and the configuration, the memory and other resources reserved for the system.

The kubelet reserves memory for the node as a whole. The kernel and daemons allocate on the NUMA nodes whose CPUs they
run on, so the reserve is divided among the NUMA nodes with CPUs and normal memory, in proportion to their size; nodes
that have only CXL memory or HBM get no share. ``reservedMemory`` overrides this division and has the same meaning as in
the kubelet's Memory Manager.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Final

from numa_contract.config import Config
from numa_contract.errors import MalformedError
from numa_contract.quantity import parse_quantity

from dra_frontend.machine.model import MEMORY_STEP, Machine, NumaNode

DEFAULT_DIVISOR: Final = 20
"""The default reserve is a node's memory divided by this number; it applies if neither the configuration nor the
kubelet sets one.
"""
_SOURCES: Final = {
    "reservedMemory": "as configured (reservedMemory)",
    "kubelet": (
        "the kubelet's reserve (the Node's capacity minus allocatable), divided among NUMA nodes with CPUs in "
        "proportion to their memory"
    ),
    "default": (
        f"1/{DEFAULT_DIVISOR} of the memory of each NUMA node with CPUs, since the Node does not show what the kubelet "
        "reserves"
    ),
}


@dataclass(frozen=True, slots=True)
class MemoryReserve:
    """Plain memory that is never offered to claims."""

    source: str = "default"
    """Source of the figures: ``reservedMemory``, ``kubelet`` or ``default``."""
    by_node: Mapping[int, int] = field(default_factory=dict)
    """Number of reserved bytes, by NUMA node."""
    kubelet_bytes: int | None = None
    """Number of bytes that the kubelet reserves on the whole node, or None if the kubelet is not the source."""

    @property
    def text(self) -> str:
        """Description of where the figures come from, for messages."""
        return _SOURCES[self.source]


def reserved_by_kubelet(node: Mapping[str, Any], resource: str) -> Fraction | None:
    """Returns the amount of a node resource (``cpu``, ``memory``) that pods cannot use, or None if the amount is
    unknown.

    This is the Node's capacity minus its allocatable amount: kubeReserved, systemReserved and the hard eviction
    threshold. Hugepages reduce allocatable memory even though they are not a reserve (pkg/kubelet/nodestatus/setters.go
    in Kubernetes), so they are subtracted. A negative amount is returned as 0.
    """
    status = node.get("status") or {}
    try:
        capacity, allocatable = status["capacity"], status["allocatable"]
        reserved = parse_quantity(capacity[resource]) - parse_quantity(allocatable[resource])
        if resource == "memory":
            reserved -= sum(parse_quantity(size) for name, size in capacity.items() if name.startswith("hugepages-"))
    except (KeyError, TypeError, AttributeError, MalformedError):
        return None
    return max(Fraction(0), reserved)


def is_explicit(config: Config) -> bool:
    """Returns True if the configuration sets the memory reserve of each NUMA node."""
    return any("memory" in entry.limits for entry in config.reserved_memory)


def _system_nodes(machine: Machine) -> list[NumaNode]:
    """Returns the NUMA nodes on which the kernel and daemons allocate memory: those with CPUs and normal memory.

    If there are none, returns the nodes with normal memory or, failing that, all nodes with memory.
    """
    filled = [node for node in machine.numa_nodes.values() if node.memory_bytes]
    with_normal_memory = [node for node in filled if node.cpus and node.normal_memory]
    return with_normal_memory or [node for node in filled if node.normal_memory] or filled


def memory_reserve(machine: Machine, config: Config, kubelet: int | None = None) -> MemoryReserve:
    """Returns each NUMA node's reserve. ``kubelet`` is the kubelet's total reserve, or None if it is unknown."""
    if is_explicit(config):
        return MemoryReserve("reservedMemory", {node: config.reserved_bytes(node) for node in machine.numa_nodes})
    # The reserve is divided in proportion to all memory, including hugepages, so that allocating or freeing hugepages
    # does not change other nodes' capacity. Like the capacity, it is rounded to whole steps, so that neither changes by
    # a few pages between boots.
    sizes = {node.id: node.memory_bytes // MEMORY_STEP for node in _system_nodes(machine)}
    total = max(1, sum(sizes.values()))
    reserved, of = (1, DEFAULT_DIVISOR) if kubelet is None else (kubelet, total * MEMORY_STEP)
    by_node = {node: -(-sizes.get(node, 0) * reserved // of) * MEMORY_STEP for node in machine.numa_nodes}
    return MemoryReserve("default" if kubelet is None else "kubelet", by_node, kubelet)
