# SPDX-License-Identifier: Apache-2.0
"""Every example is valid, can be applied to a cluster with the chart's classes, is scheduled, and is prepared."""

import asyncio
import dataclasses
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from dra_frontend.allocation.claim import parse_claim
from dra_frontend.devices.inventory import Inventory, build_inventory
from dra_frontend.devices.slices import slice_documents
from dra_frontend.machine.discovery import discover
from dra_frontend.machine.model import HugepagePool
from dra_frontend.publishing.plan import variants
from numa_contract.config import Config
from numa_contract.quantity import parse_quantity
from numa_node.config_file import parse_yaml_documents

from tests.chart.helm import Document, render
from tests.chart.schemas import KUEUE, VERSIONS, check_object
from tests.fakes.apiserver import ApiServer
from tests.fakes.scheduler import schedule
from tests.rigs.builders import claim, result
from tests.rigs.decisions import decided
from tests.rigs.trees import captured
from tests.stage.wires import ask_http

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
CLAIMING = [path for path in EXAMPLES if path.stem not in {"kubevirt", "slurm-bridge"}]
"""Examples whose pods refer to claims. In one of the two remaining examples, slurm-bridge creates the claims; in
the other, a policy adds them to virtual machines.
"""
NODE = "node-a"
PATHS = {
    "ResourceClaim": "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims",
    "ResourceClaimTemplate": "/apis/resource.k8s.io/v1/namespaces/default/resourceclaimtemplates",
    "ResourceSlice": "/apis/resource.k8s.io/v1/resourceslices",
    "DeviceClass": "/apis/resource.k8s.io/v1/deviceclasses",
    "Pod": "/api/v1/namespaces/default/pods",
}
# Kinds that the fake API server does not serve; their schemas are checked if they are part of Kubernetes.
NOT_SERVED = {
    *("Deployment", "Job", "JobSet", "LeaderWorkerSet", "Service", "StatefulSet", "VirtualMachineInstance"),
    *KUEUE,
}


def documents(path: Path) -> list[Document]:
    """Returns the objects in an example, read as kubectl reads them."""
    return [document for document in parse_yaml_documents(path.read_bytes(), path.name) if document]


def inventory(**config: Any) -> Inventory:
    """Returns the devices of two NUMA nodes, each with 16 CPUs, 64 GiB of memory, 2048 pages of 2 MiB and 8 pages of 1
    GiB.
    """
    machine = discover(captured("32intel64-2p8co2t+8ve"))
    pages = (HugepagePool(2 << 20, 2048, 2048), HugepagePool(1 << 30, 8, 8))
    nodes = {
        number: dataclasses.replace(node, memory_bytes=64 << 30, hugepages=pages)
        for number, node in machine.numa_nodes.items()
    }
    return build_inventory(dataclasses.replace(machine, numa_nodes=nodes), Config(**config), NODE)


def foreign_slice(driver: str, attribute: str) -> Document:
    """Returns a slice with another driver's device on NUMA node 1."""
    device = {"name": "one", "attributes": {attribute: {"int": 1}}}
    pool = {"name": NODE, "generation": 1, "resourceSliceCount": 1}
    spec = {"driver": driver, "nodeName": NODE, "pool": pool, "devices": [device]}
    return {"kind": "ResourceSlice", "metadata": {"name": driver}, "spec": spec}


def foreign_class(name: str) -> Document:
    """Returns the other driver's class."""
    selector = {"cel": {"expression": f'device.driver == "{name}"'}}
    return {"kind": "DeviceClass", "metadata": {"name": name}, "spec": {"selectors": [selector]}}


def cluster(published: Inventory) -> list[Document]:
    """Yields the cluster before the example is applied: the chart's classes, the driver's slices, and a NIC and a
    GPU.
    """
    # Feature gates that are off by default are turned on.
    slices = [document for pool in published.pools for document in variants(slice_documents(pool, NODE))[-1][0]]
    others = {"dra.net": "dra.net/numaNode", "gpu.nvidia.com": "resource.kubernetes.io/numaNode"}
    return [
        *(document for document in render() if document["kind"] == "DeviceClass"),
        *slices,
        *(foreign_slice(driver, attribute) for driver, attribute in others.items()),
        *map(foreign_class, others),
    ]


def create(server: str, document: Document) -> Document:
    """Creates an object. Fails if the server rejects it, or if its kind is neither served nor exempt."""
    metadata = {key: value for key, value in document["metadata"].items() if key != "labels"}
    answer: Document = ask_http(server, PATHS[document["kind"]], "POST", {**document, "metadata": metadata})
    return answer


def claims_of(found: list[Document]) -> list[Document]:
    """Returns the claims that Kubernetes creates from the templates, and the standalone claims."""
    made = [
        {"kind": "ResourceClaim", "metadata": {"name": one["metadata"]["name"]}, "spec": one["spec"]["spec"]}
        for one in found
        if one["kind"] == "ResourceClaimTemplate"
    ]
    return made + [one for one in found if one["kind"] == "ResourceClaim"]


