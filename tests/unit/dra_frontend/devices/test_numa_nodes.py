# SPDX-License-Identifier: Apache-2.0
"""The NUMA node or nodes that a CPU device lists, and the device's alignment with other devices (KEP-6072)."""

from dataclasses import replace
from typing import Any

import pytest
from dra_frontend.devices.cpu_groups import NUMA_NODE
from dra_frontend.devices.inventory import build_inventory
from dra_frontend.devices.slices import slice_documents
from dra_frontend.machine.discovery import discover
from dra_frontend.machine.model import Machine
from numa_contract.config import Config

from tests.fakes.scheduler import UnschedulableError, allocate
from tests.rigs.trees import captured, small_machine

TWO = discover(small_machine())
"""Two sockets with one NUMA node each. The first node has CPUs 0-3, and the second has CPUs 4-7."""
EIGHT = discover(captured("48amd64-4pa2n6c-sparse"))
"""Four sockets with two NUMA nodes each."""


def nodes(machine: Machine, **config: object) -> dict[str, Any]:
    """Returns the value of each CPU device's NUMA node attribute."""
    inventory = build_inventory(machine, Config.model_validate(config), "n")
    return {device.name: device.attributes.get(NUMA_NODE) for device in inventory.pools[0].devices}


def test_a_device_lists_the_numa_nodes_of_its_cpus() -> None:
    """A single node is published as a number, which every server accepts, and several nodes are published as a list. A
    node whose CPUs are all reserved is not listed.
    """
    assert nodes(TWO) == {"cpudevnuma000": 0, "cpudevnuma001": 1}
    assert nodes(TWO, groupBy="machine") == {"cpudevmachine": (0, 1)}
    assert nodes(TWO, groupBy="socket") == {"cpudevsocket000": 0, "cpudevsocket001": 1}
    assert nodes(TWO, groupBy="machine", reservedCPUs="0-3") == {"cpudevmachine": 1}
    sockets = nodes(EIGHT, groupBy="socket")
    assert len(sockets) == 4
    assert all(isinstance(one, tuple) and len(one) == 2 for one in sockets.values())
    assert {node for one in sockets.values() for node in one} == EIGHT.numa_nodes.keys()


def test_a_list_that_is_too_long_for_the_server_is_left_out() -> None:
    """A device can have at most 48 attribute values, and a truncated list would wrongly exclude the other nodes."""
    spread = {cpu: replace(TWO.cpus[cpu % 8], id=cpu, core=cpu, numa_node=cpu) for cpu in range(64)}
    node = TWO.numa_nodes[0]
    many = replace(TWO, cpus=spread, numa_nodes={n: replace(node, id=n, cpus=frozenset({n})) for n in range(64)})
    assert nodes(many, groupBy="machine", withheldCPUs=0) == {"cpudevmachine": None}


def aligned(gpu: dict[str, object], **config: object) -> str:
    """Returns the CPU device that a claim gets together with a GPU on the given NUMA node."""
    pool = {"name": "gpus", "generation": 1, "resourceSliceCount": 1}
    device = {"name": "gpu0", "attributes": {NUMA_NODE: gpu}}
    spec = {"driver": "gpu.example", "nodeName": "n", "pool": pool, "devices": [device]}
    cpus = build_inventory(TWO, Config.model_validate(config), "n").pools[0]
    slices = [{"metadata": {"name": "gpu"}, "spec": spec}]
    slices += [{**document, "metadata": {"name": "cpus"}} for document in slice_documents(cpus, "n")]
    classes = {
        name: {"spec": {"selectors": [{"cel": {"expression": f'device.driver == "{name}"'}}]}}
        for name in ("gpu.example", "dra.cpu")
    }
    requests = [
        {"name": "gpu", "exactly": {"deviceClassName": "gpu.example"}},
        {"name": "cpus", "exactly": {"deviceClassName": "dra.cpu"}},
    ]
    devices = {"requests": requests, "constraints": [{"matchAttribute": NUMA_NODE}]}
    claim = allocate({"metadata": {"name": "c"}, "spec": {"devices": devices}}, slices, classes)
    return str(claim["status"]["allocation"]["devices"]["results"][1]["device"])


def test_cpus_are_found_next_to_a_gpu_on_several_nodes() -> None:
    """A number matches a list that contains it, and two lists match if they intersect."""
    assert aligned({"ints": [1, 2]}) == "cpudevnuma001"
    assert aligned({"int": 1}) == "cpudevnuma001"
    between: tuple[dict[str, object], ...] = ({"int": 1}, {"ints": [1, 2]})
    for gpu in between:
        assert aligned(gpu, groupBy="machine") == "cpudevmachine"
    with pytest.raises(UnschedulableError):
        aligned({"ints": [2, 3]}, groupBy="machine")
