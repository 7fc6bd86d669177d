# SPDX-License-Identifier: Apache-2.0
"""The limits that the 1.36 and 1.37 kubelets set for a pod and its containers, on cgroup v2.

The limits are a function of the pod's spec and of ``status.nodeAllocatableResourceClaimStatuses``, computed as in these
files: `kubernetes/kubernetes pkg/kubelet/cm/helpers_linux.go, 1.36 and 1.37` (the pod), `kubernetes/kubernetes
pkg/kubelet/kuberuntime/kuberuntime_container_linux.go, 1.36 and 1.37` (containers), `kubernetes/kubernetes
staging/src/k8s.io/component-helpers/resource/helpers.go, 1.37` (the contribution of claims). The 1.36 kubelet does not
add claims to limits; in that release only the scheduler takes them into account.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.fakes import quantities

PERIOD = 100_000
"""Period of the CPU quota in microseconds."""
_HUGE = "hugepages-"
Amounts = Mapping[str, int]
"""Amounts by resource name, in millicores for ``cpu`` and in bytes for the other resources."""


@dataclass(frozen=True)
class Limits:
    """The limits that the kubelet sets for a cgroup; None means no limit."""

    cpu_quota: int | None = None
    """CPU quota in microseconds per period."""
    memory: int | None = None
    """Memory limit in bytes."""
    hugepages: Amounts = field(default_factory=dict)
    """Limits in bytes, keyed by page size such as ``2Mi``; a missing size has a limit of 0."""


def claim_status(claim: str, containers: Sequence[str], amounts: Mapping[str, str]) -> dict[str, Any]:
    """Returns an entry as the 1.37 scheduler writes it for a claim with mapped devices."""
    mapping = [{"name": name, "quantity": quantity} for name, quantity in amounts.items()]
    return {"resourceClaimName": claim, "containers": [*containers], "mapping": mapping}


def pod_limits(pod: Mapping[str, Any], release: str, *, gate: bool) -> Limits:
    """Returns the limits for the pod's own cgroup. ``gate`` is the kubelet's DRANodeAllocatableResources gate."""
    spec = pod["spec"]
    every = [*spec.get("initContainers", ()), *spec["containers"]]
    counted = _added(_statuses(pod, release, gate=gate))
    own = _amounts(spec, "limits")
    limits = {**_with_claims(_sum_of_containers(spec), counted), **own}
    declared = {
        name for name in ("cpu", "memory") if name in own or all(_amounts(one, "limits").get(name) for one in every)
    }
    return _limits({name: amount for name, amount in limits.items() if name in declared or name.startswith(_HUGE)})


def container_limits(pod: Mapping[str, Any], name: str, release: str, *, gate: bool) -> Limits:
    """Returns the limits that the kubelet sends to the runtime for a container."""
    spec = pod["spec"]
    (container,) = [one for one in (*spec.get("initContainers", ()), *spec["containers"]) if one["name"] == name]
    statuses = [one for one in _statuses(pod, release, gate=gate) if name in one["containers"]]
    own = _with_claims(_amounts(container, "limits"), _added(statuses))
    # A container without its own limit may use the pod's limit, not including claims.
    inherited = {key: amount for key, amount in _amounts(spec, "limits").items() if not key.startswith(_HUGE)}
    return _limits({**inherited, **own})


def _statuses(pod: Mapping[str, Any], release: str, *, gate: bool) -> list[Mapping[str, Any]]:
    found = pod.get("status", {}).get("nodeAllocatableResourceClaimStatuses", [])
    return found if release == "1.37" and gate else []


def _added(statuses: Iterable[Mapping[str, Any]]) -> Amounts:
    """Returns the contribution of claims; a claim that several containers share is added once."""
    added = Counter[str]()
    for status in statuses:
        for one in status.get("mapping", ()):
            added[one["name"]] += _amount(one["name"], one["quantity"])
    return added


def _with_claims(own: Amounts, counted: Amounts) -> Amounts:
    """Adds the contribution of claims to limits. A resource without a limit stays unlimited, but a missing hugepage
    limit is treated as 0.
    """
    added = {name: own.get(name, 0) + more for name, more in counted.items() if name in own or name.startswith(_HUGE)}
    return {**own, **added}


def _sum_of_containers(spec: Mapping[str, Any]) -> Amounts:
    """Returns the sum over the containers, or, if larger, the amount for an init container plus the sidecars before
    it.
    """
    total, sidecars, peak = Counter[str](), Counter[str](), Counter[str]()
    for container in spec["containers"]:
        total.update(_amounts(container, "limits"))
    for container in spec.get("initContainers", ()):
        needed = Counter(_amounts(container, "limits"))
        if container.get("restartPolicy") == "Always":
            total.update(needed)
            sidecars.update(needed)
            needed = Counter[str]()
        needed.update(sidecars)
        peak |= needed
    return total | peak


def _amounts(part: Mapping[str, Any], kind: str) -> dict[str, int]:
    return {name: _amount(name, text) for name, text in part.get("resources", {}).get(kind, {}).items()}


def _amount(name: str, text: str) -> int:
    return int(quantities.parse(text) * (1000 if name == "cpu" else 1))


def _limits(amounts: Amounts) -> Limits:
    cpu = amounts.get("cpu")
    return Limits(
        cpu_quota=None if cpu is None else max(cpu * PERIOD // 1000, 1000),
        memory=amounts.get("memory"),
        hugepages={name.removeprefix(_HUGE): size for name, size in amounts.items() if name.startswith(_HUGE)},
    )
