# SPDX-License-Identifier: Apache-2.0
"""A cluster's devices and claims as values, read from ResourceSlices and ResourceClaims. This module does no I/O.

Objects are read leniently: fields with unexpected values are skipped, so one malformed object never hides the others.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from kubectl_numa.quantity import parse_quantity

CPU_DRIVER: Final = "dra.cpu"
MEMORY_DRIVER: Final = "dra.memory"
DRIVERS: Final = (CPU_DRIVER, MEMORY_DRIVER)
CPUS: Final = "cpu"
MEMORY: Final = "memory"
_CAPACITIES: Final = {CPU_DRIVER: ("dra.cpu/cpu", "cpu"), MEMORY_DRIVER: ("dra.memory/size", "size")}
_REFUSAL_PREFIX: Final = "dra-driver-numa: "
"""Prefix of every nri-backend refusal. The kubelet copies the runtime's error, which contains the refusal, to the pod's
status.
"""
_STARTING: Final = ("ContainerCreating", "PodInitializing")
_NUMA_NODE: Final = ("resource.kubernetes.io/numaNode", "dra.cpu/numaNodeID")


class Key(NamedTuple):
    """A device's name, unique in a cluster."""

    driver: str
    pool: str
    device: str


@dataclass(frozen=True, slots=True)
class Device:
    """A device in a ResourceSlice."""

    node: str
    kind: str
    """``cpu``, ``memory`` or ``hugepages-2Mi``."""
    numa_node: int | None
    total: int
    """Number of CPUs or bytes."""
    tainted: bool
    observes: bool = False
    """True if the node runs with ``enforcement: observe``, which means that it refuses claims and changes nothing."""


@dataclass(frozen=True, slots=True)
class Part:
    """Part of a device that is allocated to a claim."""

    key: Key
    request: str
    amount: int
    cpus: str = ""
    """List of CPUs. Empty until the node has reported the CPUs."""
    isolation: str = ""
    pool_cpus: str = ""
    """``all`` or ``numa`` if the container also runs on CPUs from the shared pool."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim. ``parts`` is empty if the claim is not allocated or has no devices from our drivers."""

    namespace: str
    name: str
    parts: tuple[Part, ...]
    pods: tuple[str, ...]
    requests: tuple[Mapping[str, Any], ...]
    allocated: bool
    enforced: str = ""
    """Status of the ``Enforced`` condition: ``True``, ``False`` or ``Unknown``. Empty if the node has not set it."""
    reason: str = ""
    message: str = ""


class ClaimName(NamedTuple):
    """An entry in a pod's ``spec.resourceClaims``."""

    entry: str
    name: str
    """Name of the ResourceClaim. Empty until a claim is created from the template."""
    template: str = ""
    """Name of the ResourceClaimTemplate if the pod names one."""


class WaitingContainer(NamedTuple):
    """A pod's container that is not running."""

    container: str
    reason: str
    message: str
    refused: bool
    """True if nri-backend refused the container."""


@dataclass(frozen=True, slots=True)
class Pod:
    """The parts of a pod that are related to its claims."""

    claims: tuple[ClaimName, ...]
    waiting: tuple[WaitingContainer, ...] = ()
    unscheduled: str = ""
    """The scheduler's message in the PodScheduled condition. Empty if the pod has been assigned to a node."""

    @property
    def refused(self) -> tuple[str, ...]:
        """Returns the names of the containers that nri-backend refused."""
        return tuple(one.container for one in self.waiting if one.refused)


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster's devices and claims, and the allocated amounts."""

    devices: Mapping[Key, Device]
    claims: tuple[Claim, ...]
    used: Mapping[Key, int] = field(default_factory=dict)

    def free(self, key: Key) -> int:
        """Returns a device's free amount, in CPUs or bytes."""
        return max(0, self.devices[key].total - self.used.get(key, 0))

    def node_of(self, claim: Claim) -> str:
        """Returns the node to which a claim is allocated, or "" if none of the claim's devices is published."""
        return next((self.devices[part.key].node for part in claim.parts if part.key in self.devices), "")


def read_cluster(slices: Iterable[Mapping[str, Any]], claims: Iterable[Mapping[str, Any]]) -> Cluster:
    """Returns the devices and claims, and the amount of each device that is allocated."""
    devices: dict[Key, Device] = {}
    generations: dict[tuple[str, str], int] = {}
    for one in sorted(slices, key=_generation):
        spec = _dict(one.get("spec"))
        driver, pool = str(spec.get("driver")), str(_dict(spec.get("pool")).get("name"))
        if driver not in DRIVERS:
            continue
        if generations.setdefault((driver, pool), _generation(one)) < _generation(one):
            # Only the slices of a pool's newest generation are valid. Older slices are about to be deleted.
            devices = {key: device for key, device in devices.items() if key[:2] != (driver, pool)}
            generations[driver, pool] = _generation(one)
        for document in _dicts(spec.get("devices")):
            devices[Key(driver, pool, str(document.get("name")))] = _device(
                str(spec.get("nodeName", "")), driver, document
            )
    read = tuple(sorted(map(_claim, claims), key=lambda claim: (claim.namespace, claim.name)))
    used: defaultdict[Key, int] = defaultdict(int)
    for part in (part for claim in read for part in claim.parts):
        used[part.key] += part.amount
    return Cluster(devices, read, dict(used))


def _generation(document: Mapping[str, Any]) -> int:
    found = _dict(_dict(document.get("spec")).get("pool")).get("generation")
    return found if isinstance(found, int) else 0


