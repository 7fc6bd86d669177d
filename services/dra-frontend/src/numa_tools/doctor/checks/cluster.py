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
from numa_tools.doctor.model import Check, Finding, Unread, note, problem, unknown

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
        yield problem("The API server does not serve resource.k8s.io/v1.", why, "take it out of --runtime-config")
    elif isinstance(slices, Unread):
        yield unknown(slices)


def _consumable(trial: Trial) -> Iterator[Finding]:
    if any(path.rpartition(".")[2] in gates.SHARING_FIELDS for path in trial.dropped):
        yield problem(
            f"The API server drops what lets several claims share a device (feature gate {gates.SHARING}).",
            "each device would be given away whole, so nothing is published",
            f"{_ON}; it is on by default from Kubernetes 1.36",
        )


def _taints(trial: Trial) -> Iterator[Finding]:
    if any(f".{gates.TAINTS_FIELD}" in path for path in trial.dropped):
        why = "a device of which claims hold more than the machine has left still looks free to the scheduler"
        yield note(f"The API server drops taints of devices (feature gate {gates.TAINTS}).", why, _ON)


def _mapping(trial: Trial, config: Config) -> Iterator[Finding]:
    lost = gates.COUNTING in trial.refused or any(gates.ALLOCATABLE in one for one in trial.dropped)
    if config.publish_node_allocatable_resource_mapping and lost:
        yield problem(
            "The API server does not take what publishNodeAllocatableResourceMapping publishes.",
            "claims do not count against the node, though the configuration wants it",
            f"{gates.COUNTING} (Kubernetes 1.37): {_ON}; or set the key to false",
        )


def _lists(trial: Trial) -> Iterator[Finding]:
    if gates.LISTS in trial.refused:
        yield problem(
            f"The API server refuses list attributes (feature gate {gates.LISTS}).",
            "devices are published without the PCIe roots that exposePCIeRoots asks for",
            f"{_ON}, or set exposePCIeRoots: false",
        )


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
        yield problem(f"The Node object cannot be read: {node.why}.", why, "set NODE_NAME, or hostnameOverride")


def _may(resource: str, why: str) -> Check:
    """Returns the check of all rights to one kind of object."""

    def judge(rights: Mapping[Right, bool]) -> Iterator[Finding]:
        missing = [right for right, granted in rights.items() if right[2] == resource and not granted]
        if missing:
            names = ", ".join(sorted({name for *_, name in missing if name}))
            verbs = ", ".join(dict.fromkeys(verb for verb, *_ in missing))
            groups = ", ".join(dict.fromkeys(group for _, group, *_ in missing))
            remedy = f'{_GRANT}: apiGroups: ["{groups}"], resources: [{resource}], verbs: [{verbs}]'
            rule = f"RBAC does not let the driver {verbs} {resource}{f' ({names})' if names else ''}."
            yield problem(rule, why, remedy)

    name = resource.replace("/", "-")
    return Check(f"api.rights-{name}", f"RBAC grants what is done with {resource}.", ("rights",), judge)


def _published(slices: tuple[Document, ...], service: Service) -> Iterator[Finding]:
    served = {
        (one["spec"].get("driver"), one["spec"]["pool"]["name"], device.get("name"))
        for one in slices
        for device in one["spec"].get("devices") or []
    }
    ours = {(one.get("driver"), one.get("pool"), one.get("name")) for one in service.devices}
    for what, found in (("lack", ours - served), ("still have", served - ours)):
        if found:
            yield problem(
                f"The ResourceSlices {what} {', '.join(sorted(str(name) for *_, name in found))}.",
                "the scheduler sees other devices than the driver offers",
                "see driver.ready and the log of the container frontend; slices are written again within a minute",
            )


def _whole(slices: tuple[Document, ...]) -> Iterator[Finding]:
    pools: dict[tuple[str, str], list[Document]] = {}
    for one in slices:
        pools.setdefault((str(one["spec"].get("driver")), one["spec"]["pool"]["name"]), []).append(one["spec"]["pool"])
    for (driver, name), headers in pools.items():
        newest = max(header.get("generation") or 0 for header in headers)
        there = [header for header in headers if (header.get("generation") or 0) == newest]
        if len(there) != there[0].get("resourceSliceCount") or len(there) < len(headers):
            yield problem(
                f"Pool {name} of {driver} has {len(headers)} slices, {len(there)} of them of generation {newest}.",
                "the scheduler uses no device of a pool that is not whole",
                "see driver.ready; who else writes ResourceSlices of this node?",
            )


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
            "delete them: the driver writes them again, with the present owner",
        )


CHECKS: Final = (
    Check("api.reachable", "The API server answers.", ("server",), _reachable, always=True),
    Check("api.served", "It serves resource.k8s.io/v1.", ("slices",), _served, always=True),
    Check("api.node", "There is a Node object of this name.", ("node", "server"), _node, always=True),
    Check("api.release", "The API server is of Kubernetes 1.34 or later.", ("server",), _release),
    Check("api.consumable-capacity", "It keeps the fields that let claims share a device.", ("trial",), _consumable),
    Check("api.taints", "It keeps taints of devices.", ("trial",), _taints),
    Check("api.mapping", "It keeps what publishNodeAllocatableResourceMapping adds.", ("trial", "config"), _mapping),
    Check("api.list-attributes", "It takes what exposePCIeRoots adds.", ("trial",), _lists),
    Check("api.clock", f"Its clock is within {_MOST_SECONDS:.0f} s of this node's.", ("trial",), _clock),
    Check("api.classes", "There is a DeviceClass for each kind of device.", ("classes", "machine"), _classes),
    _may("resourceslices", "devices are not published, or not kept right"),
    _may("resourceclaims", "no claim can be prepared"),
    _may("resourceclaims/status", "status.devices of claims stay empty"),
    _may("resourceclaims/driver", "status.devices of claims stay empty from Kubernetes 1.36 on"),
    _may("nodes", "slices cannot be given to their Node, so none is written"),
    _may("deviceclasses", "explain and doctor cannot tell which classes there are"),
    _may("events", "pods and node get no Events of the driver"),
    Check("api.slices", "The slices have the devices that the driver offers.", ("slices", "service"), _published),
    Check("api.pools", "Each pool of slices is whole.", ("slices",), _whole),
    Check("api.owner", "The slices belong to this Node object.", ("slices", "node"), _owned),
)
