# SPDX-License-Identifier: Apache-2.0
"""Builds the state endpoint's documents from the machine, the devices, the ledger and the backend's reports."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from numa_contract import __version__
from numa_contract.pagesize import kubernetes_page_size
from numa_contract.records import RECORD_VERSION, MemoryAllocation
from numa_contract.reports import REPORT_VERSION
from numa_contract.state import STATE_VERSION
from numa_contract.state.devices import CpuDocument, DeviceDocument, MemoryDocument
from numa_contract.state.machine import ErrorCounterDocument, HugepagesDocument, MachineDocument, NumaNodeDocument
from numa_contract.state.node import PageCpu
from numa_contract.state.service import BackendDocument, FormatsDocument, VersionDocument

from dra_frontend.allocation.entitlement import claimed_cpu_use
from dra_frontend.allocation.ledger import Ledger
from dra_frontend.claims.backend import BackendView
from dra_frontend.devices.inventory import Inventory
from dra_frontend.devices.memory import nearest_nodes
from dra_frontend.devices.model import CpuDevice, MemoryDevice, taints
from dra_frontend.machine.errors import ErrorCounter
from dra_frontend.machine.host_hugepages import PageKey
from dra_frontend.machine.model import Cpu, Machine, NumaNode
from dra_frontend.node.machine_watch import MachineWatch
from dra_frontend.publishing.offer import Snapshot


def version_view(node: str, instance: str) -> VersionDocument:
    """Returns the versions of the software and of the document formats."""
    formats = FormatsDocument(record=RECORD_VERSION, report=REPORT_VERSION, state=STATE_VERSION)
    return VersionDocument(version=__version__, node=node, instance=instance, formats=formats)


def machine_view(watch: MachineWatch) -> MachineDocument:
    """Returns the machine document, with the machine's resources grouped by NUMA node."""
    machine = watch.machine
    return MachineDocument(
        problem=watch.problem,
        warnings=tuple(watch.warnings),
        cpus=machine.online,
        offline=machine.offline,
        isolcpus=machine.isolcpus,
        cores=len({cpu.core for cpu in machine.cpus.values()}),
        packages=len({cpu.package for cpu in machine.cpus.values()}),
        smt=machine.smt,
        base_page_bytes=machine.base_page_bytes,
        kubelet_reserved_bytes=watch.inventory.reserve.kubelet_bytes,
        numa_nodes=tuple(_node_view(machine, node, watch.host_pages) for node in machine.numa_nodes.values()),
        errors=tuple(map(_errors_view, watch.errors.counters)),
    )


def _node_view(machine: Machine, node: NumaNode, host_pages: Mapping[PageKey, int]) -> NumaNodeDocument:
    return NumaNodeDocument(
        id=node.id,
        cpus=node.cpus,
        memory_bytes=node.memory_bytes,
        memory_kind=node.traits.kind.value,
        bandwidth=node.traits.bandwidth,
        latency_nanoseconds=node.traits.latency,
        kernel_tier=node.traits.kernel_tier,
        nearest_numa_nodes=frozenset(nearest_nodes(machine, node)),
        distances=node.distances,
        hugepages=tuple(
            HugepagesDocument(
                page_size=kubernetes_page_size(pool.page_bytes),
                total=pool.total,
                free=pool.free,
                held_by_host=host_pages.get((node.id, pool.page_bytes), 0),
            )
            for pool in node.hugepages
        ),
    )


def _errors_view(counter: ErrorCounter) -> ErrorCounterDocument:
    return ErrorCounterDocument(
        source=counter.source,
        what=counter.description,
        corrected=counter.corrected,
        uncorrected=counter.uncorrected,
        numa_nodes=tuple(sorted(counter.numa_nodes)),
        cpus=counter.cpus,
    )


def devices_view(snapshot: Snapshot) -> list[DeviceDocument]:
    """Returns every published device with its capacity, its claimed amount, and its health."""
    health = {(driver, h.device): h for driver, devices in snapshot.health.items() for h in devices}
    return [
        DeviceDocument(
            driver=pool.driver,
            pool=pool.name,
            name=device.name,
            attributes=dict(device.attributes),
            cpus=device.cpus if isinstance(device, CpuDevice) else None,
            numa_node=device.numa_node if isinstance(device, MemoryDevice) else None,
            capacity=device.amount,
            claimed=snapshot.holdings[key].amount if key in snapshot.holdings else 0,
            health=health[key].health.name.lower(),
            message=health[key].message,
            taints=tuple(taints(pool.driver, device)),
        )
        for pool in snapshot.pools
        for device in pool.devices
        for key in ((pool.driver, device.name),)
    ]


