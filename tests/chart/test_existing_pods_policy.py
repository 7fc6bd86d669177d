# SPDX-License-Identifier: Apache-2.0
"""The policy that adds claims to pods without any: its CEL, evaluated for pods as the API server passes them.

Only a real server can show that it accepts the types in the mutation (``Object.spec...``) and merges the result
according to its schema. Here, the types are maps, and lists of objects are merged by name.
"""

import asyncio
import re
from fractions import Fraction
from typing import Any

import cel
import pytest
import yaml
from dra_frontend.allocation.claim import parse_claim
from numa_contract.quantity import parse_quantity

from tests.chart.helm import CHART, Document, HelmError, render, run
from tests.chart.schemas import check_object
from tests.chart.test_examples import cluster, create, inventory
from tests.chart.test_existing_pods import example
from tests.fakes.apiserver import ApiServer
from tests.fakes.scheduler import schedule
from tests.rigs.decisions import decided

ON = {"existingPods": {"enabled": True, "sizes": [2, 4, 8]}}
FUNCTIONS: dict[str, Any] = {
    "quantity": lambda text: float(parse_quantity(text)),
    "compareTo": lambda one, other: (one > other) - (one < other),
    "isInteger": lambda value: Fraction(value).denominator == 1,
    "asInteger": int,
}
"""Functions in the server's environment (k8s.io/apiserver/pkg/cel/library/quantity.go)."""


def policy() -> tuple[Document, Document]:
    """Returns the specs of the policy and its binding."""
    found = {one["kind"]: one["spec"] for one in render(ON) if one["kind"].startswith("Mutating")}
    return found["MutatingAdmissionPolicy"], found["MutatingAdmissionPolicyBinding"]


def mutated(pod: Document) -> Document:
    """Returns the pod after the policy has been applied."""
    spec, _ = policy()
    variables: Document = {}
    context = cel.Context({"object": pod, "variables": variables}, functions=FUNCTIONS)
    for condition in spec["matchConditions"]:
        try:
            if cel.evaluate(condition["expression"], context) is False:
                return pod
        except (RuntimeError, ValueError, TypeError):
            # An error is ignored if another condition is false.
            continue
    for variable in spec["variables"]:
        variables[variable["name"]] = cel.evaluate(variable["expression"], context)
    context.add_variable("variables", variables)
    (mutation,) = spec["mutations"]
    assert mutation["patchType"] == "ApplyConfiguration"
    return dict(_merged(pod, cel.evaluate(_as_maps(mutation["applyConfiguration"]["expression"]), context)))


def _as_maps(expression: str) -> str:
    """Replaces the typed objects in an expression with plain maps, which this evaluator supports. Each type must be
    named after the path of its field.
    """
    assert set(re.findall(r"Object[\w.]*(?=\{)", expression)) == {
        "Object",
        "Object.spec",
        "Object.spec.resourceClaims",
        "Object.spec.containers",
        "Object.spec.containers.resources",
        "Object.spec.containers.resources.claims",
    }
    return re.sub(r"(\w+): ", r'"\1": ', re.sub(r"Object[\w.]*\{", "{", expression))


def _merged(old: Any, new: Any) -> Any:
    if isinstance(old, dict) and isinstance(new, dict):
        return {**old, **{key: _merged(old.get(key), value) for key, value in new.items()}}
    if isinstance(old, list) and isinstance(new, list):
        by_name = {one["name"]: one for one in old}
        by_name |= {one["name"]: _merged(by_name.get(one["name"]), one) for one in new}
        return list(by_name.values())
    return new


def pod(*resources: Document, **spec: Any) -> Document:
    """Returns a pod whose containers have these resources."""
    containers = [{"name": f"c{number}", "resources": one} for number, one in enumerate(resources)]
    return {"kind": "Pod", "metadata": {"name": "p"}, "spec": {"containers": containers, **spec}}


def equal(cpu: str, memory: str = "1Gi") -> Document:
    """Returns requests that equal the limits."""
    return {"requests": {"cpu": cpu, "memory": memory}, "limits": {"cpu": cpu, "memory": memory}}


def claims_of(document: Document) -> dict[str, str]:
    """Returns each container's claim template."""
    templates = {one["name"]: one["resourceClaimTemplateName"] for one in document["spec"].get("resourceClaims", [])}
    return {
        container["name"]: templates[claim["name"]]
        for container in document["spec"]["containers"]
        for claim in container["resources"].get("claims", [])
    }


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([equal("4")], {"c0": "numa-cpus-4"}),
        ([equal("4000m"), equal("500m"), equal("2")], {"c0": "numa-cpus-4", "c2": "numa-cpus-2"}),
        (
            [{"requests": {"cpu": "4", "memory": "1024Mi"}, "limits": {"cpu": "4", "memory": "1Gi"}}],
            {"c0": "numa-cpus-4"},
        ),
    ],
)
def test_whole_cpus_of_guaranteed_pods_become_claims(given: list[Document], expected: dict[str, str]) -> None:
    """There is one claim for each container; the rest of the pod is unchanged, so it stays Guaranteed."""
    before = pod(*given, priority=7)
    after = mutated(before)
    assert claims_of(after) == expected
    for one in after["spec"]["containers"]:
        one["resources"].pop("claims", None)
    del after["spec"]["resourceClaims"]
    assert after == before


