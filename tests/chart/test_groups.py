# SPDX-License-Identifier: Apache-2.0
"""Groups of nodes in one release: each node has one DaemonSet, and changing one group does not affect the others."""

import itertools
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.chart.helm import Document, HelmError, render
from tests.chart.schemas import VERSIONS, check_object

LABEL = "dra-driver-numa/group"
Labels = dict[str, str]


def daemon_sets(values: Document) -> dict[str, Document]:
    """Returns the spec of each group's DaemonSet by the group's name, which is "" for nodes without a group."""
    found = [one for one in render(values) if one["kind"] == "DaemonSet"]
    return {one["metadata"]["name"].removeprefix("dra-driver-numa").lstrip("-"): one["spec"] for one in found}


def fits(expression: Document, labels: Labels) -> bool:
    """Evaluates one expression of a NodeSelectorTerm for a node with these labels (k8s.io/component-helpers)."""
    value = labels.get(expression["key"])
    match expression["operator"]:
        case "NotIn":
            return value not in expression["values"]
        case "DoesNotExist":
            return value is None
        case "In":
            return value in expression["values"]
    raise AssertionError(expression)


def chosen(spec: Document, labels: Labels) -> bool:
    """Returns True if the DaemonSet controller creates a pod on a node with these labels."""
    pod = spec["template"]["spec"]
    if any(labels.get(key) != value for key, value in pod["nodeSelector"].items()):
        return False
    required = pod["affinity"].get("nodeAffinity", {}).get("requiredDuringSchedulingIgnoredDuringExecution")
    if required is None:
        return True
    terms = required["nodeSelectorTerms"]
    return any(all(fits(one, labels) for one in term["matchExpressions"]) for term in terms)


def group(name: str, selector: Labels | None = None, **other: Any) -> Document:
    """Returns an entry for the "groups" value."""
    return {"name": name, **({"nodeSelector": selector} if selector else {}), **other}


SELECTORS = st.dictionaries(st.sampled_from(["a", "b", LABEL]), st.sampled_from("xy"), min_size=1)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(SELECTORS, max_size=3))
@example([{"a": "x", "b": "y"}, {"b": "y"}, {LABEL: "x", "a": "y"}])
def test_every_node_has_one_daemon_set(selectors: list[Labels]) -> None:
    """The node gets the DaemonSet for the first group that selects the node, or else the default one. A node whose
    label names an unknown group gets none.
    """
    groups = [group(f"g{number}", selector) for number, selector in enumerate(selectors)]
    if any(one.items() <= two.items() for one, two in itertools.combinations(selectors, 2)):
        with pytest.raises(HelmError, match="would have no nodes"):
            render({"groups": groups})
        return
    sets = daemon_sets({"groups": groups})
    for values in itertools.product(["x", "y", None], repeat=3):
        labels = {key: value for key, value in zip(["a", "b", LABEL], values, strict=True) if value}
        labels["kubernetes.io/os"] = "linux"
        fitting = [f"g{number}" for number, one in enumerate(selectors) if one.items() <= labels.items()]
        expected = fitting[:1] or ([] if LABEL in labels else [""])
        assert [name for name, spec in sets.items() if chosen(spec, labels)] == expected


def test_the_operators_own_affinity_is_kept() -> None:
    """The affinity's terms are alternatives, so each of them excludes the groups' nodes; the rest of the affinity is
    unchanged.
    """
    terms = [{"matchExpressions": [{"key": "pool", "operator": "In", "values": [one]}]} for one in ("p", "q")]
    affinity = {
        "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}},
        "podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []},
    }
    sets = daemon_sets({"affinity": affinity, "groups": [group("big", {"size": "big"})]})
    assert sets["big"]["template"]["spec"]["affinity"] == affinity
    node = {"kubernetes.io/os": "linux", "pool": "q"}
    assert chosen(sets[""], node)
    assert not chosen(sets[""], node | {"size": "big"})
    assert not chosen(sets[""], node | {"pool": "r"})
    assert "podAffinity" in sets[""]["template"]["spec"]["affinity"]


def test_a_group_selected_by_the_drivers_label_restarts_no_other_pod() -> None:
    """Adding the group, or changing its image and settings, leaves the pods of all other nodes unchanged."""
    before = daemon_sets({"groups": [group("a")]})
    canary = group("canary", backend={"image": {"tag": "9.9.9"}}, driverConfig={"logLevel": "debug"})
    after = daemon_sets({"groups": [group("a"), canary]})
    assert daemon_sets({})[""] == before[""] == after[""]
    assert before["a"] == after["a"]
    images = [one["image"] for one in after["canary"]["template"]["spec"]["containers"]]
    assert images == ["localhost/dra-frontend:0.2.0", "localhost/nri-backend:9.9.9"]


