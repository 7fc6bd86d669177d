# SPDX-License-Identifier: Apache-2.0
"""What would become of claims and pods on this node: scheduled as kube-scheduler does, prepared by our own code."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from numa_contract.cdi import ClaimFile
from numa_contract.config import Config, ConfigError
from numa_contract.cpuset import format_cpu_list
from numa_contract.names import DRIVERS, ClaimKey
from numa_contract.records import AllocationRecord

from dra_frontend.allocation.claim import Refused, read_claim
from dra_frontend.allocation.decide import decide, judge
from dra_frontend.allocation.ledger import Ledger
from dra_frontend.commands.classes import device_classes
from dra_frontend.commands.forms import table
from dra_frontend.commands.manifest_files import read_manifests
from dra_frontend.commands.node_files import NodeFiles
from dra_frontend.devices.inventory import Inventory
from dra_frontend.devices.quantity import format_quantity
from dra_frontend.devices.slices import slice_documents
from dra_frontend.scheduling.allocate import Choice, Search, UnschedulableError, allocated
from dra_frontend.scheduling.fit import InUse
from dra_frontend.scheduling.manifests import Claim, Workload
from dra_frontend.scheduling.published import Published, read_slices
from dra_frontend.scheduling.reading import ManifestError
from dra_frontend.scheduling.wanted import DeviceClass, read_class

NODE: Final = "simulated"
Row = dict[str, Any]


def own_devices(inventory: Inventory, node: str) -> list[Published]:
    """Returns the devices of this node as the API server has them."""
    return read_slices(document for pool in inventory.pools for document in slice_documents(pool, node))


def in_use(ledger: Ledger, devices: Sequence[Published]) -> InUse:
    """Returns what prepared claims have of the devices, whatever their pools were called."""
    by_name = {(device.driver, device.name): device for device in devices}
    used = InUse()
    for record in ledger.records:
        for result in record.results:
            device = by_name.get((record.driver, result.device))
            if device is not None:
                shares = {name: device.capacity[name] for name in result.consumed if name in device.capacity}
                consumed = {name: share.amount(result.consumed[name]) for name, share in shares.items()}
                used.add(device.key, consumed if device.shared else None)
    return used


@dataclass(slots=True)
class Simulation:
    """A node that exists in memory alone."""

    inventory: Inventory
    config: Config
    classes: Mapping[str, DeviceClass]
    files: dict[ClaimKey, ClaimFile] = field(default_factory=dict)
    """Of the claims that are prepared."""
    others: Sequence[Published] = ()
    """Devices of other drivers."""
    search: Search = field(init=False)
    _made: int = 0

    def __post_init__(self) -> None:
        """Offers what the claims that are prepared have left."""
        devices = [*own_devices(self.inventory, NODE), *self.others]
        self.search = Search(devices, self.classes, in_use(Ledger(self.files), devices))

    def run(self, workload: Workload, name: str) -> Row:
        """Returns what its claims get; or why they do not fit, and then they have nothing."""
        row: Row = {"name": name, "fits": True}
        if workload.notes:
            row["notes"] = list(workload.notes)
        try:
            choices = self.search.allocate([claim.wanted for claim in workload.claims])
        except UnschedulableError as error:
            return {**row, "fits": False, "stage": "scheduling", "reasons": list(error.reasons)}
        before, row["claims"] = dict(self.files), []
        for place, claim in enumerate(workload.claims):
            own = [one for one in choices if one.claim == place]
            try:
                row["claims"].append(self._prepared(claim, own))
            except Refused as error:
                # The devices stay allocated, as in a cluster, where nobody tries others: the pod waits for good.
                self.files = before
                return {**row, "fits": False, "stage": "preparing", "reasons": [str(error)]}
        return row

    def _prepared(self, claim: Claim, choices: Sequence[Choice]) -> Row:
        self._made += 1
        document = allocated(claim.document, claim.wanted, choices, self.classes)
        document["metadata"] = {**document["metadata"], "uid": f"simulated-{self._made}"}
        document["status"]["reservedFor"] = [{"resource": "pods", "name": NODE, "uid": NODE}]
        view = read_claim(document)
        records = []
        for driver in DRIVERS:
            if view.results[driver]:
                record = decide(judge(view, driver, self.inventory, self.config), self.inventory, Ledger(self.files))
                self.files[driver, view.claim.uid] = ClaimFile.of(record)
                records.append(record)
        return {"name": claim.name, "devices": [_given(one, records) for one in choices]}

    def pool(self) -> str:
        """Returns the CPUs of everybody without a claim: the reserved ones where no other is left."""
        online, reserved = self.inventory.machine.online, self.inventory.reserved_cpus
        return format_cpu_list(online - reserved - Ledger(self.files).held_cpus() or reserved)


def _given(one: Choice, records: Sequence[AllocationRecord]) -> Row:
    row: Row = {"request": one.wish.name, "driver": one.device.driver, "device": one.device.name}
    base = one.wish.name.partition("/")[0]
    for record in records:
        mine = record.driver == one.device.driver
        for cpus in (part for part in record.cpus if mine and (part.request, part.device) == (base, one.device.name)):
            row["cpus"] = format_cpu_list(cpus.cpus)
        for part in (part for part in record.memory if mine and (part.request, part.device) == (base, one.device.name)):
            row |= {"bytes": part.size, "numaNode": part.numa_node}
    return row


def prepared(
    claims: Sequence[str], pods: Sequence[str], node: NodeFiles, config: Config
) -> tuple[Simulation, list[Workload]]:
    """Reads manifests: those whose claims and those whose pods are simulated. Raises ConfigError naming the fault.

    Each finds its templates, classes and other drivers' slices in any of the files.
    """
    of_claims, of_pods = read_manifests(claims), read_manifests(pods)
    everything = of_claims.with_all(of_pods)
    own = (read_class(document) for document in device_classes(node.inventory.machine))
    classes = {one.name: one for one in own} | everything.classes
    try:
        workloads = of_claims.of_claims() + of_pods.of_pods(everything, classes)
        others = [one for one in read_slices(everything.slices) if one.driver not in DRIVERS]
    except ManifestError as error:
        raise ConfigError("manifests", [str(error)]) from error
    if not workloads:
        kinds = "no ResourceClaim or ResourceClaimTemplate" if claims else "no Pod, and nothing that makes pods"
        raise ConfigError(", ".join(claims or pods), [f"has {kinds}"])
    return Simulation(node.inventory, config, classes, dict(node.claims.files), others), workloads


def simulate(simulation: Simulation, workloads: Sequence[Workload], times: int) -> Row:
    """Runs each workload so many times; returns an outcome for each, how many fit, and the shared pool at the end."""
    rows = [
        simulation.run(workload, workload.name if times == 1 else f"{workload.name}-{number}")
        for number in range(1, times + 1)
        for workload in workloads
    ]
    return {"outcomes": rows, "fit": sum(row["fits"] for row in rows), "of": len(rows), "pool": simulation.pool()}


def outcome_table(outcome: Row) -> str:
    """Returns the outcome for a person."""
    rows: list[list[object]] = [["NAME", "CLAIM", "REQUEST", "DEVICE", "GETS"]]
    faults = []
    for row in outcome["outcomes"]:
        for claim in row.get("claims", []) if row["fits"] else ():
            rows += [
                [row["name"], claim["name"], one["request"], one["device"], _gets(one)] for one in claim["devices"]
            ]
        if row["fits"] and not row["claims"]:
            rows.append([row["name"], "-", "-", "-", "nothing of a driver"])
        faults += [f"{row['name']}: does not fit ({row['stage']}): {why}" for why in row.get("reasons", ())]
        faults += [f"{row['name']}: note: {note}" for note in row.get("notes", ())]
    summary = f"{outcome['fit']} of {outcome['of']} fit; the shared pool has CPUs {outcome['pool'] or 'none'}"
    return "\n".join([*([table(rows)] if len(rows) > 1 else []), *faults, summary])


def _gets(one: Row) -> str:
    if "cpus" in one:
        return f"CPUs {one['cpus']}"
    if "bytes" in one:
        return f"{format_quantity(one['bytes'], binary=True)} of NUMA node {one['numaNode']}"
    return "the device"
