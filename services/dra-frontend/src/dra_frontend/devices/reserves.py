# SPDX-License-Identifier: Apache-2.0
"""What is kept for the system: by the kubelet, as its Node shows it, and of the plain memory of each NUMA node.

The kubelet reserves memory for the node as a whole. The kernel and daemons allocate on the NUMA nodes whose CPUs they
run on, so the sum is split by size over the NUMA nodes with CPUs and normal memory, never over those with only CXL
memory or HBM, unless the operator splits it (``reservedMemory``, as the kubelet's Memory Manager reads it).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Final

from numa_contract.config import Config
from numa_contract.errors import MalformedError
from numa_contract.quantity import parse_quantity

from dra_frontend.machine.model import MEMORY_STEP, Machine, NumaNode

DEFAULT_PART: Final = 20
"""Divisor of the memory for the default reserve, if neither the configuration nor the kubelet has one."""
_SOURCES: Final = {
    "reservedMemory": "as the configuration says (reservedMemory)",
    "kubelet": (
        "what the kubelet reserves (capacity less allocatable of the Node), split by size over NUMA nodes with CPUs"
    ),
    "default": f"1/{DEFAULT_PART} of each NUMA node with CPUs, since no Node says what the kubelet reserves",
}


@dataclass(frozen=True, slots=True)
class MemoryReserve:
    """Plain memory that is never offered."""

    source: str = "default"
    """``reservedMemory``, ``kubelet`` or ``default``."""
    by_node: Mapping[int, int] = field(default_factory=dict)
    """Bytes by NUMA node."""
    kubelet_bytes: int | None = None
    """Bytes that the kubelet reserves on the whole node; None unless they are the source."""

    @property
    def text(self) -> str:
        """How the figure came about, for people."""
        return _SOURCES[self.source]


def reserved_by_kubelet(node: Mapping[str, Any], resource: str) -> Fraction | None:
    """Returns the amount of a node resource (``cpu``, ``memory``) that pods cannot have, or None if it is not known.

    It is the capacity of the Node less its allocatable part: kubeReserved, systemReserved and the hard eviction
    threshold. Hugepages are not allocatable as memory, although they are no reserve (pkg/kubelet/nodestatus/setters.go
    of Kubernetes). A negative amount is reported as 0.
    """
    status = node.get("status") or {}
    try:
        capacity, allocatable = status["capacity"], status["allocatable"]
        kept = parse_quantity(capacity[resource]) - parse_quantity(allocatable[resource])
        if resource == "memory":
            kept -= sum(parse_quantity(size) for name, size in capacity.items() if name.startswith("hugepages-"))
    except (KeyError, TypeError, AttributeError, MalformedError):
        return None
    return max(Fraction(0), kept)


def is_explicit(config: Config) -> bool:
    """Returns True if the configuration sets the memory reserve of each NUMA node."""
    return any("memory" in entry.limits for entry in config.reserved_memory)


def _system_nodes(machine: Machine) -> list[NumaNode]:
    """Returns the NUMA nodes from which the kernel and daemons allocate, or all if the kernel's files exclude each."""
    filled = [node for node in machine.numa_nodes.values() if node.memory_bytes]
    usual = [node for node in filled if node.cpus and node.normal_memory]
    return usual or [node for node in filled if node.normal_memory] or filled


def memory_reserve(machine: Machine, config: Config, kubelet: int | None = None) -> MemoryReserve:
    """Returns what is kept of each NUMA node; ``kubelet``: what it reserves in all, None if that is not known."""
    if is_explicit(config):
        return MemoryReserve("reservedMemory", {node: config.reserved_bytes(node) for node in machine.numa_nodes})
    # By all memory and not by what hugepages leave of it: pages that come and go move no other node's capacity. In
    # whole steps, as the capacity is, so that neither moves by some pages between boots.
    sizes = {node.id: node.memory_bytes // MEMORY_STEP for node in _system_nodes(machine)}
    total = max(1, sum(sizes.values()))
    kept, of = (1, DEFAULT_PART) if kubelet is None else (kubelet, total * MEMORY_STEP)
    by_node = {node: -(-sizes.get(node, 0) * kept // of) * MEMORY_STEP for node in machine.numa_nodes}
    return MemoryReserve("default" if kubelet is None else "kubelet", by_node, kubelet)
