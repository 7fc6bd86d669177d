# SPDX-License-Identifier: Apache-2.0
"""ResourceSlices satisfy the API server's validation rules, for captured and generated machines."""

import random
import re
from dataclasses import replace
from typing import Any

import pytest
from dra_frontend.devices.gates import ALLOCATABLE_FIELD
from dra_frontend.devices.inventory import Inventory, build_inventory
from dra_frontend.devices.model import MemoryDevice
from dra_frontend.devices.slices import DEVICES_PER_SLICE, slice_documents
from dra_frontend.machine.discovery import discover
from dra_frontend.machine.model import HugepagePool, Machine
from dra_frontend.publishing.plan import canonical, differences, variants
from hypothesis import given, settings
from hypothesis import strategies as st
from numa_contract.config import Config

from tests.fakes import quantities
from tests.fakes.apiserver_rules import GATES_OF_1_36, admit
from tests.fakes.apiserver_store import Resource
from tests.rigs.trees import NAMES, MemoryTree, captured, small_machine
from tests.strategies.machines import GIB, machine, machines, odd_machines
from tests.strategies.modes import MODES

SLICES = Resource("resource.k8s.io", "resourceslices", "ResourceSlice")
SUBDOMAIN = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")
PAGES = [64 << 10, 2 << 20, 32 << 20, 512 << 20, 1 << 30, 16 << 30]


def published(inventory: Inventory) -> dict[str, list[dict[str, Any]]]:
    """Returns the slice documents by pool."""
    return {pool.name: slice_documents(pool, "n") for pool in inventory.pools}


def assert_admitted(slices: dict[str, list[dict[str, Any]]]) -> None:
    """Asserts that the server stores every slice unchanged, with and without list attributes, that each pool is
    complete, and that device names are unique within a pool.
    """
    for pool, documents in slices.items():
        names = []
        for index, document in enumerate(documents):
            for gate, ((sent,), _) in ((True, variants([document])[0]), (False, variants([document])[-1])):
                stored = admit({**GATES_OF_1_36, "DRAListTypeAttributes": gate}, SLICES, sent, None)
                assert canonical(stored["spec"]) == canonical(sent["spec"])
            assert document["metadata"] == {"name": f"{index:05x}-{document['spec']['driver']}-{pool}"}
            assert document["spec"]["pool"] == {"name": pool, "generation": 1, "resourceSliceCount": len(documents)}
            assert document["spec"]["nodeName"] == "n"
            assert len(document["spec"]["devices"]) <= DEVICES_PER_SLICE
            names += [device["name"] for device in document["spec"]["devices"]]
            assert_canonical(document["spec"]["devices"])
        assert len(names) == len(set(names))


def assert_canonical(devices: list[dict[str, Any]]) -> None:
    """Asserts that quantities have the server's canonical format and that a shared device has exactly one capacity,
    with a request policy.
    """
    for device in devices:
        if "allowMultipleAllocations" not in device:
            assert "capacity" not in device
            continue
        (capacity,) = device["capacity"].values()
        policy = capacity["requestPolicy"]
        assert policy["validRange"]["max"] == capacity["value"]
        for text in (capacity["value"], policy["default"], *policy["validRange"].values()):
            assert quantities.canonical(text) == text
            assert quantities.whole(text) > 0
        assert device["allowMultipleAllocations"] is True


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("reserved", [frozenset(), frozenset({0, 1})])
def test_slices_for_captured_machines_are_admitted(name: str, reserved: frozenset[int]) -> None:
    """In every mode, the slices for every captured machine pass the server's validation unchanged. On each node, plain
    memory and hugepages together fit into the node's memory.
    """
    found = discover(captured(name))
    for mode in MODES:
        inventory = build_inventory(found, Config(reserved_cpus=reserved, **mode), "n")
        assert_admitted(published(inventory))
    for node in found.numa_nodes.values():
        offered = (one for pool in inventory.pools for one in pool.devices if isinstance(one, MemoryDevice))
        assert sum(one.amount for one in offered if one.numa_node == node.id) <= node.memory_bytes


