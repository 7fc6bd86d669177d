# SPDX-License-Identifier: Apache-2.0
"""What each command shows of a cluster, as rows. Pure."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Final

from kubectl_numa.cluster import CPUS, MEMORY, Claim, ClaimName, Cluster, Key, Pod
from kubectl_numa.quantity import Amount, parse_quantity
from kubectl_numa.tables import Row

NO_POD: Final = Pod(())
ENFORCED: Final = {"True": "yes", "False": "no", "Unknown": "not known"}
"""Words for the status of a claim's condition ``Enforced``, the same as on the page of a node."""


def node_rows(cluster: Cluster) -> list[Row]:
    """Returns a row for each node: what is free of what there is, and what is wrong."""
    by_node: defaultdict[str, list[Key]] = defaultdict(list)
    for key, device in cluster.devices.items():
        by_node[device.node].append(key)
    claims: defaultdict[str, list[Claim]] = defaultdict(list)
    for claim in cluster.claims:
        claims[cluster.node_of(claim)].append(claim)
    rows: list[Row] = []
    for node, keys in sorted(by_node.items()):
        here = claims[node]
        row: dict[str, object] = {"node": node}
        row["numa nodes"] = len({cluster.devices[key].numa_node for key in keys} - {None})
        row |= {kind: _free_of(cluster, of_kind) for kind, of_kind in _kinds(cluster, keys).items()}
        row["claims"] = len(here)
        row["not enforced"] = sum(claim.enforced == "False" for claim in here)
        row["enforcement"] = "observe" if any(cluster.devices[key].observes for key in keys) else "enforce"
        row["tainted"] = sum(cluster.devices[key].tainted for key in keys)
        rows.append(row)
    return rows


def free_rows(cluster: Cluster, node: str = "") -> list[Row]:
    """Returns a row for each NUMA node (or what devices are grouped by), with what claims can still have."""
    places: defaultdict[tuple[str, int], list[Key]] = defaultdict(list)
    for key, device in cluster.devices.items():
        if not device.tainted and not device.observes and node in ("", device.node):
            places[device.node, -1 if device.numa_node is None else device.numa_node].append(key)
    rows: list[Row] = []
    for (name, numa), keys in sorted(places.items()):
        free = {kind: _amount(kind, sum(map(cluster.free, of))) for kind, of in _kinds(cluster, keys).items()}
        devices = (
            {"+devices": ", ".join(sorted(key.device for key in keys))}
            if len(keys) < 9
            else {"+devices": f"{len(keys)}"}
        )
        rows.append({"node": name, "numa node": "any" if numa < 0 else numa, **free, **devices})
    return rows


def claim_rows(cluster: Cluster, namespace: str = "") -> list[Row]:
    """Returns a row for each claim that our drivers have a part of."""
    claims = (claim for claim in cluster.claims if claim.parts and namespace in ("", claim.namespace))
    return [
        {
            "namespace": claim.namespace,
            "claim": claim.name,
            "node": cluster.node_of(claim),
            "cpus": ",".join(
                part.cpus or f"{part.amount} CPUs" for part in claim.parts if part.key.driver == "dra.cpu"
            ),
            "memory": ", ".join(_memory(cluster, claim)),
            "pods": ", ".join(claim.pods),
            "enforced": ENFORCED.get(claim.enforced, "not reported"),
            "+reason": claim.reason,
            "+message": claim.message,
        }
        for claim in claims
    ]


def explain_pod(pod: Pod, namespace: str, name: str) -> Iterator[str]:
    """Yields lines about the pod itself: why it has no node, and which of its containers do not run."""
    if not pod.claims:
        yield f"pod {namespace}/{name} has no claims: it runs in the shared pool of its node"
    if pod.unscheduled:
        yield f"pod {namespace}/{name} has no node yet; the scheduler's reason: {pod.unscheduled}"
    for one in pod.waiting:
        what = "was refused" if one.refused else "does not run"
        yield f"container {one.container} {what}: " + ": ".join(filter(None, (one.reason, one.message)))


def explain_missing(use: ClaimName, namespace: str, *, template_exists: bool | None) -> Iterator[str]:
    """Yields lines about a claim that a pod names and that does not exist."""
    yield f"claim {use.name or use.entry}"
    if use.name and not use.template:
        yield f"  does not exist: create ResourceClaim {use.name} in namespace {namespace}, or name another in the pod"
    elif use.name:
        yield f"  does not exist any more; it was made from template {use.template}: delete the pod to get a new one"
    elif template_exists is False:
        yield f"  cannot be made: there is no ResourceClaimTemplate {use.template} in namespace {namespace}"
    else:
        yield f"  is not made yet; kube-controller-manager makes it from template {use.template or '(none is named)'}"


