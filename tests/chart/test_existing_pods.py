# SPDX-License-Identifier: Apache-2.0
"""Pods without claims in their spec get CPUs through an extended resource."""

import asyncio
import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from dra_frontend.allocation.claim import parse_claim
from dra_frontend.devices.inventory import Inventory, build_inventory
from dra_frontend.devices.slices import slice_documents
from dra_frontend.machine.discovery import discover
from dra_frontend.publishing.plan import variants
from numa_contract.config import Config
from numa_contract.cpuset import format_cpu_list

from tests.chart.helm import Document, HelmError, only, render
from tests.chart.schemas import VERSIONS, check_object
from tests.fakes.apiserver import ApiServer
from tests.fakes.apiserver_store import CLAIMS, CLASSES, SLICES
from tests.fakes.apiserver_values import Options
from tests.fakes.scheduler import UnschedulableError, schedule
from tests.fakes.scheduler_extended import claim_of
from tests.rigs.decisions import decided
from tests.rigs.trees import captured

NODE = "node-a"
EXAMPLES = Path(__file__).parents[2] / "examples/existing-pods"
RESOURCE = {"deviceClasses": {"extendedResource": "dra-numa/cpu"}}
POD_UID = "11111111-2222-3333-4444-555555555555"


def example(name: str) -> list[Document]:
    return list(yaml.safe_load_all((EXAMPLES / f"{name}.yaml").read_text()))


def classes(values: Document) -> list[Document]:
    return [one for one in render(values) if one["kind"] == "DeviceClass"]


def inventory(**config: Any) -> Inventory:
    return build_inventory(discover(captured("32intel64-2p8co2t+8ve")), Config(**config), NODE)


async def scheduled(
    pod: Document, published: Inventory, values: Document = RESOURCE, version: str = "1.36"
) -> Document:
    """Returns the allocated claim that the scheduler creates for the pod's extended resources."""
    options = Options(version=version)
    options.gates["DRAExtendedResource"] = version not in {"1.34", "1.35"}
    pod = {**pod, "metadata": {**pod["metadata"], "uid": POD_UID}}
    async with ApiServer(options) as server:
        for document in classes(values):
            server.store.create(CLASSES, "", document)
        for pool in published.pools:
            for document in variants(slice_documents(pool, NODE))[-1][0]:
                server.store.create(SLICES, "", document)
        made = claim_of(pod, server.store.select(CLASSES))
        if made is None:
            raise UnschedulableError("no class has the resource")
        name = server.store.create(CLAIMS, "default", made[0])["metadata"]["name"]
        reference = {"name": pod["metadata"]["name"], "uid": POD_UID}
        return await asyncio.to_thread(schedule, server.url, "default", name, pods=[reference])


def asking(**units: int) -> Document:
    """Returns a pod whose containers request these numbers of CPUs."""
    (pod,) = example("extended-resource")
    (container,) = pod["spec"]["containers"]
    pod["spec"]["containers"] = []
    for name, count in units.items():
        one = copy.deepcopy(container) | {"name": name}
        one["resources"]["requests"]["dra-numa/cpu"] = str(count)
        pod["spec"]["containers"].append(one)
    return pod


def test_the_extended_resource_is_off_by_default() -> None:
    """API servers of older releases drop the field ``extendedResourceName``, and users can claim CPUs without the
    resource.
    """
    assert not any("extendedResourceName" in one["spec"] for one in classes({}))
    added = [one for one in classes(RESOURCE) if one not in classes({})]
    assert [one["spec"]["extendedResourceName"] for one in added] == ["dra-numa/cpu"]
    for version in VERSIONS:
        check_object(added[0], version)


@pytest.mark.parametrize("name", ["cpu", "dra-numa/", "/cpu", "Dra/cpu"])
def test_a_name_without_a_domain_is_rejected(name: str) -> None:
    """The server would reject the class, which would leave the release partly installed."""
    with pytest.raises(HelmError):
        render({"deviceClasses": {"extendedResource": name}})


async def test_single_cpus_are_an_extended_resource() -> None:
    """Each unit is one CPU in the pod's claim. The containers share the claim, but each one gets its own CPUs."""
    published = inventory(cpu_device_mode="individual")
    view = parse_claim(await scheduled(asking(one=4, two=2), published))
    record = decided(view, "dra.cpu", inventory=published)
    assert record.sharing == "pod"
    assert {request: format_cpu_list(record.cpus_of([request])) for request in record.requests} == {
        "container-0-request-1": "0-3",
        "container-1-request-1": "4-5",
    }


@pytest.mark.parametrize("group_by", ["numanode", "socket", "machine", "l3"])
async def test_groups_of_cpus_are_not_an_extended_resource(group_by: str) -> None:
    """A request for N units would allocate one CPU from each of N groups. The class therefore selects no groups, and
    the scheduler reports why the pod stays pending.
    """
    with pytest.raises(UnschedulableError):
        await scheduled(asking(one=2), inventory(group_by=group_by))


async def test_a_unit_of_a_shared_device_is_its_default_amount() -> None:
    """A request for two units allocates two devices, with one page or CPU from each. That is why the chart's extended
    resource covers neither groups of CPUs nor hugepages.
    """
    pod = asking(one=2)
    (container,) = pod["spec"]["containers"]
    container["resources"]["requests"] = {"deviceclass.resource.kubernetes.io/dra.cpu": "2"}
    claim = await scheduled(pod, inventory(group_by="numanode"), {})
    results = claim["status"]["allocation"]["devices"]["results"]
    assert [(one["device"], one["consumedCapacity"]) for one in results] == [
        ("cpudevnuma000", {"dra.cpu/cpu": "1"}),
        ("cpudevnuma001", {"dra.cpu/cpu": "1"}),
    ]
    container["resources"]["requests"] = {"deviceclass.resource.kubernetes.io/dra.cpu": "3"}
    with pytest.raises(UnschedulableError):
        await scheduled(pod, inventory(group_by="numanode"), {})


@pytest.mark.parametrize("version", ["1.34", "1.35"])
async def test_older_servers_drop_the_extended_resource_name(version: str) -> None:
    """The class exists, but no pod can request it."""
    with pytest.raises(UnschedulableError):
        await scheduled(asking(one=1), inventory(cpu_device_mode="individual"), version=version)


def test_the_parameters_of_the_class_are_accepted() -> None:
    """The chart's own policy and the driver accept the parameters."""
    single = next(one for one in classes(RESOURCE) if one["metadata"]["name"] == "dra.cpu-single")
    assert single["spec"]["config"][0]["opaque"]["parameters"]["cpuConfig"] == {"sharing": "pod"}
    assert only([single], "DeviceClass")["spec"]["selectors"][0]["cel"]["expression"].endswith(".cpuID)")
