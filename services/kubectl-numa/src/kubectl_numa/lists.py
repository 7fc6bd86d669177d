# SPDX-License-Identifier: Apache-2.0
"""The lists that ``nodes``, ``free`` and ``claims`` print: documents for programs, and table rows. This module does no
I/O.

Values in a document are not formatted: lists stay lists, and amounts are numbers whose unit is part of the key.
``-o json`` and ``-o yaml`` print the documents. Table rows are built from the same documents, so all output formats
show the same information.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from kubectl_numa.cluster import CPU_DRIVER, CPUS, MEMORY, MEMORY_DRIVER, Claim, Cluster, Key
from kubectl_numa.quantity import format_bytes, format_cpus, parse_cpus
from kubectl_numa.tables import Row

ENFORCED: Final = {"True": "yes", "False": "no", "Unknown": "not known"}
"""Display text for the status of a claim's ``Enforced`` condition. A node's page shows the same text."""
_NOT_REPORTED: Final = "not reported"
_TRUTH: Final = {"True": True, "False": False}
_AMOUNTS: Final = {CPUS: "cpus", MEMORY: "memoryBytes"}
"""Keys for amounts in a document, by device kind. Hugepage amounts are in ``hugepagesBytes``, by page size."""
_HUGEPAGES: Final = "hugepages-"

Document = Mapping[str, Any]


def node_documents(cluster: Cluster) -> list[Document]:
    """Returns a document for each node, with the free and total amounts, the claims that are not enforced, and the
    taints.
    """
    by_node: defaultdict[str, list[Key]] = defaultdict(list)
    for key, device in cluster.devices.items():
        by_node[device.node].append(key)
    claims: defaultdict[str, list[Claim]] = defaultdict(list)
    for claim in cluster.claims:
        claims[cluster.node_of(claim)].append(claim)
    return [_node(cluster, node, keys, claims[node]) for node, keys in sorted(by_node.items())]


def _node(cluster: Cluster, node: str, keys: Sequence[Key], claims: Sequence[Claim]) -> Document:
    devices = [cluster.devices[key] for key in keys]
    amounts = {
        kind: {"free": sum(map(cluster.free, kind_keys)), "total": sum(cluster.devices[key].total for key in kind_keys)}
        for kind, kind_keys in _kinds(cluster, keys).items()
    }
    return {
        "node": node,
        "numaNodes": len({device.numa_node for device in devices} - {None}),
        **_by_key(amounts),
        "claims": len(claims),
        "notEnforced": sum(claim.enforced == "False" for claim in claims),
        "enforcement": "observe" if any(device.observes for device in devices) else "enforce",
        "tainted": sum(device.tainted for device in devices),
        "devices": sorted(key.device for key in keys),
        "taintedDevices": sorted(key.device for key in keys if cluster.devices[key].tainted),
    }


def free_documents(cluster: Cluster, node: str = "") -> list[Document]:
    """Returns a document for each NUMA node (or other group of devices), with the amounts free for claims."""
    keys_by_numa_node: defaultdict[tuple[str, int], list[Key]] = defaultdict(list)
    for key, device in cluster.devices.items():
        if not device.tainted and not device.observes and node in ("", device.node):
            keys_by_numa_node[device.node, -1 if device.numa_node is None else device.numa_node].append(key)
    found: list[Document] = []
    for (name, numa), keys in sorted(keys_by_numa_node.items()):
        free = {kind: sum(map(cluster.free, kind_keys)) for kind, kind_keys in _kinds(cluster, keys).items()}
        devices = sorted(key.device for key in keys)
        found.append({"node": name, "numaNode": None if numa < 0 else numa, **_by_key(free), "devices": devices})
    return found


def claim_documents(cluster: Cluster) -> list[Document]:
    """Returns a document for each claim that has a device from our drivers."""
    return [_claim(cluster, claim) for claim in cluster.claims if claim.parts]


def _claim(cluster: Cluster, claim: Claim) -> Document:
    cpu_parts = [part for part in claim.parts if part.key.driver == CPU_DRIVER]
    cpus = [parse_cpus(part.cpus) for part in cpu_parts]
    known = [one for one in cpus if one]
    return {
        "namespace": claim.namespace,
        "claim": claim.name,
        "node": cluster.node_of(claim),
        "cpuCount": sum(part.amount for part in cpu_parts),
        "cpus": sorted({cpu for of_part in known for cpu in of_part}) if len(known) == len(cpus) else None,
        "memory": [
            {"device": part.key.device, "kind": _kind(cluster, part.key), "bytes": part.amount}
            for part in claim.parts
            if part.key.driver == MEMORY_DRIVER
        ],
        "pods": list(claim.pods),
        "enforced": _TRUTH.get(claim.enforced),
        "reported": claim.enforced in ENFORCED,
        "reason": claim.reason,
        "message": claim.message,
    }


def _kind(cluster: Cluster, key: Key) -> str:
    return cluster.devices[key].kind if key in cluster.devices else key.device


def node_row(document: Document) -> Row:
    """Returns a node's row."""
    return {
        "node": document["node"],
        "numa nodes": document["numaNodes"],
        **_cells(document),
        "claims": document["claims"],
        "not enforced": document["notEnforced"],
        "enforcement": document["enforcement"],
        "tainted": document["tainted"],
        "+devices": len(document["devices"]),
        "+tainted devices": ", ".join(document["taintedDevices"]),
    }


