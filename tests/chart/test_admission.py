# SPDX-License-Identifier: Apache-2.0
"""The driver may write only its own node's slices and Events, and other clients are not restricted."""

from typing import Any

import pytest
from dra_frontend.devices.inventory import build_inventory
from dra_frontend.devices.slices import slice_documents
from dra_frontend.machine.discovery import discover
from numa_contract.config import Config

from tests.chart.helm import Document
from tests.chart.policies import ALLOWED, NOT_MATCHED, binding, judge, policy
from tests.rigs.trees import captured

NODE_EXTRA = "authentication.kubernetes.io/node-name"
ACCOUNT = "system:serviceaccount:dra-driver-numa:dra-driver-numa"
SLICES = policy("own-node")
CLAIMS = policy("own-claims")
EVENTS = policy("own-events")


def caller(node: str | None = "a", account: str = ACCOUNT) -> Document:
    """Returns the requesting user: a service account whose token is bound to a pod on a node."""
    return {"username": account} | ({"extra": {NODE_EXTRA: [node]}} if node else {})


def of_node(name: str, driver: str = "dra.cpu", pool: str | None = None) -> Document:
    """Returns a slice for a node."""
    return {"metadata": {"name": "s"}, "spec": {"driver": driver, "nodeName": name, "pool": {"name": pool or name}}}


def event(regarding: Document, controller: str = "dra-driver-numa") -> Document:
    """Returns an Event."""
    return {"kind": "Event", "reportingController": controller, "regarding": regarding}


@pytest.mark.parametrize("operation", ["CREATE", "UPDATE", "DELETE"])
@pytest.mark.parametrize("node", ["a", "node-1.example.com"])
def test_slices_that_the_driver_publishes_are_allowed(operation: str, node: str) -> None:
    """The driver may create, update and delete every slice of its node."""
    pools = build_inventory(discover(captured("32intel64-2p8co2t+8ve")), Config(), node).pools
    published = [document for pool in pools for document in slice_documents(pool, node)]
    assert {document["spec"]["pool"]["name"] for document in published} >= {node, f"{node}-memory"}
    assert {judge(SLICES, operation, document, user=caller(node)) for document in published} == {ALLOWED}


@pytest.mark.parametrize("operation", ["CREATE", "UPDATE", "DELETE"])
@pytest.mark.parametrize(
    ("document", "node", "text"),
    [
        pytest.param(
            of_node("b"), "a", "the driver on node a may not write a slice of node b", id="another node's slice"
        ),
        pytest.param(
            {"spec": {"driver": "dra.cpu", "allNodes": True, "pool": {"name": "a"}}},
            "a",
            "may not write a slice of node",
            id="devices for all nodes",
        ),
        pytest.param(
            of_node("a", "gpu.example"), "a", "slices of dra.cpu and dra.memory only", id="another driver's slice"
        ),
        pytest.param(of_node("a"), None, "the token names no node", id="token that is not bound to a pod"),
    ],
)
def test_slices_of_other_nodes_and_drivers_are_rejected(
    operation: str, document: Document, node: str | None, text: str
) -> None:
    """With its token, a pod can change only its own driver's slices, and only those of its own node."""
    assert text in judge(SLICES, operation, document, user=caller(node))


@pytest.mark.parametrize(
    ("driver", "pool"),
    [
        ("dra.cpu", "b"),
        ("dra.cpu", "a-memory"),
        ("dra.memory", "a"),
        ("dra.memory", "b-memory"),
        ("dra.memory", "a-hugepages-"),
        ("dra.memory", "a-hugepages-2m-more"),
        ("dra.memory", "a-hugepages-x-hugepages-2m"),
        ("dra.memory", "b-hugepages-2m"),
    ],
)
def test_pools_of_other_nodes_are_rejected(driver: str, pool: str) -> None:
    """Writing another node's pool with a higher generation would make that node's own slices obsolete."""
    text = f"the driver on node a may not write the pool {pool}"
    assert judge(SLICES, "CREATE", of_node("a", driver, pool), user=caller()) == text
    assert judge(SLICES, "DELETE", of_node("a", driver, pool), user=caller()) == ALLOWED


@pytest.mark.parametrize(
    "pool", ["a-memory", "a-hugepages-2m", "a-hugepages-64k", "a-hugepages-512m", "a-hugepages-16g"]
)
def test_every_memory_pool_of_the_node_is_allowed(pool: str) -> None:
    """The allowed pools are the pool for plain memory, and one for each hugepage size that exists on any
    architecture.
    """
    assert judge(SLICES, "CREATE", of_node("a", "dra.memory", pool), user=caller()) == ALLOWED


