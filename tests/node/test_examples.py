# SPDX-License-Identifier: Apache-2.0
"""The claims of the core examples, as a user applies them: what each asks for is in the kernel's files."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from dra_frontend.devices.quantity import parse_quantity

from tests.node.rig.claims import ClaimPod, Wish
from tests.node.rig.cluster import Cluster
from tests.node.rig.pods import Container

EXAMPLES = Path(__file__).parents[2] / "examples"
PAGES = {"dra.hugepages-2m": "2MB", "dra.hugepages-1g": "1GB"}


def claim_spec(name: str) -> dict[str, Any]:
    """The spec of the example's claim template."""
    documents = yaml.safe_load_all((EXAMPLES / f"{name}.yaml").read_text())
    (template,) = [one for one in documents if one["kind"] == "ResourceClaimTemplate"]
    spec: dict[str, Any] = template["spec"]["spec"]
    return spec


def asked(spec: dict[str, Any]) -> Counter[str]:
    """CPUs and bytes, by device class."""
    amounts: Counter[str] = Counter()
    for request in spec["devices"]["requests"]:
        (amount,) = request["exactly"]["capacity"]["requests"].values()
        amounts[request["exactly"]["deviceClassName"]] += int(parse_quantity(amount))
    return amounts


def numa_nodes(cluster: Cluster, pod: ClaimPod) -> set[int]:
    """The NUMA nodes of the devices that were allocated."""
    results = pod.claims[0]["status"]["allocation"]["devices"]["results"]
    attributes = [cluster.devices()[result["device"]]["attributes"] for result in results]
    return {one["resource.kubernetes.io/numaNode"]["int"] for one in attributes}


def check_pages(box: Container, wanted: Counter[str]) -> None:
    """Each size is limited to what was asked for, a size that was not to nothing."""
    for device_class, size in PAGES.items():
        assert box.cgroup.hugetlb(size)["rsvd.max"] == str(wanted[device_class])


@pytest.mark.parametrize("name", ["cpus", "memory", "hugepages-2m", "hugepages-1g", "hugepages-mount", "one-numa-node"])
def test_an_example_is_what_its_container_gets(cluster: Cluster, name: str) -> None:
    """Scheduled and prepared as it is written: CPUs, nodes of memory and limits of the running container."""
    spec = claim_spec(name)
    wanted = asked(spec)
    pod = cluster.pod_of(Wish.written(spec))
    box = pod.run()
    check_pages(box, wanted)
    if count := wanted["dra.cpu"]:
        assert box.cpus_allowed == pod.cpus
        assert len(pod.cpus) == count
    if wanted.total() > count:
        assert box.mems_allowed == numa_nodes(cluster, pod)
    if name == "memory":
        assert box.cgroup.read("memory.max") == str(wanted["dra.memory"])
