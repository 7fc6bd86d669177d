# SPDX-License-Identifier: Apache-2.0
"""What the state endpoint shows, as plain values made from machine, devices, ledger and the backend's reports.

Also a page without scripts that draws the node: one box per core in its NUMA node, coloured by holder.
"""

from collections import defaultdict
from collections.abc import Mapping
from html import escape
from typing import Any

from numa_contract.cpuset import format_cpu_list
from numa_contract.pagesize import short_page_size
from numa_contract.records import MemoryAllocation

from dra_frontend.allocation.ledger import Ledger
from dra_frontend.claims.backend import BackendView
from dra_frontend.devices.inventory import Inventory
from dra_frontend.devices.model import CpuDevice, MemoryDevice, taints
from dra_frontend.machine.errors import ErrorCounter
from dra_frontend.machine.host_hugepages import PageKey
from dra_frontend.machine.model import NumaNode
from dra_frontend.node.machine_watch import MachineWatch
from dra_frontend.publishing.offer import Snapshot

_STYLE = """
body{font:14px/1.4 system-ui,sans-serif;margin:2rem;color:#222;background:#fff}
h1{font-size:1.3rem}h2{font-size:1rem;margin:1.2rem 0 .4rem}
.core{display:inline-block;border:1px solid #bbb;border-radius:4px;margin:2px;padding:2px}
.cpu{display:inline-block;min-width:2.2em;text-align:center;border-radius:3px;margin:1px;padding:1px 3px}
.shared{background:#e8f0e4}.reserved{background:#ddd}.claimed{color:#fff}
.bar{background:#eee;border-radius:3px;width:24rem;height:1rem;overflow:hidden}
.bar div{background:#4a7fb5;height:100%}
table{border-collapse:collapse}td,th{padding:2px 10px 2px 0;text-align:left}.bad{color:#b00}
"""


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
        "numaNodes": [_node_view(node, live.host_pages) for node in machine.numa_nodes.values()],
        "errors": [_errors_view(counter) for counter in live.errors.counters],
    }


def _node_view(node: NumaNode, host_pages: Mapping[PageKey, int]) -> dict[str, Any]:
    return {
        "id": node.id,
        "cpus": format_cpu_list(node.cpus),
        "memoryBytes": node.memory_bytes,
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
                entry |= {"exclusivity": user.exclusivity} | ({"pooled": user.pooled} if user.pooled else {})
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
    shown = None if status is None else status.model_dump(mode="json", exclude={"metrics", "epoch", "complete"})
    return {"live": backend.live, "problem": backend.problem, "age": backend.age, "status": shown}


def _colour(uid: str) -> str:
    return f"hsl({sum(uid.encode()) * 47 % 360},45%,42%)"


def _cpus(inventory: Inventory, ledger: Ledger, backend: BackendView) -> str:
    nodes: dict[int, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for cpu in cpus_view(inventory, ledger, backend):
        if cpu["use"] == "offline":
            continue
        uid = str(cpu.get("claimUid", ""))
        style = f' style="background:{_colour(uid)}"' if uid else ""
        title = escape(str(cpu.get("claim", cpu["use"])) or uid, quote=True)
        box = f'<span class="cpu {cpu["use"]}"{style} title="{title}">{cpu["cpu"]}</span>'
        nodes[int(cpu["numaNode"])][int(cpu["core"])].append(box)
    parts = []
    for node, cores in sorted(nodes.items()):
        boxes = "".join(f'<span class="core">{"".join(cpus)}</span>' for _, cpus in sorted(cores.items()))
        parts.append(f"<h2>NUMA node {node}</h2><div>{boxes}</div>")
    return "".join(parts)


def _memory(inventory: Inventory, ledger: Ledger) -> str:
    rows = []
    for entry in memory_view(inventory, ledger):
        share = 100 * entry["claimedBytes"] / entry["capacityBytes"] if entry["capacityBytes"] else 0
        amount = f"{entry['claimedBytes'] >> 20} of {entry['capacityBytes'] >> 20} MiB"
        bar = f"<div class=bar><div style='width:{share:.1f}%'></div></div>"
        rows.append(f"<tr><td>{escape(entry['device'])}</td><td>{amount}</td><td>{bar}</td></tr>")
    return "<h2>Memory</h2><table>" + "".join(rows) + "</table>"


def _claims(ledger: Ledger) -> str:
    rows = []
    for record in ledger.records:
        owner = f"{record.owner.container} of pod {record.owner.pod_uid}" if record.owner else "-"
        name = escape(f"{record.claim.namespace}/{record.claim.name}")
        given = ",".join(str(c) for c in sorted(record.cpus_of())) or "; ".join(
            f"{m.device} {m.size >> 20} MiB" for m in record.memory
        )
        rows.append(f"<tr><td>{name}</td><td>{record.driver}</td><td>{escape(given)}</td><td>{escape(owner)}</td></tr>")
    head = "<tr><th>claim</th><th>driver</th><th>given</th><th>owner</th></tr>"
    return "<h2>Claims</h2><table>" + head + "".join(rows) + "</table>"


def node_page(node: str, inventory: Inventory, ledger: Ledger, backend: BackendView) -> str:
    """Returns the page as HTML."""
    problem = f"<p class=bad>{escape(backend.problem)}</p>" if backend.problem else "<p>Enforcement is live.</p>"
    body = _cpus(inventory, ledger, backend) + _memory(inventory, ledger) + _claims(ledger)
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(node)}</title><style>{_STYLE}</style>"
        f"<h1>{escape(node)}</h1>{problem}{body}</html>"
    )
