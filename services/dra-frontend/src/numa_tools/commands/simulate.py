# SPDX-License-Identifier: Apache-2.0
"""Simulates claims and pods on this node: allocates devices like kube-scheduler, and prepares the claims with the
driver's own code.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from dra_frontend.machine.model import Machine
from numa_contract.config import Config, ConfigError
from numa_contract.names import DRIVERS
from numa_contract.pagesize import kubernetes_page_size
from numa_contract.quantity import format_quantity

from numa_tools.commands.classes import known_classes
from numa_tools.commands.forms import table
from numa_tools.commands.manifest_files import read_manifests
from numa_tools.commands.node_files import NodeFiles
from numa_tools.scheduling.fit import NO_CLASS
from numa_tools.scheduling.manifests import Workload
from numa_tools.scheduling.published import read_slices, slices_of_node
from numa_tools.scheduling.reading import ManifestError, mapping
from numa_tools.scheduling.simulation import Row, Simulation

_ADD_HINT = "; add it to the files, with its driver's ResourceSlices for this node"
_OBSERVE_NOTE = (
    "this node only observes: it refuses every claim until driverConfig sets enforcement: enforce; the result above "
    "applies from then on"
)
_NO_PODS = (
    "no Pod and no workload with a recognizable pod template; for a KubeVirt VirtualMachine, simulate the Pod "
    "virt-launcher-... that it creates"
)


def read_simulation(
    claims: Sequence[str], pods: Sequence[str], node: NodeFiles, config: Config, name: str
) -> tuple[Simulation, list[Workload]]:
    """Reads the claims and the pods to simulate, each from their own files. Raises a ConfigError that describes the
    fault.

    Templates, classes and other drivers' slices may be in any of these files. If the files contain the slices of
    several nodes, only the slices of the node ``name`` are used.
    """
    claim_manifests, pod_manifests = read_manifests(claims), read_manifests(pods)
    everything = claim_manifests.merged_with(pod_manifests)
    classes = known_classes(node.inventory.machine) | everything.classes
    try:
        workloads = claim_manifests.claim_workloads() + pod_manifests.pod_workloads(everything, classes)
        others = read_slices(_foreign_slices(everything.slices, name))
    except ManifestError as error:
        raise ConfigError("manifests", [str(error)]) from error
    if not workloads:
        kinds = "no ResourceClaim or ResourceClaimTemplate" if claims else _NO_PODS
        raise ConfigError(", ".join(claims or pods), [f"has {kinds}"])
    return Simulation(node.inventory, config, classes, dict(node.claims.files), others), workloads


def _foreign_slices(slices: Sequence[Mapping[str, Any]], node: str) -> list[Mapping[str, Any]]:
    """Returns other drivers' slices for this node. Raises ManifestError if it is unclear which node is meant."""

    def foreign(found: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        return [one for one in found if mapping(one, "spec").get("driver") not in DRIVERS]

    return foreign(slices_of_node(slices, node)) if foreign(slices) else []


def simulate(simulation: Simulation, workloads: Sequence[Workload], times: int) -> Row:
    """Runs each workload ``times`` times.

    Returns the outcome of each run, the number of runs that fit, the number of runs for which it is unknown whether
    they fit, the shared pool at the end, and whether the node enforces claims or is in observe mode. In observe mode, a
    node refuses every claim, even one that fits.
    """
    rows = [
        simulation.run(workload, workload.name if times == 1 else f"{workload.name}-{number}")
        for number in range(1, times + 1)
        for workload in workloads
    ]
    for row in rows:
        if "reasons" in row:
            machine = simulation.inventory.machine
            row["reasons"] = [
                _missing_class_reason(why, machine) if why.startswith(NO_CLASS) else why for why in row["reasons"]
            ]
    counts = {"fit": sum(row["fits"] is True for row in rows), "unknown": sum(row["fits"] is None for row in rows)}
    enforcement = simulation.config.enforcement
    return {"outcomes": rows, **counts, "of": len(rows), "pool": simulation.pool(), "enforcement": enforcement}


def _missing_class_reason(why: str, machine: Machine) -> str:
    """Explains why a DeviceClass is missing and, if there is a remedy, states it.

    The chart creates this driver's classes for every page size, but a node has devices only for its own sizes.
    """
    name = why.removeprefix(NO_CLASS).strip()
    if name.startswith("dra.hugepages-") and not name.endswith("-far"):
        sizes = ", ".join(map(kubernetes_page_size, machine.page_sizes)) or "none"
        return (
            f"this node has no hugepages of the size that DeviceClass {name} selects (its kernel's page sizes: {sizes})"
        )
    if name.startswith(("dra.hugepages-", "dra.memory")):
        return (
            f"this node has no memory that DeviceClass {name} selects: none of its NUMA nodes without CPUs has such "
            "memory"
        )
    return f"{why}{_ADD_HINT}"


def outcome_table(outcome: Row) -> str:
    """Formats the outcome as a table followed by lines of text."""
    rows: list[list[object]] = [["NAME", "CLAIM", "REQUEST", "DEVICE", "GETS"]]
    faults = []
    for row in outcome["outcomes"]:
        for claim in row.get("claims", []) if row["fits"] else ():
            rows += [
                [row["name"], claim["name"], one["request"], one["device"], _allocation_text(one)]
                for one in claim["devices"]
            ]
        if row["fits"] and not row["claims"]:
            rows.append([row["name"], "-", "-", "-", "nothing from these drivers"])
        faults += [f"{row['name']}: does not fit ({row['stage']}): {why}" for why in row.get("reasons", ())]
        faults += [f"{row['name']}: unknown ({row['stage']}): {why}" for why in row.get("unknown", ())]
        faults += [f"{row['name']}: note: {note}" for note in row.get("notes", ())]
    unknown = f", {outcome['unknown']} unknown" if outcome["unknown"] else ""
    summary = f"{outcome['fit']} of {outcome['of']} fit{unknown}; the shared pool has CPUs {outcome['pool'] or 'none'}"
    observes = [_OBSERVE_NOTE] if outcome["enforcement"] == "observe" else []
    return "\n".join([*([table(rows)] if len(rows) > 1 else []), *faults, summary, *observes])


def _allocation_text(one: Row) -> str:
    if "cpus" in one:
        return f"CPUs {one['cpus']}"
    if "bytes" in one:
        return f"{format_quantity(one['bytes'], binary=True)} of NUMA node {one['numaNode']}"
    return "the device"