def scheduled(server: str, found: list[Document], published: Inventory) -> list[Document]:
    """Applies the example to the cluster and has the scheduler allocate its claims."""
    claims = claims_of(found)
    others = [one for one in found if one["kind"] not in {*NOT_SERVED, "ResourceClaim"}]
    for document in [*cluster(published), *others, *claims]:
        create(server, document)
    pods = [{"name": "pod", "uid": "11111111-2222-3333-4444-555555555555"}]
    return [schedule(server, "default", claim["metadata"]["name"], pods=pods) for claim in claims]


@pytest.mark.parametrize("path", [path for path in EXAMPLES if path.stem != "slurm-bridge"], ids=lambda path: path.stem)
async def test_the_example_works(path: Path) -> None:
    """The example is applied, its claims are allocated on one node, and the frontend prepares them with their
    parameters.
    """
    found = documents(path)
    published = inventory()
    async with ApiServer() as server:
        allocated = await asyncio.to_thread(scheduled, server.url, found, published)
    assert allocated
    for document in allocated:
        view = parse_claim(document)
        for driver in [driver for driver, results in view.results.items() if results]:
            decided(view, driver, inventory=published)


@pytest.mark.parametrize("name", ["nic-same-node", "gpu-same-node"])
async def test_cpus_and_memory_are_near_the_other_drivers_device(name: str) -> None:
    """The CPUs and memory come from the NUMA node of the other driver's device, which is not the first node."""
    found = documents(Path(__file__).parents[2] / f"examples/{name}.yaml")
    async with ApiServer() as server:
        (allocated,) = await asyncio.to_thread(scheduled, server.url, found, inventory())
    devices = {one["device"] for one in allocated["status"]["allocation"]["devices"]["results"]}
    assert devices == {"cpudevnuma001", "memory-numa001", "one"}


async def test_devices_that_are_joined_by_two_attributes_are_near_each_other() -> None:
    """The drivers of the GPU and of the network interface publish the NUMA node under different attribute names."""
    found = documents(Path(__file__).parents[2] / "examples/vllm.yaml")
    async with ApiServer() as server:
        (allocated,) = await asyncio.to_thread(scheduled, server.url, found, inventory())
    results = allocated["status"]["allocation"]["devices"]["results"]
    devices = {one["request"]: one["device"] for one in results}
    assert devices == {"cpus": "cpudevnuma001", "memory": "memory-numa001", "gpu": "one", "nic": "one"}


def test_every_kind_is_applied_or_exempt() -> None:
    """An object of a new kind is not silently skipped, and an exemption is removed together with its last example."""
    kinds = {document["kind"] for path in EXAMPLES for document in documents(path)}
    assert kinds - PATHS.keys() == NOT_SERVED


def test_the_databases_service_selects_its_pods() -> None:
    """The StatefulSet's headless Service is in the file and selects its pods."""
    found = documents(Path(__file__).parents[2] / "examples/postgresql.yaml")
    (service,) = [one for one in found if one["kind"] == "Service"]
    (owner,) = [one for one in found if one["kind"] == "StatefulSet"]
    assert service["metadata"]["name"] == owner["spec"]["serviceName"]
    assert service["spec"]["selector"].items() <= owner["spec"]["template"]["metadata"]["labels"].items()


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_valid(version: str) -> None:
    """The schemas of the supported Kubernetes versions accept every object, with unknown fields rejected."""
    for path in EXAMPLES:
        for document in documents(path):
            check_object(document, version)


