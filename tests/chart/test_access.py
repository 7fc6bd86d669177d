# SPDX-License-Identifier: Apache-2.0
"""The service account has exactly the permissions that the API calls in the frontend's code require."""

import ast
import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from dra_frontend.api_server import client
from numa_contract.names import DRIVERS
from numa_tools.doctor.sources import inquiry
from numa_tools.doctor.sources.inquiry import RIGHTS

from tests.chart.helm import only, render
from tests.chart.policies import policy

# The server requires this permission in addition to patch on resourceclaims/status. The resourceclaims/driver resource
# exists only as a name in RBAC rules.
SINCE_1_36 = ("associated-node:patch", "resource.k8s.io", "resourceclaims/driver")


# Every client may query its own permissions (system:basic-user).
OPEN_TO_ALL = "selfsubjectaccessreviews"


def calls(module: ModuleType) -> Iterator[tuple[str, str, str]]:
    """Returns (verb, group, resource) for every Call in a module, except calls that every client may make."""
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Call":
            verb, group, resource, *_ = [word for argument in node.args for word in values(module, argument)]
            if resource != OPEN_TO_ALL:
                yield verb, group, resource


def values(module: ModuleType, argument: ast.expr) -> tuple[str, ...]:
    """Returns the possible values of an argument to Call, which is a literal or one of the module's constants."""
    if isinstance(argument, ast.Starred):
        return values(module, argument.value)
    found = getattr(module, argument.id, "") if isinstance(argument, ast.Name) else getattr(argument, "value", "")
    return found if isinstance(found, tuple) else (str(found),)


def test_the_role_grants_exactly_the_calls_that_the_code_makes() -> None:
    """Fails for a call without a rule, which would otherwise fail in a cluster, and for a rule without a call."""

    def granted(**config: object) -> set[tuple[str, str, str]]:
        return {
            (verb, group, resource)
            for rule in only(render({"driverConfig": config}), "ClusterRole")["rules"]
            for group in rule.get("apiGroups", [""])
            for resource in rule["resources"]
            for verb in rule["verbs"]
        }

    full = granted(hugepagesOnDemand=[{"numaNode": 0, "size": "1Gi", "pages": 1}])
    assert full == {*calls(client), *calls(inquiry), SINCE_1_36}
    assert full - granted() == {("watch", "resource.k8s.io", "resourceclaims")}
    assert granted() == {right[:3] for right in RIGHTS}, "this permission is for the doctor command, not for the driver"
    assert "*" not in str(full)


def test_the_account_can_write_the_device_status_of_its_own_drivers_only() -> None:
    """The rule's resourceNames are the names of this project's drivers."""
    (rule,) = [one for one in only(render(), "ClusterRole")["rules"] if SINCE_1_36[2] in one["resources"]]
    assert rule["resourceNames"] == list(DRIVERS)


def test_the_doctors_permission_to_query_kubelets_is_optional() -> None:
    """The permission is equivalent to a shell in every pod, so it is not granted by default."""
    plain, wide = (
        only(render({"doctor": {"kubeletProxy": wanted}} if wanted else {}), "ClusterRole")["rules"]
        for wanted in (False, True)
    )
    assert [rule for rule in wide if rule not in plain] == [
        {"apiGroups": [""], "resources": ["nodes/proxy"], "verbs": ["get"]}
    ]


def test_the_role_is_bound_to_the_pods_account() -> None:
    """The pods use the account that has the role and that the admission policy restricts."""
    values = {"serviceAccount": {"create": False}, "fullnameOverride": "given"}
    documents = render(values)
    (subject,) = only(documents, "ClusterRoleBinding")["subjects"]
    account = only(documents, "DaemonSet")["spec"]["template"]["spec"]["serviceAccountName"]
    assert subject["name"] == account == "given"
    for name in ("own-node", "own-claims", "own-events"):
        (condition,) = policy(name, values)["matchConditions"]
        assert f'"system:serviceaccount:{subject["namespace"]}:given"' in condition["expression"]


def test_the_service_account_can_have_another_name_and_annotations() -> None:
    """Cloud providers bind identities to annotated accounts, and some clusters create the accounts themselves."""
    values: dict[str, Any] = {"serviceAccount": {"name": "nodes", "annotations": {"example.com/identity": "numa"}}}
    documents = render(values)
    account = only(documents, "ServiceAccount")["metadata"]
    assert (account["name"], account["annotations"]) == ("nodes", {"example.com/identity": "numa"})
    (subject,) = only(documents, "ClusterRoleBinding")["subjects"]
    assert subject["name"] == "nodes"
    assert only(documents, "DaemonSet")["spec"]["template"]["spec"]["serviceAccountName"] == "nodes"
    (condition,) = policy("own-node", values)["matchConditions"]
    assert condition["expression"].endswith(':nodes"')