def test_a_group_selected_by_another_label_restarts_the_default_pods_once() -> None:
    """The node affinity is part of the pod template, so excluding nodes changes all pods of the default DaemonSet."""
    assert daemon_sets({})[""] != daemon_sets({"groups": [group("a", {"b": "c"})]})[""]


def test_a_group_has_its_own_configuration() -> None:
    """A group's key replaces the common one, even if its value is false or 0, and the mounts change accordingly."""
    common = {"reservedCPUs": "0", "hugepageGuard": True, "reservedMemory": [{"numaNode": 0, "limits": {"memory": 1}}]}
    pages = {"enabled": True, "pages": [{"size": "1Gi", "count": 2}]}
    own = {"hugepageGuard": False, "withheldCPUs": 0, "kubeletRootDir": "/var/lib/k0s/kubelet"}
    values = {"driverConfig": common, "groups": [group("a", driverConfig=own, hugepageProvision=pages)]}
    documents = render(values)
    files = {d["metadata"]["name"]: d["data"] for d in documents if d["kind"] == "ConfigMap"}
    read = {name: yaml.safe_load(data["config.yaml"]) for name, data in files.items()}
    assert read["dra-driver-numa-config"] == {"apiVersion": "v1alpha1", **common}
    assert read["dra-driver-numa-a-config"] == {"apiVersion": "v1alpha1", **common, **own}
    assert "hugepages.yaml" not in files["dra-driver-numa-config"]
    sets = daemon_sets(values)
    assert "initContainers" in sets["a"]["template"]["spec"]
    volumes = {name: {v["name"]: v for v in spec["template"]["spec"]["volumes"]} for name, spec in sets.items()}
    assert volumes["a"]["config"]["configMap"]["name"] == "dra-driver-numa-a-config"
    assert volumes["a"]["plugin-cpu"]["hostPath"]["path"] == "/var/lib/k0s/kubelet/plugins/dra.cpu"
    assert volumes[""]["plugin-cpu"]["hostPath"]["path"] == "/var/lib/kubelet/plugins/dra.cpu"


def test_selectors_of_daemon_sets_are_disjoint() -> None:
    """A pod matches the selector of its own DaemonSet and of no other; the NetworkPolicy and the PodMonitor select it
    too.
    """
    values = {"groups": [group("a"), group("b")], "metrics": {"podMonitor": {"enabled": True}}}
    sets = daemon_sets(values)
    for name, spec in sets.items():
        labels = spec["template"]["metadata"]["labels"].items()
        assert [other for other, one in sets.items() if one["selector"]["matchLabels"].items() <= labels] == [name]
        for document in render(values):
            selector = document.get("spec", {}).get("podSelector") or document.get("spec", {}).get("selector", {})
            if document["kind"] in ("NetworkPolicy", "PodMonitor"):
                assert selector["matchLabels"].items() <= labels


@pytest.mark.parametrize("version", VERSIONS)
def test_the_objects_of_groups_are_valid(version: str) -> None:
    """The groups' objects are validated like all others."""
    values = {"groups": [group("a", {"x": "y", "z": "1"}, driverConfig={"reservedCPUs": "0-3"}), group("b")]}
    for document in render(values):
        check_object(document, version)


@pytest.mark.parametrize(
    ("groups", "named"),
    [
        ([group("a"), group("a")], "groups: a is listed twice"),
        ([group("a", {"x": "y"}), group("b", {"x": "y", "z": "1"})], "groups: b would have no nodes: a, above it"),
        ([group("a", {"x": "y"}), group("a", {"x": "z"})], "groups: a is listed twice"),
        ([group("A")], "groups.0.name"),
        ([{"name": "a", "nodeSelector": {}}], "groups.0.nodeSelector"),
        ([group("a", driverConfig={"reservedCpus": "0"})], "- groups.0.driverConfig: Additional property reservedCpus"),
        ([group("a", driverConfig={"cdiDir": "/root"})], "group a: driverConfig.cdiDir: /root is mounted"),
        ([group("a", driverConfig={"runDir": "/run/../x"})], "group a: driverConfig.runDir: /run/../x must be"),
        ([group("a", backend={"image": {"repository": "Upper"}})], "group a: backend.image.repository: Upper:0.2.0"),
        ([group("a", hugepageProvision={"enabled": True, "pages": []})], "group a: hugepageProvision.pages: is empty"),
        (
            [group(f"g{n}", {f"{n}": "x", f"{n}b": "y"}) for n in range(7)],
            "groups: the nodes in no group would need 128",
        ),
    ],
    ids=[str(number) for number in range(11)],
)
def test_groups_that_cannot_work_are_rejected(groups: list[Document], named: str) -> None:
    """The message names the group and the key."""
    with pytest.raises(HelmError) as caught:
        render({"groups": groups})
    assert named in str(caught.value)
