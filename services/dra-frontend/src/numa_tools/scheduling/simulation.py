# SPDX-License-Identifier: Apache-2.0
"""Simulates a node in memory: schedules claims on it and prepares them with the service's own allocation code."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from dra_frontend.allocation.alignment import OtherDevices
from dra_frontend.allocation.allocate import allocate_claim, parse_driver_claim
from dra_frontend.allocation.claim import RefusedError, parse_claim
from dra_frontend.allocation.ledger import Ledger
from dra_frontend.devices.inventory import Inventory
from dra_frontend.devices.slices import slice_documents
from numa_contract.cdi import ClaimFile
from numa_contract.config import Config
from numa_contract.cpuset import format_cpu_list
from numa_contract.names import DRIVERS, ClaimKey
from numa_contract.records import AllocationRecord

from numa_tools.scheduling.allocate import Choice, Search, UndecidedError, UnschedulableError, allocated
from numa_tools.scheduling.claim_spec import DeviceClass
from numa_tools.scheduling.fit import AllocatedDevices
from numa_tools.scheduling.manifests import Claim, Workload
from numa_tools.scheduling.published import SliceDevice, read_slices

NODE: Final = "simulated"
Row = dict[str, Any]


def own_devices(inventory: Inventory, node: str) -> list[SliceDevice]:
    """Returns the devices that this driver publishes for a node, in the form that the simulated scheduler uses."""
    return read_slices(document for pool in inventory.pools for document in slice_documents(pool, node))


def in_use(ledger: Ledger, devices: Sequence[SliceDevice]) -> AllocatedDevices:
    """Returns the device allocations of prepared claims. Devices are matched by driver and name only, not by pool."""
    by_name = {(device.driver, device.name): device for device in devices}
    used = AllocatedDevices()
    for record in ledger.records:
        for result in record.results:
            device = by_name.get((record.driver, result.device))
            if device is not None:
                capacities = {name: device.capacity[name] for name in result.consumed if name in device.capacity}
                consumed = {name: capacity.amount(result.consumed[name]) for name, capacity in capacities.items()}
                used.add(device.key, consumed if device.shared else None)
    return used


@dataclass(slots=True)
class Simulation:
    """A node that exists only in memory."""

    inventory: Inventory
    config: Config
    classes: Mapping[str, DeviceClass]
    files: dict[ClaimKey, ClaimFile] = field(default_factory=dict)
    """The prepared claims' files."""
    others: Sequence[SliceDevice] = ()
    """Other drivers' devices."""
    held_resources: Ledger = field(default_factory=lambda: Ledger({}))
    """Resources that are not free even though no prepared claim has them, such as those of released claims. The
    driver knows about them, but the scheduler does not. The ledger's own files are ignored.
    """
    search: Search = field(init=False)
    _claim_count: int = 0

    def __post_init__(self) -> None:
        """Marks the devices of prepared claims as in use."""
        devices = [*own_devices(self.inventory, NODE), *self.others]
        self.search = Search(devices, self.classes, in_use(self._ledger(), devices))

    def run(self, workload: Workload, name: str) -> Row:
        """Schedules and prepares a workload and returns a row for the report.

        The row contains each claim's devices, or the reasons why the claims do not fit, or the reasons why it is
        unknown whether they fit (``fits`` is None).
        """
        row: Row = {"name": name, "fits": True}
        if workload.notes:
            row["notes"] = list(workload.notes)
        try:
            choices = self.search.allocate([claim.spec for claim in workload.claims])
        except UnschedulableError as error:
            return {**row, "fits": False, "stage": "scheduling", "reasons": list(error.reasons)}
        except UndecidedError as error:
            return {**row, "fits": None, "stage": "scheduling", "unknown": list(error.reasons)}
        before, row["claims"] = dict(self.files), []
        for index, claim in enumerate(workload.claims):
            own = [one for one in choices if one.claim == index]
            try:
                claim_row, records = self._prepared(claim, own)
            except RefusedError as error:
                # The devices stay allocated although the claim cannot be prepared. In a cluster, the scheduler would
                # not try other devices either, and the pod would wait.
                self.files = before
                return {**row, "fits": False, "stage": "preparing", "reasons": [str(error)]}
            row["claims"].append(claim_row)
            if len(claim.users) > 1 and any(record.sharing != "pod" for record in records):
                who = " and ".join(claim.users)
                text = (
                    f"containers {who} use claim {claim.name}: one will be rejected unless the claim sets sharing: pod"
                )
                row.setdefault("notes", []).append(text)
            if claim.pods > 1 and records:
                text = (
                    f"{claim.pods} pods name claim {claim.name}, and only one of them can run at a time, because pods "
                    "cannot share a claim; give each pod its own claim with a ResourceClaimTemplate"
                )
                row.setdefault("notes", []).append(text)
        return row

    def _prepared(self, claim: Claim, choices: Sequence[Choice]) -> tuple[Row, list[AllocationRecord]]:
        self._claim_count += 1
        document = allocated(claim.document, claim.spec, choices, self.classes)
        document["metadata"] = {**document["metadata"], "uid": f"simulated-{self._claim_count}"}
        document["status"]["reservedFor"] = [{"resource": "pods", "name": NODE, "uid": NODE}]
        view = parse_claim(document)
        records = []
        known = OtherDevices({one.device.key: one.device.attribute_values for one in choices})
        for driver in DRIVERS:
            if view.results[driver]:
                parsed = parse_driver_claim(view, driver, self.inventory, self.config, others=known)
                record = allocate_claim(parsed, self.inventory, self._ledger())
                self.files[driver, view.claim.uid] = ClaimFile.of(record)
                records.append(record)
        return {"name": claim.name, "devices": [_device_row(one, records) for one in choices]}, records

    def _ledger(self) -> Ledger:
        return replace(self.held_resources, files=self.files)

    def pool(self) -> str:
        """Returns the CPUs for containers without a claim, or the online reserved CPUs if no other CPUs are left."""
        online, reserved = self.inventory.machine.online, self.inventory.reserved_cpus
        return format_cpu_list(online - reserved - self._ledger().held_cpus() or online & reserved)


def _device_row(one: Choice, records: Sequence[AllocationRecord]) -> Row:
    row: Row = {"request": one.subrequest.name, "driver": one.device.driver, "device": one.device.name}
    base = one.subrequest.name.partition("/")[0]
    for record in records:
        mine = record.driver == one.device.driver
        for cpus in (part for part in record.cpus if mine and (part.request, part.device) == (base, one.device.name)):
            row["cpus"] = format_cpu_list(cpus.cpus)
        for part in (part for part in record.memory if mine and (part.request, part.device) == (base, one.device.name)):
            row |= {"bytes": part.size, "numaNode": part.numa_node}
    return row