@pytest.mark.parametrize("spec", [SLICES, EVENTS], ids=["slices", "events"])
def test_other_clients_are_not_restricted(spec: Document) -> None:
    """The policies do not match writes by the kubelet, the garbage collector or other drivers."""
    assert judge(spec, "UPDATE", of_node("b"), user=caller("b", "system:node:b")) == NOT_MATCHED


def with_status(node: str = "a", **status: Any) -> Document:
    """Returns a claim that is allocated to a node."""
    term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
    allocation = {"devices": {"results": []}, "nodeSelector": {"nodeSelectorTerms": [term]}}
    return {"metadata": {"name": "c"}, "status": {"allocation": allocation, "reservedFor": [{"uid": "p"}], **status}}


MINE = [{"driver": "dra.cpu", "device": "cpudevnuma000", "data": {"cpus": "1-2"}}]
GPU = [{"driver": "gpu.example", "device": "gpu-0"}]


@pytest.mark.parametrize(
    ("new", "old", "text"),
    [
        pytest.param(with_status(devices=MINE), with_status(), ALLOWED, id="own entry"),
        pytest.param(
            with_status(devices=[*GPU, *MINE]), with_status(devices=GPU), ALLOWED, id="own entry, another driver's kept"
        ),
        pytest.param(
            with_status("b", devices=MINE), with_status("b"), "a claim on another node", id="claim on another node"
        ),
        pytest.param({"status": {"devices": MINE}}, {"status": {}}, "a claim on another node", id="unallocated claim"),
        pytest.param(
            with_status(devices=GPU), with_status(), "dra.cpu and dra.memory only", id="another driver's entry added"
        ),
        pytest.param(
            with_status(), with_status(devices=GPU), "dra.cpu and dra.memory only", id="another driver's entry removed"
        ),
        pytest.param(
            with_status(reservedFor=[]), with_status(), "may change only status.devices", id="reservation removed"
        ),
        pytest.param(
            with_status("b"), with_status(), "may change only status.devices", id="allocation moved to another node"
        ),
    ],
)
def test_the_status_of_the_nodes_claims_can_be_written(new: Document, old: Document, text: str) -> None:
    """A driver may write its own entries in claims that are allocated to its node. Kubernetes 1.36 enforces the same
    rule itself.
    """
    assert text in judge(CLAIMS, "UPDATE", new, old, user=caller())


@pytest.mark.parametrize(
    ("document", "text"),
    [
        (event({"kind": "Pod", "name": "p", "namespace": "n"}), ALLOWED),
        (event({"kind": "Node", "name": "a"}), ALLOWED),
        (event({"kind": "Node", "name": "b"}), "Events only about pods and about its own node, a"),
        (event({"kind": "Secret", "name": "a"}), "Events only about pods and about its own node"),
        (event({"kind": "Pod", "name": "p"}, "kubelet"), "Events of the reportingController dra-driver-numa only"),
    ],
)
def test_events_contain_the_drivers_own_name(document: Document, text: str) -> None:
    """The Events are about pods or about the driver's own node, and cannot be attributed to another component."""
    assert text in judge(EVENTS, "CREATE", document, user=caller())


def test_the_driver_can_change_only_its_own_events() -> None:
    """RBAC grants patch for all Events in the API group, so the policy rejects changes to another component's Events.
    The reportingController of an Event is immutable.
    """
    pod = {"kind": "Pod", "name": "p", "namespace": "n"}
    assert judge(EVENTS, "UPDATE", event(pod), event(pod), user=caller()) == ALLOWED
    foreign = event(pod, "kubelet")
    assert "dra-driver-numa only" in judge(EVENTS, "UPDATE", foreign, foreign, user=caller())


@pytest.mark.parametrize("name", ["own-node", "own-claims", "own-events", "parameters", "tolerate-missing"])
def test_a_policy_is_bound_and_fails_closed(name: str) -> None:
    """A policy without a binding has no effect; one that cannot be evaluated rejects the request."""
    assert binding(name)["policyName"].endswith(f"-{name}")
    assert binding(name)["validationActions"] == ["Deny"]
    assert policy(name)["failurePolicy"] == "Fail"
    (rule,) = SLICES["matchConstraints"]["resourceRules"]
    assert rule["operations"] == ["CREATE", "UPDATE", "DELETE"]
