# SPDX-License-Identifier: Apache-2.0
"""The service account may do what the frontend's code calls, and nothing else."""

import ast
import inspect
from collections.abc import Iterator

from dra_frontend.api_server import client as kube

from tests.chart.helm import only, render
from tests.chart.policies import policy


def calls() -> Iterator[tuple[str, str, str]]:
    """(verb, group, resource) of every Call that kube.py makes; what is no resource has its path instead."""
    for node in ast.walk(ast.parse(inspect.getsource(kube))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Call":
            verb = ast.literal_eval(node.args[0])
            shared = any(isinstance(argument, ast.Starred) for argument in node.args)
            group, resource = kube._SLICES if shared else map(ast.literal_eval, node.args[1:3])
            urls = [ast.literal_eval(keyword.value) for keyword in node.keywords if keyword.arg == "url"]
            group, resource = ("", urls[0]) if urls else (group, resource)
            yield verb, group, resource


def test_the_role_is_what_the_code_calls() -> None:
    """A new call without a rule fails here and not in a cluster; a rule without a call is taken away."""
    granted = {
        (verb, group, resource)
        for rule in only(render(), "ClusterRole")["rules"]
        for group in rule.get("apiGroups", [""])
        for resource in rule.get("resources") or rule["nonResourceURLs"]
        for verb in rule["verbs"]
    }
    assert granted == set(calls())
    assert "*" not in str(granted)


def test_the_role_is_bound_to_the_pods_account() -> None:
    """The account of the pods is the one that has the role and the one that the admission policy watches."""
    documents = render({"serviceAccount": {"create": False, "name": "given"}})
    (subject,) = only(documents, "ClusterRoleBinding")["subjects"]
    account = only(documents, "DaemonSet")["spec"]["template"]["spec"]["serviceAccountName"]
    assert subject["name"] == account == "given"
    values = {"serviceAccount": {"create": False, "name": "given"}}
    for name in ("own-node", "own-events"):
        (condition,) = policy(name, values)["matchConditions"]
        assert f'"system:serviceaccount:{subject["namespace"]}:given"' in condition["expression"]
