# SPDX-License-Identifier: Apache-2.0
"""The text that ``explain`` prints about a pod and its claims. This module does no I/O."""

from collections.abc import Iterator

from kubectl_numa.cluster import CPUS, MEMORY, Claim, ClaimName, Cluster, Part, Pod
from kubectl_numa.lists import ENFORCED
from kubectl_numa.quantity import format_bytes, parse_quantity

NO_POD = Pod(())


def explain_pod(pod: Pod, namespace: str, name: str) -> Iterator[str]:
    """Yields the reason why the pod has no node, and the pod's containers that are not running."""
    if not pod.claims:
        yield f"pod {namespace}/{name} has no claims: it runs in its node's shared pool"
    if pod.unscheduled:
        yield f"pod {namespace}/{name} has no node yet; the scheduler's reason: {pod.unscheduled}"
    for one in pod.waiting:
        what = "was refused" if one.refused else "is not running"
        yield f"container {one.container} {what}: " + ": ".join(filter(None, (one.reason, one.message)))


def explain_missing(use: ClaimName, namespace: str, *, template_exists: bool | None) -> Iterator[str]:
    """Yields the lines about a claim that is named by a pod but does not exist."""
    yield f"claim {use.name or use.entry}"
    if use.name and not use.template:
        create = f"create ResourceClaim {use.name} in namespace {namespace}"
        yield f"  does not exist: {create}, or name a different claim in the pod"
    elif use.name:
        yield f"  no longer exists; it was created from template {use.template}: delete the pod to get a new one"
    elif template_exists is False:
        yield f"  cannot be created: there is no ResourceClaimTemplate {use.template} in namespace {namespace}"
    else:
        template = use.template or "(none is named)"
        yield f"  has not been created yet; kube-controller-manager creates it from template {template}"


def explain(cluster: Cluster, claim: Claim, pod: Pod = NO_POD) -> Iterator[str]:
    """Yields the lines about a claim's devices, or about its unmet requests. ``pod`` is a pod that uses the claim."""
    yield f"claim {claim.namespace}/{claim.name}"
    if not claim.allocated:
        yield "  not allocated: waiting for the scheduler to find a node that suits both the claim and the pod"
        for request in claim.requests:
            yield from _waiting(cluster, request)
        return
    for part in claim.parts:
        device = cluster.devices.get(part.key)
        where = f"on {device.node}" if device else "from a device that is no longer published"
        amount = _amount(device.kind if device else CPUS, part.amount)
        yield f"  {part.request}: {amount} of {part.key.device} {where}{_cpus(part)}"
    if claim.pods[1:]:
        yield f"  reserved for pods {', '.join(claim.pods)}"
    yield f"  {_enforced(claim, pod)}"


def _cpus(part: Part) -> str:
    """Returns a claim part's CPUs and how the container uses them, or "" if its CPUs are unknown."""
    pool = f"poolCPUs: {part.pool_cpus}" if part.pool_cpus else ""
    return ", ".join(filter(None, (f": CPUs {part.cpus}", part.isolation, pool))) if part.cpus else ""


def _enforced(claim: Claim, pod: Pod) -> str:
    if not claim.parts:
        return "none of its devices belong to this driver"
    if pod.refused:
        return f"enforced: not for this pod (refused containers: {', '.join(pod.refused)}; see above)"
    if not claim.enforced:
        return "enforced: not reported; the claim is not prepared yet, or the node does not write status.devices"
    return f"enforced: {ENFORCED[claim.enforced]}: {claim.message or claim.reason}"


def _waiting(cluster: Cluster, request: dict[str, object] | object) -> Iterator[str]:
    """Yields a line about an unmet request: the requested amount and the device with the largest free amount, or the
    reason why no device can be named.
    """
    document = request if isinstance(request, dict) else {}
    exact = document.get("exactly")
    name, exact = str(document.get("name")), exact if isinstance(exact, dict) else {}
    kind = _kind_of_class(str(exact.get("deviceClassName", "")))
    capacity = exact.get("capacity")
    requested = (
        next(iter(((capacity or {}).get("requests") or {}).values()), None) if isinstance(capacity, dict) else None
    )
    wanted = parse_quantity(requested) if requested is not None else 1
    published = [key for key, device in cluster.devices.items() if device.kind == kind]
    usable = [key for key in published if not (cluster.devices[key].tainted or cluster.devices[key].observes)]
    ranked = sorted(usable, key=cluster.free, reverse=True)
    if not exact or not ranked:
        of_class = f"  {name}: class {exact.get('deviceClassName', '(several)')}; "
        if published:
            yield f"{of_class}all of its devices are tainted, or their nodes only observe; see kubectl numa nodes"
        elif kind:
            yield f"{of_class}no node publishes such devices; see kubectl numa nodes"
        else:
            yield f"{of_class}the free amount cannot be determined from the ResourceSlices"
        return
    fits = sum(cluster.free(key) >= wanted for key in ranked)
    best = cluster.devices[ranked[0]]
    count = exact.get("count")
    several = isinstance(count, int) and count > 1
    needs = f"{count} devices with {_amount(kind, wanted)} each" if several else _amount(kind, wanted)
    enough = f"{fits} of {len(ranked)} devices have that much free"
    largest = (
        f"the largest free amount is {_amount(kind, cluster.free(ranked[0]))} of {ranked[0].device} on {best.node}"
    )
    yield f"  {name}: requests {needs}; {enough}; {largest}"


def _kind_of_class(name: str) -> str:
    if name.startswith("dra.hugepages-"):
        size = name.removeprefix("dra.hugepages-").removesuffix("-far")
        return f"hugepages-{size.upper()}i"
    return CPUS if name.startswith("dra.cpu") else MEMORY if name.startswith("dra.memory") else ""


def _amount(kind: str, amount: int) -> str:
    return str(amount) if kind == CPUS else format_bytes(amount)