def explain(cluster: Cluster, claim: Claim, pod: Pod = NO_POD) -> Iterator[str]:
    """Yields lines about the devices of a claim, or its unmet requests; ``pod`` is the pod that is explained."""
    yield f"claim {claim.namespace}/{claim.name}"
    if not claim.allocated:
        yield "  not allocated: the scheduler allocates it together with a node for the pod, which must fit there, too"
        for request in claim.requests:
            yield from _waiting(cluster, request)
        return
    for part in claim.parts:
        device = cluster.devices.get(part.key)
        where = f"on {device.node}" if device else "of a device that is not published any more"
        amount = _amount(device.kind if device else CPUS, part.amount)
        cpus = f": CPUs {part.cpus}" + (f", {part.isolation}" if part.isolation else "") if part.cpus else ""
        yield f"  {part.request}: {amount} of {part.key.device} {where}{cpus}"
    if claim.pods[1:]:
        yield f"  reserved for pods {', '.join(claim.pods)}"
    yield f"  {_enforced(claim, pod)}"


def _enforced(claim: Claim, pod: Pod) -> str:
    if not claim.parts:
        return "no part of it is of this driver"
    if pod.refused:
        return f"enforced: not for this pod: container {', '.join(pod.refused)} was refused, see above"
    if not claim.enforced:
        return "enforced: not reported; the claim is not prepared yet, or the node does not write status.devices"
    return f"enforced: {ENFORCED[claim.enforced]}: {claim.message or claim.reason}"


def _waiting(cluster: Cluster, request: dict[str, object] | object) -> Iterator[str]:
    """Yields where there is most of what a request asks for."""
    document = request if isinstance(request, dict) else {}
    exact = document.get("exactly")
    name, exact = str(document.get("name")), exact if isinstance(exact, dict) else {}
    kind = _kind_of_class(str(exact.get("deviceClassName", "")))
    capacity = exact.get("capacity")
    asked = next(iter(((capacity or {}).get("requests") or {}).values()), None) if isinstance(capacity, dict) else None
    wanted = parse_quantity(asked) if asked is not None else 1
    most = sorted(
        (k for k, d in cluster.devices.items() if d.kind == kind and not d.tainted), key=cluster.free, reverse=True
    )
    if not exact or not most:
        yield f"  {name}: of class {exact.get('deviceClassName', 'several')}; no slice says what is free of it"
        return
    fits = sum(cluster.free(key) >= wanted for key in most)
    best = cluster.devices[most[0]]
    largest = f"{_amount(kind, cluster.free(most[0]))} of {most[0].device} on {best.node}"
    yield f"  {name}: asks for {_amount(kind, wanted)}; {fits} of {len(most)} devices have that, the most is {largest}"


def _kind_of_class(name: str) -> str:
    if name.startswith("dra.hugepages-"):
        size = name.removeprefix("dra.hugepages-").removesuffix("-far")
        return f"hugepages-{size.upper()}i"
    return CPUS if name.startswith("dra.cpu") else MEMORY if name.startswith("dra.memory") else ""


def _memory(cluster: Cluster, claim: Claim) -> Iterator[str]:
    for part in claim.parts:
        if part.key.driver == "dra.memory":
            device = cluster.devices.get(part.key)
            yield f"{_amount(MEMORY, part.amount)} {device.kind if device else part.key.device}"


def _kinds(cluster: Cluster, keys: list[Key]) -> dict[str, list[Key]]:
    """Returns devices by kind: CPUs, memory, then hugepages by size."""
    kinds: defaultdict[str, list[Key]] = defaultdict(list)
    for key in keys:
        kinds[cluster.devices[key].kind].append(key)
    return dict(sorted(kinds.items(), key=lambda item: (item[0] != CPUS, item[0] != MEMORY, item[0])))


def _free_of(cluster: Cluster, keys: list[Key]) -> Amount:
    total = sum(cluster.devices[key].total for key in keys)
    return Amount(sum(map(cluster.free, keys)), cluster.devices[keys[0]].kind != CPUS, total)


def _amount(kind: str, amount: int) -> Amount:
    return Amount(amount, kind != CPUS)