def _device(node: str, driver: str, document: Mapping[str, Any]) -> Device:
    attributes = {
        name: next(iter(_dict(value).values()), None) for name, value in _dict(document.get("attributes")).items()
    }
    numa = next((attributes[name] for name in _NUMA_NODE if isinstance(attributes.get(name), int)), None)
    huge = attributes.get("resource.kubernetes.io/hugeTLB") is True
    kind = CPUS if driver == CPU_DRIVER else f"hugepages-{attributes.get('dra.memory/pageSize')}" if huge else MEMORY
    amounts = [
        _dict(value).get("value")
        for name, value in _dict(document.get("capacity")).items()
        if name in _CAPACITIES[driver]
    ]
    total = parse_quantity(amounts[0]) if amounts else 1
    observes = attributes.get(f"{driver}/observe") is True
    return Device(node, kind, numa, total, bool(document.get("taints")), observes)


def _claim(document: Mapping[str, Any]) -> Claim:
    meta, spec, status = (_dict(document.get(name)) for name in ("metadata", "spec", "status"))
    allocation = _dict(status.get("allocation"))
    device_statuses = {(_key(one), str(one.get("shareID") or "")): one for one in _dicts(status.get("devices"))}
    parts, conditions = [], []
    for result in _dicts(_dict(allocation.get("devices")).get("results")):
        if (key := _key(result)).driver in DRIVERS and result.get("adminAccess") is not True:
            entry = _dict(device_statuses.get((key, str(result.get("shareID") or ""))))
            parts.append(_part(key, result, _dict(entry.get("data"))))
            conditions += [one for one in _dicts(entry.get("conditions")) if one.get("type") == "Enforced"]
    worst = _worst(conditions)
    return Claim(
        namespace=str(meta.get("namespace", "")),
        name=str(meta.get("name", "")),
        parts=tuple(parts),
        pods=tuple(str(one.get("name")) for one in _dicts(status.get("reservedFor")) if one.get("resource") == "pods"),
        requests=tuple(_dicts(_dict(spec.get("devices")).get("requests"))),
        allocated=bool(allocation),
        **{
            name: str(worst.get(field, ""))
            for name, field in (("enforced", "status"), ("reason", "reason"), ("message", "message"))
        },
    )


def read_pod(document: object) -> Pod:
    """Returns a pod's claims, its containers that are not running and, if the pod has no node, the reason for that."""
    spec, status = (_dict(_dict(document).get(name)) for name in ("spec", "status"))
    generated_names = {
        one.get("name"): str(one.get("resourceClaimName") or "") for one in _dicts(status.get("resourceClaimStatuses"))
    }
    claims = []
    for one in _dicts(spec.get("resourceClaims")):
        name = str(one.get("resourceClaimName") or generated_names.get(one.get("name")) or "")
        claims.append(ClaimName(str(one.get("name")), name, str(one.get("resourceClaimTemplateName") or "")))
    if extended := _dict(status.get("extendedResourceClaimStatus")).get("resourceClaimName"):
        claims.append(ClaimName("extended resources", str(extended)))
    container_statuses = [
        one for key in ("initContainerStatuses", "containerStatuses") for one in _dicts(status.get(key))
    ]
    return Pod(
        tuple(claims), tuple(found for one in container_statuses if (found := _waiting(one))), _unscheduled(status)
    )


def _waiting(status: Mapping[str, Any]) -> WaitingContainer | None:
    """Returns the reason why a container is not running, or None if it is running, has succeeded or is starting."""
    state = _dict(status.get("state"))
    ended = [_dict(_dict(status.get(key)).get("terminated")) for key in ("state", "lastState")]
    found = [_dict(state.get("waiting")), *ended]
    name, ours = str(status.get("name")), [one for one in found if _REFUSAL_PREFIX in str(one.get("message"))]
    if ours and "running" not in state:
        message = str(ours[0].get("message"))
        return WaitingContainer(
            name, str(ours[0].get("reason")), message[message.index(_REFUSAL_PREFIX) :], refused=True
        )
    # A container that is not restarted has no waiting state.
    current = found[0] or found[1]
    reason = str(current.get("reason") or "")
    if not reason or reason in _STARTING or current.get("exitCode") == 0:
        return None
    return WaitingContainer(name, reason, str(current.get("message") or ""), refused=False)


def _unscheduled(status: Mapping[str, Any]) -> str:
    for one in _dicts(status.get("conditions")):
        if one.get("type") == "PodScheduled" and one.get("status") == "False":
            return str(one.get("message") or one.get("reason") or "the PodScheduled condition gives no reason")
    return ""


def _part(key: Key, result: Mapping[str, Any], data: Mapping[str, Any]) -> Part:
    consumed = [
        value for name, value in _dict(result.get("consumedCapacity")).items() if name in _CAPACITIES[key.driver]
    ]
    request = str(result.get("request", "")).partition("/")[0]
    cpu_fields = [str(data.get(name) or "") for name in ("cpus", "isolation", "poolCPUs")]
    return Part(key, request, parse_quantity(consumed[0]) if consumed else 1, *cpu_fields)


def _worst(conditions: Iterable[Mapping[str, Any]]) -> Mapping[str, Any]:
    order = ("False", "Unknown", "True")
    known = [one for one in conditions if one.get("status") in order]
    return min(known, key=lambda one: order.index(str(one.get("status"))), default={})


def _key(document: Mapping[str, Any]) -> Key:
    return Key(*(str(document.get(name)) for name in Key._fields))


def _dict(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _dicts(value: object) -> list[Mapping[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []
