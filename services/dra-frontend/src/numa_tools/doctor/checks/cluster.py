# SPDX-License-Identifier: Apache-2.0
"""Whether the API server serves what the driver needs, lets it, and holds what it has published. Pure."""

import re
from collections.abc import Iterator, Mapping
from typing import Final

from dra_frontend.devices import gates
from dra_frontend.devices.inventory import Inventory
from dra_frontend.machine.model import FAR_TIER
from numa_contract.config import Config
from numa_contract.names import CPU_DRIVER, memory_class_name

from numa_tools.doctor.facts import Document, Right, Service, Trial
from numa_tools.doctor.model import Check, Finding, Unread, known, note, problem, unknown

_OLDEST: Final = (1, 34)
_MOST_SECONDS: Final = 30.0
"""By which clocks may differ. Tokens are valid from the moment at which they were made."""
_ON: Final = "switch it on in API server, scheduler, controller manager and kubelet"
_GRANT: Final = "install the chart's ClusterRole, or add the rule to your own"


def _reachable(server: object) -> Iterator[Finding]:
    if isinstance(server, Unread) and server.on_purpose:
        yield unknown(server)
    elif isinstance(server, Unread):
        why = "no claim can be read, so none is prepared; slices are not published"
        remedy = "check network, NetworkPolicy, kubeconfig and the pod's service account"
        yield problem(f"The API server does not answer: {server.why}.", why, remedy)


def _release(server: str) -> Iterator[Finding]:
    found = re.match(r"v(\d{1,3})\.(\d{1,4})", server, re.ASCII)
    if found and (int(found[1]), int(found[2])) < _OLDEST:
        why = "resource.k8s.io/v1 is served since Kubernetes 1.34"
        yield problem(f"The API server is {server}.", why, "update the cluster to Kubernetes 1.34 or later")


def _served(slices: object) -> Iterator[Finding]:
    if isinstance(slices, Unread) and "is resource.k8s.io/v1 served?" in slices.why:
        why = "devices cannot be published and claims cannot be read"
        remedy = "take resource.k8s.io/v1=false out of --runtime-config of the API server"
        yield problem("The API server does not serve resource.k8s.io/v1.", why, remedy)
    elif isinstance(slices, Unread):
        yield unknown(slices)


def _gates(trial: Trial, config: Config) -> Iterator[Finding]:
    lost = _gates_off(trial)
    if gates.SHARING in lost:
        yield problem(
            f"The API server drops the fields that let several claims share a device (feature gate {gates.SHARING}).",
            "each device would be given away whole, so nothing is published",
            f"{_ON}; it is on by default from Kubernetes 1.36",
        )
    if gates.TAINTS in lost:
        why = "a device of which claims hold more than the machine has left still looks free to the scheduler"
        yield note(f"The API server drops taints of devices (feature gate {gates.TAINTS}).", why, _ON)
    if gates.COUNTING in lost and config.publish_node_allocatable_resource_mapping:
        yield problem(
            "The API server does not accept what publishNodeAllocatableResourceMapping adds to devices (feature gate "
            f"{gates.COUNTING}).",
            "claims do not count against the node, though the configuration asks for it",
            f"{_ON}, from Kubernetes 1.37 on; or set publishNodeAllocatableResourceMapping: false",
        )
    if gates.LISTS in lost:
        yield problem(
            f"The API server refuses list attributes (feature gate {gates.LISTS}).",
            "devices are published without the PCIe roots that exposePCIeRoots asks for",
            f"{_ON}, or set exposePCIeRoots: false",
        )


def _gates_off(trial: Trial) -> set[str]:
    """Returns the feature gates whose fields the server has dropped or refused."""
    lost = set(trial.refused)
    for path in trial.dropped:
        if path.rpartition(".")[2] in gates.SHARING_FIELDS:
            lost.add(gates.SHARING)
        if f".{gates.TAINTS_FIELD}" in path:
            lost.add(gates.TAINTS)
        if gates.ALLOCATABLE in path:
            lost.add(gates.COUNTING)
    return lost


def _clock(trial: Trial) -> Iterator[Finding]:
    if abs(trial.server_ahead) > _MOST_SECONDS:
        yield problem(
            f"The clocks of this node and of the API server differ by {abs(trial.server_ahead):.0f} s.",
            "tokens and certificates may count as expired or not yet valid, and times of Events mislead",
            "run a time service (chrony, systemd-timesyncd) on both",
        )


def _classes(classes: frozenset[str], machine: Inventory) -> Iterator[Finding]:
    nodes = machine.machine.numa_nodes.values()
    wanted = {CPU_DRIVER}
    for node in nodes:
        far = node.tier == FAR_TIER
        wanted |= {memory_class_name(None, far=far)} if node.memory_bytes else set()
        # The kernel has a pool of every size that it knows; most are empty.
        wanted |= {memory_class_name(pool.page_bytes, far=far) for pool in node.hugepages if pool.total}
    if missing := sorted(wanted - classes):
        yield problem(
            f"There is no DeviceClass {', '.join(missing)}.",
            "no claim can ask for these devices of this node by the names that the documentation uses",
            "dra-frontend classes | kubectl apply -f -, or deviceClasses.create: true in the chart",
        )


def _node(node: object, server: object) -> Iterator[Finding]:
    if isinstance(server, Unread):
        yield unknown(server)
    elif isinstance(node, Unread):
        why = "slices belong to the Node object, and are deleted with it"
        remedy = "set NODE_NAME, or hostnameOverride in driverConfig, to the name of the Node"
        yield problem(f"The Node object cannot be read: {node.why}.", why, remedy)


_EFFECTS: Final = {
    "resourceslices": "devices are not published, or not kept right",
    "resourceclaims": "no claim can be prepared",
    "resourceclaims/status": "status.devices of claims stay empty",
    "resourceclaims/driver": "status.devices of claims stay empty from Kubernetes 1.36 on",
    "nodes": "slices cannot be given to their Node, so none is written",
    "deviceclasses": "explain and doctor cannot tell which classes there are",
    "events": "pods and node get no Events of the driver",
}
"""By resource, the effect of a right that is missing."""


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
            f"{_GRANT}: {'; '.join(rules)}",
        )


def _verbs(rights: list[Right]) -> str:
    return ", ".join(dict.fromkeys(verb for verb, *_ in rights))


def _names(rights: list[Right]) -> str:
    names = ", ".join(sorted({name for *_, name in rights if name}))
    return f" ({names})" if names else ""


def _published(slices: tuple[Document, ...], service: Service | Unread) -> Iterator[Finding]:
    evidence = [*_unlike(slices, known(service)), *_incomplete(slices)]
    if evidence:
        yield problem(
            "The ResourceSlices of this node are not those that the driver writes.",
            "the scheduler sees other devices than the driver offers, and uses none of a pool that is not whole",
            "see driver.status: the driver writes its slices again within a minute; if they change again, find the "
            "other writer: kubectl get resourceslices -o yaml --show-managed-fields",
            evidence,
        )
    elif isinstance(service, Unread):
        yield unknown(service)


def _unlike(slices: tuple[Document, ...], service: Service | None) -> Iterator[str]:
    """Yields the devices that slices lack, or still have."""
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
    """Yields the pools of which not all slices of the newest generation are there, or older ones are."""
    pools: dict[tuple[str, str], list[Document]] = {}
    for one in slices:
        pools.setdefault((str(one["spec"].get("driver")), one["spec"]["pool"]["name"]), []).append(one["spec"]["pool"])
    for (driver, name), headers in pools.items():
        newest = max(header.get("generation") or 0 for header in headers)
        there = [header for header in headers if (header.get("generation") or 0) == newest]
        if len(there) != there[0].get("resourceSliceCount") or len(there) < len(headers):
            count = f"{len(there)} slices of generation {newest} and {len(headers) - len(there)} older ones"
            yield f"pool {name} of {driver} has {count}, its resourceSliceCount is {there[0].get('resourceSliceCount')}"


def _owned(slices: tuple[Document, ...], node: Document) -> Iterator[Finding]:
    uid = node["metadata"]["uid"]
    strange = [
        one["metadata"]["name"]
        for one in slices
        if uid not in [owner.get("uid") for owner in one["metadata"].get("ownerReferences") or []]
    ]
    if strange:
        yield problem(
            f"Slices {', '.join(strange)} do not belong to the Node object that there is.",
            "the garbage collector deletes slices of a Node that is gone",
            f"kubectl delete resourceslice {' '.join(strange)}: the driver writes them again, with the present owner",
        )


CHECKS: Final = (
    Check("api.reachable", "The API server answers.", ("server",), _reachable, always=True),
    Check("api.served", "It serves resource.k8s.io/v1.", ("slices",), _served, always=True),
    Check("api.node", "There is a Node object of this name.", ("node", "server"), _node, always=True),
    Check("api.release", "The API server is of Kubernetes 1.34 or later.", ("server",), _release),
    Check("api.gates", "It keeps every field that the driver publishes.", ("trial", "config"), _gates),
    Check("api.clock", f"Its clock is within {_MOST_SECONDS:.0f} s of this node's.", ("trial",), _clock),
    Check("api.classes", "There is a DeviceClass for each kind of device.", ("classes", "machine"), _classes),
    Check("api.rights", "RBAC grants the driver all that it does.", ("rights",), _rights),
    Check(
        "api.slices",
        "The slices have the devices that the driver offers, and each pool is whole.",
        ("slices",),
        _published,
        also=("service",),
    ),
    Check("api.owner", "The slices belong to this Node object.", ("slices", "node"), _owned),
)
