# SPDX-License-Identifier: Apache-2.0
"""The search for pods in objects of every kind, within limits."""

import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from numa_tools.scheduling.manifests import Manifests
from numa_tools.scheduling.pod_templates import MAX_TEMPLATES, pod_templates
from numa_tools.scheduling.reading import ManifestError

DATA = Path(__file__).parents[3] / "data" / "manifests"
POD = {"spec": {"containers": [{"name": "c"}]}}


def read(*documents: Any) -> Manifests:
    """Returns the manifests in the given documents."""
    found = Manifests()
    for document in documents:
        found.add(document)
    return found


@pytest.mark.parametrize(
    ("file", "pods"),
    [
        # A Job never runs more pods at the same time than remain to be completed.
        ("generated-names.yaml", {"probe-*": 1, "solve-*": 3}),
        ("jobset.yaml", {"fluid/driver": 1, "fluid/workers": 6}),
        # Each group has one leader, which is included in the size.
        ("leaderworkerset.yaml", {"model/leaderTemplate": 3, "model/workerTemplate": 9}),
        ("mpijob.yaml", {"weather/Launcher": 1, "weather/Worker": 2}),
        ("raycluster.yaml", {"ray/headGroupSpec": 1, "ray/pinned": 5}),
        ("workload.yaml", {"queued": 6}),
        ("tasks.yaml", {"train/server": 1, "train/worker": 2}),
        ("wrapped.yaml", {"bundle/inner": 1, "bundle/service": 3}),
    ],
)
def test_pods_are_found_in_common_kinds(file: str, pods: dict[str, int]) -> None:
    """A single rule finds the pods in objects of all kinds and determines how many of them run at the same time."""
    found = read(*yaml.safe_load_all((DATA / file).read_text()))
    assert {name[1]: template.pods for name, template in found.pods} == pods
    assert all(name[0] == "default" for name, _ in found.pods)


@pytest.mark.parametrize(
    "document",
    [
        {"kind": "ConfigMap", "metadata": {"name": "n"}, "data": {"template": "spec: containers"}},
        # Monitoring operators' custom resources do not contain a pod template, only a list of extra containers that run
        # next to those that the operator adds.
        {"kind": "Prometheus", "metadata": {"name": "n"}, "spec": {"containers": [{"name": "c"}]}},
        # A schema contains the names of the fields, but no pod.
        {"kind": "CustomResourceDefinition", "spec": {"template": {"spec": {"containers": {"type": "array"}}}}},
        # A virtual machine has no containers.
        {"kind": "VirtualMachine", "metadata": {"name": "n"}, "spec": {"template": {"spec": {"domain": {}}}}},
        {"kind": "Odd", "metadata": {"name": "n"}, "spec": [[None, 1, "x", {"template": []}]]},
    ],
)
def test_other_objects_have_no_pods(document: dict[str, Any]) -> None:
    """Objects without a pod template are skipped, whether or not they have a name."""
    assert read(document).pods == []


@pytest.mark.parametrize(
    ("document", "text"),
    [
        ({"kind": "Pod", "spec": POD["spec"]}, "Pod: name: is missing"),
        ({"kind": "JobSet", "spec": {"template": POD}}, "JobSet: name: is missing"),
        ({"kind": "Pod", "metadata": {"generateName": 5}, "spec": {}}, "Pod '5': generateName: must be a string"),
        ({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "n"}, "spec": 5}, "spec: must be a map"),
    ],
)
def test_a_pod_needs_a_name(document: dict[str, Any], text: str) -> None:
    """``generateName`` is enough. Without either, the error names the kind instead of a pod "None"."""
    with pytest.raises(ManifestError) as caught:
        read(document)
    assert text in str(caught.value)


def test_claims_can_have_generated_names_too() -> None:
    """Two claims with the same ``generateName`` are two objects, since the API server completes each name
    differently.
    """
    spec: dict[str, Any] = {"devices": {"requests": []}}
    claims = [{"kind": "ResourceClaim", "metadata": {"generateName": "c-"}, "spec": spec}] * 3
    found = read(*claims, {**claims[0], "metadata": {"name": "c-"}}, {**claims[0], "metadata": {"name": "c-"}})
    assert sorted(name for _, name in found.claims) == ["c-", "c-*", "c-*2", "c-*3"]


def test_thousands_of_generated_names_take_linear_time() -> None:
    """A counter, rather than a search, numbers the objects with the same ``generateName``."""
    found, began = Manifests(), time.thread_time()
    for _ in range(10_000):
        found.add({"kind": "ResourceClaim", "metadata": {"generateName": "c-"}})
    assert ("default", "c-*10000") in found.claims
    assert time.thread_time() - began < 2


def nested(levels: int) -> dict[str, Any]:
    """Returns an object whose pod template is at the given depth."""
    inner: Any = {"template": POD}
    for _ in range(levels):
        inner = {"a": inner}
    return {"kind": "Deep", "metadata": {"name": "n"}, **inner}


def test_the_search_is_limited() -> None:
    """Limits apply to an object's depth and to the number of values and templates in it. Exceeding any of them ends the
    search immediately.
    """
    assert len(pod_templates(nested(60))) == 1
    many = {"kind": "Many", "metadata": {"name": "n"}, "items": [{"template": POD}] * MAX_TEMPLATES}
    assert len(pod_templates(many)) == MAX_TEMPLATES
    shared: Any = [[]] * 10
    for _ in range(20):
        shared = [shared] * 10
    began = time.thread_time()
    for document, text in (
        (nested(70), "nested more than 64 levels deep"),
        (nested(100_000), "nested more than 64 levels deep"),
        ({**many, "more": {"template": POD}}, "has more than 256 pod templates"),
        ({"kind": "Wide", "values": shared}, "has more than 100000 values"),
    ):
        with pytest.raises(ManifestError, match=text):
            pod_templates(document)
    assert time.thread_time() - began < 5


def test_the_number_of_pods_is_limited() -> None:
    """A value that is not a valid number of pods counts as 1, and the product of the numbers is bounded."""
    for replicas in (0, -1, True, "3", 10**30, None):
        assert pod_templates({"spec": {"replicas": replicas, "template": POD}})[0].pods == 1
    inner: Any = {"replicas": 10**6, "template": POD}
    for _ in range(10):
        inner = {"replicas": 10**6, "xTemplate": inner}
    assert pod_templates(inner)[0].pods == 10**6