@settings(deadline=None)
@given(machines() | odd_machines(), st.data())
def test_slices_for_any_machine_are_admitted(found: Machine, data: st.DataObject) -> None:
    """The server accepts the slices whatever the memory sizes and the reserve, and even if there is only a single
    page.
    """
    nodes = {
        node.id: replace(
            node,
            memory_bytes=data.draw(st.integers(0, 8 * GIB)),
            hugepages=tuple(
                HugepagePool(size, total := data.draw(st.integers(0, 3)), 0, data.draw(st.integers(0, total)))
                for size in data.draw(st.lists(st.sampled_from(PAGES), unique=True, max_size=3))
            ),
        )
        for node in found.numa_nodes.values()
    }
    page = data.draw(st.sampled_from([4 << 10, 16 << 10, 64 << 10]))
    reserved = data.draw(st.frozensets(st.sampled_from(sorted(found.online))))
    found = replace(found, numa_nodes=nodes, base_page_bytes=page)
    mode = data.draw(st.sampled_from(MODES))
    assert_admitted(published(build_inventory(found, Config(reserved_cpus=reserved, **mode), "n")))


@pytest.mark.parametrize("name", NAMES)
def test_rediscovering_a_machine_produces_the_same_documents(name: str) -> None:
    """The directories are listed in a different order when the machine is discovered again. The documents stay the
    same, so nothing is rewritten or renamed.
    """
    tree = captured(name)
    files = list(tree.files.items())
    random.Random(name).shuffle(files)
    first, second = (discover(t) for t in (tree, MemoryTree(dict(files))))
    assert repr(first) == repr(second)
    for numbers in (first.cpus, first.numa_nodes):
        assert list(numbers) == sorted(numbers)
    shuffled = replace(
        second, cpus=dict(reversed(second.cpus.items())), numa_nodes=dict(reversed(second.numa_nodes.items()))
    )
    assert repr(published(build_inventory(first, Config(), "n"))) == repr(
        published(build_inventory(shuffled, Config(), "n"))
    )


def test_a_complete_device_document() -> None:
    """A device's document has the format of resource.k8s.io/v1, with canonical quantities."""
    inventory = build_inventory(discover(small_machine()), Config(), "n")
    documents = published(inventory)
    assert documents["n"][0]["spec"]["devices"][0] == {
        "name": "cpudevnuma000",
        "allowMultipleAllocations": True,
        "attributes": {
            "resource.kubernetes.io/numaNode": {"int": 0},
            "dra.cpu/numaNodeID": {"int": 0},
            "dra.net/numaNode": {"int": 0},
            "dra.cpu/nearestNumaNode": {"int": 0},
            "dra.cpu/socketID": {"int": 0},
            "dra.cpu/smtEnabled": {"bool": True},
            "dra.cpu/numCPUs": {"int": 4},
        },
        "capacity": {
            "dra.cpu/cpu": {
                "value": "4",
                "requestPolicy": {"default": "1", "validRange": {"min": "1", "max": "4", "step": "1"}},
            }
        },
    }
    huge = documents["n-hugepages-1g"][0]["spec"]["devices"][0]
    assert huge["attributes"]["resource.kubernetes.io/pageSize"] == {"string": "1g"}
    assert huge["capacity"] == {
        "size": {"value": "1Gi", "requestPolicy": {"default": "1Gi", "validRange": {"min": "1Gi", "max": "1Gi"}}}
    }


def test_slice_names_are_the_same_on_every_start_and_differ_between_nodes() -> None:
    """A name consists of the index, the driver and the pool. The end of a name that is too long is replaced by a
    hash.
    """
    inventory = build_inventory(machine(), Config(), "n")
    assert [one["metadata"]["name"] for pool in inventory.pools for one in slice_documents(pool, "n")] == [
        "00000-dra.cpu-n",
        "00000-dra.memory-n-memory",
        "00000-dra.memory-n-hugepages-2m",
    ]
    names = {
        one["metadata"]["name"]
        for node in ("a", "a-memory", "a.b", "x" * 61 + "." + "y" * 176, "x" * 61 + "." + "y" * 175 + "z")
        for pool in build_inventory(machine(), Config(), node).pools
        for one in slice_documents(pool, node)
    }
    assert len(names) == 15
    assert all(len(name) <= 253 and SUBDOMAIN.fullmatch(name) for name in names)


def test_an_empty_pool_is_one_slice_without_devices() -> None:
    """Without any slice, consumers would still see the previous devices."""
    (document,) = slice_documents(build_inventory(machine(1, 1, 1, 1, 1), Config(), "n").pools[0], "n")
    assert document["spec"]["devices"] == []
    assert document["spec"]["pool"] == {"name": "n", "generation": 1, "resourceSliceCount": 1}


