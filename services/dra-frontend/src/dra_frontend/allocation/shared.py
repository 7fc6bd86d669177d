# SPDX-License-Identifier: Apache-2.0
"""Which CPUs of the shared pool a container may have beside those of its claim."""

from collections.abc import Mapping, Sequence

from numa_contract.records import CpuAllocation, CpuParameters, SharedCpus

from dra_frontend.machine.model import Machine


def shared_cpus(
    allocations: Sequence[CpuAllocation], parameters: Mapping[str, CpuParameters], machine: Machine
) -> dict[str, SharedCpus]:
    """Returns the CPUs for each request (base name) that wants some; what is in the pool later, the backend sees."""
    claimed = frozenset[int]().union(*(one.cpus for one in allocations))
    others = (machine.possible | machine.online | machine.offline) - claimed
    shared: dict[str, SharedCpus] = {}
    for request, wanted in parameters.items():
        if wanted.shared != "none":
            own = frozenset[int]().union(*(one.cpus for one in allocations if one.request == request))
            near = _numa_cpus(own, machine) - claimed if wanted.shared == "numa" else others
            shared[request] = SharedCpus(cpus=others, near=near or others)
    return shared


def _numa_cpus(cpus: frozenset[int], machine: Machine) -> frozenset[int]:
    known = {**machine.known, **machine.cpus}
    nodes = {known[cpu].numa_node for cpu in cpus if cpu in known}
    return frozenset(cpu.id for cpu in known.values() if cpu.numa_node in nodes)
