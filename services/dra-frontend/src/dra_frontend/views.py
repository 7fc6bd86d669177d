# SPDX-License-Identifier: Apache-2.0
"""What the state endpoint shows, as plain values made from machine, devices, ledger and the backend's reports."""

from collections import defaultdict
from typing import Any

from numa_contract.cpuset import format_cpu_list
from numa_contract.pagesize import short_page_size

from dra_frontend.devices import CpuDevice, MemoryDevice
from dra_frontend.inventory import Inventory
from dra_frontend.ledger import Ledger
from dra_frontend.machine import Machine


def machine_view(machine: Machine) -> dict[str, Any]:
    """Returns the machine by NUMA node."""
    nodes = [
        {
            "id": node.id,
            "cpus": format_cpu_list(node.cpus),
            "memoryBytes": node.memory_bytes,
            "distances": node.distances,
            "hugepages": [
                {"pageSize": short_page_size(h.page_bytes), "total": h.total, "free": h.free} for h in node.hugepages
            ],
        }
        for node in machine.numa_nodes.values()
    ]
    return {
        "cpus": format_cpu_list(machine.online),
        "offline": format_cpu_list(machine.offline),
        "isolated": format_cpu_list(machine.isolated),
        "cores": len({cpu.core for cpu in machine.cpus.values()}),
        "packages": len({cpu.package for cpu in machine.cpus.values()}),
        "smt": machine.smt,
        "basePageBytes": machine.base_page_bytes,
        "numaNodes": nodes,
    }


def devices_view(inventory: Inventory) -> list[dict[str, Any]]:
    """Returns every device with its pool and what it holds."""
    shown: list[dict[str, Any]] = []
    for pool in inventory.pools:
        for device in pool.devices:
            entry: dict[str, Any] = {"driver": pool.driver, "pool": pool.name, "name": device.name}
            entry["attributes"] = dict(device.attributes)
            if isinstance(device, CpuDevice):
                entry |= {"cpus": format_cpu_list(device.cpus), "capacity": len(device.cpus)}
            else:
                entry |= {"numaNode": device.numa_node, "capacity": device.capacity.value}
            shown.append(entry)
    return shown


def cpus_view(inventory: Inventory, ledger: Ledger) -> list[dict[str, Any]]:
    """Returns one entry for each online CPU: where it is, and who holds it."""
    holders = ledger.cpu_holders()
    names = {record.claim.uid: f"{record.claim.namespace}/{record.claim.name}" for record in ledger.records}
    shown = []
    for cpu in inventory.machine.cpus.values():
        holder = holders.get(cpu.id)
        use = "reserved" if cpu.id in inventory.reserved_cpus else "shared" if holder is None else "claimed"
        entry = {"cpu": cpu.id, "core": cpu.core, "numaNode": cpu.numa_node, "l3": cpu.l3_id, "use": use}
        if holder is not None:
            entry |= {"claimUid": holder, "claim": names.get(holder, "")}
        shown.append(entry)
    return shown


def memory_view(inventory: Inventory, ledger: Ledger) -> list[dict[str, Any]]:
    """Returns capacity, claimed and free bytes of each memory device."""
    claimed = ledger.claimed_bytes()
    holders: dict[str, list[str]] = defaultdict(list)
    for record in ledger.records:
        for allocation in record.memory:
            holders[allocation.device].append(f"{record.claim.namespace}/{record.claim.name}")
    shown = []
    for pool in inventory.pools:
        for device in pool.devices:
            if isinstance(device, MemoryDevice):
                used = claimed.get(device.name, 0)
                shown.append(
                    {
                        "device": device.name,
                        "numaNode": device.numa_node,
                        "pageSize": short_page_size(device.page_bytes),
                        "hugepages": device.hugepages,
                        "capacityBytes": device.capacity_bytes,
                        "claimedBytes": used,
                        "freeBytes": max(0, device.capacity_bytes - used),
                        "claims": sorted(set(holders[device.name])),
                    }
                )
    return shown
