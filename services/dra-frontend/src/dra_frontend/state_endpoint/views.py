# SPDX-License-Identifier: Apache-2.0
"""What the state endpoint shows, as plain values made from machine, devices, ledger and the backend's reports."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from numa_contract.cpuset import format_cpu_list
from numa_contract.pagesize import short_page_size
from numa_contract.records import MemoryAllocation

from dra_frontend.allocation.ledger import Ledger
from dra_frontend.claims.backend import BackendView
from dra_frontend.devices.inventory import Inventory
from dra_frontend.devices.memory import nearest_nodes
from dra_frontend.devices.model import CpuDevice, MemoryDevice, taints
from dra_frontend.machine.errors import ErrorCounter
from dra_frontend.machine.host_hugepages import PageKey
from dra_frontend.machine.model import Machine, NumaNode
from dra_frontend.node.machine_watch import MachineWatch
from dra_frontend.publishing.offer import Snapshot


def machine_view(live: MachineWatch) -> dict[str, Any]:
    """Returns the machine by NUMA node."""
    machine = live.machine
    return {
        "problem": live.problem,
        "warnings": list(live.warnings),
        "cpus": format_cpu_list(machine.online),
        "offline": format_cpu_list(machine.offline),
        "isolated": format_cpu_list(machine.isolated),
        "cores": len({cpu.core for cpu in machine.cpus.values()}),
        "packages": len({cpu.package for cpu in machine.cpus.values()}),
        "smt": machine.smt,
        "basePageBytes": machine.base_page_bytes,
        "kubeletReservedBytes": live.inventory.reserve.kubelet_bytes,
        "numaNodes": [_node_view(machine, node, live.host_pages) for node in machine.numa_nodes.values()],
        "errors": [_errors_view(counter) for counter in live.errors.counters],
    }


def _node_view(machine: Machine, node: NumaNode, host_pages: Mapping[PageKey, int]) -> dict[str, Any]:
    return {
        "id": node.id,
        "cpus": format_cpu_list(node.cpus),
        "memoryBytes": node.memory_bytes,
        "memoryKind": node.traits.kind.value,
        "bandwidthMBps": node.traits.bandwidth,
        "latencyNanoseconds": node.traits.latency,
        "kernelTier": node.traits.kernel_tier,
        "nearestNumaNodes": format_cpu_list(nearest_nodes(machine, node)),
        "distances": node.distances,
        "hugepages": [
            {
                "pageSize": short_page_size(pool.page_bytes),
                "total": pool.total,
                "free": pool.free,
                "heldByHost": host_pages.get((node.id, pool.page_bytes), 0),
            }
            for pool in node.hugepages
        ],
    }


def _errors_view(counter: ErrorCounter) -> dict[str, Any]:
    return {
        "source": counter.source,
        "what": counter.what,
        "corrected": counter.corrected,
        "uncorrected": counter.uncorrected,
        "numaNodes": sorted(counter.numa_nodes),
        "cpus": format_cpu_list(counter.cpus),
    }


def devices_view(snapshot: Snapshot) -> list[dict[str, Any]]:
    """Returns every published device with what it has, what claims hold of it, and how it is."""
    health = {(driver, h.device): h for driver, devices in snapshot.health.items() for h in devices}
    shown: list[dict[str, Any]] = []
    for pool in snapshot.pools:
        for device in pool.devices:
            key = (pool.driver, device.name)
            if isinstance(device, CpuDevice):
                where: dict[str, Any] = {"cpus": format_cpu_list(device.cpus)}
            else:
                where = {"numaNode": device.numa_node}
            shown.append(
                {
                    "driver": pool.driver,
                    "pool": pool.name,
                    "name": device.name,
                    "attributes": dict(device.attributes),
                    **where,
                    "capacity": device.amount,
                    "claimed": snapshot.holdings[key].amount if key in snapshot.holdings else 0,
                    "health": health[key].health.name.lower(),
                    "message": health[key].message,
                    "taints": list(taints(pool.driver, device)),
                }
            )
    return shown


def cpus_view(inventory: Inventory, ledger: Ledger, backend: BackendView) -> list[dict[str, Any]]:
    """Returns one entry for each CPU that is online or in a claim: where it is, who holds it, who keeps others off."""
    users = {use.uid: one for one in backend.containers.values() if one.alive for use in one.claims}
    holders = ledger.cpu_holders()
    names = {record.claim.uid: f"{record.claim.namespace}/{record.claim.name}" for record in ledger.records}
    shown = []
    for cpu in inventory.machine.cpus.values():
        holder = holders.get(cpu.id)
        use = "reserved" if cpu.id in inventory.reserved_cpus else "shared" if holder is None else "claimed"
        entry = {"cpu": cpu.id, "core": cpu.core, "numaNode": cpu.numa_node, "l3": cpu.l3_id, "use": use}
        if holder is not None:
            entry |= {"claimUid": holder, "claim": names.get(holder, "")}
            if (user := users.get(holder)) is not None:
                reasons = {"pooled": user.pooled, "poolRequested": user.pool_requested}
                entry |= {"exclusivity": user.exclusivity} | {key: text for key, text in reasons.items() if text}
        shown.append(entry)
    for cpu_id in sorted(holders.keys() - inventory.machine.online):
        holder = holders[cpu_id]
        shown.append({"cpu": cpu_id, "use": "offline", "claimUid": holder, "claim": names.get(holder, "")})
    return shown


def memory_view(inventory: Inventory, ledger: Ledger) -> list[dict[str, Any]]:
    """Returns capacity, claimed and free bytes of each memory device; those of claims that are gone have nothing."""
    claimed = ledger.claimed_bytes()
    claims: dict[str, set[str]] = defaultdict(set)
    devices = (device for pool in inventory.pools for device in pool.devices)
    whats: dict[str, tuple[MemoryDevice | MemoryAllocation, int]] = {
        device.name: (device, device.amount) for device in devices if isinstance(device, MemoryDevice)
    }
    for record in ledger.records:
        for allocation in record.memory:
            claims[allocation.device].add(f"{record.claim.namespace}/{record.claim.name}")
            whats.setdefault(allocation.device, (allocation, 0))
    return [
        {
            "device": name,
            "numaNode": what.numa_node,
            "pageSize": short_page_size(what.page_bytes),
            "hugepages": what.hugepages,
            "capacityBytes": capacity,
            "claimedBytes": claimed.get(name, 0),
            "freeBytes": max(0, capacity - claimed.get(name, 0)),
            **({} if what.hugepages else _reserved(inventory, what.numa_node)),
            "claims": sorted(claims[name]),
        }
        for name, (what, capacity) in whats.items()
    ]


def _reserved(inventory: Inventory, numa_node: int) -> dict[str, Any]:
    reserve = inventory.reserve
    return {"reservedBytes": reserve.by_node.get(numa_node, 0), "reservedAs": reserve.text}


def backend_view(backend: BackendView) -> dict[str, Any]:
    """Returns the backend's lease; its metrics are shown elsewhere."""
    status = backend.status
    shown = None if status is None else status.model_dump(mode="json", exclude={"metrics"})
    return {"live": backend.live, "problem": backend.problem, "age": backend.age, "status": shown}