def cpus_view(inventory: Inventory, ledger: Ledger, backend: BackendView) -> Iterator[CpuDocument]:
    """Yields an entry for each CPU that is online or allocated to a claim: its location, its claim, and how exclusivity
    is enforced.
    """
    users = {use.uid: one for one in backend.containers.values() if one.alive for use in one.claims}
    holders = ledger.cpu_holders()
    names = {record.claim.uid: record.claim.full_name for record in ledger.records}

    def holder_of(number: int) -> dict[str, Any]:
        if (uid := holders.get(number)) is None:
            return {}
        return {"claim_uid": uid, "claim": names.get(uid, "")}

    for cpu in inventory.machine.cpus.values():
        holder = holder_of(cpu.id)
        use = "claimed" if holder else "withheld" if cpu.id in inventory.withheld_cpus else "pool"
        use = "reserved" if cpu.id in inventory.reserved_cpus else use
        user = users.get(holder["claim_uid"]) if holder else None
        kept = (
            {"exclusivity": user.exclusivity, **_reasons(user.fallback_reason, user.pool_requested_by)} if user else {}
        )
        yield CpuDocument(cpu=cpu.id, use=use, **_place(cpu), **holder, **kept)
    for number in sorted(holders.keys() - inventory.machine.online):
        yield CpuDocument(cpu=number, use="offline", **holder_of(number))


def cpu_uses_view(inventory: Inventory, ledger: Ledger, backend: BackendView) -> Iterator[PageCpu]:
    """Yields an entry for each present CPU. The entry's ``use`` is a key of ``words.USES``."""
    machine = inventory.machine
    records = {record.claim.uid: record for record in ledger.records if record.cpus}
    shown = list(cpus_view(inventory, ledger, backend))
    offline = machine.offline - {entry.cpu for entry in shown}
    for entry in (*shown, *(CpuDocument(cpu=number, use="offline") for number in sorted(offline))):
        number, use = entry.cpu, entry.use
        if use == "claimed":
            use = claimed_cpu_use(records.get(entry.claim_uid or ""), number, entry.exclusivity or "")
        fields = {**dict(entry), "use": use, **_last_place(machine.cpus.get(number) or machine.known.get(number))}
        yield PageCpu(**fields, isolcpus=True if number in machine.isolcpus else None)


def _last_place(cpu: Cpu | None) -> dict[str, Any]:
    if cpu is None:
        return {}
    return {"socket": cpu.package, **_place(cpu), "core_type": cpu.core_type.value}


def _place(cpu: Cpu) -> dict[str, Any]:
    return {"core": cpu.core, "numa_node": cpu.numa_node, "l3": cpu.l3_id}


def _reasons(fallback: str, requested: str) -> dict[str, Any]:
    return {"fallback_reason": fallback or None, "pool_requested_by": requested or None}


def memory_view(inventory: Inventory, ledger: Ledger) -> list[MemoryDocument]:
    """Returns the capacity, the claimed bytes and the free bytes of each memory device. A device that no longer exists
    is included if its memory is still allocated to claims.
    """
    claimed = ledger.claimed_bytes()
    claims: dict[str, set[str]] = defaultdict(set)
    devices = (device for pool in inventory.pools for device in pool.devices)
    by_device: dict[str, tuple[MemoryDevice | MemoryAllocation, int]] = {
        device.name: (device, device.amount) for device in devices if isinstance(device, MemoryDevice)
    }
    for record in ledger.records:
        for allocation in record.memory:
            claims[allocation.device].add(record.claim.full_name)
            by_device.setdefault(allocation.device, (allocation, 0))
    return [
        MemoryDocument(
            device=name,
            numa_node=memory.numa_node,
            page_size=kubernetes_page_size(memory.page_bytes),
            hugepages=memory.hugepages,
            capacity_bytes=capacity,
            claimed_bytes=claimed.get(name, 0),
            free_bytes=max(0, capacity - claimed.get(name, 0)),
            **({} if memory.hugepages else _reserved(inventory, memory.numa_node)),
            claims=tuple(sorted(claims[name])),
        )
        for name, (memory, capacity) in by_device.items()
    ]


def _reserved(inventory: Inventory, numa_node: int) -> dict[str, Any]:
    reserve = inventory.reserve
    return {"reserved_bytes": reserve.by_node.get(numa_node, 0), "reserved_as": reserve.text}


def backend_view(backend: BackendView) -> BackendDocument:
    """Returns the backend's last report, and whether any backend on this node enforces claims.

    The report includes the metrics, which the endpoint omits from its response.
    """
    return BackendDocument(live=backend.live, problem=backend.problem, age=backend.age, status=backend.status)
