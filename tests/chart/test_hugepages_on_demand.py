# SPDX-License-Identifier: Apache-2.0
"""Hugepages on demand in the chart: a helper container with one writable mount, and a policy that labels claims."""

from pathlib import PurePath
from typing import Any

import cel
import pytest
import yaml
from numa_contract.config import Config
from numa_contract.names import ON_DEMAND_LABEL, pool_socket_path
from numa_contract.pagesize import parse_page_size

from tests.chart.helm import CHART, Document, container, host_mounts, only, pod_of, render, run
from tests.chart.schemas import check_object

POOL = {"numaNode": 0, "size": "1Gi", "pages": 4}
ON: Document = {"driverConfig": {"hugepagesOnDemand": [POOL]}}


def names(documents: list[Document]) -> list[str]:
    """Returns the names of the pod's containers."""
    return [one["name"] for one in pod_of(documents)["containers"]]


def test_the_helper_has_its_mount_and_nothing_else() -> None:
    """The helper has no capabilities, no token and none of the driver's directories, and needs no AppArmor exception,
    since its path is not under /sys.
    """
    documents = render(ON)
    helper = container(documents, "hugepages")
    assert helper["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    mounts = {"/host/sys/devices/system/node": ("/sys/devices/system/node", False)}
    assert host_mounts(documents, "hugepages") == mounts
    assert {one["name"] for one in helper["volumeMounts"]} == {"config", "hugepages", "numa-nodes"}
    assert helper["image"] == container(documents, "frontend")["image"]
    assert helper["args"][-1] == "serve-hugepages"
    assert not {"env", "envFrom", "ports"} & helper.keys()


@pytest.mark.parametrize("run_dir", [Config().run_dir, "/run/numa"])
def test_frontend_and_helper_share_only_the_socket(run_dir: str) -> None:
    """The frontend only connects to the socket, so it mounts the socket's directory read-only. It does not mount the
    directory in sysfs where the number of hugepages is set. The backend mounts neither directory.
    """
    documents = render({"driverConfig": {"hugepagesOnDemand": [POOL], "runDir": run_dir}})
    directory = str(PurePath(pool_socket_path(run_dir)).parent)
    found: dict[str, Any] = {
        name: {one["mountPath"]: one.get("readOnly", False) for one in container(documents, name)["volumeMounts"]}
        for name in ("frontend", "backend", "hugepages")
    }
    assert found["frontend"][directory] is True
    assert found["hugepages"][directory] is False
    assert not any("hugepages" in path for path in found["backend"])
    assert not any("/sys/devices" in path for path in found["frontend"])
    (volume,) = [one for one in pod_of(documents)["volumes"] if one["name"] == "hugepages"]
    assert volume == {"name": "hugepages", "emptyDir": {}}


def test_without_pools_there_is_neither_helper_nor_policy() -> None:
    """By default there are no pools."""
    documents = render()
    assert names(documents) == ["frontend", "backend"]
    assert not any(one["kind"].startswith("Mutating") for one in documents)
    assert "numa-nodes" not in str(pod_of(documents)["volumes"])


def test_pools_of_one_group_add_the_helper_to_its_pods_only() -> None:
    """The other groups have no helper. The permission to watch claims is the same for all pods, because they share one
    account.
    """
    documents = render({"groups": [{"name": "db", "driverConfig": {"hugepagesOnDemand": [POOL]}}]})
    sets = {one["metadata"]["name"]: one for one in documents if one["kind"] == "DaemonSet"}
    helpers = {
        name: "hugepages" in [one["name"] for one in each["spec"]["template"]["spec"]["containers"]]
        for name, each in sets.items()
    }
    assert helpers == {"dra-driver-numa": False, "dra-driver-numa-db": True}
    rules = only(documents, "ClusterRole")["rules"]
    assert [one["verbs"] for one in rules if one["resources"] == ["resourceclaims"]] == [["get", "list", "watch"]]
    assert only(documents, "MutatingAdmissionPolicy")


def matched(claim: Document, **values: Any) -> bool:
    """Returns True if the policy changes a claim. An error in one condition is ignored if another one is false."""
    results: list[bool | None] = []
    context = cel.Context({"object": claim})
    for condition in only(render({**ON, **values}), "MutatingAdmissionPolicy")["spec"]["matchConditions"]:
        try:
            results.append(bool(cel.evaluate(condition["expression"], context)))
        except (KeyError, RuntimeError, ValueError, TypeError):
            results.append(None)
    assert None not in results or False in results
    return all(results)


def claim(*requests: Document, **metadata: Any) -> Document:
    """Returns a claim as the policy receives it when the claim is created."""
    return {"metadata": {"name": "c", **metadata}, "spec": {"devices": {"requests": [*requests]} if requests else {}}}


def exactly(name: str) -> Document:
    """Returns a request for a device from one class, without alternatives."""
    return {"name": "r", "exactly": {"deviceClassName": name}}


def first(*classes: str) -> Document:
    """Returns a request with alternatives."""
    return {"name": "r", "firstAvailable": [{"name": f"s{n}", "deviceClassName": one} for n, one in enumerate(classes)]}


@pytest.mark.parametrize(
    ("document", "labelled"),
    [
        (claim(exactly("dra.hugepages-1g")), True),
        (claim(exactly("dra.hugepages-1g-far")), True),
        (claim(exactly("dra.cpu"), exactly("dra.hugepages-1g"), labels={"a": "b"}), True),
        (claim(first("dra.hugepages-2m", "dra.hugepages-1g")), True),
        (claim(exactly("dra.hugepages-2m")), False),
        (claim(exactly("dra.cpu"), first("dra.memory")), False),
        (claim(), False),
        ({"metadata": {"name": "c"}, "spec": {}}, False),
        (claim(exactly("dra.hugepages-1g"), labels={ON_DEMAND_LABEL: "false"}), False),
        (claim(exactly("db-pages")), False),
    ],
)
def test_claims_for_on_demand_pools_are_labelled(document: Document, labelled: bool) -> None:
    """The label does not depend on the claims' other requests; a label that the author has set is kept."""
    assert matched(document) is labelled


@pytest.mark.parametrize(
    ("size", "name"),
    [
        ("2Mi", "2m"),
        ("2M", "2m"),
        ("2048kB", "2m"),
        ("1g", "1g"),
        ("1024MB", "1g"),
        ("1048576Ki", "1g"),
        ("64K", "64k"),
    ],
)
def test_every_spelling_of_a_page_size_selects_its_class(size: str, name: str) -> None:
    """The services also accept every spelling."""
    config = {"hugepagesOnDemand": [{"numaNode": 0, "size": size, "pages": 1}]}
    assert Config.model_validate(config).pages_on_demand(0, parse_page_size(name)) == 1
    assert matched(claim(exactly(f"dra.hugepages-{name}")), driverConfig=config)


def test_the_operators_own_classes_can_be_configured() -> None:
    """The operator's class matches the same devices as the chart's."""
    assert matched(claim(exactly("db-pages")), hugepagesOnDemand={"labelPolicy": {"classes": ["db-pages"]}})


def test_the_label_is_the_one_that_the_driver_selects() -> None:
    """The policy sets exactly the key and the value that the driver's selector matches, and rejects the claim if it
    cannot set them.
    """
    (mutation,) = only(render(ON), "MutatingAdmissionPolicy")["spec"]["mutations"]
    expected = f'Object{{metadata: Object.metadata{{labels: {{"{ON_DEMAND_LABEL}": "true"}}}}}}'
    assert mutation["applyConfiguration"]["expression"] == expected
    assert only(render(ON), "MutatingAdmissionPolicy")["spec"]["failurePolicy"] == "Fail"


def test_the_policy_can_be_left_out() -> None:
    """Operators who set the label themselves do not need the policy. The helper container remains."""
    documents = render({**ON, "hugepagesOnDemand": {"labelPolicy": {"enabled": False}}})
    assert not any(one["kind"].startswith("Mutating") for one in documents)
    assert names(documents) == ["frontend", "backend", "hugepages"]


@pytest.mark.parametrize(("release", "served"), [("1.34", "v1beta1"), ("1.36", "v1"), ("1.37", "v1")])
def test_the_policy_is_valid_in_every_release(release: str, served: str) -> None:
    """The policy uses the API version that the release serves."""
    text = run(
        *("template", "x", str(CHART), "--namespace", "n", "--kube-version", f"{release}.1"),
        *(
            "--set",
            "driverConfig.hugepagesOnDemand[0].numaNode=0",
            "--set",
            "driverConfig.hugepagesOnDemand[0].pages=1",
        ),
        *("--set", "driverConfig.hugepagesOnDemand[0].size=1Gi", "--show-only", "templates/hugepagesondemand.yaml"),
    )
    found = list(yaml.safe_load_all(text))
    assert len(found) == 2
    for document in found:
        assert document["apiVersion"] == f"admissionregistration.k8s.io/{served}"
        check_object(document, release)
