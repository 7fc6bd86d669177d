# SPDX-License-Identifier: Apache-2.0
"""DeviceClasses, and the devices that a scheduler allocates for requests that use them."""

from dataclasses import replace
from typing import Any

import pytest
import yaml
from dra_frontend.devices.inventory import build_inventory
from dra_frontend.devices.slices import slice_documents
from dra_frontend.machine.discovery import discover
from dra_frontend.machine.model import HugepagePool, Machine, NumaNode
from numa_contract.config import Config
from numa_tools.cli import main
from numa_tools.commands.classes import device_classes

from tests.fakes.scheduler import UnschedulableError, allocate
from tests.fakes.scheduler_devices import candidates, selected
from tests.rigs.builders import NODE
from tests.rigs.trees import NAMES, captured, small_machine, write_tree
from tests.strategies.machines import machine

GIB = 1 << 30


def names(found: Machine) -> list[str]:
    """Returns the names of a machine's classes."""
    return [document["metadata"]["name"] for document in device_classes(found)]


def with_far_node(found: Machine) -> Machine:
    """Returns the machine with an additional NUMA node 2, which has 8 GiB of CXL memory, half of it in 2 MiB pages."""
    pages = HugepagePool(2 << 20, 2048, 2048)
    far = NumaNode(2, frozenset(), 8 * GIB, (pages,), {0: 24, 1: 17, 2: 10})
    return replace(found, numa_nodes=found.numa_nodes | {2: far})


def published(found: Machine) -> list[dict[str, Any]]:
    """Returns a machine's slices with the names that the server gives them."""
    pools = build_inventory(found, Config(), NODE).pools
    documents = [document for pool in pools for document in slice_documents(pool, NODE)]
    for index, document in enumerate(documents):
        document["metadata"]["name"] = f"slice-{index}"
    return documents


def selectors(device_class: dict[str, Any]) -> list[str]:
    """Returns a class's CEL expressions."""
    return [selector["cel"]["expression"] for selector in device_class["spec"]["selectors"]]


def chosen(found: Machine, device_class: str, size: str = "2Mi", slices: list[dict[str, Any]] | None = None) -> str:
    """Returns the device that a scheduler allocates for a request with the given class and bytes."""
    request = {"name": "r", "exactly": {"deviceClassName": device_class, "capacity": {"requests": {"size": size}}}}
    claim = {"metadata": {"name": "c"}, "spec": {"devices": {"requests": [request]}}}
    classes = {document["metadata"]["name"]: document for document in device_classes(found)}
    (result,) = allocate(claim, slices or published(found), classes)["status"]["allocation"]["devices"]["results"]
    return str(result["device"])


@pytest.mark.parametrize(
    ("base", "pages", "words"),
    [
        (4 << 10, {}, []),
        # A supported page size has a class even if there are no pages of that size.
        (4 << 10, {2 << 20: 0, 1 << 30: 0}, ["2m", "1g"]),
        # arm64 with 4 KiB and with 64 KiB pages.
        (4 << 10, dict.fromkeys((64 << 10, 2 << 20, 32 << 20, 1 << 30), 16 * GIB), ["64k", "2m", "32m", "1g"]),
        (64 << 10, dict.fromkeys((2 << 20, 512 << 20, 16 << 30), 16 * GIB), ["2m", "512m", "16g"]),
    ],
)
def test_one_class_for_each_kind(base: int, pages: dict[int, int], words: list[str]) -> None:
    """There is one class for CPUs, one for plain memory, and one for every hugepage size that the kernel supports. Each
    hugepage class matches only pages of its own size.
    """
    pools = tuple(HugepagePool(size, held // size, held // size) for size, held in pages.items())
    found = replace(machine(memory=256 * GIB, hugepages=pools), base_page_bytes=base)
    assert names(found) == ["dra.cpu", "dra.memory", *(f"dra.hugepages-{word}" for word in words)]
    for word, (size, held) in zip(words, pages.items(), strict=True):
        if held:
            assert chosen(found, f"dra.hugepages-{word}", str(size)) == f"hugepages-{word}-numa000"
    assert chosen(found, "dra.memory") == "memory-numa000"


def test_far_memory_is_never_a_default_target() -> None:
    """Memory on nodes without CPUs is allocated only to claims that use the class for far memory, however much of it is
    free.
    """
    found = with_far_node(machine(memory=2 * GIB, hugepages=(HugepagePool(2 << 20, 256, 256),)))
    assert names(found)[3:] == ["dra.memory-far", "dra.hugepages-2m-far"]
    for name, size in (("dra.memory", "3Gi"), ("dra.hugepages-2m", "1Gi")):
        with pytest.raises(UnschedulableError):
            chosen(found, name, size)
    assert chosen(found, "dra.memory-far", "3Gi") == chosen(found, "dra.memory-far", "4Ki") == "memory-numa002"
    assert chosen(found, "dra.hugepages-2m-far", "1Gi") == "hugepages-2m-numa002"


@pytest.mark.parametrize("memory", [0, 8 * GIB])
def test_a_far_node_without_memory_or_hugepages_gets_no_class_for_them(memory: int) -> None:
    """No device would match the class."""
    found = machine()
    far = NumaNode(2, frozenset(), memory)
    far_names = ["dra.memory-far"] if memory else []
    assert names(replace(found, numa_nodes=found.numa_nodes | {2: far})) == [*names(found), *far_names]


def test_dra_driver_memorys_devices_match_too() -> None:
    """dra-driver-memory's devices spell the page size differently and have no tier. They still match, so nodes can be
    migrated one at a time.
    """
    page, huge = "resource.kubernetes.io/pageSize", "resource.kubernetes.io/hugeTLB"
    devices = [
        {
            "name": f"hugepages-2m-{name}",
            "attributes": {page: {"string": size}, huge: {"bool": size != "4Ki"}},
            "capacity": {"size": {"value": "1Gi"}},
            "allowMultipleAllocations": True,
        }
        for name, size in (("abcdef", "2Mi"), ("ghijkl", "1Gi"), ("mnopqr", "4Ki"))
    ]
    header = {"name": NODE, "generation": 1, "resourceSliceCount": 1}
    spec = {"driver": "dra.memory", "nodeName": NODE, "pool": header, "devices": devices}
    found = discover(small_machine())
    slices: list[dict[str, Any]] = [{"metadata": {"name": "slice"}, "spec": spec}]
    assert chosen(found, "dra.hugepages-2m", slices=slices) == "hugepages-2m-abcdef"
    assert chosen(found, "dra.hugepages-1g", slices=slices) == "hugepages-2m-ghijkl"
    assert chosen(found, "dra.memory", slices=slices) == "hugepages-2m-mnopqr"


@pytest.mark.parametrize("name", NAMES)
def test_every_device_of_a_machine_is_in_one_class(name: str) -> None:
    """Every device can be requested, and no device is in two classes."""
    found = discover(captured(name))
    devices = list(candidates(published(found), NODE))
    assert devices
    for device in devices:
        assert sum(all(selected(device, term) for term in selectors(each)) for each in device_classes(found)) == 1


def test_classes_are_printed_for_kubectl(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """``dra-frontend classes`` prints one List on standard output, in YAML or JSON."""
    root = str(write_tree(small_machine(), tmp_path / "host"))
    assert main(["classes", "--host-root", root]) == 0
    document = yaml.safe_load(capsys.readouterr().out)
    assert document == {"apiVersion": "v1", "kind": "List", "items": device_classes(discover(small_machine()))}
    assert {item["apiVersion"] for item in document["items"]} == {"resource.k8s.io/v1"}