def free_row(document: Document) -> Row:
    """Returns a NUMA node's row."""
    devices, numa = document["devices"], document["numaNode"]
    return {
        "node": document["node"],
        "numa node": "any" if numa is None else numa,
        **_cells(document),
        "+devices": ", ".join(devices) if len(devices) < 9 else len(devices),
    }


def claim_row(document: Document, *, namespaced: bool = True) -> Row:
    """Returns a claim's row, with the namespace if ``namespaced`` is true."""
    cpus, count = document["cpus"], document["cpuCount"]
    enforced = {True: "True", False: "False", None: "Unknown"}[document["enforced"]]
    return {
        **({"namespace": document["namespace"]} if namespaced else {}),
        "claim": document["claim"],
        "node": document["node"],
        "cpus": (f"{count} CPUs" if cpus is None else format_cpus(cpus)) if count else "",
        "memory": ", ".join(f"{format_bytes(one['bytes'])} {one['kind']}" for one in document["memory"]),
        "pods": ", ".join(document["pods"]),
        "enforced": ENFORCED[enforced] if document["reported"] else _NOT_REPORTED,
        "+reason": document["reason"],
        "+message": document["message"],
    }


def _kinds(cluster: Cluster, keys: Iterable[Key]) -> dict[str, list[Key]]:
    """Groups the devices by kind: CPUs, memory, then hugepages by size."""
    kinds: defaultdict[str, list[Key]] = defaultdict(list)
    for key in keys:
        kinds[cluster.devices[key].kind].append(key)
    return dict(sorted(kinds.items(), key=lambda item: (item[0] != CPUS, item[0] != MEMORY, item[0])))


def _by_key(amounts: Mapping[str, Any]) -> dict[str, Any]:
    """Converts amounts keyed by device kind to amounts with the keys that a document uses."""
    found = {_AMOUNTS[kind]: amount for kind, amount in amounts.items() if kind in _AMOUNTS}
    pages = {kind.removeprefix(_HUGEPAGES): amount for kind, amount in amounts.items() if kind not in _AMOUNTS}
    return found | ({"hugepagesBytes": pages} if pages else {})


def _cells(document: Document) -> Row:
    """Returns the amounts in a document as table cells, with a column for each kind of device."""
    cells = {kind: _amount(document[key], kind) for kind, key in _AMOUNTS.items() if key in document}
    pages = document.get("hugepagesBytes", {})
    return cells | {f"{_HUGEPAGES}{size}": _amount(amount, _HUGEPAGES) for size, amount in pages.items()}


def _amount(amount: int | Mapping[str, int], kind: str) -> str:
    """Formats an amount, such as ``4`` CPUs or ``1.5Gi``; a free and a total amount become ``4 of 8``."""
    numbers = [amount] if isinstance(amount, int) else [amount["free"], amount["total"]]
    return " of ".join(str(one) if kind == CPUS else format_bytes(one) for one in numbers)
