# SPDX-License-Identifier: Apache-2.0
"""Evaluates the chart's ValidatingAdmissionPolicies as the API server would, by applying their CEL to a request."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import cel

from tests.chart.helm import Document, render

ALLOWED = "allowed"
NOT_MATCHED = "not matched"
# Functions in the server's environment (k8s.io/apiserver/pkg/cel/environment) that this evaluator does not have.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "join": lambda texts, between: between.join(texts),
    "split": lambda text, at: text.split(at),
    "replace": lambda text, old, new: text.replace(old, new),
    "trim": lambda text: text.strip(),
    "isSorted": lambda values: list(values) == sorted(values),
}


def policy(name: str, values: Mapping[str, Any] | None = None) -> Document:
    """Returns the spec of the policy whose name ends with this suffix."""
    return _spec("ValidatingAdmissionPolicy", name, values)


def binding(name: str, values: Mapping[str, Any] | None = None) -> Document:
    """Returns the spec of the policy's binding."""
    return _spec("ValidatingAdmissionPolicyBinding", name, values)


def _spec(kind: str, name: str, values: Mapping[str, Any] | None) -> Document:
    (found,) = [one for one in render(values) if one["kind"] == kind and one["metadata"]["name"].endswith(f"-{name}")]
    spec: Document = found["spec"]
    return spec


def judge(
    spec: Document, operation: str, document: Document, old: Document | None = None, user: Document | None = None
) -> str:
    """Returns the server's decision about a request: ``not matched``, ``allowed``, or the messages of the failed
    validations.
    """
    deleted = operation == "DELETE"
    request = {"operation": operation, "userInfo": user or {}, "kind": {"kind": document.get("kind", "")}}
    variables: Document = {}
    scope = {"request": request, "object": None if deleted else document, "variables": variables}
    context = cel.Context({**scope, "oldObject": document if deleted else old}, functions=FUNCTIONS)

    def evaluate(expression: str) -> Any:
        context.add_variable("variables", dict(variables))
        return cel.evaluate(expression, context)

    if not all(evaluate(condition["expression"]) for condition in spec.get("matchConditions", ())):
        return NOT_MATCHED
    for variable in spec.get("variables", ()):
        variables[variable["name"]] = evaluate(variable["expression"])
    refused = [rule for rule in spec["validations"] if evaluate(rule["expression"]) is not True]
    texts = (
        evaluate(rule["messageExpression"]) if "messageExpression" in rule else rule["message"] for rule in refused
    )
    return "; ".join(map(str, texts)) or ALLOWED


def messages(spec: Document) -> Iterable[str]:
    """Returns the policy's static messages (``message``, as opposed to ``messageExpression``)."""
    return [rule["message"] for rule in spec["validations"] if "message" in rule]