def pod_spec(document: Document) -> Any:
    """Returns the pod spec in an object."""
    match document["kind"]:
        case "Pod":
            return document["spec"]
        case "Deployment" | "Job" | "StatefulSet":
            return document["spec"]["template"]["spec"]
        case "JobSet":
            (jobs,) = document["spec"]["replicatedJobs"]
            return jobs["template"]["spec"]["template"]["spec"]
        case "LeaderWorkerSet":
            return document["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]
    return None


def claimed(found: list[Document], driver: str, key: str) -> int:
    """Returns the CPUs, or bytes of plain memory, that an example's claim requests."""
    (spec,) = [claim["spec"] for claim in claims_of(found)]
    asked = [one["exactly"] for one in spec["devices"]["requests"]]
    amounts = (one["capacity"]["requests"][key] for one in asked if one["deviceClassName"] == driver)
    return sum(int(parse_quantity(amount)) for amount in amounts)


@pytest.mark.parametrize("path", CLAIMING, ids=lambda path: path.stem)
def test_every_pod_is_guaranteed(path: Path) -> None:
    """Claims do not count toward the QoS class, so the container also requests their CPUs and memory. It does not
    request hugepages, because those would then be counted twice.
    """
    found = documents(path)
    (spec,) = [spec for spec in map(pod_spec, found) if spec]
    for container in spec["containers"]:
        resources = container["resources"]
        assert resources["requests"] == resources["limits"]
        assert resources["requests"].keys() == {"cpu", "memory"}
        cpus, size = (parse_quantity(resources["requests"][name]) for name in ("cpu", "memory"))
        wanted = claimed(found, "dra.cpu", "dra.cpu/cpu")
        assert cpus == wanted if wanted else cpus < 1
        assert size >= claimed(found, "dra.memory", "size")
        assert "QoS class Guaranteed" in path.read_text()


@pytest.mark.parametrize("path", CLAIMING, ids=lambda path: path.stem)
def test_every_claim_is_used(path: Path) -> None:
    """A pod refers to the template or claim in its file, and its containers refer to the pod's claims."""
    found = documents(path)
    names = {one["metadata"]["name"] for one in found if one["kind"].startswith("ResourceClaim")}
    (spec,) = [spec for spec in map(pod_spec, found) if spec]
    refers = {one.get("resourceClaimTemplateName") or one.get("resourceClaimName") for one in spec["resourceClaims"]}
    assert refers == names
    used = {claim["name"] for one in spec["containers"] for claim in one["resources"]["claims"]}
    assert used == {one["name"] for one in spec["resourceClaims"]}


def test_slurm_bridge_gets_the_cpus_that_slurm_has_allocated() -> None:
    """slurm-bridge allocates as many individual CPUs as the pod asks for, in a request named ``cpu``, and the driver
    prepares exactly these CPUs. slurm-bridge reads the CPU of each device from the attributes in a single slice. It
    rejects a pod that has claims or requests the native resource ``cpu``.
    """
    (pod,) = documents(Path(__file__).parents[2] / "examples/slurm-bridge.yaml")
    (container,) = pod["spec"]["containers"]
    wanted = container["resources"]["requests"]
    assert wanted == container["resources"]["limits"]
    assert "resourceClaims" not in pod["spec"]
    assert wanted.keys() == {"deviceclass.resource.kubernetes.io/dra.cpu", "memory"}
    published = inventory(cpu_device_mode="individual")
    (cpus,) = [pool for pool in published.pools if pool.driver == "dra.cpu"]
    (document,) = slice_documents(cpus, NODE)
    ids = {one["attributes"]["dra.cpu/cpuID"]["int"]: one["name"] for one in document["spec"]["devices"]}
    chosen = [3, 5, 19, 21]
    assert len(chosen) == int(wanted["deviceclass.resource.kubernetes.io/dra.cpu"])
    view = parse_claim(claim("u", *(result("cpu", "dra.cpu", ids[cpu]) for cpu in chosen)))
    assert decided(view, "dra.cpu", inventory=published).cpus_of() == set(chosen)


def test_a_shell_can_read_both_sets_of_cpus(tmp_path: Path) -> None:
    """The names of the variables contain a claim's UID and therefore hyphens. Shells cannot expand variables with such
    names, and do not pass all of them on to the programs that they start.
    """
    found = documents(Path(__file__).parents[2] / "examples/shared-beside-exclusive.yaml")
    (command,) = [one["spec"]["containers"][0]["command"] for one in found if one["kind"] == "Pod"]
    taskset = tmp_path / "taskset"
    taskset.write_text("#!/bin/sh\necho $2\n")
    taskset.chmod(0o755)
    names = {
        "DRA_CPUSET_1a-2b": "2-3",
        "DRA_SHARED_CPUSET_1a-2b": "0-1,4-7",
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }
    run = subprocess.run(command, env=names, capture_output=True, text=True, check=True)
    assert sorted(run.stdout.splitlines()) == ["0-1,4-7", "2-3"]


def test_kueue_counts_the_claims_of_the_job() -> None:
    """The page maps the chart's classes to published capacities, and the queue covers the amounts that the job
    requests. A job never starts if its class has no mapping or if no queue covers one of its resources.
    """
    root = Path(__file__).parents[2]
    config = yaml.safe_load((root / "docs/quota.md").read_text().split("```yaml\n")[2].split("```")[0])
    mappings = config["resources"]["deviceClassMappings"]
    sources = {one["deviceClassNames"][0]: one["sources"][0]["capacity"] for one in mappings}
    assert sources.keys() <= {one["metadata"]["name"] for one in render() if one["kind"] == "DeviceClass"}
    slices = [one["spec"] for pool in inventory().pools for one in slice_documents(pool, NODE)]
    published = {(one["driver"], name) for one in slices for device in one["devices"] for name in device["capacity"]}
    assert {(one["driver"], one["name"]) for one in sources.values()} <= published
    found = documents(root / "examples/kueue.yaml")
    (claim,) = claims_of(found)
    wanted = {request["exactly"]["deviceClassName"] for request in claim["spec"]["devices"]["requests"]}
    (group,) = next(one["spec"]["resourceGroups"] for one in found if one["kind"] == "ClusterQueue")
    counted = {"cpu", "memory"} | {one["name"] for one in mappings if wanted & set(one["deviceClassNames"])}
    assert wanted <= sources.keys()
    assert set(group["coveredResources"]) == counted == {one["name"] for one in group["flavors"][0]["resources"]}


def test_every_expected_example_exists() -> None:
    """There is an example for each common use case."""
    wanted = "cpus memory hugepages-2m hugepages-1g one-numa-node nic-same-node gpu-same-node"
    assert {path.stem for path in EXAMPLES} >= {
        *wanted.split(),
        "postgresql",
        "dpdk",
        "kubevirt",
        "slurm-bridge",
        "kueue",
        "jobset",
        "vllm",
    }