def counted(**config: Any) -> dict[str, Any]:
    """Returns each device's node-allocatable mapping on a small machine, by device name."""
    pools = build_inventory(discover(small_machine()), Config(**config), "n").pools
    slices = [one for pool in pools for one in slice_documents(pool, "n", counted=True)]
    return {device["name"]: device[ALLOCATABLE_FIELD] for one in slices for device in one["spec"]["devices"]}


def test_the_mapping_counts_amounts_one_to_one_with_the_devices_capacity() -> None:
    """CPUs, bytes of memory and bytes of hugepages of each size are counted one to one with the device's capacity. A
    single-CPU device counts as one CPU.
    """
    assert counted(cpu_device_mode="individual")["cpudev001"] == {"cpu": {"mapping": {"deviceMultiplier": "1"}}}
    found = counted()
    for name, resource, key in (
        ("cpudevnuma000", "cpu", "dra.cpu/cpu"),
        ("memory-numa000", "memory", "size"),
        ("hugepages-2m-numa000", "hugepages-2Mi", "size"),
        ("hugepages-1g-numa001", "hugepages-1Gi", "size"),
    ):
        assert found[name] == {resource: {"mapping": {"capacityKey": key, "capacityMultiplier": "1"}}}


@settings(max_examples=8)
@given(found=machines(), mode=st.sampled_from(["grouped", "individual"]))
def test_the_mapping_passes_the_validation_of_1_37(found: Machine, mode: str) -> None:
    """An API server stores the slice unchanged if the feature gate is on. A server from a release that does not have
    the field drops the field.
    """
    gates = {**GATES_OF_1_36, "DRANodeAllocatableResources": True, "DRAListTypeAttributes": True}
    for pool in build_inventory(found, Config.model_validate({"cpuDeviceMode": mode}), "n").pools:
        one = slice_documents(pool, "n", counted=True)[0]
        assert canonical(admit(gates, SLICES, one, None, "1.37")["spec"]) == canonical(one["spec"])
        lost = differences(canonical(one["spec"]), canonical(admit(gates, SLICES, one, None, "1.36")["spec"]))
        assert set(lost) == ({f"devices[*].{ALLOCATABLE_FIELD}"} if one["spec"]["devices"] else set())


def test_many_devices_are_split_into_slices_of_64() -> None:
    """130 NUMA nodes result in three slices, in device order."""
    documents = published(build_inventory(machine(130, 1, 1, 1, 1), Config(), "n"))
    assert [len(document["spec"]["devices"]) for document in documents["n-memory"]] == [64, 64, 2]
    assert documents["n-memory"][2]["spec"]["devices"][0]["name"] == "memory-numa128"
    assert_admitted(documents)


def test_a_single_cpu_is_not_shared() -> None:
    """A device with one CPU is named after that CPU and cannot be shared. A machine with 511 such devices has eight
    slices.
    """
    config = Config(cpu_device_mode="individual", reserved_cpus=frozenset({0}))
    documents = published(build_inventory(machine(2, 4, 4, 8, 2), config, "n"))["n"]
    assert [len(document["spec"]["devices"]) for document in documents] == [64] * 7 + [63]
    assert documents[0]["spec"]["devices"][0] == {
        "name": "cpudev001",
        "attributes": {
            "resource.kubernetes.io/numaNode": {"int": 0},
            "dra.cpu/numaNodeID": {"int": 0},
            "dra.net/numaNode": {"int": 0},
            "dra.cpu/nearestNumaNode": {"int": 0},
            "dra.cpu/socketID": {"int": 0},
            "dra.cpu/cacheL3ID": {"int": 0},
            "dra.cpu/coreType": {"string": "standard"},
            "dra.cpu/coreID": {"int": 1},
            "dra.cpu/cpuID": {"int": 1},
            "dra.cpu/smtEnabled": {"bool": True},
        },
    }


def test_metadata_has_the_same_attributes_as_the_slices() -> None:
    """The attributes include True and 1, which are equal in Python but must stay distinct."""
    inventory = build_inventory(machine(1, 1, 2, 1, 2), Config(cpu_device_mode="individual"), "n")
    published = {
        (pool.driver, pool.name, device["name"]): device["attributes"]
        for pool in inventory.pools
        for document in slice_documents(pool, "n")
        for device in document["spec"]["devices"]
    }
    assert inventory.attributes == published
    values = [value for attributes in published.values() for value in attributes.values()]
    assert {"bool": True} in values
    assert {"int": 1} in values