BURSTABLE = {"requests": {"cpu": "4", "memory": "1Gi"}, "limits": {"cpu": "4", "memory": "2Gi"}}


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(pod({}), id="best effort"),
        pytest.param(pod(BURSTABLE), id="burstable"),
        pytest.param(pod(equal("4"), {}), id="a container without requests"),
        pytest.param(
            pod(equal("4"), initContainers=[{"name": "i", "resources": {}}]), id="an init container without requests"
        ),
        pytest.param(pod(equal("2500m")), id="a fractional number of CPUs"),
        pytest.param(pod(equal("3")), id="a number of CPUs without a template"),
        pytest.param(pod(equal("4"), resourceClaims=[{"name": "x"}]), id="a pod with a claim"),
        pytest.param(pod(equal("4"), resources={"limits": {"cpu": "8"}}), id="pod-level resources"),
        pytest.param(pod(equal("4"), nodeName="node-a"), id="a pod that is already bound"),
    ],
)
def test_all_other_pods_are_unchanged(given: Document) -> None:
    """Pods that the kubelet's static CPU manager would not pin, and pods with their own claims, are unchanged."""
    assert mutated(given) == given


def test_the_policy_applies_to_labelled_namespaces_only() -> None:
    """By default, an installation does not change any pods."""
    assert not any(one["kind"].startswith("Mutating") for one in render())
    spec, binding = policy()
    assert spec["failurePolicy"] == "Fail"
    assert binding["matchResources"]["namespaceSelector"] == {"matchLabels": {"dra-driver-numa/existing-pods": "claim"}}
    with pytest.raises(HelmError):
        render({"existingPods": {"enabled": True, "sizes": []}})


@pytest.mark.parametrize(
    ("release", "served"), [("1.34", "v1beta1"), ("1.35", "v1beta1"), ("1.36", "v1"), ("1.37", "v1")]
)
def test_the_policy_is_valid_in_every_release(release: str, served: str) -> None:
    """The policy uses the API version that the release serves. A vendor's suffix in the version makes no difference."""
    text = run(
        *("template", "x", str(CHART), "--namespace", "n", "--set", "existingPods.enabled=true"),
        *("--kube-version", f"{release}.1-vendor.3", "--show-only", "templates/existingpods.yaml"),
    )
    for document in yaml.safe_load_all(text):
        assert document["apiVersion"] == f"admissionregistration.k8s.io/{served}"
        check_object(document, release)


def test_a_virtual_machine_gets_the_claim_of_the_example() -> None:
    """The pod is like those that KubeVirt 1.9 creates: it has the machine's resources plus a memory overhead, and small
    helper containers.
    """
    found = list(yaml.safe_load_all((CHART.parents[1] / "examples/kubevirt.yaml").read_text()))
    (machine,) = [one["spec"]["domain"] for one in found if one["kind"] == "VirtualMachineInstance"]
    (template,) = [one["metadata"]["name"] for one in found if one["kind"] == "ResourceClaimTemplate"]
    both, small = machine["resources"], {"cpu": "15m", "memory": "60M"}
    assert both["requests"] == both["limits"]
    assert machine["cpu"]["cores"] * machine["cpu"]["threads"] == int(both["limits"]["cpu"])
    compute = {**both["limits"], "memory": "4600Mi"}
    pod = {
        "spec": {
            "containers": [{"name": "compute", "resources": {"requests": compute, "limits": compute}}],
            "initContainers": [{"name": "guest-console-log", "resources": {"requests": small, "limits": small}}],
        }
    }
    assert claims_of(mutated(pod)) == {"compute": template}


async def test_the_example_is_scheduled_and_prepared() -> None:
    """The pod that the policy has changed finds its templates, and gets the number of CPUs that it requested."""
    found = example("claimed-by-policy")
    (namespace,) = [one for one in found if one["kind"] == "Namespace"]
    _, binding = policy()
    assert (
        binding["matchResources"]["namespaceSelector"]["matchLabels"].items() <= namespace["metadata"]["labels"].items()
    )
    templates = {one["metadata"]["name"]: one["spec"] for one in found if one["kind"] == "ResourceClaimTemplate"}
    assert templates.keys() == {"numa-cpus-2", "numa-cpus-4"}
    (unchanged,) = [one for one in found if one["kind"] == "Pod"]
    assert claims_of(mutated(unchanged)) == {"work": "numa-cpus-4"}
    published = inventory()

    def allocated(server: str) -> Document:
        claim = {"kind": "ResourceClaim", "metadata": {"name": "c"}, "spec": templates["numa-cpus-4"]["spec"]}
        for document in [*cluster(published), claim]:
            create(server, document)
        return schedule(server, "default", "c", pods=[{"name": "unchanged", "uid": "u"}])

    async with ApiServer() as server:
        view = parse_claim(await asyncio.to_thread(allocated, server.url))
    assert len(decided(view, "dra.cpu", inventory=published).cpus_of()) == 4
