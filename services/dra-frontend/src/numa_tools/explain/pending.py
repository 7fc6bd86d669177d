# SPDX-License-Identifier: Apache-2.0
"""Explains a claim that this node has not prepared: which devices fit, what is missing, and whether preparing it would
fail.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from dra_frontend.allocation.alignment import NO_OTHER_DEVICES, Key, OtherDevices, needed_devices
from dra_frontend.allocation.allocate import allocate_claim, parse_driver_claim
from dra_frontend.allocation.claim import RefusedError, parse_claim
from numa_contract.names import DRIVERS

from numa_tools.explain.enforced import Problem, problem
from numa_tools.explain.snapshot import NodeSnapshot
from numa_tools.scheduling.claim_spec import ClaimSpec, DeviceClass, Request, read_claim_spec
from numa_tools.scheduling.fit import Verdict
from numa_tools.scheduling.manifests import Claim, Workload
from numa_tools.scheduling.reading import ManifestError, mapping, value
from numa_tools.scheduling.simulation import Simulation

_FREE_RESOURCES = "free resources on this node, request less, or use another node"
_WAIT_REASON = (
    "this node can serve the claim; if it stays pending, the pod itself does not fit (requests, taints, affinity) or "
    "is waiting for another claim: the pod's PodScheduled condition gives the reason (kubectl numa explain POD)"
)
_UNDECIDED = "read the pod's Events, which contain the scheduler's own result; or rewrite the selector"
_UNPREPARED = "the claim is not prepared here"
_EVENTS = "see the pod's Events: kubectl describe pod"


def joined_devices(snapshot: NodeSnapshot, document: Mapping[str, Any]) -> frozenset[Key]:
    """Returns the other drivers' devices whose attributes affect the choice of a claim's CPUs.

    Returns no devices if the claim cannot be parsed.
    """
    with suppress(RefusedError):
        return needed_devices(parse_claim(document), snapshot.inventory)
    return frozenset()


def allocation_problem(
    snapshot: NodeSnapshot, document: Mapping[str, Any], node: str, others: OtherDevices
) -> Problem | None:
    """Returns the reason why an allocated claim is not prepared here, or None if the claim has not been allocated."""
    try:
        view = parse_claim(document)
        if not view.allocated:
            return None
        if not view.is_for(node, view.claim.uid):
            names = ", ".join(sorted(frozenset[str]().union(*view.nodes)))
            remedy = "run the command in the driver's pod on that node"
            return problem(_UNPREPARED, f"it is allocated to node {names}", remedy)
        view.check_usable(view.claim.uid)
        for driver in (driver for driver, results in view.results.items() if results):
            parsed = parse_driver_claim(view, driver, snapshot.inventory, snapshot.config, others=others)
            allocate_claim(parsed, snapshot.inventory, snapshot.ledger)
    except RefusedError as refusal:
        remedy = f"fix the cause given in the message; {_EVENTS}"
        return problem(_UNPREPARED, str(refusal), remedy)
    if not any(view.results.values()):
        why = "it is allocated, but none of its devices belong to this driver"
        return problem(_UNPREPARED, why, f"this driver has nothing to prepare; {_EVENTS}")
    if reasons := "; ".join(snapshot.refusal_reasons):
        why = f"it is allocated to this node and fits; {reasons}"
        return problem(_UNPREPARED, why, "run dra-frontend doctor, which suggests a remedy")
    why = "it is allocated to this node and fits; the kubelet has not asked the driver to prepare it yet"
    return problem(_UNPREPARED, why, _EVENTS)


def verdicts(simulation: Simulation, spec: ClaimSpec) -> tuple[list[dict[str, Any]], list[Request], list[str]]:
    """Returns, for each request, a verdict on each of this node's devices.

    Also returns the requests that match at least one of these devices, and the errors in classes or selectors that make
    a request impossible to meet on any node.
    """
    rows: list[dict[str, Any]] = []
    ours: list[Request] = []
    faults: list[str] = []
    for request in spec.requests:
        mine = []
        for subrequest in request.subrequests:
            row: dict[str, Any] = {"request": subrequest.name, "class": subrequest.device_class, "devices": []}
            rows.append(row)
            try:
                found = simulation.search.verdicts(subrequest)
            except ManifestError as error:
                row["problem"] = str(error)
                faults.append(str(error))
                continue
            row["devices"] = [_row(one) for one in found]
            if found:
                mine.append(subrequest)
            else:
                row["problem"] = "does not request this node's CPUs or memory"
        if mine:
            ours.append(replace(request, subrequests=tuple(mine)))
    return rows, ours, faults


def _row(one: Verdict) -> dict[str, Any]:
    row: dict[str, Any] = {"device": one.device.name, "fits": None if one.unknown else not one.missing}
    return row | {key: text for key, text in (("missing", one.missing), ("unknown", one.unknown)) if text}


def explain_pending(
    snapshot: NodeSnapshot,
    document: Mapping[str, Any],
    classes: Mapping[str, DeviceClass],
    node: str,
    others: OtherDevices = NO_OTHER_DEVICES,
) -> tuple[dict[str, Any], list[Problem]]:
    """Returns a claim's explanation and its problems. If there are no problems, nothing prevents the claim from being
    prepared.

    ``others`` contains the devices that :func:`joined_devices` returns.
    """
    metadata = mapping(document, "metadata")
    namespace, name = value(metadata, "namespace", str, "default"), value(metadata, "name", str)
    found: dict[str, Any] = {"claim": f"{namespace}/{name}", "uid": metadata.get("uid", ""), "state": "pending"}
    if unprepared := allocation_problem(snapshot, document, node, others):
        return found | {"state": "allocated"}, [unprepared]
    try:
        spec = read_claim_spec(mapping(document, "spec"))
    except ManifestError as error:
        return found, [problem("the claim cannot be explained", str(error), "change the claim")]
    simulation = Simulation(
        snapshot.inventory, snapshot.config, classes, dict(snapshot.files), held_resources=snapshot.ledger
    )
    found["requests"], ours, faults = verdicts(simulation, spec)
    refusals = [
        problem("this node currently accepts no claims", one, "run dra-frontend doctor")
        for one in snapshot.refusal_reasons
    ]
    unreadable = [
        problem("a request cannot be met on any node", one, "create the class, or change the claim") for one in faults
    ]
    if not ours:
        why = f"no request matches a device from {' or '.join(DRIVERS)} on this node"
        return found, refusals + (unreadable or [problem("no device on this node fits", why, _FREE_RESOURCES)])
    names = {one.name for one in ours}
    constraints = tuple(replace(one, requests=one.requests or frozenset(names)) for one in spec.constraints)
    row = simulation.run(
        Workload(name, (Claim(namespace, name, ClaimSpec(tuple(ours), constraints, spec.configs)),)), name
    )
    if row["fits"]:
        found["wouldGet"], found["waitsFor"] = row["claims"][0]["devices"], _WAIT_REASON
        return found, refusals + unreadable
    if row["fits"] is None:
        text = "it is unknown whether this node can serve the claim"
        return found, refusals + unreadable + [problem(text, why, _UNDECIDED) for why in row["unknown"]]
    who = "the scheduler finds no devices" if row["stage"] == "scheduling" else "the driver would reject it"
    return found, refusals + unreadable + [problem(who, why, _FREE_RESOURCES) for why in row["reasons"]]
