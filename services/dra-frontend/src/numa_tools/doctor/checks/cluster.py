# SPDX-License-Identifier: Apache-2.0
"""Checks that the API server serves the resources and grants the rights that the driver needs, and that the published
slices are intact. This module does no I/O.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Final

from dra_frontend.devices import gates
from dra_frontend.devices.inventory import Inventory
from dra_frontend.machine.model import FAR_TIER
from numa_contract.config import Config
from numa_contract.names import CPU_DRIVER, memory_class_name

from numa_tools.doctor.facts import Document, Right, Service, Trial
from numa_tools.doctor.model import Check, Finding, Unread, facts_or_none, note, problem, unknown

_OLDEST: Final = (1, 34)
_MAX_SECONDS: Final = 30.0
"""Maximum difference in seconds between the clocks of this node and the API server. A larger difference can
make tokens unusable, because a token is not valid before the time at which it was issued.
"""
_ENABLE_GATE: Final = "enable it in the API server, scheduler, controller manager and kubelet"
_GRANT_RIGHT: Final = "install the chart's ClusterRole, or add the rule to your own"


def _reachable(server: object) -> Iterator[Finding]:
    if isinstance(server, Unread) and server.intentional:
        yield unknown(server)
    elif isinstance(server, Unread):
        why = "no claim can be read, so none is prepared; slices are not published"
        remedy = "check the network, NetworkPolicies, the kubeconfig and the pod's service account"
        yield problem(f"The API server is not responding: {server.why}.", why, remedy)


def _release(server: str) -> Iterator[Finding]:
    found = re.match(r"v(\d{1,3})\.(\d{1,4})", server, re.ASCII)
    if found and (int(found[1]), int(found[2])) < _OLDEST:
        why = "resource.k8s.io/v1 has been served since Kubernetes 1.34"
        yield problem(f"The API server's version is {server}.", why, "upgrade the cluster to Kubernetes 1.34 or later")


def _served(slices: object) -> Iterator[Finding]:
    if isinstance(slices, Unread) and "is resource.k8s.io/v1 served?" in slices.why:
        why = "devices cannot be published and claims cannot be read"
        remedy = "remove resource.k8s.io/v1=false from the API server's --runtime-config"
        yield problem("The API server does not serve resource.k8s.io/v1.", why, remedy)
    elif isinstance(slices, Unread):
        yield unknown(slices)


def _gates(trial: Trial, config: Config) -> Iterator[Finding]:
    lost = _gates_off(trial)
    if gates.SHARING_GATE in lost:
        yield problem(
            "The API server drops the fields that let several claims share a device "
            f"(feature gate {gates.SHARING_GATE}).",
            "devices could only be allocated whole, so nothing is published",
            f"{_ENABLE_GATE}; it is on by default from Kubernetes 1.36",
        )
    if gates.TAINTS_GATE in lost:
        why = "an overcommitted device (the machine has lost some of its resources) still looks free to the scheduler"
        yield note(f"The API server drops device taints (feature gate {gates.TAINTS_GATE}).", why, _ENABLE_GATE)
    if gates.COUNTING_GATE in lost and config.publish_node_allocatable_resource_mapping:
        yield problem(
            "The API server does not accept the fields that publishNodeAllocatableResourceMapping adds (feature gate "
            f"{gates.COUNTING_GATE}).",
            "claims do not count against the node's allocatable resources, although the configuration requires that",
            f"{_ENABLE_GATE}, in Kubernetes 1.37 or later; or set publishNodeAllocatableResourceMapping: false",
        )
    if gates.LISTS_GATE in lost:
        yield problem(
            f"The API server rejects list attributes (feature gate {gates.LISTS_GATE}).",
            "devices are published without the PCIe roots that exposePCIeRoots enables",
            f"{_ENABLE_GATE}, or set exposePCIeRoots: false",
        )


def _gates_off(trial: Trial) -> set[str]:
    """Returns the feature gates whose fields the server dropped or rejected."""
    lost = set(trial.refused)
    for path in trial.dropped:
        if path.rpartition(".")[2] in gates.SHARING_FIELDS:
            lost.add(gates.SHARING_GATE)
        if f".{gates.TAINTS_FIELD}" in path:
            lost.add(gates.TAINTS_GATE)
        if gates.ALLOCATABLE_FIELD in path:
            lost.add(gates.COUNTING_GATE)
    return lost


def _clock(trial: Trial) -> Iterator[Finding]:
    if abs(trial.server_ahead) > _MAX_SECONDS:
        yield problem(
            f"The clocks of this node and the API server differ by {abs(trial.server_ahead):.0f} s.",
            "tokens and certificates may seem expired or not yet valid, and the timestamps of Events are misleading",
            "run a time service (chrony, systemd-timesyncd) on both",
        )


def _classes(classes: frozenset[str], machine: Inventory) -> Iterator[Finding]:
    nodes = machine.machine.numa_nodes.values()
    wanted = {CPU_DRIVER}
    for node in nodes:
        far = node.tier == FAR_TIER
        wanted |= {memory_class_name(None, far=far)} if node.memory_bytes else set()
        # The kernel has a pool for every supported page size, but most pools are empty.
        wanted |= {memory_class_name(pool.page_bytes, far=far) for pool in node.hugepages if pool.total}
    if missing := sorted(wanted - classes):
        yield problem(
            f"The cluster has no DeviceClass {', '.join(missing)}.",
            "claims cannot request these devices by the class names that the documentation uses",
            "run dra-frontend classes | kubectl apply -f -, or set deviceClasses.create: true in the chart",
        )


def _node(node: object, server: object) -> Iterator[Finding]:
    if isinstance(server, Unread):
        yield unknown(server)
    elif isinstance(node, Unread):
        why = "slices are owned by the Node object and deleted with it"
        remedy = "set NODE_NAME, or hostnameOverride in driverConfig, to the name of the Node"
        yield problem(f"The Node object cannot be read: {node.why}.", why, remedy)


_EFFECTS: Final = {
    "resourceslices": "devices are not published, or not kept up to date",
    "resourceclaims": "no claim can be prepared",
    "resourceclaims/status": "claims' status.devices stays empty",
    "resourceclaims/driver": "claims' status.devices stays empty in Kubernetes 1.36 and later",
    "nodes": "slices cannot be owned by their Node, so no slices are written",
    "deviceclasses": "explain and doctor cannot determine which classes exist",
    "events": "pods and the node get no Events from the driver",
}
"""Effects of missing rights, by the resource to which the right applies."""


def _rights(rights: Mapping[Right, bool]) -> Iterator[Finding]:
    missing: dict[tuple[str, str], list[Right]] = {}
    for right, granted in rights.items():
        if not granted:
            missing.setdefault(right[1:3], []).append(right)
    if missing:
        denied = [f"{_verbs(found)} {resource}{_names(found)}" for (_, resource), found in missing.items()]
        rules = [
            f'apiGroups: ["{group}"], resources: [{resource}], verbs: [{_verbs(found)}]'
            for (group, resource), found in missing.items()
        ]
        yield problem(
            f"RBAC does not let the driver {'; '.join(denied)}.",
            "; ".join(dict.fromkeys(_EFFECTS[resource] for _, resource in missing)),
            f"{_GRANT_RIGHT}: {'; '.join(rules)}",
        )


def _verbs(rights: list[Right]) -> str:
    return ", ".join(dict.fromkeys(verb for verb, *_ in rights))


def _names(rights: list[Right]) -> str:
    names = ", ".join(sorted({name for *_, name in rights if name}))
    return f" ({names})" if names else ""


def _published(slices: tuple[Document, ...], service: Service | Unread) -> Iterator[Finding]:
    evidence = [*_differences(slices, facts_or_none(service)), *_incomplete(slices)]
    if evidence:
        yield problem(
            "This node's ResourceSlices differ from those that the driver writes.",
            "the scheduler sees different devices than the driver offers, and ignores incomplete pools",
            "see driver.status: the driver rewrites its slices within a minute; if they change again, find the "
            "other writer: kubectl get resourceslices -o yaml --show-managed-fields",
            evidence,
        )
    elif isinstance(service, Unread):
        yield unknown(service)


def _differences(slices: tuple[Document, ...], service: Service | None) -> Iterator[str]:
    """Yields the devices that are missing from the slices, and the devices that the slices should no longer contain."""
    if service is None:
        return
    served = {
        (one["spec"].get("driver"), one["spec"]["pool"]["name"], device.get("name"))
        for one in slices
        for device in one["spec"].get("devices") or []
    }
    ours = {(one.driver, one.pool, one.name) for one in service.devices}
    for what, found in (("lack", ours - served), ("still have", served - ours)):
        if found:
            yield f"the slices {what} {', '.join(sorted({str(name) for *_, name in found}))}"


def _incomplete(slices: tuple[Document, ...]) -> Iterator[str]:
    """Yields the pools whose newest generation is incomplete, and the pools that still have older slices."""
    pools: dict[tuple[str, str], list[Document]] = {}
    for one in slices:
        pools.setdefault((str(one["spec"].get("driver")), one["spec"]["pool"]["name"]), []).append(one["spec"]["pool"])
    for (driver, name), headers in pools.items():
        newest = max(header.get("generation") or 0 for header in headers)
        current = [header for header in headers if (header.get("generation") or 0) == newest]
        if len(current) != current[0].get("resourceSliceCount") or len(current) < len(headers):
            count = f"{len(current)} slices of generation {newest} and {len(headers) - len(current)} older ones"
            declared = current[0].get("resourceSliceCount")
            yield f"pool {name} of {driver} has {count}, but its resourceSliceCount is {declared}"


def _owned(slices: tuple[Document, ...], node: Document) -> Iterator[Finding]:
    uid = node["metadata"]["uid"]
    foreign = [
        one["metadata"]["name"]
        for one in slices
        if uid not in [owner.get("uid") for owner in one["metadata"].get("ownerReferences") or []]
    ]
    if foreign:
        yield problem(
            f"Slices {', '.join(foreign)} are not owned by the current Node object.",
            "the garbage collector deletes slices whose Node no longer exists",
            f"kubectl delete resourceslice {' '.join(foreign)}: the driver will recreate them with the current owner",
        )


CHECKS: Final = (
    Check("api.reachable", "The API server responds.", ("server",), _reachable, accepts_unread=True),
    Check("api.served", "It serves resource.k8s.io/v1.", ("slices",), _served, accepts_unread=True),
    Check(
        "api.node", "A Node object with the driver's node name exists.", ("node", "server"), _node, accepts_unread=True
    ),
    Check("api.release", "The API server runs Kubernetes 1.34 or later.", ("server",), _release),
    Check("api.gates", "The API server stores every field that the driver publishes.", ("trial", "config"), _gates),
    Check("api.clock", f"The API server's clock is within {_MAX_SECONDS:.0f} s of this node's.", ("trial",), _clock),
    Check("api.classes", "A DeviceClass exists for each kind of device.", ("classes", "machine"), _classes),
    Check("api.rights", "RBAC grants the driver all the permissions it needs.", ("rights",), _rights),
    Check(
        "api.slices",
        "The slices contain the devices that the driver offers, and each pool is complete.",
        ("slices",),
        _published,
        optional_reads=("service",),
    ),
    Check("api.owner", "The slices are owned by the current Node object.", ("slices", "node"), _owned),
)
