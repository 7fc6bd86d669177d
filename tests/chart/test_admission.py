# SPDX-License-Identifier: Apache-2.0
"""The admission policy lets the driver write the slices of its own node, and leaves everybody else alone."""

from typing import Any

import cel
import pytest
from dra_frontend.devices.inventory import build_inventory
from dra_frontend.devices.slices import slice_documents
from dra_frontend.machine.discovery import discover
from numa_contract.config import Config

from tests.chart.helm import Document, only, render
from tests.fakes.trees import captured

NODE_EXTRA = "authentication.kubernetes.io/node-name"
ACCOUNT = "system:serviceaccount:dra-driver-numa:dra-driver-numa"
POLICY = only(render(), "ValidatingAdmissionPolicy")["spec"]


def verdict(operation: str, document: Document, *, node: str | None = "a", account: str = ACCOUNT) -> str:
    """What the API server makes of a request: ``not ours``, ``allowed``, or the message of what refused it."""
    user: Document = {"username": account} | ({"extra": {NODE_EXTRA: [node]}} if node else {})
    deleted = operation == "DELETE"
    scope: dict[str, Any] = {
        "request": {"operation": operation, "userInfo": user},
        "object": None if deleted else document,
        "oldObject": document if deleted else None,
        "variables": {},
    }
    if not all(cel.evaluate(condition["expression"], scope) for condition in POLICY["matchConditions"]):
        return "not ours"
    for variable in POLICY["variables"]:
        scope["variables"][variable["name"]] = cel.evaluate(variable["expression"], scope)
    for rule in POLICY["validations"]:
        if not cel.evaluate(rule["expression"], scope):
            return str(rule.get("message") or cel.evaluate(rule["messageExpression"], scope))
    return "allowed"


def of_node(name: str, driver: str = "dra.cpu") -> Document:
    """A slice."""
    return {"metadata": {"name": "s"}, "spec": {"driver": driver, "nodeName": name}}


def test_what_the_driver_publishes_is_allowed() -> None:
    """Every slice of a node, whatever is done to it."""
    pools = build_inventory(discover(captured("32intel64-2p8co2t+8ve")), Config(), "a").pools
    published = [document for pool in pools for document in slice_documents(pool, "a")]
    assert published
    for operation in ("CREATE", "UPDATE", "DELETE"):
        assert {verdict(operation, document) for document in published} == {"allowed"}


@pytest.mark.parametrize("operation", ["CREATE", "UPDATE", "DELETE"])
def test_slices_of_other_nodes_are_refused(operation: str) -> None:
    """A stolen token is worth one node."""
    assert verdict(operation, of_node("b")) == "the driver on node a may not write a slice of node b"


def test_slices_without_a_node_are_refused() -> None:
    """Devices for the whole cluster are not this driver's business."""
    everywhere = {"metadata": {"name": "s"}, "spec": {"driver": "dra.cpu", "allNodes": True}}
    assert "may not write a slice of node" in verdict("CREATE", everywhere)


def test_slices_of_other_drivers_are_refused() -> None:
    """Devices of a GPU driver on the same node cannot be forged."""
    assert verdict("CREATE", of_node("a", "gpu.nvidia.com")).startswith("this driver writes slices of dra.cpu")


def test_a_token_without_a_node_is_refused() -> None:
    """A token that is not bound to a pod does not say where it is used."""
    assert verdict("CREATE", of_node("a"), node=None).startswith("the token names no node")


def test_others_are_left_alone() -> None:
    """The kubelet, the garbage collector and other drivers write as before."""
    assert verdict("DELETE", of_node("b"), account="system:node:b") == "not ours"


def test_the_policy_is_bound_and_fails_closed() -> None:
    """A policy without a binding does nothing; one that cannot be evaluated refuses."""
    binding = only(render(), "ValidatingAdmissionPolicyBinding")["spec"]
    assert binding["policyName"] == only(render(), "ValidatingAdmissionPolicy")["metadata"]["name"]
    assert binding["validationActions"] == ["Deny"]
    assert POLICY["failurePolicy"] == "Fail"
    (rule,) = POLICY["matchConstraints"]["resourceRules"]
    assert rule["operations"] == ["CREATE", "UPDATE", "DELETE"]
